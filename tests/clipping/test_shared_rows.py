"""Texts of a unit share rows of that unit alone: the same loss and sums, in fewer tokens."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from experiments.harness.stores import store_of
from fedsim.clipping import Clip, Strategy, in_shared_rows, shared_lengths
from fedsim.engine.worker import LocalEngine, Worker
from fedsim.models import LanguageModelTask, TransformerConfig, language_model

LENGTHS = (32, 64, 128, 256, 300)


def units_of(rng, units, group, longest, *, flagged):
    """Texts whose tokens are all different, in a batch of units, and a mask."""
    mask = rng.random((units, group)) < 0.8
    sizes = rng.integers(longest + 1, size=(units, group)) * mask
    tokens = 1 + np.arange(units * group * 300).reshape(units, group, 300)
    batch = {"tokens": np.where(np.arange(300) < sizes[..., None], tokens, 0), "sizes": sizes}
    if flagged:
        batch["trained"] = rng.random(tokens.shape) < 0.5
    return batch, mask


@settings(deadline=None, max_examples=60)
@given(
    units=st.integers(0, 8),
    group=st.integers(1, 6),
    longest=st.sampled_from([0, 1, 9, 90, 300]),
    flagged=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_prediction_is_there_once_with_its_weight(units, group, longest, flagged, seed):
    batch, mask = units_of(np.random.default_rng(seed), units, group, longest, flagged=flagged)
    seen = []
    for numbers, made, real in in_shared_rows(batch, mask, LENGTHS):
        seen += numbers.tolist()
        length = shared_lengths(np.where(mask, batch["sizes"], 0)[numbers], LENGTHS)
        assert set(length) == {made["tokens"].shape[-1]}
        for place, unit in enumerate(numbers):
            own, weights, expected = {n: leaf[place] for n, leaf in made.items()}, {}, {}
            for row, at in zip(*np.nonzero(own["targets"] >= 0), strict=True):
                pair = int(own["tokens"][row, at]), int(own["targets"][row, at])
                weights[*pair, int(own["positions"][row, at])] = own["weights"][row, at]
                assert real[place, row]
                start = at - own["positions"][row, at]  # a text is in one piece
                assert own["tokens"][row, at] - own["tokens"][row, start] == at - start
            texts, rows = int(mask[unit].sum()), int(real[place].sum())
            for text in np.flatnonzero(mask[unit]):
                size, ids = batch["sizes"][unit, text], batch["tokens"][unit, text]
                flags = batch["trained"][unit, text] if flagged else np.ones(300, bool)
                places = [at for at in range(size - 1) if flags[at + 1]]
                for at in places:
                    share = rows / texts / len(places)
                    expected[int(ids[at]), int(ids[at + 1]), at] = np.float32(share)
            assert weights == pytest.approx(expected, rel=1e-6)
            assert real[place, :rows].all() and bool(rows) == bool(texts)
    assert sorted(seen) == list(range(units))


@pytest.fixture(scope="module")
def problem():
    """A task on users' texts of very different lengths, its parameters, and units of five."""
    rng = np.random.default_rng(0)
    users = {
        f"{user:02d}": [rng.integers(60, size=rng.integers(1, 120)).tolist() for _ in range(5)]
        for user in range(12)
    }
    users["00"] = [[7]] * 5  # nothing to predict
    store = store_of(users, 128, 60)
    config = TransformerConfig(60, 128, 16, 2, 2)
    task = LanguageModelTask(SimpleNamespace(train=store), config)  # pyright: ignore
    rows = np.arange(60).reshape(12, 5)
    rows[3, 2:], rows[5] = -1, -1
    return task, task.init(jax.random.key(0)), rows


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.int64) for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("name", ["direct:1", "direct:4", "ghost:4", "direct:4 of texts"])
def test_a_unit_adds_the_same_whole_numbers_alone(problem, name, monkeypatch):
    """So does a text of a large model, whose passes have few tokens."""
    task, params, rows = problem
    name, _, texts = name.partition(" ")
    clip, strategy, worker = Clip(1.0, normalised=True), Strategy.parse(name), Worker(task)
    if texts or name == "ghost:4":
        monkeypatch.setattr(language_model, "LARGE", 0)
        rows = rows.reshape(-1, 1)
        assert {each.rows for each in worker.passes(strategy, 1)} == {1, 2, 4}
    total, stats = worker.add_lane(params, rows, clip, strategy)
    alone = [worker.add_lane(params, row[None], clip, strategy) for row in rows]
    assert np.array_equal(flat(total), sum(flat(own) for own, _ in alone))
    assert stats.norms.tolist() == [own.norms[0] for _, own in alone]
    assert stats.losses.tolist() == [own.losses[0] for _, own in alone]
    assert not flat(alone[0][0]).any() and (stats.norms > 0).sum() > 9


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["direct:1", "direct:4"])
def test_sums_are_those_of_texts_in_rows_of_their_own(problem, name):
    task, params, rows = problem
    engine, clip = LocalEngine(task, num_lanes=3), Clip(1.0, normalised=True)
    expected, plain = engine.clipped_sum(params, rows, clip, Strategy("scan", 5))
    total, stats = engine.clipped_sum(params, rows, clip, Strategy.parse(name))
    assert stats.norms == pytest.approx(plain.norms, rel=1e-4)
    assert stats.losses == pytest.approx(plain.losses, rel=1e-5)
    assert stats.num_rows.tolist() == plain.num_rows.tolist() == [5, 5, 5, 2, 5, 0, *[5] * 6]
    difference = np.linalg.norm(flat(total) - flat(expected))
    assert difference < 1e-3 * np.linalg.norm(flat(expected))
