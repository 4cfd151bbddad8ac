"""Workers, which compute one lane's clipped sum or loss, without Ray; and the engine of one worker.

A lane's result is a function of (params, rows, clip): another worker can compute it again. A worker
returns a sum over two units or more (one, if no more were drawn) and per-unit scalars. In
evaluations, short texts share rows and calls have few shapes, so that little is compiled.
"""

import dataclasses
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim.clipping import (
    Chunk,
    Clip,
    Strategy,
    UnsupportedModel,
    chunks,
    chunks_of_shared,
    lattice_capacity,
    num_coordinates,
)
from fedsim.engine.engine import Engine, Stats
from fedsim.engine.environment import expect_allowed, host_kind, keep_compiled, versions
from fedsim.engine.preflight import keep_memory
from fedsim.engine.programs import (
    Programs,
    check_arithmetic,
    check_contributions,
    default_device,
    on_accelerator,
)
from fedsim.engine.task import DUMMY, Task
from fedsim.signals import raise_if_stopped

UNITS_PER_CALL = 32  # least units of a full call of `clip_chunk`
EVAL_ROWS_PER_CHUNK = 16
EVAL_TOKENS_PER_CALL = 2048  # if short texts share rows

SHARE = 0.9  # of a device's memory that a step may take
SAME_NORMS = 0.02  # relative; strategies agree to 1e-5 in float32, and to less in bfloat16

_fit = functools.cache(check_arithmetic)


class NoTask(RuntimeError):
    """This worker has no task yet: its process has been started again."""


class Worker:
    """Computes lanes of a task on one device.

    Cohorts vary in size, but units are cut into chunks of few static shapes, and a loop runs over
    the chunks that were drawn, so no program is compiled twice.
    """

    def __init__(self, task: Task | None = None, cache_dir: Path | None = None):
        """Start without compiling anything.

        Args:
          task: the model and its data; None: `begin` brings it.
          cache_dir: directory of compiled programs, shared with other processes and runs.
        """
        if cache_dir is not None:
            keep_compiled(cache_dir)
            keep_memory()
        self._programs = None if task is None else Programs(task)

    def begin(self, task: Task) -> dict[str, Any]:
        """Take a task, unless the worker has one, and return `facts`."""
        self._programs = self._programs or Programs(task)
        return self.facts()

    @property
    def programs(self) -> Programs:
        """The compiled programs of the task. Raises NoTask if there is none yet."""
        if self._programs is None:
            raise NoTask("no task yet")
        return self._programs

    @property
    def task(self) -> Task:
        """The model and its data. Raises NoTask if there is none yet."""
        return self.programs.task

    def facts(self) -> dict[str, Any]:
        """Return device, platform, host, kind of host (on which bits depend), kernels, process and
        versions, after a check of the process.

        Raises:
          ConfigError: an option of XLA or JAX is not allowed.
          UnfitDevice: the device's arithmetic is not that of the proof.
        """
        expect_allowed()
        _fit(default_device())
        device, threads = jax.local_devices()[0], os.environ.get("NPROC", os.cpu_count())
        kernels = getattr(self._programs and self._programs.task, "kernels", "")
        return {
            "device": str(device),
            "platform": jax.default_backend(),
            "host": socket.gethostname(),
            "kind": f"{host_kind()}, {device.device_kind}, {threads} threads{kernels}",
            "kernels": kernels,
            "process": os.getpid(),
            "versions": versions(),
        }

    def run(self, version: int, params: Any, part: Any, function: Callable[..., Any], *args: Any):
        """Compute function(part, params, *args)."""
        return function(part, params, *args)

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy):
        """Compute the clipped sum of a lane.

        Args:
          version: number of the parameters; each version is put on the device once.
          params: tree of float32 arrays.
          rows: example indices, int [units, group], -1 = padding.
          clip: the clip norm C.
          strategy: how the sum is computed.
        Returns: (NumPy tree of whole numbers in units of `clip.unit`, int32, or int64 if they might
          not fit, or float32 with `clip.in_float32`; Stats of the units).
        Raises: UnfitDevice, UnsupportedModel.
        """
        params = self.programs.on_device(version, params)
        if not clip.in_float32:
            _fit(default_device())
            for each in self.passes(strategy, rows.shape[1]):
                check_contributions(each, params)
        return self.add_lane(params, rows, clip, strategy)

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """Compute (sum of nats, number of predicted tokens) over examples `rows` [n] of a split."""
        params = self.programs.on_device(version, params)
        nats, predictions = 0.0, 0
        for batch, real in self._evaluated(split, rows):
            raise_if_stopped()
            batch_nats, batch_predictions = self.programs.nats(params, batch)
            nats += float(batch_nats[:real].sum(dtype=np.float64))
            predictions += int(batch_predictions[:real].sum())
        return nats, predictions

    def _evaluated(self, split: str, rows: np.ndarray) -> Iterator[tuple[Any, int]]:
        """Yield (batch of a call of `nats`, number of its real rows) for all examples `rows`."""
        buckets = self.task.buckets
        if buckets is not None and buckets.packed is not None:
            for batch in buckets.packed(self._rows(split, rows)):
                yield from in_calls(batch)
            return
        batch, mask = self._read(split, rows[:, None])
        for chunk in chunks(batch, mask, EVAL_ROWS_PER_CHUNK, buckets):
            yield jax.tree.map(lambda leaf: leaf[:, 0], chunk.batch), len(chunk.units)

    def _rows(self, split: str, rows: np.ndarray) -> Any:
        return self.task.dummy_batch(rows) if split == DUMMY else self.task.read(split, rows)

    def _read(self, split: str, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Read rows [units, group]; return (batch [units, group, ...], mask of real rows)."""
        batch = self._rows(split, rows.ravel())
        return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), batch), rows >= 0

    def faults(
        self, version: int, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy
    ) -> tuple[str, str]:
        """See `Engine.faults`. Args: rows: numbers of made-up rows, int [units, group]; others as
        of `lane_sum`."""
        params = self.programs.on_device(version, params)
        try:
            if stats := default_device().memory_stats():
                chunk = next(self.lane_chunks(params, rows, clip, strategy, DUMMY))
                most = stats.get("bytes_limit", sys.maxsize) * SHARE
                if (needed := self.programs.memory(params, chunk, clip, strategy)) > most:
                    return "", f"needs {needed / 2**30:.3g} GiB of {most / 2**30:.3g} GiB there"
            if strategy.name != "ghost":
                return "", ""
            # It forms no gradient for a norm, so its norms are compared with those of `scan`.
            norms, expected = (
                self.add_lane(params, rows, clip, each, DUMMY)[1].norms
                for each in (strategy, Strategy("scan", 1))
            )
        except UnsupportedModel as error:
            return str(error), ""
        same = np.allclose(norms, expected, SAME_NORMS, equal_nan=True)
        return "" if same else "other norms than scan finds", ""

    def _shares_rows(self, strategy: Strategy, group: int) -> bool:
        """True if the texts of a unit share rows: on CPUs. `scan`, the oracle, has them alone."""
        shared = self.task.buckets is not None and self.task.buckets.shared
        return bool(shared) and strategy.name == "direct" and group > 1 and not on_accelerator()

    def units_of_pass(self, strategy: Strategy, group: int, length: int) -> int:
        """Return the units of a pass over rows of this length: those of the strategy, or as many
        as `Buckets.side_by_side` says, or of their powers of two the largest whose tokens are no
        more than those of the strategy's rows of the longest text."""
        rows_of_unit = 1 if self._shares_rows(strategy, group) else group
        units = strategy.units_at_once(rows_of_unit)
        if self.task.buckets is None:
            return units
        tokens = length * rows_of_unit
        if table := self.task.buckets.side_by_side:
            return min(units, next((most for up_to, most in table if tokens <= up_to), 1))
        fit = max(1, strategy.rows * self.task.buckets.lengths[-1] // tokens)
        return units if units <= fit else 1 << (fit.bit_length() - 1)

    def passes(self, strategy: Strategy, group: int) -> list[Strategy]:
        """Return the strategy for units of one row, for each number of units of a pass."""
        at_once = strategy.units_at_once(group)
        if self.task.buckets is None or (at_once > 1 and on_accelerator()):
            return [dataclasses.replace(strategy, rows=at_once)]
        shared = self._shares_rows(strategy, group)
        lengths = self.task.buckets.shared if shared else self.task.buckets.lengths
        numbers = {self.units_of_pass(strategy, group, length) for length in lengths}
        if shared:  # units of several rows
            numbers.add(1)
        return [dataclasses.replace(strategy, rows=number) for number in sorted(numbers)]

    def add_lane(
        self, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy, split: str = "train"
    ) -> tuple[Any, Stats]:
        """Compute `lane_sum` with parameters that are on the device."""
        stats, programs, most = Stats.zeros(len(rows)), self.programs, sum_holds(params, clip)
        full, total, held, found = [], programs.zeros(params, clip), 0, []
        for chunk in self.lane_chunks(params, rows, clip, strategy, split):
            if held + len(chunk.units) > most:  # it is fetched while the next ones are computed
                jax.tree.map(lambda leaf: leaf.copy_to_host_async(), total)
                full, total, held = [*joined(full), total], programs.zeros(params, clip), 0
            held += len(chunk.units)
            total, *values = programs.clip_chunk(total, params, chunk, clip, strategy)
            found.append((chunk.units, values))
        for units, values in found:  # nothing is fetched before, so that the device never waits
            values = [*values, (rows[units] >= 0).sum(axis=1)]
            for column, value in zip(stats.columns(), values, strict=True):
                column[units] = np.asarray(value)[: len(units)]
        return joined([*full, total])[0] if full else jax.device_get(total), stats

    def lane_chunks(
        self, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy, split: str = "train"
    ) -> Iterator[Chunk]:
        """Yield a lane in chunks, each of which is one call of a program.

        Raises: UnsupportedModel: a sum might not hold the units of one pass.
        """
        group, most, buckets = rows.shape[1], sum_holds(params, clip), self.task.buckets
        at_once = max(each.units_at_once(1) for each in self.passes(strategy, group))
        if at_once > most:
            raise UnsupportedModel(
                f"strategy={strategy}: {at_once} units at once; expected at most {most}, which "
                "int32 sums of this model hold"
            )

        def units_per_call(at_once):
            # More units in a call need no more memory, and padding at the end costs no time.
            return min(-(-UNITS_PER_CALL // at_once), most // at_once) * at_once

        units_of_pass = functools.partial(self.units_of_pass, strategy, group)
        batch, mask = self._read(split, rows)
        if self._shares_rows(strategy, group):
            assert buckets is not None, "rows are shared"
            return chunks_of_shared(batch, mask, buckets.shared, units_of_pass, units_per_call)
        keeps_places = strategy.units_at_once(group) > 1 and on_accelerator()
        if keeps_places or (strategy.name != "ghost" and strategy.rows < group):
            if buckets is not None:
                # Passes of several lengths would give a unit a place that others' texts decide; or
                # the program chooses the length of each pass.
                buckets = dataclasses.replace(buckets, lengths=buckets.lengths[-1:])
            units_of_pass = None
        return chunks(batch, mask, units_per_call(at_once), buckets, units_of_pass)


def in_calls(batch: Any) -> Iterator[tuple[Any, int]]:
    """Yield (part of a batch [rows, length], its rows): full calls, then powers of two."""
    start, (count, length) = 0, jax.tree.leaves(batch)[0].shape
    most = max(1, EVAL_TOKENS_PER_CALL // length)
    while (left := count - start) > 0:
        rows = min(most, 1 << (left.bit_length() - 1))
        yield jax.tree.map(lambda leaf: leaf[start : start + rows], batch), rows  # noqa: B023
        start += rows


def joined(sums: list[Any]) -> list[Any]:
    """Return what sums add up to, in int64, once they are computed; nothing of none."""
    return sums and [jax.tree.map(lambda *x: sum(np.asarray(leaf, np.int64) for leaf in x), *sums)]


def sum_holds(params: Any, clip: Clip) -> int:
    """Number of units that one sum holds without overflow."""
    return sys.maxsize if clip.in_float32 else lattice_capacity(num_coordinates(params))


class LocalEngine(Engine):
    """The engine in this process: one worker, one lane after another."""

    def __init__(self, task: Task, *, num_lanes: int):
        """Start the worker."""
        super().__init__(task, num_lanes)
        self._worker = Worker(task)
        self._version = 0

    def ready(self) -> None:
        self._worker.facts()

    def facts(self) -> dict[str, Any]:
        return self._worker.facts()

    def close(self) -> None:
        pass

    def describe(self) -> str:
        return f"this process ({self._worker.facts()['device']})"

    def _lanes(self, method, params, lanes, *args):
        self._version += 1
        for lane in lanes:
            raise_if_stopped()
            yield getattr(self._worker, method)(self._version, params, lane, *args)
