"""A worker with several devices, each with a share of a lane: the sum and the losses of one."""

import jax
import numpy as np
import pytest
from problems import softmax_problem

from fedsim.clipping import Clip, Strategy
from fedsim.engine.worker import LocalEngine, MultiDeviceWorker, Worker, _added

ROWS = np.where(np.arange(42).reshape(14, 3) % 5, np.arange(42).reshape(14, 3), -1)


@pytest.fixture(scope="module")
def problem():
    _, task, theta = softmax_problem(np.random.default_rng(2), [4] * 50)
    return task, jax.numpy.asarray(theta, np.float32)


@pytest.fixture
def three_devices(monkeypatch):
    """The one device that there is, three times."""
    device = jax.local_devices()[0]
    monkeypatch.setattr(jax, "local_devices", lambda: [device] * 3)


@pytest.mark.parametrize("clip", [Clip(0.5), Clip(np.inf, in_float32=True)])
def test_devices_have_the_sum_and_the_statistics_of_one(clip, problem, three_devices):
    task, params = problem
    expected, known = Worker(task).lane_sum(0, params, ROWS, clip, Strategy())
    total, stats = MultiDeviceWorker(task).lane_sum(0, params, ROWS, clip, Strategy())
    assert np.abs(total).max() > 0
    if clip.in_float32:
        assert total.dtype == np.float32
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)
    else:  # whole numbers: in any order
        assert total.dtype == np.int32  # which holds it: half as much to send
        np.testing.assert_array_equal(total, expected)
    for column, values in zip(stats.columns(), known.columns(), strict=True):
        np.testing.assert_array_equal(column, values)


def test_devices_have_the_losses_of_one(problem, three_devices):
    task, params = problem
    expected, count = Worker(task).lane_nats(0, params, np.arange(40), "any")
    nats, predictions = MultiDeviceWorker(task).lane_nats(0, params, np.arange(40), "any")
    assert nats == pytest.approx(expected, rel=1e-6) and predictions == count == 40


def test_sums_of_devices_do_not_overflow():
    largest = np.full(3, 2**31 - 1, np.int32)
    np.testing.assert_array_equal(_added(np.int64, largest, largest, largest), 3 * (2**31 - 1))
    np.testing.assert_array_equal(largest, 2**31 - 1)


@pytest.mark.ray
@pytest.mark.slow
def test_ray_workers_with_two_devices_agree_with_this_process(ray_cluster, problem):
    from fedsim.engine.ray_engine import RayEngine

    task, params = problem
    local = LocalEngine(task, num_lanes=4)
    expected, _ = local.clipped_sum(params, ROWS, Clip(0.5))
    totals = []
    for num_workers in (1, 2):
        pool = RayEngine(task, num_lanes=4, num_workers=num_workers, threads=1, devices=2)
        totals.append(pool.clipped_sum(params, ROWS, Clip(0.5))[0])
        nats = pool.mean_nats(params, "any", np.arange(20))
        pool.close()
        np.testing.assert_allclose(
            totals[-1], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
        )
    np.testing.assert_array_equal(*totals)
    assert nats == pytest.approx(local.mean_nats(params, "any", np.arange(20)), rel=1e-6)


def test_the_first_device_has_the_model_once(problem, three_devices):
    """What a trial compiled, and the frozen model, are those of the first device."""
    worker = MultiDeviceWorker(problem[0])
    programs = worker.programs
    worker.lane_nats(0, problem[1], np.arange(40), "any")
    assert worker._workers[0].programs is programs is worker.programs
