"""What leaves the driver for the dashboard: the names of the run's own files, and few of them."""

import math
import re
from types import SimpleNamespace

import pytest
from ray.util.metrics import Gauge

from fedsim.engine.cluster import Monitor
from fedsim.run import visible

pytestmark = pytest.mark.ray


PLAN = {"evaluations": None}
NOT_TO_SEE = {
    "non_private/loss": 2.0,
    "non_private/cohort_size": 17,
    "non_private/units_per_second": 3.0,
    "performance/step_seconds": 0.2,  # a larger draw takes longer
    "performance/busy_share": 0.9,
    "eval/loss": 4.5,  # of held-out users, without noise
}


def test_what_others_may_see_has_a_gauge_of_its_name_and_the_rest_has_none(
    ray_cluster, monkeypatch
):
    was_set = []
    real = Gauge.set

    def record(self, value, tags=None):
        was_set.append((self.info["name"], value, tags))
        return real(self, value, tags)

    monkeypatch.setattr(Gauge, "set", record)
    monkeypatch.setenv("RAY_JOB_SUBMISSION_ID", "job-7")
    monitor, plan = Monitor(), SimpleNamespace(**PLAN, noise_multiplier=1.0)
    for step in (1, 2):
        counts = {"performance/worker_restarts": 3, "performance/redispatched_lanes": 4}
        values = {"privacy/epsilon": 0.5, **NOT_TO_SEE, **counts}
        monitor.publish({"step": step, **visible(plan, values)})
    tags = {"job": "job-7"}
    assert was_set == [
        (name, value, tags)
        for step in (1, 2)
        for name, value in (
            ("fedsim_step", step),
            ("fedsim_privacy_epsilon", 0.5),
            ("fedsim_performance_worker_restarts", 3),
            ("fedsim_performance_redispatched_lanes", 4),
        )
    ]
    assert len(monitor._gauges) == 4
    assert all(re.fullmatch("[a-z_]+", name) for name, _, _ in was_set)  # as Prometheus wants them


def test_a_clip_norm_that_follows_the_data_without_noise_is_not_seen():
    names = {"privacy/clip_norm": 0.3, "privacy/epsilon": math.inf}
    noisy, plain = (SimpleNamespace(**PLAN, noise_multiplier=noise) for noise in (1.0, 0.0))
    assert visible(noisy, names) == names
    assert visible(plain, names) == {"privacy/epsilon": math.inf}
