"""What runs on a worker: one lane's clipped sum. Plain Python and JAX; Ray is in `ray_engine`.

Pure in (params, rows, clip): a lane can be computed again, elsewhere, with the same result. What
leaves a worker is a sum over two units or more (one, if no more were drawn) and per-unit scalars.
"""

import dataclasses
import functools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets, Clip, Strategy, clipped_sum
from fedsim.clipping.clip import lattice_capacity, num_coordinates
from fedsim.clipping.observed import UnsupportedModel
from fedsim.clipping.packing import Chunk, chunks, padded
from fedsim.clipping.scan import zeros_like
from fedsim.config import MeshShape
from fedsim.engine.arithmetic import check_arithmetic, check_contributions, check_stored
from fedsim.engine.engine import Stats, Trial
from fedsim.engine.environment import versions
from fedsim.engine.eval_batches import EVAL_FEW, EVAL_ROWS_PER_CHUNK, in_calls
from fedsim.engine.host import free_memory, host_kind, keep_compiled, trial_clock
from fedsim.engine.prefetch import ahead, touch
from fedsim.engine.resources import compiler_options
from fedsim.engine.task import Task
from fedsim.placement import everywhere, in_parts, make_mesh, shardings

ROWS_PER_READ = 4096
TRIAL_REPEATS = 3
TRIAL_FEW = 4  # units that are tried first
TELLING_SECONDS = 0.3  # what takes less, a first call and other work may have disturbed
TRIAL_SECONDS = 3.0  # a trial that takes longer is not repeated, nor done with more units
GIVE_UP = 1.5  # times the best so far: the same
SAME_NORMS = 0.02  # strategies agree to 1e-5 in float32; in bfloat16 to less

_fit = functools.cache(check_arithmetic)
_zeros = jax.jit(zeros_like, static_argnums=1)  # leaf by leaf costs a small model a hundredth


def no_sum(params: Any, clip: Clip) -> Any:
    """The sum over no units at all: zeros in the shape of the parameters."""
    return _zeros(params, jnp.float32 if clip.in_float32 else jnp.int32)


class NoTask(RuntimeError):
    """This worker is not told yet what it computes: its process has been started again."""


class Worker:
    """Computes lanes of a task. Cohorts vary in size, shapes do not: units are cut into chunks of
    few shapes, and the loop runs over as many chunks as were drawn, so nothing is compiled twice.

    With a mesh, its devices have the parameters, the frozen ones, each gradient and the sum between
    them, and XLA cuts the same programs. In what order numbers are added is then a matter of the
    mesh: bits are, too.
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
        self._frozen: tuple[Any, ...] | None = None
        self.programs: dict[tuple, Any] = {}
        """Compiled programs by what they depend on."""
        self._checked: set[int] = set()
        self.shape, self.mesh = mesh, mesh and make_mesh(mesh)
        self._version, self._params = None, None

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
        params = self._on_device(version, params)
        if not clip.in_float32:
            check_contributions(strategy.for_examples(rows.shape[1]), params, self.mesh)
        return self._add_lane(params, rows, clip, strategy)

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """(sum of nats, number of predicted tokens) over examples `rows` [n] of a split."""
        params = self._on_device(version, params)
        nats, predictions = 0.0, 0
        for batch, real in self._evaluated(split, rows):
            arguments = (params, self._on_all(batch), *self.frozen())
            key = ("nats", *(leaf.shape for leaf in jax.tree.leaves(batch)))
            program = self._program(key, self.task.nats, *arguments)
            found = map(np.asarray, program(*arguments))
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

    def try_strategy(
        self,
        version: int,
        params: Any,
        rows: np.ndarray,
        clip: Clip,
        strategy: Strategy,
        norms: np.ndarray | None,
        best: float,
        together: int,
    ) -> tuple[Trial, np.ndarray]:
        """Compile and time a strategy on the units among `rows` of the length that costs most.

        Args:
          norms: of these units, as another strategy finds them; None: nothing to hold against.
          best: seconds of the fastest strategy so far.
          together: units of a lane, at least one.
        Returns: (what became of it, with the seconds that all of `rows` would take; norms).
        """
        params = self._on_device(version, params)
        lengths = self._lengths(rows)
        length = _most_telling(lengths)
        rows = rows[lengths == length]
        count = strategy.units_at_once(rows.shape[1])
        some = np.resize(rows, (-(-len(rows) // count) * count, rows.shape[1]))
        share = padded(lengths, count, together) / (len(some) * length)
        try:
            trial, found = self._try(params, some, clip, strategy, best / share)
        except UnsupportedModel as error:
            return Trial(strategy, fault=str(error)), np.zeros(0)
        found = found[: len(rows)]
        if trial.fault is None and not _alike(found, norms):
            trial = dataclasses.replace(trial, fault="other norms than simpler ones find")
        return dataclasses.replace(trial, seconds=trial.seconds * share), found

    def _try(self, params, rows, clip, strategy, best):
        before = set(self.programs)
        for chunk in self._lane_chunks(params, rows, clip, strategy):
            self._chunk_program(self._no_sum(params, clip), params, chunk, clip, strategy)
        new = [self.programs[key].memory_analysis() for key in self.programs.keys() - before]
        memory = max((found.temp_size_in_bytes for found in new if found), default=0)
        if jax.default_backend() == "cpu" and self.mesh is not None:  # one memory for all devices
            memory *= self.mesh.size
        if memory > (free := free_memory()):
            fault = f"needs {memory / 2**20:.0f} MiB, and {free / 2**20:.0f} are free"
            return Trial(strategy, memory=memory, fault=fault), np.zeros(0)
        clock = trial_clock()

        def timed(rows):
            start = clock()
            _, stats = self._add_lane(params, rows, clip, strategy)
            return clock() - start, stats.norms

        # A few units tell whether there is anything to look at closely.
        few = max(TRIAL_FEW, strategy.units_at_once(rows.shape[1]))
        for chunk in self._lane_chunks(params, rows[:few], clip, strategy):
            self._checked_program(self._no_sum(params, clip), params, chunk, clip, strategy)
        probe, norms = timed(rows[:few])
        seconds = probe * len(rows) / len(rows[:few])
        if probe < TELLING_SECONDS or seconds < min(TRIAL_SECONDS, GIVE_UP * best):
            times, norms = zip(*(timed(rows) for _ in range(TRIAL_REPEATS)), strict=True)
            seconds, norms = min(times), norms[0]
        return Trial(strategy, seconds, memory), norms

    def _lengths(self, rows: np.ndarray) -> np.ndarray:
        """The bucket of each unit's longest row, int [units]; 1 where there are no buckets."""
        if self.buckets is None or not len(rows):
            return np.ones(len(rows), int)
        sizes = self.buckets.sizes(self.task.read("train", rows.ravel())).reshape(rows.shape)
        longest = np.where(rows >= 0, sizes, 0).max(axis=1)
        return self.buckets.holding(longest)

    def _add_lane(self, params, rows, clip, strategy):
        stats, total, flushed = Stats.zeros(len(rows)), self._no_sum(params, clip), None
        room = most = sum_holds(params, clip)
        for chunk in self._lane_chunks(params, rows, clip, strategy):
            room -= len(chunk.units)
            if room < 0:
                flushed = flush(flushed, total)
                total, room = self._no_sum(params, clip), most - len(chunk.units)
            program = self._checked_program(total, params, chunk, clip, strategy)
            total, *values = program(total, params, *self._of_chunk(chunk, clip))
            values = [*values, chunk.mask.sum(axis=1)]
            for column, value in zip(stats.columns(), values, strict=True):
                column[chunk.units] = np.asarray(value)[: len(chunk.units)]
        total = jax.tree.map(np.asarray, total) if flushed is None else flush(flushed, total)
        return total, stats

    def _lane_chunks(self, params, rows, clip, strategy):
        """Raises UnsupportedModel: a sum might not hold the units of one pass, or what a unit
        contributes might depend on its place there."""
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

    def _chunk_program(self, total, params, chunk, clip, strategy):
        buckets = self.buckets.up_to(chunk.length) if self.buckets else None

        # One program for a clip norm that moves.
        def add(total, params, batch, mask, norm, *frozen):
            def losses(params, batch):
                return self.task.losses(in_parts(params, self.mesh), batch, *frozen)

            own = dataclasses.replace(clip, norm=norm)
            options = {"buckets": buckets, "local": self.task.local_steps, "total": total}
            return clipped_sum(losses, params, batch, mask, own, strategy, **options)

        key = ("sum", chunk.length, chunk.mask.shape, clip.normalised, clip.in_float32, strategy)
        arguments = (total, params, *self._of_chunk(chunk, clip))
        is_new = key not in self.programs
        options: dict[str, Any] = {"donate_argnums": 0}
        if self.mesh is not None:  # the sum is cut as the parameters are
            whole = everywhere(self.mesh)
            options["out_shardings"] = (shardings(total, self.mesh), whole, whole, whole)
        program = self._program(key, add, *arguments, **options)
        if is_new and not clip.in_float32:
            check_stored(program)
        return program

    def _of_chunk(self, chunk, clip):
        """What a chunk's program gets beside the sum and the parameters."""
        own = self._on_all((chunk.batch, chunk.mask, np.float32(clip.norm)))
        return *own, *self.frozen()

    def _checked_program(self, total, params, chunk, clip, strategy):
        """The program of a chunk, looked at before it is used for the first time."""
        program = self._chunk_program(total, params, chunk, clip, strategy)
        if id(program) not in self._checked and not clip.in_float32:
            fresh = functools.partial(self._no_sum, params, clip)
            arguments = (params, *self._of_chunk(chunk, clip))
            if _checked_side_by_side(program, fresh, arguments, chunk, strategy):
                self._checked.add(id(program))
        return program

    def _program(self, key, function, *args, **options):
        """`function`, compiled for arguments like these; `key` says what else it depends on."""
        if key not in self.programs:
            lowered = jax.jit(function, **options).lower(*args)
            self.programs[key] = lowered.compile(compiler_options(jax.default_backend()))
        return self.programs[key]

    def place(self, params: Any) -> Any:
        """Parameters or the like, put on the device, or in parts on those of the mesh."""
        return jax.device_put(params, None if self.mesh is None else shardings(params, self.mesh))

    def _on_all(self, tree):
        """What each device needs whole, as programs take it."""
        return tree if self.mesh is None else jax.device_put(tree, everywhere(self.mesh))

    def _no_sum(self, params, clip):
        total = no_sum(params, clip)
        return total if self.mesh is None else self.place(total)

    def frozen(self) -> tuple[Any, ...]:
        """What the task's functions get beside parameters and batch, put on the device once."""
        if self._frozen is None:
            frozen = self.task.frozen
            self._frozen = () if frozen is None else (self.place(frozen),)
        return self._frozen

    def _on_device(self, version, params):
        if version != self._version:
            # The previous parameters go first: they may pin an object of shared memory.
            self._version, self._params = None, None
            self._version, self._params = version, self.place(params)
        return self._params


def _kind_of_host(shape: MeshShape | None) -> str:
    """What bits depend on beside packages: the processor, the device, the number of threads, and
    how several devices have the model between them."""
    threads = os.environ.get("NPROC", os.cpu_count())
    mesh = "" if shape is None else f", mesh {shape}"
    return f"{host_kind()}, {jax.local_devices()[0].device_kind}, {threads} threads{mesh}"


def _alike(found: np.ndarray, expected: np.ndarray | None) -> bool:
    """Whether norms are the same, as far as both are known."""
    known = 0 if expected is None else min(len(found), len(expected))
    return expected is None or np.allclose(
        found[:known], expected[:known], SAME_NORMS, equal_nan=True
    )


def _most_telling(lengths: np.ndarray) -> int:
    """The length of the units that make up most together, the shortest where there are several."""
    values, counts = np.unique(lengths, return_counts=True)
    return values[(values * counts).argmax()]


def _checked_side_by_side(program, no_sum, arguments, chunk, strategy):
    """Whether there was anything to see: units with rows whose numbers are not all zero.

    Raises UnsupportedModel: what a unit contributes depends on its place in a pass or on the
    others there.

    Units side by side share matrix products, of which each computes its own rows. In what order a
    row's terms are added is a matter of shapes, not of values. So one look at any values tells:
    the whole numbers of all are those of every other one, and of the rest, in other places; so
    are their norms and losses, which are released, too, if that is asked for.
    """
    at_once = strategy.units_at_once(chunk.mask.shape[1])
    if at_once == 1:
        return True
    params, batch, mask, *others = arguments
    if not (real := np.flatnonzero(chunk.mask.any(axis=1))).size:
        return False
    some = np.resize(real, at_once)

    def total(units, places):
        of_place = np.zeros(len(mask), int)
        of_place[places] = units
        real = np.isin(np.arange(len(mask)), places)[:, None] & mask[of_place]
        moved = jax.tree.map(lambda leaf: leaf[of_place], batch)
        added, norms, losses, _ = program(no_sum(), params, moved, real, *others)
        return jax.tree.map(np.asarray, added), np.stack([norms, losses])[:, places]

    places = np.arange(at_once)
    together, values = total(some, places)
    apart = [total(some[half::2], (places[half::2] + 1) % at_once) for half in (0, 1)]
    added = jax.tree.map(lambda *leaves: sum(leaves), *(each for each, _ in apart))
    alike = map(np.array_equal, jax.tree.leaves(together), jax.tree.leaves(added))
    # A loss or norm that is not a number is the same as itself.
    halves = ((values[:, half::2], apart[half][1]) for half in (0, 1))
    same = (np.array_equal(*pair, equal_nan=True) for pair in halves)
    if not (all(alike) and all(same)):
        raise UnsupportedModel("side by side, units change what the others contribute")
    return any(leaf.any() for leaf in jax.tree.leaves(together))


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
