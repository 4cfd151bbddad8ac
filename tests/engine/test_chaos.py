"""A run whose workers are killed at random, one of them frozen, has the same parameters."""

import contextlib
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from problems import SoftmaxTask, softmax_problem

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine.engine import ignore
from fedsim.engine.worker import LocalEngine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CLIP = Clip(0.5)


class SlowTask(SoftmaxTask):
    """Softmax regression whose rows take their time, so that lanes are met under way."""

    def read(self, split, rows):
        time.sleep(0.02)
        return super().read(split, rows)


@pytest.fixture(scope="module")
def problem():
    _, task, theta = softmax_problem(np.random.default_rng(2), [4] * 50)
    return SlowTask(task.features, task.labels, task.num_classes), jax.numpy.asarray(theta)


def steps(engine, params, count, between=ignore):
    """Parameters after `count` steps of gradient descent on cohorts of varying size."""
    rng = np.random.default_rng(1)
    for step in range(count):
        rows = rng.integers(200, size=(int(rng.integers(30, 90)), 2))
        total, stats = engine.clipped_sum(params, rows, CLIP)
        assert len(stats.norms) == len(rows)
        params = params - 0.01 * jax.numpy.asarray(total)
        between(step)
    return np.asarray(params)


def ray_pool(task, **options):
    from fedsim.engine.ray_engine import RayEngine

    options = {"num_lanes": 6, "worker_timeout": 120, **options}
    pool = RayEngine(task, EngineConfig("ray", **options))
    pool.ready()
    return pool


def processes(pool):
    """Of the workers that answer now, at least one: those that were killed start again."""
    import ray

    found = []
    while not found:
        for ref in [worker.actor.facts.remote() for worker in list(pool._workers.values())]:
            with contextlib.suppress(ray.exceptions.RayError):
                found.append(ray.get(ref, timeout=5)["process"])
    return found


@pytest.mark.privacy
def test_a_storm_changes_nothing(ray_cluster, problem):
    task, params = problem
    expected = steps(LocalEngine(task, num_lanes=6), params, 20)
    pool, rng = ray_pool(task, num_workers=3), np.random.default_rng(5)

    def strike(step):
        """Freeze a worker before its next lane, and but for the last time kill it in that lane."""
        if step in (3, 7, 11, 15):
            os.kill(process := rng.choice(processes(pool)), signal.SIGSTOP)
            if step < 15:
                threading.Timer(0.1, os.kill, (process, signal.SIGKILL)).start()
            else:
                pool._timeout_s = 5

    found = steps(pool, params, 20, strike)
    assert np.array_equal(found, expected) and pool.redispatched >= 2
    pool.close()
