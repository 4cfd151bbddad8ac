"""A worker with several devices, each computing its share of a lane with the whole model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim.engine.engine import Stats
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker


class MultiDeviceWorker(Worker):
    """Computes lanes on all devices of its process, on each as a worker of its own."""

    def __init__(self, task: Task | None = None, cache_dir: Path | None = None):
        super().__init__(task, cache_dir)
        self._workers: list[Worker] = []  # one per device

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, *args):
        found = self._on_all("lane_sum", version, params, rows, *args)
        sums, stats = zip(*found, strict=True)
        return jax.tree.map(_added, *sums), Stats.join(stats)

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        found = self._on_all("lane_nats", version, params, rows, split)
        return sum(nats for nats, _ in found), sum(count for _, count in found)

    def _on_all(self, method, version, params, rows, *args):
        """The answers of all devices, each for its share of `rows`, in their order."""
        devices = jax.local_devices()
        self._workers = self._workers or [Worker(self.task) for _ in devices]

        def run(worker, device, share):
            with jax.default_device(device):
                return getattr(worker, method)(version, params, share, *args)

        shares = np.array_split(rows, len(devices))
        with ThreadPoolExecutor(len(devices)) as threads:
            return list(threads.map(run, self._workers, devices, shares))


def _added(*leaves: np.ndarray) -> np.ndarray:
    """The sum of an array over devices: of whole numbers int64, which it cannot overflow."""
    dtype = np.float32 if leaves[0].dtype == np.float32 else np.int64
    total = leaves[0].astype(dtype)
    for leaf in leaves[1:]:
        total += leaf
    return total
