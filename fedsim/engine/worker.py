"""What runs on a worker: one lane's clipped sum. Plain Python and JAX; Ray is in `ray_pool`.

Pure in (params, rows, clip): a lane can be computed again, elsewhere, with the same result. What
leaves a worker is a sum over units and per-unit scalars, never one user's gradient.
"""

import functools
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Clip, clipped_sum
from fedsim.clipping.scan import zeros_like
from fedsim.engine.engine import Stats
from fedsim.engine.facts import versions
from fedsim.engine.prefetch import ahead, touch

UNITS_PER_CHUNK = 8
EVAL_ROWS_PER_CHUNK = 16


class Worker:
    """Computes lanes of a task. Cohorts vary in size, shapes do not: rows are padded to whole
    chunks and the loop runs over as many chunks as were drawn, so nothing is compiled twice."""

    def __init__(self, task: Any, cache_dir: Path | None = None):
        """Args: cache_dir: where compiled programs are kept for other processes and runs."""
        if cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", str(cache_dir / _host_kind()))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        self.task = task
        self._version, self._params = None, None

    def facts(self) -> dict[str, Any]:
        """Where this worker computes, and with what."""
        return {
            "device": str(jax.local_devices()[0]),
            "host": socket.gethostname(),
            "process": os.getpid(),
            "versions": versions(),
        }

    def read_ahead(self, split: str, rows: np.ndarray) -> None:
        """Bring rows that will be needed soon into memory, in the background."""
        touch(lambda: self.task.read(split, rows.ravel()))

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, clip: Clip):
        """The clipped sum of a lane: (NumPy float32 tree, Stats).

        Args:
          version: names the parameters; equal versions are put on the device once.
          rows: [units, group], -1 = padding.
        """
        params = self._on_device(version, params)
        total, stats = zeros_like(params), []

        def read(piece):
            return self.task.read("train", piece[0].ravel())

        for (chunk, units), batch in ahead(read, _chunks(rows, UNITS_PER_CHUNK)):
            batch = jax.tree.map(lambda leaf: leaf.reshape(*chunk.shape, *leaf.shape[1:]), batch)  # noqa: B023
            mask = chunk >= 0
            total, *values = self._add_chunk(total, params, batch, mask, clip)
            values = [*values, mask.sum(axis=1)]
            stats.append(Stats(*(np.asarray(value)[:units] for value in values)))
        return jax.tree.map(np.asarray, total), Stats.join(stats)

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """(sum of nats, number of predicted tokens) over examples `rows` [n] of a split."""
        params = self._on_device(version, params)
        nats, predictions = 0.0, 0
        pieces = _chunks(rows, EVAL_ROWS_PER_CHUNK)
        for (_, real), batch in ahead(lambda piece: self.task.read(split, piece[0]), pieces):
            values = map(np.asarray, self._nats(params, batch))
            chunk_nats, chunk_predictions = (value[:real] for value in values)
            nats += float(chunk_nats.sum(dtype=np.float64))
            predictions += int(chunk_predictions.sum())
        return nats, predictions

    def _on_device(self, version, params):
        if version != self._version:
            # The previous parameters go first: they may pin an object of shared memory.
            self._version, self._params = None, None
            self._version, self._params = version, jax.device_put(params)
        return self._params

    @functools.partial(jax.jit, static_argnums=(0, 5), donate_argnums=1)
    def _add_chunk(self, total, params, batch, mask, clip):
        chunk_sum, *values = clipped_sum(self.task.losses, params, batch, mask, clip)
        return jax.tree.map(jnp.add, total, chunk_sum), *values

    @functools.partial(jax.jit, static_argnums=0)
    def _nats(self, params, batch):
        return self.task.nats(params, batch)


def _chunks(rows: np.ndarray, size: int):
    """Consecutive chunks of exactly `size` rows, the last one padded with -1, and how many of its
    rows are real."""
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        padding = [(0, size - len(chunk))] + [(0, 0)] * (rows.ndim - 1)
        yield np.pad(chunk, padding, constant_values=-1), len(chunk)


def _host_kind() -> str:
    """Names what compiled programs depend on: unlike hosts must not share them."""
    try:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return re.sub(r"\W+", "-", model[1] if model else platform.machine()).strip("-")
