"""Cutting units into lanes, of texts about as long, so that little is computed for padding.

On the driver, in NumPy. A lane computes some units side by side, cut to one length: where short and
long ones are mixed, each lane has a little of every length, padded to whole passes. Where short
texts share a row, in evaluations, it is the other way round.
"""

from typing import NamedTuple

import numpy as np

from fedsim.engine.task import Task

AT_ONCE = 4  # units that most strategies compute side by side
LEAST_TOKENS = 512  # of a lane of examples that share rows: a few rows at once cost less each


class Lanes(NamedTuple):
    """The units of one call, cut into lanes: each is one worker's task."""

    order: np.ndarray
    """Which unit is at which place of the lanes end to end, int [units]."""
    rows: list[np.ndarray]
    """The units of each lane, [units of the lane, ...]."""
    lengths: list[int]
    """To what the longest text of each lane is padded; 0 where that is not known."""


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
