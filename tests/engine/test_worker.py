"""What one worker does: every unit counted once, few programs, flat memory, checks of them."""

import contextlib
import dataclasses
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import Tied, losses_of

from experiments.harness.mean_task import MeanTask
from experiments.harness.stores import store_of
from fedsim.clipping import Buckets, Clip, Strategy, UnsupportedModel, clip_chunk, ghost
from fedsim.data.dataset import Dataset
from fedsim.engine.programs import UnfitDevice
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine, Worker
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

VOCAB, LENGTH = 40, 48  # buckets of 32 and 48 tokens
CLIP = Clip(0.1)
ALL_DIGITS = Clip(0.1, in_float32=True)  # whole numbers are those of a slightly shorter gradient
SEVERAL_AT_ONCE = ["ghost:4"]  # takes seconds to compile
STRATEGIES = ["scan:4", "direct:2", "direct:9", "scan:2"]
STRATEGIES += [pytest.param(text, marks=pytest.mark.slow) for text in SEVERAL_AT_ONCE]
several_at_once = pytest.mark.skipif(
    os.environ["JAX_PLATFORMS"] != "cpu", reason="on an accelerator units keep their places"
)


@pytest.fixture(scope="module")
def task():
    """One user's 200 examples: 100 short and 100 long, in this order."""
    rng = np.random.default_rng(5)
    sizes = [rng.integers(*ends) for ends in ((1, 33), (33, 49)) for _ in range(100)]
    examples = {"u": [rng.integers(VOCAB, size=size) for size in sizes]}
    store = store_of(examples, max_length=LENGTH, vocab_size=VOCAB)
    config = TransformerConfig(VOCAB, LENGTH, width=8, num_layers=1, num_heads=2)
    return LanguageModelTask(Dataset(train=store), config)


@pytest.fixture(scope="module")
def params(task):
    rng = np.random.default_rng(6)
    fresh = jax.jit(task.init)(jax.random.key(0))
    return jax.tree.map(
        lambda p: np.asarray(p) + rng.normal(0, 0.2, p.shape).astype(np.float32), fresh
    )


def cohort(rng, units, group, low=0, high=200):
    rows = rng.integers(low, high, size=(units, group))
    return np.where(rng.random((units, group)) < 0.2, -1, rows)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, group, cohorts",
    [
        pytest.param("scan:4", 1, 60, marks=pytest.mark.ci),
        pytest.param("direct:2", 4, 60, marks=pytest.mark.ci),
        *((*case, 200) for case in [("scan:2", 4), ("ghost:4", 1), ("ghost:4", 4)]),
    ],
)
def test_random_cohorts_compile_nothing_new(text, group, cohorts, task, params, rng, compiled):
    worker, strategy = Worker(task), Strategy.parse(text)
    for low in (0, 100):  # one bucket after the other
        worker.lane_sum(0, params, cohort(rng, 40, group, low, low + 100), CLIP, strategy)
    worker.lane_sum(0, params, cohort(rng, 40, group), CLIP, strategy)
    known = set(worker.programs.compiled)
    most = len(task.buckets.lengths)
    if strategy.shares_rows(group, task.buckets):  # one row or several, in each length
        most = 2 * len(task.buckets.shared)
    assert compiled and len(known) <= most
    compiled.clear()
    for step in range(cohorts):
        rows = cohort(rng, rng.integers(41 if step % 20 == 0 else 9), group)
        total, stats = worker.lane_sum(step, params, rows, CLIP, strategy)
        assert len(stats.norms) == len(rows)
        if not step % 50:
            moved = jax.tree.map(lambda p, t: p - np.float32(0.01) * t, params, total)
            assert jax.tree.structure(moved) == jax.tree.structure(params)
            params = moved
    assert not compiled and set(worker.programs.compiled) == known


@pytest.fixture(scope="module", params=[1, 4])
def lane(request, task, params):
    """Rows of units, and what one call of `clip_chunk` finds for them."""
    group = request.param
    rows = cohort(np.random.default_rng(0), 37, group)
    rows[5] = -1
    batch = jax.tree.map(
        lambda leaf: leaf.reshape(37, group, *leaf.shape[1:]), task.read("train", rows.ravel())
    )
    run = jax.jit(lambda *args: clip_chunk(task.losses, *args, ALL_DIGITS, Strategy("scan", 4)))
    return rows, run(params, batch, rows >= 0)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("text", STRATEGIES)
def test_a_lane_is_the_sum_of_its_units_in_their_order(text, lane, task, params):
    rows, (expected, norms, losses, _) = lane
    total, stats = Worker(task).lane_sum(0, params, rows, ALL_DIGITS, Strategy.parse(text))
    assert np.linalg.norm(flat(total) - flat(expected)) <= 1e-5 * np.linalg.norm(flat(expected))
    np.testing.assert_allclose(stats.norms, norms, rtol=1e-5)
    np.testing.assert_allclose(stats.losses, losses, rtol=1e-5)
    np.testing.assert_array_equal(stats.num_rows, (rows >= 0).sum(axis=1))
    assert not stats.dropped.any() and (stats.norms > 0).sum() > 20


@pytest.mark.parametrize(
    "text, group, table, expected",
    [
        ("direct:4", 1, ((16, 4), (32, 2)), {16: 4, 32: 2, 48: 1, 64: 1}),
        ("direct:8", 1, ((32, 8), (64, 4)), {16: 8, 32: 8, 48: 4, 64: 4}),
        ("direct:6", 1, (), {16: 6, 64: 6}),  # no fewer than asked for
        ("direct:2", 1, ((16, 4), (32, 2)), {16: 2, 32: 2, 48: 1}),  # nor more
        ("ghost:4", 2, ((32, 4), (64, 2)), {16: 2, 32: 2, 48: 1}),  # units of two rows
        ("scan:8", 1, ((64, 8),), {16: 1, 64: 1}),
    ],
)
def test_long_texts_of_a_large_model_have_small_passes(text, group, table, expected):
    buckets = Buckets((16, 32, 48, 64), lambda batch: batch, lambda batch, length: batch)
    buckets = dataclasses.replace(buckets, side_by_side=table)
    worker, strategy = Worker(SimpleNamespace(buckets=buckets)), Strategy.parse(text)  # pyright: ignore
    assert expected == {n: worker.units_of_pass(strategy, group, n) for n in expected}
    assert {each.rows for each in worker.passes(strategy, group)} == set(expected.values())


class ModelTask(Task):
    """A model of the zoo as a task without data."""

    def __init__(self, model):
        self.model, self.losses = model, losses_of(model)

    def read(self, split, rows):
        return self.dummy_batch(rows)

    def dummy_batch(self, rows):
        rng = np.random.default_rng(3)
        tokens = rng.integers(11, size=(50, 5)).astype(np.int32)[rows]
        return {"tokens": tokens, "sizes": np.full(len(rows), 5, np.int32)}


def of_model():
    task = ModelTask(Tied(4))
    batch = task.read("train", np.arange(2))
    params = jax.jit(task.model.init)(jax.random.key(0), batch)["params"]
    return LocalEngine(task, num_lanes=1), params


@pytest.mark.slow
@several_at_once
@pytest.mark.parametrize(
    "factor",
    [pytest.param(0.9, marks=pytest.mark.ci), pytest.param(np.nan, marks=pytest.mark.ci), 1.1],
)
def test_a_strategy_that_finds_other_norms_is_refused(factor, monkeypatch):
    right = ghost.matrix

    def wrong(*args):
        found = right(*args)
        if "embedding" in found:
            ids, rows = found["embedding"].lookups
            lookups = ids, rows * np.float32(factor)
            found = {"embedding": dataclasses.replace(found["embedding"], lookups=lookups)}
        return found

    monkeypatch.setattr(ghost, "matrix", wrong)
    engine, params = of_model()
    found = engine.ghost_fault(params, 1, CLIP, Strategy("ghost", 4))
    assert found == "other norms than scan finds"


@several_at_once
@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("moved", ["", "sum", "norms", "losses", "nan"])
def test_units_that_change_what_others_contribute_are_not_computed_side_by_side(moved, monkeypatch):
    def wrong(losses, params, batch, mask, *args, **options):
        total, *found = clip_chunk(losses, params, batch, mask, *args, **options)
        both = mask.any(axis=1)[:2].all()
        if moved == "sum":  # by one, the least there is
            total = jax.tree.map(lambda leaf: leaf + both.astype(jnp.int32), total)
        elif moved == "nan":  # of a unit that is dropped, wherever it is
            found[0] = jnp.where(found[0] > 0, jnp.nan, found[0])
        elif moved:
            which = ("norms", "losses").index(moved)
            found[which] = jnp.where(both, jnp.nextafter(found[which], jnp.inf), found[which])
        return total, *found

    monkeypatch.setattr("fedsim.engine.programs.clip_chunk", wrong)
    changed = moved not in ("", "nan")
    refusal = pytest.raises(UnsupportedModel, match="side by side, units change what the others")
    engine, params = of_model()
    with refusal if changed else contextlib.nullcontext():
        engine.clipped_sum(params, np.arange(10).reshape(-1, 1), CLIP, Strategy("direct", 4))


@several_at_once
@pytest.mark.privacy
@pytest.mark.parametrize("first", [4, 32, 0])
def test_units_that_add_nothing_do_not_tell_whether_others_change_each_other(first, monkeypatch):
    def wrong(*args, **options):
        total, *found = clip_chunk(*args, **options)
        both = args[3].any(axis=1)[:2].all()
        return jax.tree.map(lambda leaf: leaf * (1 + both), total), *found

    monkeypatch.setattr("fedsim.engine.programs.clip_chunk", wrong)
    points = np.repeat([0.0, 1.0], (32 - first, 40))[:, None]  # of zero the gradient is zero
    rows = np.concatenate([np.full(first, -1), np.arange(len(points))])[:, None]
    with pytest.raises(UnsupportedModel, match="side by side, units change"):
        Worker(MeanTask(points)).lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 4))


@pytest.mark.privacy
def test_hostile_units_are_looked_at_before_a_lane_is_added(monkeypatch):
    def unfit(strategy, params):
        raise UnfitDevice("a unit contributes 2 C")

    worker, rows = Worker(MeanTask(np.ones((9, 1)))), np.arange(9)[:, None]
    monkeypatch.setattr("fedsim.engine.worker.check_contributions", unfit)
    with pytest.raises(UnfitDevice, match="contributes 2 C"):
        worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 4))
    worker.lane_sum(0, np.zeros(1), rows, ALL_DIGITS, Strategy("direct", 4))  # nothing is promised


@pytest.mark.privacy
def test_the_device_is_measured_before_a_lane_is_added(monkeypatch):
    def unfit(device):
        raise UnfitDevice(f"{device} errs")

    engine, rows = LocalEngine(MeanTask(np.ones((9, 1))), num_lanes=1), np.arange(9)[:, None]
    monkeypatch.setattr("fedsim.engine.worker._fit", unfit)
    with pytest.raises(UnfitDevice, match="errs"):
        engine.clipped_sum(np.zeros(1), rows, CLIP, Strategy("direct", 4))
    Worker(engine.task).lane_sum(0, np.zeros(1), rows, ALL_DIGITS, Strategy("direct", 4))


@several_at_once
@pytest.mark.slow
@pytest.mark.privacy
def test_no_call_adds_more_units_than_int32_holds(monkeypatch):
    worker, rows = Worker(MeanTask(np.ones((9, 1)))), np.arange(9)[:, None]
    expected, _ = worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2))
    assert -9 * 2**20 <= expected < -8.9 * 2**20
    with pytest.raises(UnsupportedModel, match="direct:2048: 2048 units at once; .* most 2047, wh"):
        worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2048))
    monkeypatch.setattr("fedsim.engine.worker.lattice_capacity", lambda dimensions: 5)
    worker = Worker(worker.task)
    total, stats = worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2))
    assert total == expected and total.dtype == np.int64 and stats.norms.all()
    assert {shape for _, _, _, shape, *_ in worker.programs.compiled} == {(4, 1)}
