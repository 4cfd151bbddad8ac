"""One contract, several engines: the same sums, bit for bit, whoever computed them."""

import math
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import found, keys_of_noise, other_secrets, recorded
from problems import mean_problem
from refused import refuses

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine.engine import EngineError
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine
from fedsim.mechanism import noisy_mean
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import Transformer, TransformerConfig

CLIP = Clip(0.5)


class TokensTask(Task):
    """A small transformer on random tokens."""

    def __init__(self):
        self.model = Transformer(TransformerConfig(31, 12, width=16, num_layers=1, num_heads=2))
        self.tokens = np.random.default_rng(1).integers(31, size=(200, 12)).astype(np.int32)

    def init(self, key):
        return jax.jit(self.model.init)(key, self.tokens[:1])["params"]

    def read(self, split, rows):
        return {"tokens": self.tokens[rows], "sizes": np.full(len(rows), 12)}

    def nats(self, params, batch):
        return LanguageModelTask(None, self.model.config).nats(params, batch)

    def losses(self, params, batch):
        nats, predictions = self.nats(params, batch)
        return nats / predictions


def ray_pool(task, **options):
    from fedsim.engine.ray_engine import RayEngine

    return RayEngine(task, EngineConfig("ray", **{"num_lanes": 4, "num_workers": 2, **options}))


def process_of(pool, worker=0):
    import ray

    return ray.get(pool._workers[worker].actor.facts.remote())["process"]


def groups(rng, units, group):
    """Random rows [units, group] of the 200 examples, some of them padding."""
    rows = rng.integers(200, size=(units, group))
    return np.where(rng.random((units, group)) < 0.2, -1, rows)


def same(first, second):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.fixture(scope="module")
def task():
    return TokensTask()


@pytest.fixture(scope="module")
def params(task):
    return task.init(jax.random.key(0))


@pytest.fixture(scope="module")
def pool(ray_cluster, task):
    engine = ray_pool(task)
    yield engine
    engine.close()


@pytest.fixture(params=["local", "ray"])
def engine(request, task):
    if request.param == "local":
        return LocalEngine(task, num_lanes=4)
    return request.getfixturevalue("pool")


@pytest.mark.slow
@pytest.mark.ci
def test_the_sum_is_that_of_all_units_whatever_the_lanes(engine, rng, task, params):
    rows = groups(rng, 21, 3)
    total, stats = engine.clipped_sum(params, rows, CLIP)
    expected, one_lane = LocalEngine(task, num_lanes=1).clipped_sum(params, rows, CLIP)
    assert same(total, expected)  # whole numbers: in any order
    for name in ("norms", "losses", "dropped", "num_rows"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(one_lane, name))
    np.testing.assert_array_equal(stats.num_rows, (rows >= 0).sum(axis=1))


@pytest.mark.slow
@pytest.mark.privacy
def test_no_worker_is_sent_what_noise_follows_from(pool, rng, params, key, monkeypatch):
    with recorded(monkeypatch) as sent:
        total, _ = pool.clipped_sum(params, groups(rng, 9, 3), CLIP)
        noisy_mean(total, clip=CLIP, noise_multiplier=1.0, count=9, key=key, step=1)
    noise = keys_of_noise(key, [leaf.size for leaf in jax.tree.leaves(params)], 1)
    assert len(sent) > 2 and not found([*noise, *other_secrets(key, 1)], sent)


def test_no_units_give_a_sum_of_zero(engine, params):
    total, stats = engine.clipped_sum(params, np.zeros((0, 3), int), CLIP)
    assert all((leaf == 0).all() and leaf.dtype == np.int32 for leaf in jax.tree.leaves(total))
    assert len(stats.norms) == 0


def test_evaluation_is_a_mean_over_predictions(engine, rng, task, params):
    rows = rng.integers(200, size=45)
    nats, predictions = jax.jit(task.nats)(params, task.read("any", rows))
    expected = float(nats.sum() / predictions.sum())
    assert engine.begin_mean_nats(params, "any", rows)() == pytest.approx(expected, rel=1e-6)


def test_cohorts_of_varying_size_compile_once(rng, task, params):
    engine = LocalEngine(task, num_lanes=4)
    for units in [5, 0, 40, 1, 17, 33, 8]:
        engine.clipped_sum(params, groups(rng, units, 3), CLIP)
    assert len(engine._worker.programs.compiled) == 1


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("num_workers", [pytest.param(3, marks=pytest.mark.ci), 1])
def test_any_number_of_workers_gives_the_same_bits(
    num_workers, ray_cluster, pool, rng, task, params
):
    rows = groups(rng, 30, 2)
    expected, _ = LocalEngine(task, num_lanes=4).clipped_sum(params, rows, CLIP)
    assert same(pool.clipped_sum(params, rows, CLIP)[0], expected)
    other = ray_pool(task, num_workers=num_workers)
    assert same(other.clipped_sum(params, rows, CLIP)[0], expected)
    other.close()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_a_killed_worker_changes_nothing(pool, rng, task, params):
    rows = groups(rng, 200, 2)
    expected, _ = pool.clipped_sum(params, rows, CLIP)
    before = pool.redispatched
    pid = process_of(pool)
    os.kill(pid, signal.SIGSTOP)  # it cannot finish its lane before it is killed
    threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
    total, _ = pool.clipped_sum(params, rows, CLIP)
    assert same(total, expected)
    assert pool.redispatched == before + 1
    assert same(pool.clipped_sum(params, rows, CLIP)[0], expected)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_that_ray_starts_again_gets_its_task_again(
    ray_cluster, rng, task, params, capfd, monkeypatch
):
    large = np.zeros(10**6)  # a task that Ray keeps in the object store
    monkeypatch.setattr(task, "ballast", large, raising=False)
    rows = groups(rng, 60, 2)
    expected, _ = LocalEngine(task, num_lanes=4).clipped_sum(params, rows, CLIP)
    pool = ray_pool(task, num_workers=1)
    assert same(pool.clipped_sum(params, rows, CLIP)[0], expected)
    pid = process_of(pool)
    os.kill(pid, signal.SIGKILL)  # while it has nothing to do
    while (again := process_again(pool)) in (None, pid):
        pass
    before = pool.redispatched
    assert same(pool.clipped_sum(params, rows, CLIP)[0], expected)
    assert pool.redispatched == before + 1 and process_of(pool) == again
    pool.close()
    assert "object store" not in capfd.readouterr().err  # constructor arguments, that is


def process_again(pool):
    """The worker's process, if it can be reached."""
    from ray.exceptions import ActorUnavailableError

    try:
        return process_of(pool)
    except ActorUnavailableError:
        return None


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_frozen_worker_is_replaced(ray_cluster, task, rng, params):
    rows = groups(rng, 200, 2)
    pool = ray_pool(task)
    expected, _ = pool.clipped_sum(params, rows, CLIP)
    pool.clipped_sum(params, rows, CLIP)
    pool._timeout_s = 4  # now that both have compiled
    os.kill(process_of(pool), signal.SIGSTOP)
    total, _ = pool.clipped_sum(params, rows, CLIP)
    assert same(total, expected)
    assert pool.redispatched >= 1
    pool.close()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_an_answer_that_is_there_is_not_late_however_long_the_driver_was_away(pool, rng, params):
    import ray

    pool.ready()  # one of them may still be starting
    expected = pool.begin_mean_nats(params, "any", np.arange(45))()
    before, answer = pool.redispatched, pool.begin_mean_nats(params, "any", np.arange(45))
    flights = list(pool._flights)
    assert len(flights) == 2
    ray.wait(flights, num_returns=2)
    for flight in pool._flights.values():
        flight.sent = -math.inf
    assert answer() == expected and pool.redispatched == before


class FailingTask(TokensTask):
    def read(self, split, rows):
        raise RuntimeError("no such text")


class DeadlyTask(TokensTask):
    def read(self, split, rows):
        os._exit(1)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_an_exception_in_a_workers_code_ends_the_run_with_its_cause(ray_cluster, params):
    engine = ray_pool(FailingTask(), num_workers=1)
    with pytest.raises(
        EngineError, match=r"lane 0 \(examples 3\): RuntimeError: no such text"
    ) as raised:
        engine.clipped_sum(params, np.full((4, 1), 3), CLIP)
    assert "in read\n    raise RuntimeError" in raised.value.details  # the user's own line
    engine.close()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_lane_that_kills_its_workers_ends_the_run_naming_its_examples(ray_cluster, params):
    engine = ray_pool(DeadlyTask(), num_workers=1, num_lanes=1)
    with pytest.raises(
        EngineError,
        match=r"lane 0 \(examples 17\) lost its worker, or took longer than worker_timeout=600",
    ):
        engine.clipped_sum(params, np.full((1, 1), 17), CLIP)
    engine.close()


@pytest.mark.ray
def test_more_workers_than_the_cluster_has_room_for_are_refused(ray_cluster, task):
    with refuses("num_workers=9", says="at most 8"):
        ray_pool(task, num_workers=9)


def test_mean_estimation_runs_on_the_same_engine(rng):
    _, task = mean_problem(rng, [5])
    total, _ = LocalEngine(task, num_lanes=2).clipped_sum(
        jnp.zeros(6), np.arange(5)[:, None], Clip(1e6, in_float32=True)
    )
    np.testing.assert_allclose(total, -task.points.sum(axis=0), rtol=1e-5)
