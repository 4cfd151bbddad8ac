"""What one worker looks at before it adds a unit."""

import contextlib
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from refused import refuses
from zoo import VOCAB, Tied, losses_of

from experiments.mean_task import MeanTask
from fedsim.clipping import Clip, Strategy, UnsupportedModel, clip_chunk, ghost, strategy
from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine
from fedsim.engine.factory import choose_strategy
from fedsim.engine.programs import Programs, UnfitDevice
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine, Worker, joined

CLIP = Clip(0.1)
ALL_DIGITS = Clip(0.1, in_float32=True)  # whole numbers are those of a slightly shorter gradient
several_at_once = pytest.mark.skipif(
    os.environ["JAX_PLATFORMS"] != "cpu", reason="on an accelerator units keep their places"
)


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


def local(model=None, kind=ModelTask):
    task = kind(model or Tied(4))
    fresh = jax.jit(task.model.init)
    params = fresh(jax.random.key(0), task.read("train", np.arange(2)))["params"]
    return LocalEngine(task, num_lanes=2), params


@pytest.mark.slow
@several_at_once
@pytest.mark.parametrize("factor", [0.9, np.nan, 1.1])
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
    engine, params = local()
    found, _ = engine.faults(params, 1, CLIP, Strategy("ghost", 4))
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
    refusal = pytest.raises(UnsupportedModel, match="^rows_per_pass=4: expected at most 1: side")
    engine, params = local()
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
    with pytest.raises(UnsupportedModel, match="^rows_per_pass=4: expected at most 1: side"):
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
def test_no_call_adds_more_units_than_int32_holds_and_none_waits_for_full_sums(monkeypatch):
    worker, rows = Worker(MeanTask(np.ones((9, 1)))), np.arange(9)[:, None]
    expected, _ = worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2))
    assert -9 * 2**20 <= expected < -8.9 * 2**20
    with pytest.raises(UnsupportedModel, match="direct:2048: 2048 units at once; .* most 2047, wh"):
        worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2048))
    monkeypatch.setattr("fedsim.engine.worker.lattice_capacity", lambda dimensions: 5)
    worker, events, call = Worker(worker.task), [], Programs.clip_chunk
    monkeypatch.setattr(Programs, "clip_chunk", lambda *a: events.append("call") or call(*a))
    waiting = "fedsim.engine.worker.joined"
    monkeypatch.setattr(waiting, lambda sums: events.append(len(sums)) or joined(sums))
    total, stats = worker.lane_sum(0, np.zeros(1), rows, CLIP, Strategy("direct", 2))
    assert events == ["call", 0, "call", "call", 2]  # it waits for two sums, after the last call
    assert total == expected and total.dtype == np.int64 and stats.norms.all()
    assert {shape for _, _, _, shape, *_ in worker.programs.compiled} == {(4, 1)}


# ---- The strategy of a run: by rule or as asked for, checked on made-up rows

AUTO = EngineConfig()


class Unknown(nn.Module):
    """Has a parameter in no layer that `ghost` knows."""

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(VOCAB, VOCAB)(batch["tokens"])
        return x * self.param("gain", nn.initializers.ones, (1, 1, VOCAB))


class Frozen(ModelTask):
    """Has a model beneath the parameters that are trained."""

    @property
    def frozen(self):
        return np.ones(1, np.float32)


@pytest.fixture
def large(monkeypatch):
    """Every model is large."""
    monkeypatch.setattr(strategy, "MANY_PARAMETERS", 1)


def test_a_large_model_takes_ghost_for_examples_if_all_of_it_is_trained(large, monkeypatch):
    tried = []
    monkeypatch.setattr(Engine, "faults", lambda *a: tried.append(a[-1]) or ("", ""))
    assert choose_strategy(*local(), 1, CLIP, AUTO) == Strategy("ghost", 4)
    assert tried == [Strategy("ghost", 4)]
    assert choose_strategy(*local(), 2, CLIP, AUTO) == Strategy("direct", 4)
    assert choose_strategy(*local(kind=Frozen), 1, CLIP, AUTO) == Strategy("direct", 4)
    monkeypatch.setattr(LocalEngine, "facts", lambda *_: {"platform": "gpu"})
    assert choose_strategy(*local(), 1, CLIP, AUTO) == Strategy("direct", 1)


def test_a_model_that_ghost_does_not_support_is_left_to_direct(large):
    assert choose_strategy(*local(Unknown()), 1, CLIP, AUTO) == Strategy("direct", 4)
    with refuses("strategy=ghost", says="ghost:4 parameter gain: expected to be used by"):
        choose_strategy(*local(Unknown()), 1, CLIP, EngineConfig(strategy="ghost"))


@pytest.mark.slow
@pytest.mark.privacy
def test_the_check_of_ghost_reads_no_text(monkeypatch):
    def read(self, split, rows):
        assert (rows == -1).all(), "a text was read"
        return right(self, split, np.zeros(len(rows), int))

    right = ModelTask.read
    engine, params = local()
    monkeypatch.setattr(ModelTask, "read", read)
    asked = EngineConfig(strategy="ghost")
    assert choose_strategy(engine, params, 1, CLIP, asked) == Strategy("ghost", 4)
