"""Units in chunks, and short texts in shared rows: every text once, whole, with its own loss."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from stores import store_of
from zoo import PARTS, VOCAB, random_like

from fedsim.clipping import Buckets, Clip, Strategy, in_shared_rows, shared_lengths
from fedsim.clipping.packing import chunks, packed
from fedsim.engine.worker import EVAL_TOKENS_PER_CALL, LocalEngine, Worker
from fedsim.models import language_model, lora
from fedsim.models.language_model import ROW, LanguageModelTask
from fedsim.models.transformer import TransformerConfig, stacked

LENGTHS = (4, 8, 16, 20)
BUCKETS = Buckets(LENGTHS, lambda b: b["sizes"], lambda b, n: b | {"tokens": b["tokens"][..., :n]})


def lane(rng, units, group, longest=20, density=0.7):
    """Rows whose real tokens are all different, 0 is padded, and a mask."""
    mask = rng.random((units, group)) < density
    sizes = rng.integers(longest + 1, size=(units, group)) * mask
    number = 1 + np.arange(units * group).reshape(units, group, 1)
    tokens = np.where(np.arange(20) < sizes[..., None], 100 * number + np.arange(20), 0)
    return {"tokens": tokens, "sizes": sizes}, mask


def rows_of(tokens, mask):
    """The real rows of a unit, without padding, in some order."""
    return sorted(tuple(row[row > 0]) for row in tokens[mask])


@settings(deadline=None, max_examples=200)
@given(
    units=st.integers(0, 30),
    group=st.integers(1, 5),
    longest=st.sampled_from([0, 3, 8, 17, 20]),
    density=st.sampled_from([0.0, 0.5, 1.0]),
    per_chunk=st.integers(1, 9),
    buckets=st.sampled_from([None, BUCKETS]),
    seed=st.integers(0, 2**32),
)
def test_every_unit_is_in_one_chunk_and_no_row_is_cut(
    units, group, longest, density, per_chunk, buckets, seed
):
    batch, mask = lane(np.random.default_rng(seed), units, group, longest, density)
    found = list(chunks(batch, mask, per_chunk, buckets))
    placed = np.concatenate([chunk.units for chunk in found] or [np.zeros(0, int)])
    assert sorted(placed) == list(range(units))
    partial = [chunk for chunk in found if len(chunk.units) < per_chunk]
    assert len({chunk.length for chunk in partial}) == len(partial)  # at most one of each length
    assert all(len(chunk.units) for chunk in found)
    for chunk in found:
        assert chunk.mask.shape == (per_chunk, group)
        assert chunk.batch["tokens"].shape == (per_chunk, group, chunk.length or 20)
        assert not chunk.mask[len(chunk.units) :].any()
        for place, unit in enumerate(chunk.units):
            own = chunk.mask[place]
            if buckets:  # its length is its own, whoever else is there
                longest = np.where(mask[unit], batch["sizes"][unit], 0).max()
                assert chunk.length == BUCKETS.holding(longest)
            expected = rows_of(batch["tokens"][unit], mask[unit])
            assert rows_of(chunk.batch["tokens"][place], own) == expected
            sizes = (chunk.batch["tokens"][place] > 0).sum(axis=1)
            np.testing.assert_array_equal(chunk.batch["sizes"][place][own], sizes[own])
    if buckets:
        assert {chunk.length for chunk in found} <= set(LENGTHS)
        for chunk in found:  # rows of a kind stand together, padding last
            assert (np.diff(np.where(chunk.mask, chunk.batch["sizes"], -1), axis=1) <= 0).all()


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
    lengths, texts = [each["tokens"].shape[1] for each in found], []
    assert lengths == sorted({*lengths})
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
    data = type("Texts", (), {"eval_users": store})
    if not adapters:
        return LanguageModelTask(data, config), store
    frozen = LanguageModelTask(None, config).init(jax.random.key(1))
    return LanguageModelTask(data, lora.adapted(config, 2, 4.0), frozen), store


@pytest.mark.slow
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


SHARED = (32, 64, 128, 256, 300)


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
    for numbers, made, real in in_shared_rows(batch, mask, SHARED):
        seen += numbers.tolist()
        length = shared_lengths(np.where(mask, batch["sizes"], 0)[numbers], SHARED)
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
