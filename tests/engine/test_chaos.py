"""A run whose workers are killed and frozen, and whose nodes come and go, has the same parameters.

The long test is what the promise rests on: 30 workers killed at random, a SIGSTOP, a node removed
and one added.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from problems import softmax_problem

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine.engine import ignore
from fedsim.engine.task import Task
from fedsim.engine.worker import LocalEngine

pytestmark = pytest.mark.ray
CLIP = Clip(0.5)


class SlowTask(Task):
    """Softmax regression whose rows take their time, so that lanes are met under way."""

    def __init__(self, inner, seconds):
        self.inner, self.seconds = inner, seconds

    def read(self, split, rows):
        time.sleep(self.seconds)
        return self.inner.read(split, rows)

    def losses(self, params, batch):
        return self.inner.losses(params, batch)

    def nats(self, params, batch):
        return self.inner.nats(params, batch)


def steps(engine, params, rng, count, between=lambda step: None):
    """Parameters after `count` steps of gradient descent on cohorts of varying size."""
    for step in range(count):
        rows = rng.integers(200, size=(int(rng.integers(30, 90)), 2))
        total, stats = engine.clipped_sum(params, rows, CLIP)
        assert len(stats.norms) == len(rows)
        params = params - 0.01 * jax.numpy.asarray(total)
        between(step)
    return np.asarray(params)


@pytest.fixture(scope="module")
def problem():
    _, task, theta = softmax_problem(np.random.default_rng(2), [4] * 50)
    return task, jax.numpy.asarray(theta)


def ray_pool(task, warn=ignore, **options):
    from fedsim.engine.ray_engine import RayEngine

    return RayEngine(
        task, EngineConfig("ray", **{"num_lanes": 6, "worker_timeout": 60, **options}), warn=warn
    )


def processes(pool):
    """Of the workers that answer now, by worker."""
    import ray

    asked = {number: worker.actor.facts.remote() for number, worker in list(pool._workers.items())}
    found = {}
    for worker, ref in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):
            found[worker] = ray.get(ref, timeout=5)["process"]
    return found


def freeze_one(pool):
    """Sends SIGSTOP to a process of a pool that is not killed at the same moment."""
    while True:
        for process in processes(pool).values():
            with contextlib.suppress(ProcessLookupError):
                return os.kill(process, signal.SIGSTOP)


class Killer:
    """Sends SIGKILL to a random process of a pool, again and again, until there were enough."""

    def __init__(self, pool, kills, pause):
        self.left, self.pool, self.pause = kills, pool, pause
        self.rng = np.random.default_rng(5)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while self.left:
            time.sleep(self.rng.uniform(*self.pause))
            found = processes(self.pool)
            if found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.rng.choice(list(found.values())), signal.SIGKILL)
                    self.left -= 1


@pytest.mark.slow
@pytest.mark.privacy
def test_a_short_storm_changes_nothing(ray_cluster, problem):
    task, params = problem
    expected = steps(LocalEngine(task, num_lanes=6), params, np.random.default_rng(1), 8)
    pool = ray_pool(SlowTask(task, 0.05), num_workers=2)
    pool.ready()
    kill = {1: 0, 3: 1}  # in the step after step 1, worker 0 ...
    pids = processes(pool)

    def between(step):
        if step in kill:
            os.kill(pids[kill[step]], signal.SIGSTOP)  # so that it dies with its lane under way
            threading.Timer(0.1, os.kill, (pids[kill[step]], signal.SIGKILL)).start()

    found = steps(pool, params, np.random.default_rng(1), 8, between)
    measured = pool.measurements()
    pool.close()
    assert np.array_equal(found, expected)
    assert measured["performance/redispatched_lanes"] == 2


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_whose_device_broke_leaves_its_work_to_the_others(
    ray_cluster, problem, tmp_path, monkeypatch
):
    """Its process is started again, and cannot compute there."""
    from fedsim.engine import ray_engine

    (task, params), broken, said = problem, tmp_path / "broken", []

    class Breaking(ray_engine.Worker):
        def facts(self):
            if broken.exists():
                raise RuntimeError("no such device")
            return super().facts()

    monkeypatch.setattr(ray_engine, "Worker", Breaking)
    pool = ray_pool(task, num_workers=2, warn=said.append)
    try:
        pool.ready()
        os.kill(processes(pool)[0], signal.SIGKILL)
        broken.touch()
        total, _ = pool.clipped_sum(params, np.arange(60).reshape(30, 2), CLIP)
        while not said:
            pool._collect()
    finally:
        pool.close()
    expected, _ = LocalEngine(task, num_lanes=6).clipped_sum(
        params, np.arange(60).reshape(30, 2), CLIP
    )
    assert np.array_equal(total, expected) and "no such device" in said[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thirty_killed_actors_a_frozen_one_and_nodes_that_come_and_go():
    """In a process of its own: it connects to a cluster of several nodes."""
    subprocess.run([sys.executable, __file__], check=True, timeout=800)


def storm():
    """The body of the long test."""
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 150_000_000}
    _, task, theta = softmax_problem(np.random.default_rng(2), [4] * 50)
    params = jax.numpy.asarray(theta)
    for num_workers in (1, 2, 3, 4):
        cluster = Cluster(initialize_head=True, head_node_args=options)
        nodes = [cluster.add_node(**options)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        asked = num_workers if num_workers < 4 else None  # None: as many as there is room for
        pool = ray_pool(
            SlowTask(task, 0.02), num_workers=asked, worker_timeout=20, wait_for_workers=120
        )
        pool.warn = lambda text: print(text, file=sys.stderr)
        pool.ready()
        killer = Killer(pool, 30, (1.0, 2.5)) if num_workers == 4 else None
        count = 400 if killer else 40

        def between(step, pool=pool, cluster=cluster, nodes=nodes, killer=killer, count=count):
            if killer is None:
                return
            if step == 20:
                freeze_one(pool)
            if step == 60:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            if step == 100:
                nodes.append(cluster.add_node(**options))
            while step == count - 2 and killer.left:
                time.sleep(0.5)

        rng = np.random.default_rng(1)
        found = steps(pool, params, rng, count, between)
        print(num_workers, pool.measurements(), file=sys.stderr)
        rng = np.random.default_rng(1)
        assert np.array_equal(found, steps(LocalEngine(task, num_lanes=6), params, rng, count))
        assert not killer or pool.redispatched >= 10
        pool.close()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    storm()
