"""The contract between the algorithms and whatever computes gradients.

An algorithm hands over `rows`, example indices [units, group], and gets one clipped sum back, in
whole numbers. A step's units are cut into *lanes*, which are units of work. Sums of whole numbers
are exact, so the result does not depend on lanes, on the number of workers, on which of them died,
or on which was faster.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.clipping import Clip, Strategy, lattice_capacity, num_coordinates
from fedsim.engine.task import Task
from fedsim.errors import FedsimError

TRIAL_UNITS = 32  # that strategies are tried on, at most
AT_ONCE = 4  # units that most strategies compute side by side
LEAST_TOKENS = 512  # of a lane of examples that share rows: a few rows at once cost less each


class EngineError(FedsimError):
    """The engine cannot go on; the message says at which lane and why."""

    def __init__(self, message: str, *, details: str = ""):
        """Args: details: the traceback of the worker's code, if it was an exception there."""
        super().__init__(message)
        self.details = details


class Lanes(NamedTuple):
    """The units of one call, cut into lanes: each is one worker's task."""

    order: np.ndarray
    """Which unit is at which place of the lanes end to end, int [units]."""
    rows: list[np.ndarray]
    """The units of each lane, [units of the lane, ...]."""
    lengths: list[int]
    """To what the longest text of each lane is padded; 0 where that is not known."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Per-unit values of a step, in the order of its rows. Computed from private data."""

    norms: np.ndarray
    """Gradient norm before clipping, float32 [units]."""
    losses: np.ndarray
    """Mean loss over a unit's rows, float32 [units]."""
    dropped: np.ndarray
    """True where a unit's gradient was not finite and it contributed zero, bool [units]."""
    num_rows: np.ndarray
    """Examples, hence gradients, of a unit, int64 [units]."""

    @property
    def counted_norms(self) -> np.ndarray:
        """Norms of the units that a count of norms is about, float32: infinite where a unit was
        dropped. One whose norm is zero is in none, for it may be without rows or content: it must
        add nothing, like a user who is not there.
        """
        norms = np.where(self.dropped, np.float32(np.inf), self.norms)
        return norms[norms > 0]

    @property
    def counted_losses(self) -> np.ndarray:
        """Losses of the units that have rows, float32 [those units]."""
        return self.losses[self.num_rows > 0]

    @classmethod
    def zeros(cls, units: int) -> "Stats":
        """Statistics of so many units, to be filled in."""
        return cls(*(np.zeros(units, dtype) for dtype in (np.float32, np.float32, bool, np.int64)))

    @classmethod
    def join(cls, parts: Sequence["Stats"]) -> "Stats":
        """The statistics of consecutive units as one."""
        columns = zip(*(part.columns() for part in [cls.zeros(0), *parts]), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    @classmethod
    def of_all(cls, rows: np.ndarray, parts: Sequence["Stats"], order: np.ndarray) -> "Stats":
        """The statistics of all units of `rows`. Raises: EngineError: some are missing.

        Args: order: which unit is at which place of the parts end to end.
        """
        joined, found = cls.join(parts), cls.zeros(len(rows))
        if len(joined.norms) != len(rows):  # the mechanism divides by a public count
            raise EngineError(f"{len(joined.norms)} units were computed of {len(rows)} drawn")
        for column, values in zip(found.columns(), joined.columns(), strict=True):
            column[order] = values
        return found

    def columns(self) -> tuple[np.ndarray, ...]:
        """The arrays norms, losses, dropped and num_rows."""
        return self.norms, self.losses, self.dropped, self.num_rows


@dataclasses.dataclass(frozen=True)
class Trial:
    """What became of a strategy that was tried."""

    strategy: Strategy
    seconds: float = float("inf")
    """How long it took for the units that it was tried on."""
    memory: int = 0
    """Bytes that the compiled program needs beside parameters and sum."""
    fault: str | None = None
    """Why it cannot be used."""


def ignore(*heard: Any) -> None:
    """Tells nobody."""


class Engine(ABC):
    """Computes sums over lanes; subclasses say where."""

    num_workers: int
    least_units = 2
    """Units of a lane, where so many were drawn. Of one alone, its sum would be the gradient."""

    def __init__(self, task: Task, num_lanes: int, note: Callable[[str], None] = ignore):
        """Args: note: told, for people, what happened to workers."""
        self.task = task
        self.num_lanes = num_lanes
        self.note = note
        self.heard: Callable[[int, int], None] = ignore
        self.redispatched = 0
        """Lanes computed again because a worker was lost, in the life of the engine."""

    @contextmanager
    def telling(self, heard: Callable[[int, int], None]) -> Iterator[None]:
        """Tell someone how far the engine has come: (lanes there, lanes of a sum or an evaluation)
        or (workers up, workers)."""
        self.heard = heard
        try:
            yield
        finally:
            self.heard = ignore

    @abstractmethod
    def _lanes(
        self,
        method: str,
        params: Any,
        lanes: Sequence[np.ndarray],
        *args,
        lengths: Sequence[int] = (),
    ) -> Iterator[tuple[Any, Any]]:
        """Yield `Worker.<method>(version, params, lane, *args)` for every lane, in lane order.

        Args: lengths: of each lane's longest text, as in `Lanes`, where programs depend on it.
        """

    def _begin(
        self, method: str, params: Any, lanes: Sequence[np.ndarray], *args
    ) -> Iterator[tuple[Any, Any]]:
        """Like `_lanes`, for answers that are not needed yet: work may begin at once, behind calls
        that are waited for, and goes on while those are."""
        return self._lanes(method, params, lanes, *args)

    @abstractmethod
    def ready(self) -> None:
        """Wait until workers can compute. Raises EngineError if they cannot be had."""

    @abstractmethod
    def close(self) -> None:
        """Let go of workers and whatever was started for them."""

    @abstractmethod
    def describe(self) -> str:
        """What one worker is, for people."""

    def place(self, params: Any) -> Any:
        """Parameters where the sums about them are: on this process's devices, if they share."""
        return params

    def host(self, params: Any) -> str:
        """The kind of host and device that a worker computes on. Args: params: of the next sum."""
        return str(self._ask_one("host", params, np.zeros((1, 1), np.int64)))

    def machine(self, params: Any) -> str:
        """What the times of computations depend on: the host, its device, and the task."""
        return str(self._ask_one("machine", params, np.zeros((1, 1), np.int64)))

    def try_strategies(
        self,
        params: Any,
        rows: np.ndarray,
        clip: Clip,
        tried: Sequence[Strategy],
        together: int = TRIAL_UNITS,
    ) -> Iterator[Trial]:
        """What became of some strategies on units like `rows` [units, group], on one worker: one
        after another, each held against those before it.

        Args: together: how many of them a lane has.
        """
        norms, best = None, math.inf
        for strategy in tried:
            known = (norms, best, together)
            trial, found = self._ask_one("try_strategy", params, rows, clip, strategy, *known)
            if trial.fault is None:
                norms = found if norms is None else norms
                best = min(best, trial.seconds)
            yield trial

    def _ask_one(self, method: str, params: Any, rows: np.ndarray, *args: Any) -> Any:
        """What one worker answers."""
        return next(iter(self._lanes(method, params, [rows], *args)))

    def clipped_sum(
        self,
        params: Any,
        rows: np.ndarray,
        clip: Clip,
        strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    ) -> tuple[Any, Stats]:
        """The clipped sum over units.

        Guarantees: a unit's part in it is a function of params, its rows and C, of norm at most
          `clip.sensitivity`; sums are exact.
        Args:
          rows: example indices int [units, group], -1 = padding; units may be 0.
          strategy: how workers compute it.
        Returns: (a NumPy tree like params, int32 or int64 in units of `clip.unit`, or float32 where
          nothing is clipped; per-unit statistics in the order of rows).
        """
        dtype = self._dtype(params, len(rows), clip)
        total, stats, (order, lanes, lengths) = None, [], self.cut(rows)
        call = ("lane_sum", params, lanes, clip, strategy)
        for lane_sum, lane_stats in self._lanes(*call, lengths=lengths):
            stats.append(lane_stats)
            self.heard(len(stats), len(lanes))
            if total is None:  # may be read-only views of shared memory
                total = jax.tree.map(lambda leaf: leaf.astype(dtype, copy=False), lane_sum)
            elif len(stats) == 2:
                total = jax.tree.map(lambda t, x: np.asarray(np.add(t, x)), total, lane_sum)
            else:
                jax.tree.map(lambda t, x: np.add(t, x, out=t), total, lane_sum)
        if total is None:
            total = jax.tree.map(lambda leaf: np.zeros(leaf.shape, dtype), params)
        return total, Stats.of_all(rows, stats, order)

    @staticmethod
    def _dtype(params: Any, units: int, clip: Clip) -> Any:
        """The type that holds a sum over so many units, whatever they are."""
        if clip.in_float32:
            return np.float32
        return np.int32 if units <= lattice_capacity(num_coordinates(params)) else np.int64

    def mean_nats(self, params: Any, split: str, rows: np.ndarray) -> float:
        """Mean loss in nats per predicted token over the examples `rows` [n] of a split."""
        return self.begin_mean_nats(params, split, rows)()

    def begin_mean_nats(self, params: Any, split: str, rows: np.ndarray) -> Callable[[], float]:
        """Like `mean_nats`; workers compute it when they are idle, the function waits for it."""
        lanes = cut_examples(self.task, split, rows, self.num_lanes, self.least_units).rows
        answers = self._begin("lane_nats", params, lanes, split)

        def wait() -> float:
            nats, predictions = 0.0, 0
            for number, (lane_nats, lane_predictions) in enumerate(answers, 1):
                nats, predictions = nats + lane_nats, predictions + lane_predictions
                self.heard(number, len(lanes))
            return nats / max(predictions, 1)

        return wait

    def begin_group_losses(
        self, params: Any, split: str, groups: Sequence[np.ndarray]
    ) -> Callable[[], np.ndarray]:
        """Mean loss per predicted token over each group of examples of a split, float64 [groups].

        Guarantees: a group's is a function of params and of its own examples: it is a lane of its
          own, in which nobody else's are computed.
        """
        answers = self._begin("lane_nats", params, groups, split)

        def wait() -> np.ndarray:
            found = np.zeros(len(groups))
            for number, (nats, predictions) in enumerate(answers):
                found[number] = nats / max(predictions, 1)
                self.heard(number + 1, len(groups))
            return found

        return wait

    def read_ahead(self, rows: np.ndarray) -> None:  # noqa: B027
        """Tell workers, while they wait, which rows the next `clipped_sum` is about."""

    def measurements(self) -> dict[str, float]:
        """What happened to workers, by metric name."""
        return {"performance/redispatched_lanes": self.redispatched}

    def publish(self, step: int, values: dict[str, float]) -> None:  # noqa: B027
        """Show the metrics of a step where the engine can, beside the run's own files."""

    def cut(self, rows: np.ndarray) -> Lanes:
        """The units of a sum, cut into lanes, whatever workers there are."""
        return cut(self.task, "train", rows, self.num_lanes, self.least_units)


def _in_order(parts: list[np.ndarray]) -> Lanes:
    """Lanes of units that stay in their order."""
    return Lanes(np.arange(sum(map(len, parts))), parts, [0] * len(parts))


def cut(task: Task, split: str, rows: np.ndarray, num_lanes: int, least: int) -> Lanes:
    """Units in at most `num_lanes` lanes that cost about the same, the longest texts first. A
    function of its arguments, so independent of the workers.

    Args:
      rows: examples [units, group] or [units], -1 = padding.
      least: units of a lane, where there are so many.
    """
    num_lanes = max(1, min(num_lanes, len(rows) // least))
    found = None if num_lanes == 1 else costs(task, split, rows)
    if found is None:
        return _in_order([x for x in np.array_split(rows, num_lanes) if len(x)])
    longest = found.max(axis=1)
    order = np.argsort(-longest, kind="stable")
    block = max(least, min(len(rows) // num_lanes, AT_ONCE))
    costs_in_order = found[order].sum(axis=1)
    before = np.cumsum(costs_in_order) - costs_in_order
    starts = _starts_of_blocks(longest[order], block)
    share = np.minimum(before[starts] * num_lanes // max(1, costs_in_order.sum()), num_lanes - 1)
    bounds = [0]  # where each lane begins
    for start in starts[1:][np.diff(share) > 0]:
        if min(start - bounds[-1], len(rows) - start) >= least:
            bounds.append(start)
    return Lanes(order, np.split(rows[order], bounds[1:]), longest[order][bounds].tolist())


def _starts_of_blocks(lengths: np.ndarray, size: int) -> np.ndarray:
    """Where blocks of at most so many units of one length begin: passes over them are full but for
    the last of each length."""
    firsts = np.flatnonzero(np.diff(lengths, prepend=-1))
    since = np.arange(len(lengths)) - np.repeat(firsts, np.diff(firsts, append=len(lengths)))
    return np.flatnonzero(since % size == 0)


def cut_examples(task: Task, split: str, rows: np.ndarray, num_lanes: int, least: int) -> Lanes:
    """Examples [n] of an evaluation, the same; if several share a row, in lanes that have as many
    tokens, in their order: short ones fill what long ones leave."""
    buckets = task.buckets
    sizes = task.sizes(split, rows) if buckets and buckets.packed and len(rows) else None
    if sizes is None:
        return cut(task, split, rows, num_lanes, least)
    ends = np.cumsum(sizes)
    num_lanes = max(1, min(num_lanes, int(ends[-1]) // LEAST_TOKENS))
    lane = np.minimum((ends - sizes) * num_lanes // max(1, ends[-1]), num_lanes - 1)
    return _in_order(np.split(rows, 1 + np.flatnonzero(np.diff(lane))))


def costs(task: Task, split: str, rows: np.ndarray) -> np.ndarray | None:
    """The length that each example of the units is padded to, 0 for padding, int64 [units, group];
    None: all have the same."""
    if (buckets := task.buckets) is None:
        return None
    if (sizes := task.sizes(split, rows.ravel())) is None:
        return None
    found = np.where(rows.ravel() >= 0, buckets.holding(sizes), 0)
    return found.reshape(rows.shape if rows.ndim > 1 else (len(rows), 1))
