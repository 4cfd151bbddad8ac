"""Cutting units into lanes, of texts about as long, so that little is computed for padding.

On the driver, in NumPy. A lane computes some units side by side, cut to one length: where short and
long ones are mixed, each lane has a little of every length, padded to whole passes. Where short
texts share a row, in evaluations, it is the other way round: few shapes of calls, so that little is
compiled. While a lane is computed the next chunk is read in a thread, and while workers wait the
pages of the next step.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
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


EVAL_ROWS_PER_CHUNK = 16
EVAL_FEW = 4  # of what is left of a length: with a large model, padding costs more than calls
EVAL_TOKENS_PER_CALL = 2048  # where short texts share rows


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
