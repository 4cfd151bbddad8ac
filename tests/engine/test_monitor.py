"""What the dashboard is given has the names that the run's own files have."""

import re

import pytest
from ray.util.metrics import Gauge

from fedsim.engine.monitor import Monitor

pytestmark = pytest.mark.ray


def test_every_metric_has_one_gauge_of_its_name(ray_cluster, monkeypatch):
    was_set = []
    real = Gauge.set

    def record(self, value, tags=None):
        was_set.append((self.info["name"], value, tags))
        return real(self, value, tags)

    monkeypatch.setattr(Gauge, "set", record)
    monkeypatch.setenv("RAY_JOB_SUBMISSION_ID", "job-7")
    monitor = Monitor()
    for step in (1, 2):
        monitor.publish({"step": step, "privacy/epsilon": 0.5, "non_private/loss": 2.0 / step})
    tags = {"job": "job-7"}
    assert was_set == [
        ("fedsim_step", 1, tags),
        ("fedsim_privacy_epsilon", 0.5, tags),
        ("fedsim_non_private_loss", 2.0, tags),
        ("fedsim_step", 2, tags),
        ("fedsim_privacy_epsilon", 0.5, tags),
        ("fedsim_non_private_loss", 1.0, tags),
    ]
    assert len(monitor._gauges) == 3
    assert all(re.fullmatch("[a-z_]+", name) for name, _, _ in was_set)  # as Prometheus wants them
