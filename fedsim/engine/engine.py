"""The contract between the algorithms and the engines that compute gradients.

An algorithm passes `rows`, example indices [units, group], and gets one clipped sum in whole
numbers. A step's units are cut into *lanes*, the units of work and of retry. Sums of whole numbers
are exact, so the result does not depend on lanes, on the number, speed or failures of workers.

Lanes have texts of about one length, so that little is computed for padding. A worker computes some
units side by side, trimmed to one length; mixed lengths would pad each lane's passes of every
length. In evaluations lanes keep the order of the examples: texts that share rows fill those of
longer ones.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fedsim.clipping import Clip, Strategy, lattice_capacity, num_coordinates, shared_lengths
from fedsim.engine.task import Task
from fedsim.errors import FedsimError

AT_ONCE = 4  # units that most strategies compute side by side
At = Callable[[int, int], None]
"""Called with the number of lanes that are done, and of all."""
MAX_EVALUATED = 512  # examples of a lane: a worker that takes too long is started again
MIN_TOKENS, MIN_ROWS = 1024, 16  # of a lane of examples: several rows at once cost less each


class EngineError(FedsimError):
    """The engine cannot continue; the message names the lane and the reason."""

    def __init__(self, message: str, *, details: str = ""):
        """Take the message, and the worker's traceback if its code raised an exception."""
        super().__init__(message)
        self.details = details


@dataclasses.dataclass(frozen=True)
class Stats:
    """Per-unit values of a step, in the order of its rows. Not private."""

    norms: np.ndarray
    """Gradient norm before clipping, float32 [units]."""
    losses: np.ndarray
    """Mean loss over a unit's rows, float32 [units]."""
    dropped: np.ndarray
    """True where a unit's gradient was not finite and it contributed zero, bool [units]."""
    num_rows: np.ndarray
    """Number of examples, hence of gradients, of a unit, int64 [units]."""

    @property
    def counted_norms(self) -> np.ndarray:
        """Norms of the units that a private count of norms includes, float32.

        A dropped unit's norm is infinite. Units with a norm of zero are left out: they may have no
        rows or no content, and must add nothing, like an absent user.
        """
        norms = np.where(self.dropped, np.float32(np.inf), self.norms)
        return norms[norms > 0]

    @property
    def counted_losses(self) -> np.ndarray:
        """Losses of the units that have rows, float32 [units with rows]."""
        return self.losses[self.num_rows > 0]

    @classmethod
    def zeros(cls, units: int) -> "Stats":
        """Return zeros for a number of units, to be filled in."""
        return cls(*(np.zeros(units, dtype) for dtype in (np.float32, np.float32, bool, np.int64)))

    @classmethod
    def of_lanes(cls, lanes: Sequence["Stats"], order: np.ndarray, units: int) -> "Stats":
        """Join the statistics of lanes, whose units have these numbers; those of others are zero.

        Raises: EngineError: units are missing.
        """
        computed = sum(len(lane.norms) for lane in lanes)
        if computed != len(order):  # the mechanism divides by a public count
            raise EngineError(f"{computed} units were computed of {len(order)} drawn")
        stats = cls.zeros(units)
        for column, *values in zip(stats.columns(), *(x.columns() for x in lanes), strict=True):
            column[order] = np.concatenate([column[:0], *values])
        return stats

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return the arrays norms, losses, dropped and num_rows."""
        return self.norms, self.losses, self.dropped, self.num_rows


def ignore(*args: Any) -> None:
    """Do nothing: the default of callbacks."""


class Engine(ABC):
    """Computes sums over lanes, for one call at a time. A subclass determines the processes."""

    least_units = 2
    """Least units of a lane, if that many were drawn: a sum over one unit is its gradient."""

    def __init__(self, task: Task, num_lanes: int):
        """Start an engine.

        Args:
          task: the model and its data.
          num_lanes: most lanes of a step.
        """
        self.task = task
        self.num_lanes = num_lanes

    @abstractmethod
    def _lanes(self, method: str, params: Any, lanes: Sequence[Any], *args) -> Iterator[Any]:
        """Yield `Worker.<method>(version, params, lane, *args)` for every lane, in lane order."""

    @abstractmethod
    def ready(self) -> None:
        """Wait until workers can compute. Raises EngineError if they do not start."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return `Worker.facts` of a worker, after `ready`; all workers are of one kind."""

    @functools.cached_property
    def platform(self) -> str:
        """What JAX calls the workers' devices: cpu, gpu or tpu."""
        return self.facts()["platform"]

    @abstractmethod
    def close(self) -> None:
        """Release the workers, and end the processes that were started for them."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the workers, for people."""

    def faults(self, params: Any, group: int, clip: Clip, strategy: Strategy) -> tuple[str, str]:
        """Return (why `ghost` cannot be used for units of `group` rows, what a step takes of too
        little memory), as one worker finds on made-up rows; empty where nothing is wrong."""
        if self.platform == "cpu" and strategy.name != "ghost":
            return "", ""
        rows = np.resize([0, 1], (max(2, strategy.units_at_once(group)), group))
        return next(self._lanes("faults", params, [rows], clip, strategy))

    def compute(self, function: Callable[..., Any], params: Any, parts: Sequence[Any], *args: Any):
        """Yield function(part, params, *args) for each part, in their order; it is importable."""
        return self._lanes("run", params, parts, function, *args)

    def clipped_sum(
        self,
        params: Any,
        rows: np.ndarray,
        clip: Clip,
        strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    ) -> tuple[Any, Stats]:
        """Compute the clipped sum over units.

        Guarantees: a unit's contribution is a function of params, its rows and C, of norm at most
          `clip.sensitivity`; sums are exact.
        Args:
          params: theta, tree of float32 arrays.
          rows: example indices, int [units, group], -1 = padding; units may be 0.
          clip: the clip norm C.
          strategy: how workers compute it.
        Returns: (NumPy tree like params, int32 or int64 in units of `clip.unit`, or float32 with
          `clip.in_float32`; per-unit statistics in the order of rows).
        Raises: EngineError: a lane failed, or workers were lost.
        """
        dtype = np.float32 if clip.in_float32 else np.int32
        if not clip.in_float32 and len(rows) > lattice_capacity(num_coordinates(params)):
            dtype = np.int64
        total, stats = jax.tree.map(lambda leaf: np.zeros(leaf.shape, dtype), params), []
        if self.keeps_places(strategy, rows.shape[1]):
            # Lanes of whole passes: a place is a unit's number modulo the units of a pass.
            least = max(self.least_units, strategy.units_at_once(rows.shape[1]))
            order, lanes = np.arange(len(rows)), in_order(rows, self.num_lanes, least, least)
        else:
            real = np.flatnonzero((rows >= 0).any(axis=1))  # the others would only add zero
            order, lanes = cut(self.task, rows[real], self.num_lanes, self.least_units)
            order = real[order]
        for lane_sum, lane_stats in self._lanes("lane_sum", params, lanes, clip, strategy):
            stats.append(lane_stats)
            if len(lanes) == 1:
                total = lane_sum
            else:
                jax.tree.map(lambda t, x: np.add(t, x, out=t), total, lane_sum)
        return total, Stats.of_lanes(stats, order, len(rows))

    def keeps_places(self, strategy: Strategy, group: int) -> bool:
        """True if units of `group` rows share passes on an accelerator, where a contribution
        depends on the unit's place in its pass. Places are then those of the draw, and units
        without rows keep theirs (docs/theory/arithmetic.md)."""
        return strategy.units_at_once(group) > 1 and self.platform != "cpu"

    def mean_nats(self, params: Any, split: str, rows: np.ndarray, at: At = ignore) -> float:
        """Compute the mean loss over examples of a split, in nats per predicted token.

        Args:
          params: tree of float32 arrays.
          split: name of the split.
          rows: example indices, int [examples].
        """
        sizes = self.task.sizes(split, rows)
        enough = len(rows) // MIN_ROWS if sizes is None else int(sizes.sum()) // MIN_TOKENS
        number = max(1, min(self.num_lanes, enough), -(-len(rows) // MAX_EVALUATED))
        lanes = np.array_split(rows, number)
        nats = self._nats(params, split, lanes, at).sum(axis=0)
        return float(nats[0] / max(nats[1], 1))

    def group_losses(self, params: Any, split: str, groups: Sequence[np.ndarray]) -> np.ndarray:
        """Compute each group's mean loss per predicted token, float64 [groups].

        Guarantees: a group's loss is a function of params and of the group's examples, because each
          group is a lane.
        Args:
          params: tree of float32 arrays.
          split: name of the split.
          groups: example indices of each group, int [examples].
        """
        nats = self._nats(params, split, groups)
        return nats[:, 0] / np.maximum(nats[:, 1], 1)

    def _nats(
        self, params: Any, split: str, lanes: Sequence[np.ndarray], at: At = ignore
    ) -> np.ndarray:
        """Sum of nats and number of predictions of each lane, float64 [lanes, 2]."""
        pairs = []
        for pair in self._lanes("lane_nats", params, lanes, split):
            pairs.append(pair)
            at(len(pairs), len(lanes))
        return np.array(pairs, np.float64).reshape(len(lanes), 2)


def cut(
    task: Task, rows: np.ndarray, num_lanes: int, least: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Cut units into at most `num_lanes` lanes of about equal cost, the longest texts first.

    A function of its arguments, so independent of the workers.
    Args:
      task: says how long examples are.
      rows: examples of the split train, int [units, group], -1 = padding.
      num_lanes: most lanes.
      least: least units of a lane, if there are that many units.
    Returns: (number of the unit at each position of the concatenated lanes, int [units]; rows of
      each lane's units, [units of the lane, ...]).
    """
    num_lanes = max(1, min(num_lanes, len(rows) // least))
    found = None if num_lanes == 1 else _lengths_and_costs(task, rows)
    if found is None:
        return np.arange(len(rows)), in_order(rows, num_lanes, least)
    longest, cost = found
    order = np.argsort(-longest, kind="stable")
    block = max(least, min(len(rows) // num_lanes, AT_ONCE))
    costs_in_order = cost[order]
    before = np.cumsum(costs_in_order) - costs_in_order
    firsts = np.flatnonzero(np.diff(longest[order], prepend=-1))
    since = np.arange(len(rows)) - np.repeat(firsts, np.diff(firsts, append=len(rows)))
    starts = np.flatnonzero(since % block == 0)  # blocks of at most so many units of one length
    share = np.minimum(before[starts] * num_lanes // max(1, costs_in_order.sum()), num_lanes - 1)
    bounds = [0]  # first position of each lane
    for start in starts[1:][np.diff(share) > 0]:
        if min(start - bounds[-1], len(rows) - start) >= least:
            bounds.append(start)
    return order, np.split(rows[order], bounds[1:])


def in_order(rows: np.ndarray, num_lanes: int, least: int, whole: int = 1) -> list[np.ndarray]:
    """Cut units into lanes in the order of the draw, a function of their number alone; arguments
    as of `cut`. Args: whole: each lane but the last has a multiple of these units."""
    num_lanes = max(1, min(num_lanes, len(rows) // least))
    lanes = np.array_split(np.arange(len(rows) // whole), num_lanes)
    return np.split(rows, [lane[0] * whole for lane in lanes[1:]]) if len(rows) else []


def _lengths_and_costs(task: Task, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(Length of the rows, tokens with padding) of each unit, int [units] each, if it is known."""
    if (buckets := task.buckets) is None or (sizes := task.sizes("train", rows.ravel())) is None:
        return None
    sizes = sizes.reshape(rows.shape)
    if not buckets.shared or rows.shape[1] == 1:
        lengths = np.where(rows >= 0, buckets.holding(sizes), 0)
        return lengths.max(axis=1), lengths.sum(axis=1)
    sizes = np.where(rows >= 0, sizes, 0)
    longest = shared_lengths(sizes, buckets.shared)
    return longest, np.maximum(longest, sizes.sum(axis=1))
