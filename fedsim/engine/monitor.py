"""What a cluster's dashboard and Prometheus are shown of a run: what it releases, and its workers.

`metrics.jsonl` is the truth and TensorBoard has the same. Ray's agents answer all who reach them,
with no token, so only what the guarantee covers leaves the driver: no loss, no norm, and nothing
from which sizes of draws follow, such as the time of a step. A private cluster collects nothing.
"""

import os
import re

from ray.util.metrics import Gauge

SHOWN = re.compile(r"step|privacy/\w+|performance/(\w+_restarts|redispatched_lanes|workers)")


class Monitor:
    """One gauge for every metric that is shown, made when it is first set."""

    def __init__(self):
        self._gauges: dict[str, Gauge] = {}
        # Of a submitted job; a private cluster has one run.
        self._tags = {"job": os.environ.get("RAY_JOB_SUBMISSION_ID", "local")}

    def publish(self, values: dict[str, float]) -> None:
        """Set the gauges of these metrics, as far as others may see them."""
        for name, value in values.items():
            if not SHOWN.fullmatch(name):
                continue
            if name not in self._gauges:
                gauge = "fedsim_" + re.sub(r"\W", "_", name)
                self._gauges[name] = Gauge(gauge, description=name, tag_keys=("job",))
            self._gauges[name].set(value, tags=self._tags)
