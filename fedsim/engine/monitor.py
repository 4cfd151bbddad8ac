"""A run's metrics as gauges of the Ray dashboard, where Prometheus reads them.

`metrics.jsonl` is the truth and TensorBoard has the same; these are for watching a job. A metric
`non_private/loss` is the gauge `ray_fedsim_non_private_loss`: a dashboard is no place to publish
from, either.
"""

import os
import re

from ray.util.metrics import Gauge


class Monitor:
    """One gauge for every metric, made when it is first set."""

    def __init__(self):
        self._gauges: dict[str, Gauge] = {}
        # Of a submitted job; a private cluster has one run.
        self._tags = {"job": os.environ.get("RAY_JOB_SUBMISSION_ID", "local")}

    def publish(self, values: dict[str, float]) -> None:
        """Set the gauges of these metrics."""
        for name, value in values.items():
            if name not in self._gauges:
                gauge = "fedsim_" + re.sub(r"\W", "_", name)
                self._gauges[name] = Gauge(gauge, description=name, tag_keys=("job",))
            self._gauges[name].set(value, tags=self._tags)
