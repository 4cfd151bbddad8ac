"""Texts that share a row have the losses that they have in rows of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from zoo import PARTS, VOCAB, random_like

from experiments.harness.stores import store_of
from fedsim.clipping.packing import packed
from fedsim.engine.worker import EVAL_TOKENS_PER_CALL, Worker
from fedsim.models import lora
from fedsim.models.language_model import ROW, LanguageModelTask
from fedsim.models.transformer import Transformer, TransformerConfig, stacked

LENGTH = 12
NAMES = ("tokens", "targets", "positions")


def batch_of(rng, sizes, vocab=VOCAB, length=LENGTH):
    """Random texts; what is behind a text's end is as in a store, zeros."""
    tokens = rng.integers(1, vocab, (len(sizes), length), np.int32)
    there = np.arange(length) < np.array(sizes)[:, None]
    return {"tokens": np.where(there, tokens, 0), "sizes": np.array(sizes, np.int32)}


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, LENGTH), max_size=30),
    rows=st.sampled_from([(12,), (16,), (4, 12), (4, 8, 20)]),
)
def test_each_text_is_fed_once_and_rows_do_not_overlap(sizes, rows):
    batch = batch_of(np.random.default_rng(0), sizes)
    found = packed(batch, np.array(rows)[np.searchsorted(rows, batch["sizes"])])
    assert [each["tokens"].shape[1] for each in found] == sorted(
        {each["tokens"].shape[1] for each in found}
    )
    texts = []
    for each in found:
        assert {leaf.dtype for leaf in each.values()} == {np.dtype("int32")}
        for tokens, targets, positions in zip(*(each[name] for name in NAMES), strict=True):
            real = targets >= 0
            assert real[0] and (np.diff(real.astype(int)) <= 0).all()  # not empty, and no gaps
            starts = np.flatnonzero(positions[real] == 0)
            for own in np.split(np.flatnonzero(real), starts[1:]):
                assert positions[own].tolist() == list(range(len(own)))
                assert tokens[own][1:].tolist() == targets[own][:-1].tolist()
                texts.append((*tokens[own], targets[own[-1]]))
    expected = [row[:size] for row, size in zip(batch["tokens"], sizes, strict=True) if size > 1]
    assert sorted(texts) == sorted(map(tuple, expected))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("family", PARTS)
@pytest.mark.parametrize("in_one_tree", [False, True])
def test_losses_are_those_of_texts_in_rows_of_their_own(family, in_one_tree, rng):
    """All kinds of positions and of attention, and a window that is shorter than a text."""
    config = PARTS[family]
    params = random_like(config, rng)
    if in_one_tree:
        params = stacked(jax.tree.map(np.asarray, params), config.num_layers)
    sizes = [12, 11, 9, 5, 4, 3, 3, 2, 1, 0]
    batch = batch_of(rng, sizes)
    nats = jax.jit(LanguageModelTask(None, config).nats)
    expected, predictions = nats(params, batch)
    (rows,) = packed(batch, np.full(len(sizes), 20))
    found, counts = nats(params, rows)
    assert len(found) == 3 and int(counts.sum()) == int(predictions.sum()) == 41
    np.testing.assert_allclose(np.sum(found), np.sum(expected), rtol=1e-5)
    assert counts[0] == 20  # the longest text, and what fits behind it
    np.testing.assert_allclose(found[0], expected[0] + expected[2] + expected[7], rtol=1e-5)


def task_of(sizes, *, adapters, length=200):
    rng = np.random.default_rng(5)
    texts = {f"{i:03d}": [rng.integers(1, 31, size)] for i, size in enumerate(sizes)}
    store = store_of(texts, max_length=length, vocab_size=31)
    config = TransformerConfig(31, length, width=16, num_layers=1, num_heads=2)
    frozen = None
    if adapters:
        frozen = jax.jit(Transformer(config).init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))
        config = lora.adapted(config, 2, 4.0)
        frozen = frozen["params"]
    data = type("Texts", (), {"eval_users": store})
    return LanguageModelTask(data, config, frozen=frozen), store


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("adapters", [False, True])
def test_an_evaluation_is_that_of_texts_one_by_one(adapters, rng):
    sizes = [*rng.integers(2, 60, 80), 190, 150, 130, 129, 128]
    task, store = task_of(sizes, adapters=adapters)
    start = lora.init(task.config, jax.random.key(0)) if adapters else task.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape), start)
    frozen = () if task.frozen is None else (task.frozen,)
    worker, rows = Worker(task), np.arange(len(sizes))
    nats, predictions = worker.lane_nats(0, params, rows, "eval_users")
    batch = task.read("eval_users", rows)
    expected, counts = jax.jit(task.nats)(params, batch, *frozen)
    assert predictions == int(counts.sum()) == store.num_tokens - len(sizes)
    assert nats == pytest.approx(float(np.asarray(expected).sum(dtype=np.float64)), rel=1e-6)
    shapes = [shapes[0] for (name, *shapes) in worker.programs.compiled if name == "nats"]
    assert {length for _, length in shapes} == {ROW, 200}
    assert max(rows * length for rows, length in shapes) <= EVAL_TOKENS_PER_CALL
    assert len(shapes) <= (EVAL_TOKENS_PER_CALL // ROW).bit_length() + 3  # of 200 there are three
