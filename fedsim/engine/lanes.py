"""Cutting units into lanes, of texts about as long, so that little is computed for padding.

On the driver, in NumPy. A lane computes some units side by side, cut to one length: where short and
long ones are mixed, each lane has a little of every length, padded to whole passes.
"""

from typing import NamedTuple

import numpy as np

from fedsim.engine.task import Task

AT_ONCE = 4  # units that most strategies compute side by side


class Lanes(NamedTuple):
    """Units, cut."""

    order: np.ndarray
    """Which unit is at which place of the lanes end to end, int [units]."""
    rows: list[np.ndarray]
    """The units of each lane, [units of the lane, ...]."""


def whole(rows: np.ndarray) -> Lanes:
    """All units as one lane; none of none."""
    return Lanes(np.arange(len(rows)), [rows] if len(rows) else [])


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
        return Lanes(np.arange(len(rows)), [x for x in np.array_split(rows, num_lanes) if len(x)])
    order = np.argsort(-found.max(axis=1), kind="stable")
    block = max(least, min(len(rows) // num_lanes, AT_ONCE))
    starts = np.arange(0, len(rows) - block + 1, block)  # the last block takes what is left
    ends = np.cumsum(found[order].sum(axis=1))
    before = np.concatenate([[0], ends])[starts]
    lane = np.minimum(before * num_lanes // max(1, ends[-1]), num_lanes - 1)
    bounds = starts[np.flatnonzero(np.diff(lane)) + 1]
    return Lanes(order, np.split(rows[order], bounds))


def costs(task: Task, split: str, rows: np.ndarray) -> np.ndarray | None:
    """The length that each example of the units is padded to, 0 for padding, int64 [units, group];
    None: all have the same."""
    if (buckets := task.buckets) is None:
        return None
    if (sizes := task.sizes(split, rows.ravel())) is None:
        return None
    found = np.where(rows.ravel() >= 0, buckets.holding(sizes), 0)
    return found.reshape(rows.shape if rows.ndim > 1 else (len(rows), 1))
