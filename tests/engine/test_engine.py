"""One contract, several engines: the sum of the oracle, bit for bit, whoever computed it."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import SoftmaxTask, softmax_problem
from ray import cloudpickle
from ray._private.serialization import SerializationContext
from refused import refuses

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine.engine import EngineError
from fedsim.engine.worker import LocalEngine
from fedsim.mechanism import noisy_mean
from fedsim.noise.independent import blocks

CLIP, EXAMPLES = Clip(0.5), 200
FEATURES = softmax_problem(np.random.default_rng(1), [1] * EXAMPLES)


class Precise(SoftmaxTask):
    """Softmax regression that computes its scores in a precision."""

    def __init__(self, precision):
        _, inner, _ = FEATURES
        super().__init__(inner.features, inner.labels, inner.num_classes)
        self.precision = precision

    def losses(self, params, batch):
        scores = batch["x"].astype(self.precision) @ params.astype(self.precision)
        log_probs = jax.nn.log_softmax(scores.astype(jnp.float32))
        return -jnp.take_along_axis(log_probs, batch["y"][:, None], axis=1)[:, 0]


def ray_pool(task, **options):
    from fedsim.engine.ray_engine import RayEngine

    return RayEngine(task, EngineConfig("ray", **{"num_lanes": 4, "num_workers": 2, **options}))


def process_of(pool, worker=0):
    import ray

    return ray.get(pool._workers[worker].actor.facts.remote())["process"]


def groups(rng, units, group):
    """Random rows [units, group] of the examples, some of them padding."""
    rows = rng.integers(EXAMPLES, size=(units, group))
    return np.where(rng.random((units, group)) < 0.2, -1, rows)


@pytest.fixture(scope="module")
def params():
    return jnp.asarray(FEATURES[2])


@pytest.fixture(scope="module")
def task():
    return Precise("float32")


@pytest.fixture(scope="module")
def pool(ray_cluster, task):
    engine = ray_pool(task)
    engine.ready()
    yield engine
    engine.close()


def expected_sum(task, params, rows):
    """The sum of the units, each computed alone, which is that of the oracle but for rounding."""
    alone, total = LocalEngine(task, num_lanes=1), 0
    for unit in rows:
        total = total + alone.clipped_sum(params, unit[None], CLIP)[0]
    gradient = reference.softmax_gradient(task.features.astype(np.float64), task.labels)
    oracle = reference.uls_gradient(
        np.asarray(params, np.float64),
        gradient,
        [unit[unit >= 0] for unit in rows],
        **{"clip_norm": CLIP.norm, "normalised": False, "noise": 0, "expected_cohort_size": 1},
    )
    error = reference.rounding(total, CLIP, len(rows))
    error += 0.02 * len(rows) * CLIP.norm if task.precision == "bfloat16" else 0
    np.testing.assert_allclose(reference.floats(total, CLIP), oracle, atol=error)
    return total


def strike(pool, worker, kind):
    """Freeze a worker, so that it cannot finish its lane, and perhaps kill it in it."""
    os.kill(process := process_of(pool, worker), signal.SIGSTOP)
    if kind == "hangs":
        pool._timeout_s = 30
    else:
        threading.Timer(0.1, os.kill, (process, signal.SIGKILL)).start()


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["local", "ray-1", "ray-3", "dies", "hangs"])
def test_every_engine_gives_the_oracles_sum(kind, precision, request, rng, params):
    """Bit for bit, whoever computed it, and whoever was lost."""
    task, engine = Precise(precision), LocalEngine(Precise(precision), num_lanes=4)
    if kind != "local":
        request.getfixturevalue("ray_cluster")
        workers = {"ray-1": 1, "ray-3": 3, "dies": 2, "hangs": 2}[kind]
        engine = ray_pool(task, num_workers=workers, num_lanes=6)
        engine.ready()
    for group in (1, 3):  # of ELS and of ULS
        rows = groups(rng, 21, group)
        expected = expected_sum(task, params, rows)
        if kind == "dies" or (kind == "hangs" and group == 1):
            strike(engine, group // 3, kind)  # the other one may not be back yet
        total, stats = engine.clipped_sum(params, rows, CLIP)
        assert np.array_equal(total, expected)
        assert np.array_equal(stats.num_rows, (rows >= 0).sum(axis=1))
        _, one_lane = LocalEngine(task, num_lanes=1).clipped_sum(params, rows, CLIP)
        assert all(map(np.array_equal, stats.columns(), one_lane.columns()))
        if kind in ("dies", "hangs"):
            assert engine.redispatched >= 1
    engine.close()


def test_a_sum_of_no_units_is_zero(task, params):
    total, stats = LocalEngine(task, num_lanes=4).clipped_sum(params, np.zeros((0, 3), int), CLIP)
    assert not total.any() and total.dtype == np.int32 and len(stats.norms) == 0


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_evaluation_is_a_mean_over_predictions(engine, request, rng, task, params):
    rows = rng.integers(EXAMPLES, size=45)
    losses = task.losses(params, task.read("any", rows))
    engine = request.getfixturevalue("pool") if engine == "ray" else LocalEngine(task, num_lanes=4)
    assert engine.mean_nats(params, "any", rows) == pytest.approx(float(losses.mean()), rel=1e-6)
    of_groups = engine.group_losses(params, "any", [rows[:7], rows[7:]])
    np.testing.assert_allclose(of_groups, [losses[:7].mean(), losses[7:].mean()], rtol=1e-6)


def test_cohorts_of_varying_size_compile_once(rng, task, params):
    engine = LocalEngine(task, num_lanes=4)
    for units in [5, 0, 40, 1, 17, 33, 8]:
        engine.clipped_sum(params, groups(rng, units, 3), CLIP)
    assert len(engine._worker.programs.compiled) == 1


@pytest.mark.slow
@pytest.mark.privacy
def test_no_worker_is_sent_what_noise_follows_from(pool, rng, params, key, monkeypatch):
    sent, serialize = [], SerializationContext.serialize

    def serialized(self, value):
        sent.append(cloudpickle.dumps(value))  # as it goes over the wire
        return serialize(self, value)

    monkeypatch.setattr(SerializationContext, "serialize", serialized)
    total, _ = pool.clipped_sum(params, groups(rng, 9, 3), CLIP)
    noisy_mean(total, clip=CLIP, noise_multiplier=1.0, count=9, key=key, step=1)
    streams = [("noise", (1, leaf, number)) for leaf, number, _ in blocks([params.size])]
    streams += [("units", (1,)), ("pool", ())]
    secrets = [key._secret, key._sealing, *(key._derive(*stream) for stream in streams)]
    assert len(sent) > 2
    assert not [secret for secret in secrets if any(secret in message for message in sent)]


class FailingTask(Precise):
    def read(self, split, rows):
        raise RuntimeError("no such text")


class DeadlyTask(Precise):
    def read(self, split, rows):
        os._exit(1)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "kind, says",
    [
        (FailingTask, r"lane 0 \(examples 3\): RuntimeError: no such text"),
        (DeadlyTask, r"lane 0 \(examples 3\) lost its worker, or took .* worker_timeout=600"),
    ],
)
def test_a_lane_that_cannot_be_computed_ends_the_run_naming_its_examples(
    ray_cluster, params, kind, says
):
    engine = ray_pool(kind("float32"), num_workers=1, num_lanes=1)
    with pytest.raises(EngineError, match=says) as raised:
        engine.clipped_sum(params, np.full((4, 1), 3), CLIP)
    # The user's own line.
    assert (kind is DeadlyTask) != ("in read\n    raise Runtime" in raised.value.details)
    engine.close()


@pytest.mark.ray
def test_more_workers_than_the_cluster_has_room_for_are_refused(ray_cluster, task):
    with refuses("num_workers=9", says="at most 8 (a worker needs 1 CPU; nodes have 8 CPU)"):
        ray_pool(task, num_workers=9)
    waiting = ray_pool(task, num_workers=9, wait_for_workers=0.1, worker_timeout=0.1)
    with pytest.raises(EngineError, match=r"could not start: it did not answer"):
        waiting.ready()
    waiting.close()
