"""What runs on a worker: one lane's clipped sum. Plain Python and JAX; Ray is in `ray_engine`.

Pure in (params, rows, clip): a lane can be computed again, elsewhere, with the same result. What
leaves a worker is a sum over two units or more (one, if no more were drawn) and per-unit scalars.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim.clipping import (
    Buckets,
    Chunk,
    Clip,
    Strategy,
    UnsupportedModel,
    chunks,
    lattice_capacity,
    num_coordinates,
)
from fedsim.config import MeshShape
from fedsim.engine.engine import Engine, Stats
from fedsim.engine.environment import host_kind, keep_compiled, versions
from fedsim.engine.programs import Programs, check_arithmetic, check_contributions
from fedsim.engine.task import Task
from fedsim.engine.trials import try_strategy
from fedsim.placement import make_mesh

ROWS_PER_READ = 4096
EVAL_ROWS_PER_CHUNK = 16
EVAL_FEW = 4  # of what is left of a length: with a large model, padding costs more than calls
EVAL_TOKENS_PER_CALL = 2048  # where short texts share rows

_fit = functools.cache(check_arithmetic)


class NoTask(RuntimeError):
    """This worker is not told yet what it computes: its process has been started again."""


class Worker:
    """Computes lanes of a task. Cohorts vary in size, shapes do not: units are cut into chunks of
    few shapes, and the loop runs over as many chunks as were drawn, so nothing is compiled twice.
    """

    def __init__(
        self,
        task: Task | None = None,
        cache_dir: Path | None = None,
        mesh: MeshShape | None = None,
    ):
        """Args:
          task: what is computed; None: `begin` brings it.
          cache_dir: where compiled programs are kept for other processes and runs.
          mesh: of which devices that have the model between them; None: one has it.
        Raises: ConfigError: there are not so many devices.
        """
        if cache_dir is not None:
            keep_compiled(cache_dir)
        self._task = task
        self.shape, self.mesh = mesh, mesh and make_mesh(mesh)
        self._programs: Programs | None = None

    def begin(self, task: Task) -> dict[str, Any]:
        """Take a task, unless there is one; the `facts`."""
        self._task = self._task or task
        return self.facts()

    @property
    def task(self) -> Task:
        """What is computed. Raises: NoTask."""
        if self._task is None:
            raise NoTask("no task yet")
        return self._task

    @property
    def programs(self) -> Programs:
        """What the task is computed with. Raises: NoTask."""
        if self._programs is None:
            self._programs = Programs(self.task, self.mesh)
        return self._programs

    @property
    def buckets(self) -> Buckets | None:
        """The lengths to which texts of the task are padded, if they are."""
        return self.task.buckets

    def facts(self) -> dict[str, Any]:
        """Where this worker computes, and with what. Raises: UnfitDevice."""
        device = jax.local_devices()[0]
        _fit(device)
        return {
            "device": str(device),
            "host": socket.gethostname(),
            "kind": _kind_of_host(self.shape),
            "process": os.getpid(),
            "versions": versions(),
        }

    def read_ahead(self, split: str, rows: np.ndarray) -> None:
        """Bring rows that will be needed soon into memory, in the background."""
        if self._task is not None:
            touch(lambda: self.task.read(split, rows.ravel()))

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy):
        """The clipped sum of a lane: (NumPy tree, Stats). Whole numbers in units of `clip.unit`,
        int32, or int64 where they might not fit; float32 with `clip.in_float32`.

        Args:
          version: names the parameters; equal versions are put on the device once.
          rows: [units, group], -1 = padding.
        """
        params = self.programs.on_device(version, params)
        if not clip.in_float32:
            check_contributions(strategy.for_examples(rows.shape[1]), params, self.mesh)
        return self.add_lane(params, rows, clip, strategy)

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """(sum of nats, number of predicted tokens) over examples `rows` [n] of a split."""
        params = self.programs.on_device(version, params)
        nats, predictions = 0.0, 0
        for batch, real in self._evaluated(split, rows):
            found = self.programs.nats(params, batch)
            some_nats, some_predictions = (value[:real] for value in found)
            nats += float(some_nats.sum(dtype=np.float64))
            predictions += int(some_predictions.sum())
        return nats, predictions

    def _evaluated(self, split: str, rows: np.ndarray) -> Iterator[tuple[Any, int]]:
        """(batch of a call of `nats`, how many of its rows are real) for all examples `rows`."""
        if self.buckets is None or (packed := self.buckets.packed) is None:
            size, few = EVAL_ROWS_PER_CHUNK, EVAL_FEW
            for chunk in self._chunks(split, rows[:, None], size, few=few, in_passes=False):
                yield jax.tree.map(lambda leaf: leaf[:, 0], chunk.batch), len(chunk.units)
            return

        def read(start):
            return packed(self.task.read(split, rows[start : start + ROWS_PER_READ]))

        for _, batches in ahead(read, range(0, len(rows), ROWS_PER_READ)):
            for batch in batches:
                yield from in_calls(batch)

    def host(self, version: int, params: Any, rows: np.ndarray) -> str:
        """What computes here, for programs whose bits depend on it."""
        return _kind_of_host(self.shape)

    def machine(self, version: int, params: Any, rows: np.ndarray) -> str:
        """What times of computations depend on, whoever measures them."""
        return f"{self.host(version, params, rows)}, {self.task}"

    def try_strategy(self, version: int, params: Any, rows: np.ndarray, *args: Any):
        """See `trials.try_strategy`, whose other arguments these are."""
        params = self.programs.on_device(version, params)
        return try_strategy(self, params, rows, *args)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """The bucket of each unit's longest row, int [units]; 1 where there are no buckets."""
        if self.buckets is None or not len(rows):
            return np.ones(len(rows), int)
        sizes = self.buckets.sizes(self.task.read("train", rows.ravel())).reshape(rows.shape)
        longest = np.where(rows >= 0, sizes, 0).max(axis=1)
        return self.buckets.holding(longest)

    def add_lane(
        self, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy
    ) -> tuple[Any, Stats]:
        """`lane_sum` of parameters that are on the device."""
        stats, programs = Stats.zeros(len(rows)), self.programs
        total, flushed = programs.zeros(params, clip), None
        room = most = sum_holds(params, clip)
        for chunk in self.lane_chunks(params, rows, clip, strategy):
            room -= len(chunk.units)
            if room < 0:
                flushed = flush(flushed, total)
                total, room = programs.zeros(params, clip), most - len(chunk.units)
            total, *values = programs.clip_chunk(total, params, chunk, clip, strategy)
            values = [*values, chunk.mask.sum(axis=1)]
            for column, value in zip(stats.columns(), values, strict=True):
                column[chunk.units] = np.asarray(value)[: len(chunk.units)]
        total = jax.tree.map(np.asarray, total) if flushed is None else flush(flushed, total)
        return total, stats

    def lane_chunks(
        self, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy
    ) -> Iterator[Chunk]:
        """A lane in chunks, each of which is one call of a program.

        Raises: UnsupportedModel: a sum might not hold the units of one pass, or what a unit
          contributes might depend on its place there.
        """
        group, most = rows.shape[1], sum_holds(params, clip)
        at_once = strategy.units_at_once(group)
        alone = self.mesh is not None or jax.default_backend() != "cpu"
        if at_once > 1 and not clip.in_float32 and alone:
            where = "an accelerator" if self.mesh is None else "a mesh"
            raise UnsupportedModel(
                f"strategy={strategy}: {at_once} units at once; expected one at a time on "
                f"{where}, where what a unit contributes depends on its place: auto does that"
            )
        expect_fit(strategy, at_once, most)
        units = min(strategy.units_per_call(group), most // at_once * at_once)
        return self._chunks("train", rows, units, in_passes=strategy.splits_units(group))

    def _chunks(
        self,
        split: str,
        rows: np.ndarray,
        units_per_chunk: int,
        *,
        in_passes: bool,
        few: int | None = None,
    ) -> Iterator[Chunk]:
        """Chunks of rows [units, group]; the next rows are read while the caller computes.

        Args:
          in_passes: lengths are chosen pass by pass in the program, not for the chunk.
          few: as of `chunks`.
        """
        units = max(units_per_chunk, ROWS_PER_READ // rows.shape[1])
        starts = range(0, len(rows), units)
        buckets = self.buckets
        if buckets is not None and in_passes:
            buckets = dataclasses.replace(buckets, lengths=buckets.lengths[-1:])

        def read(start):
            return self.task.read(split, rows[start : start + units].ravel())

        for start, batch in ahead(read, starts):
            some = rows[start : start + units]
            shape = some.shape
            batch = jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), batch)  # noqa: B023
            for chunk in chunks(batch, some >= 0, units_per_chunk, buckets, few):
                yield chunk._replace(units=chunk.units + start)


def _kind_of_host(shape: MeshShape | None) -> str:
    """What bits depend on beside packages: the processor, the device, the number of threads, and
    how several devices have the model between them."""
    threads = os.environ.get("NPROC", os.cpu_count())
    mesh = "" if shape is None else f", mesh {shape}"
    return f"{host_kind()}, {jax.local_devices()[0].device_kind}, {threads} threads{mesh}"


def in_calls(batch: Any) -> Iterator[tuple[Any, int]]:
    """(part of a batch [rows, length], its rows): as many as a call takes, then powers of two."""
    start, (count, length) = 0, jax.tree.leaves(batch)[0].shape
    most = max(1, EVAL_TOKENS_PER_CALL // length)
    while (left := count - start) > 0:
        rows = min(most, 1 << (left.bit_length() - 1))
        yield jax.tree.map(lambda leaf: leaf[start : start + rows], batch), rows  # noqa: B023
        start += rows


def ahead(read: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(item, read(item)) in order; the next item is read while the caller works on this one.

    Raises: what `read` raised, when it is that item's turn.
    """
    with ThreadPoolExecutor(1) as thread:
        last = None
        for item in items:
            following = (item, thread.submit(read, item))
            if last is not None:
                yield last[0], last[1].result()
            last = following
        if last is not None:
            yield last[0], last[1].result()


def touch(read: Callable[[], Any]) -> None:
    """Read in the background and forget: memory-mapped pages are there when they are needed. An
    error shows when the same is read again."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            read()

    threading.Thread(target=quietly, daemon=True).start()


def flush(wide: Any, total: Any) -> Any:
    """An int32 sum, added to an int64 one (None: zero), NumPy."""
    if wide is None:
        return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.int64), total)
    return jax.tree.map(lambda w, leaf: np.add(w, np.asarray(leaf), out=w), wide, total)


def sum_holds(params: Any, clip: Clip) -> int:
    """How many units one sum surely holds."""
    return sys.maxsize if clip.in_float32 else lattice_capacity(num_coordinates(params))


def expect_fit(strategy: Strategy, at_once: int, most: int) -> None:
    """Raises UnsupportedModel: more units are added at once than a sum surely holds."""
    if at_once > most:
        expected = f"expected at most {most}, which int32 sums of this model hold"
        raise UnsupportedModel(f"strategy={strategy}: {at_once} units at once; {expected}")


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


class LocalEngine(Engine):
    """Computes in the process itself."""

    num_workers = 1

    def __init__(self, task: Task, *, num_lanes: int, mesh: MeshShape | None = None):
        """Args: mesh: how several devices have the model between them; None: one device has it."""
        super().__init__(task, num_lanes)
        self._worker = Worker(task, mesh=mesh)
        self._version = 0

    def ready(self) -> None:
        self._worker.facts()

    def close(self) -> None:
        pass

    def place(self, params):
        return params if self._worker.mesh is None else self._worker.programs.place(params)

    def describe(self) -> str:
        cut = "" if self._worker.mesh is None else f"{self._worker.shape} of "
        return f"this process ({cut}{self._worker.facts()['device']})"

    def _lanes(self, method, params, lanes, *args, lengths=()):
        self._version += 1
        for lane in lanes:
            yield getattr(self._worker, method)(self._version, params, lane, *args)
