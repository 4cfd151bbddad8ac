"""Lanes hold every unit once, of texts about as long, and cost about the same."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from stores import store_of

from fedsim.clipping import Buckets, Clip, Strategy
from fedsim.engine.engine import AT_ONCE, cut
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

LENGTHS = (4, 8, 16, 32)


class Sized(Task):
    """Examples as long as they are said to be; nothing else is known of them."""

    buckets = Buckets(LENGTHS, lambda batch: batch, lambda batch, length: batch)

    def __init__(self, sizes):
        self.of_example = sizes

    def sizes(self, split, rows):
        return np.where(rows < 0, 0, self.of_example[rows])


@settings(deadline=None, max_examples=200)
@given(
    units=st.integers(0, 60),
    group=st.integers(1, 4),
    num_lanes=st.integers(1, 12),
    least=st.integers(2, 5),
    density=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_every_unit_is_in_one_lane_the_longest_first(units, group, num_lanes, least, density, seed):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(units * group).reshape(units, group)
    rows[rng.random((units, group)) >= density] = -1
    task = Sized(rng.integers(1, 33, units * group))
    order, lanes = cut(task, rows, num_lanes, least)
    assert sorted(order) == list(range(units)) and len(lanes) <= num_lanes
    np.testing.assert_array_equal(np.concatenate([rows[:0], *lanes]), rows[order])
    if units >= least:
        assert min(map(len, lanes)) >= least
    found = np.where(rows < 0, 0, task.buckets.holding(task.sizes("train", rows)))  # with padding
    if len(lanes) > 1:
        longest = found[order].max(axis=1)
        assert (np.diff(longest) <= 0).all()
        # A lane begins before its share is full, and ends with a block; the last one has the rest.
        blocks = np.sort(found.sum(axis=1))[::-1][: 2 * max(AT_ONCE, least)].sum()
        ends = np.cumsum([0, *map(len, lanes)])
        most = max(found[order[a:b]].sum() for a, b in itertools.pairwise(ends))
        assert most <= found.sum() / min(num_lanes, units // least) + blocks


@pytest.mark.parametrize("tokens, number", [(4, 1), (16, 2), (32, 4), (256, 8)])
def test_lanes_of_an_evaluation_have_enough_tokens(tokens, number, monkeypatch):
    engine, lanes = LocalEngine(Sized(np.full(128, tokens)), num_lanes=8), []
    answer = lambda _, params, of, split: lanes.extend(of) or [(3.0, 2)] * len(of)  # noqa: E731
    monkeypatch.setattr(engine, "_lanes", answer)
    assert engine.mean_nats(None, "eval_users", np.arange(128)) == 1.5
    assert len(lanes) == number and len(np.concatenate(lanes)) == 128


@pytest.mark.slow
def test_sums_and_statistics_do_not_depend_on_lanes():
    """Statistics are in the order of the rows, whatever the order of the lanes."""
    rng = np.random.default_rng(0)
    texts = {f"{i:02d}": [rng.integers(1, 31, rng.integers(2, 70))] for i in range(24)}
    store = store_of(texts, max_length=72, vocab_size=31)
    config = TransformerConfig(31, 72, width=16, num_layers=1, num_heads=2)
    task = LanguageModelTask(type("Texts", (), {"train": store}), config)
    rows = rng.permutation(24)[:, None]
    np.testing.assert_array_equal(task.sizes("train", rows.ravel()), store.lengths[rows.ravel()])
    params = task.init(jax.random.key(0))
    one, many = (LocalEngine(task, num_lanes=lanes) for lanes in (1, 6))
    assert (cut(task, rows, 6, 2)[0] != np.arange(24)).any()
    clip, strategy = Clip(1e-3), Strategy("direct", 4)
    (a, of_one), (b, of_many) = (x.clipped_sum(params, rows, clip, strategy) for x in (one, many))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    for x, y in zip(of_one.columns(), of_many.columns(), strict=True):
        np.testing.assert_array_equal(x, y)
    assert len(set(of_one.norms)) == 24  # so that their order shows
