"""Processes joined into one mesh: the pool's sums up to rounding, their own bit for bit."""

import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from messages import found, keys_of_noise, other_secrets, recorded
from problems import softmax_problem

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine import reduction
from fedsim.engine import spmd_engine as spmd
from fedsim.engine.engine import EngineError, Stats
from fedsim.engine.local_engine import LocalEngine
from fedsim.engine.task import Task
from fedsim.errors import ConfigError
from fedsim.mechanism import noisy_mean

pytestmark = pytest.mark.ray
CLIP = Clip(0.5)
OPTIONS = {"num_lanes": 4, "num_workers": 2, "threads": 1, "devices": 2}


def spmd_engine(task, **options):
    from fedsim.engine.spmd_engine import SpmdEngine

    return SpmdEngine(task, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def problem():
    _, task, theta = softmax_problem(np.random.default_rng(2), [4] * 50)
    return task, {"theta": jax.numpy.asarray(theta), "bias": jax.numpy.zeros(())}


class TreeTask(Task):
    """Softmax regression whose parameters are a tree; with poison, a row that cannot be read."""

    def __init__(self, inner, poison=None):
        self.inner, self.poison = inner, poison

    def read(self, split, rows):
        if self.poison in rows:
            raise RuntimeError("no such text")
        return self.inner.read(split, rows)

    def losses(self, params, batch):
        return self.inner.losses(params["theta"], batch) + params["bias"] ** 2

    def nats(self, params, batch):
        return self.inner.nats(params["theta"], batch)


@pytest.fixture(scope="module")
def engine(ray_cluster, problem):
    engine = spmd_engine(TreeTask(problem[0]))
    engine.ready()
    yield engine
    engine.close()


def rows_of(rng, units):
    rows = rng.integers(200, size=(units, 3))
    return np.where(rng.random((units, 3)) < 0.2, -1, rows)


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(b).max()))


def same(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) and a.shape == b.shape for a, b in pairs)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("units", [0, 1, 3, 61])
def test_it_agrees_with_the_lanes_added_one_by_one(engine, problem, rng, units):
    task, params = problem
    rows = rows_of(rng, units)
    total, stats = engine.clipped_sum(params, rows, CLIP)
    expected, others = LocalEngine(TreeTask(task), num_lanes=4).clipped_sum(params, rows, CLIP)
    close(total, expected)
    np.testing.assert_allclose(stats.norms, others.norms, rtol=1e-5)
    np.testing.assert_array_equal(stats.num_rows, others.num_rows)
    assert same(engine.clipped_sum(params, rows, CLIP)[0], total)


@pytest.mark.privacy
def test_no_worker_is_sent_what_noise_follows_from_but_where_it_is_trusted_with_that(
    engine, problem, rng, key, monkeypatch
):
    params, rows = problem[1], rows_of(rng, 20)
    own = {"clip": CLIP, "noise_multiplier": 1.0, "count": 20, "key": key, "step": 1}
    sizes = [leaf.size for leaf in jax.tree.leaves(params)]
    noise = {step: keys_of_noise(key, sizes, step) for step in range(3)}

    def released():
        total, stats = engine.clipped_sum(params, rows, CLIP)
        return noisy_mean(total, **own), stats

    with recorded(monkeypatch) as sent:
        expected, known = released()
    assert len(sent) > 2
    assert not found([*sum(noise.values(), []), *other_secrets(key, 1)], sent)
    monkeypatch.setattr(engine, "trusted", True)
    with recorded(monkeypatch) as sent:
        noisy, stats = released()
    assert set(found(noise[1], sent)) == set(noise[1])
    assert not found([*noise[0], *noise[2], *other_secrets(key, 1)], sent)
    assert same(noisy.numbers, expected.numbers) and noisy.unit == expected.unit
    np.testing.assert_array_equal(stats.norms, known.norms)


@pytest.mark.slow
@pytest.mark.ci
def test_workers_that_take_the_place_of_lost_ones_compute_the_sum_that_they_did_not_hold(
    engine, problem, rng, key, monkeypatch
):
    import ray

    params, rows = problem[1], rows_of(rng, 20)
    own = {"clip": CLIP, "noise_multiplier": 1.0, "count": 20, "key": key, "step": 1}
    expected = noisy_mean(engine.clipped_sum(params, rows, CLIP)[0], **own)
    monkeypatch.setattr(engine, "trusted", True)
    held, _ = engine.clipped_sum(params, rows, CLIP)
    ray.kill(engine._group[1])
    assert same(noisy_mean(held, **own).numbers, expected.numbers)


def test_evaluation_is_the_same(engine, problem, rng):
    task, params = problem
    rows = rng.integers(200, size=45)
    expected = LocalEngine(TreeTask(task), num_lanes=4).mean_nats(params, "any", rows)
    assert engine.mean_nats(params, "any", rows) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_process_restarts_the_group_and_changes_nothing(engine, problem, rng):
    import ray

    _, params = problem
    rows = rows_of(rng, 200)
    expected, _ = engine.clipped_sum(params, rows, CLIP)
    before, name = engine.redispatched, "performance/group_restarts"
    restarts = engine.measurements()[name]
    process = ray.get(engine._group[1].facts.remote())["process"]
    os.kill(process, signal.SIGSTOP)  # it cannot finish before it is killed
    threading.Timer(0.1, os.kill, (process, signal.SIGKILL)).start()
    total, stats = engine.clipped_sum(params, rows, CLIP)
    assert same(total, expected) and len(stats.norms) == 200
    assert engine.redispatched == before + 1
    assert engine.measurements()[name] == restarts + 1


class Lost:
    """A Ray actor that is killed before it answers."""

    def answer(self):
        threading.Event().wait()


@pytest.fixture
def lost(ray_cluster):
    """An answer that nobody can fetch."""
    import ray

    actor = ray.remote(num_cpus=0)(Lost).remote()
    ref = actor.answer.remote()
    ray.kill(actor)
    return ref


class Group:
    """The one worker of a group, as `SpmdEngine` sees it; its answers are given."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.lane_sum, self.remote = self, lambda *args: self.answers.pop(0)

    def options(self, num_returns):
        return self


def test_a_sum_that_is_lost_on_its_way_is_computed_again(engine, lost, monkeypatch):
    import ray

    group = Group(*((ref, ray.put(Stats.zeros(3))) for ref in (lost, ray.put({"theta": 1}))))
    again = []
    monkeypatch.setattr(engine, "_group", [group])
    monkeypatch.setattr(engine, "_end", lambda: None)
    monkeypatch.setattr(engine, "_create", lambda: again.append(True))
    monkeypatch.setattr(
        engine, "_join", lambda s: engine._health.answer(spmd.GROUP, time.monotonic())
    )
    total, stats = engine._sum(np.zeros((3, 1), int), ())
    assert total == {"theta": 1} and len(stats.norms) == 3 and again == [True]


def test_answers_that_are_there_are_not_late(engine):
    import ray

    refs = [ray.put(number) for number in range(3)]
    assert engine._wait(refs, deadline=0.0) == [0, 1, 2]


def test_a_length_that_comes_for_the_first_time_has_the_patience_of_a_first_call(
    engine, monkeypatch
):
    import ray

    kinds, start = [], engine._health.start

    def started(group, kind, now, losses):
        kinds.append(kind)
        return start(group, kind, now, losses)

    monkeypatch.setattr(engine._health, "start", started)
    monkeypatch.setattr(spmd, "costs", lambda task, split, rows: np.where(rows < 0, 0, 8 + rows))
    for rows in ([[0, 8]], [[8, -1]], [[8, 0], [0, -1]], [[0, -1]]):
        engine._until_done("lane_sum", lambda: [ray.put(None)], np.array(rows))
    lengths = [kind[1] for kind in kinds]
    assert lengths == [(16,), (16,), (8, 16), (8,)]


@pytest.mark.slow
@pytest.mark.ci
def test_an_exception_in_a_workers_code_ends_the_run_with_its_cause(ray_cluster, problem):
    task, params = problem
    engine = spmd_engine(TreeTask(task, poison=17), num_workers=1)
    engine.ready()
    with pytest.raises(EngineError, match="a step failed: RuntimeError: no such text"):
        engine.clipped_sum(params, np.full((4, 1), 17), CLIP)
    engine.close()


@pytest.mark.slow
def test_a_pool_of_workers_with_two_devices_agrees_too(ray_cluster, problem, rng):
    from fedsim.engine.ray_engine import RayEngine

    task, params = problem
    rows = rows_of(rng, 40)
    expected, _ = LocalEngine(TreeTask(task), num_lanes=4).clipped_sum(params, rows, CLIP)
    totals = []
    for num_workers in (1, 2):
        pool = RayEngine(TreeTask(task), **{**OPTIONS, "num_workers": num_workers})
        totals.append(pool.clipped_sum(params, rows, CLIP)[0])
        nats = pool.mean_nats(params, "any", np.arange(20))
        pool.close()
        close(totals[-1], expected)
    assert same(*totals)
    local = LocalEngine(TreeTask(task), num_lanes=4).mean_nats(params, "any", np.arange(20))
    assert nats == pytest.approx(local, rel=1e-6)


def test_how_many_processes_there_are_is_part_of_the_bits_of_float32_sums():
    def of(exact=False, **options):
        return reduction(EngineConfig(**options), exact=exact)

    same = of(True, kind="local"), of(True, kind="spmd"), of(True, kind="ray", num_lanes=3)
    assert len(set(same)) == 1
    assert of(kind="local") == of(kind="ray", num_workers=3) == of(kind="ray")
    assert of(kind="local") != of(kind="local", num_lanes=3)
    assert of(kind="spmd", num_workers=2) != of(kind="spmd", num_workers=3)
    with pytest.raises(ConfigError, match="num_workers=None: expected a number"):
        of(kind="spmd")
