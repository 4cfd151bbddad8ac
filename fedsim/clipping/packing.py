"""Packing rows into few static shapes, so that short rows cost little. On the host, in NumPy.

`chunks` cuts a lane: a unit's rows are sorted by length, so that passes over some of them are of
one kind; units are sorted by their longest row, and a chunk is cut to the bucket that holds it.

`packed` puts several short texts into one row, for a loss that needs no gradients. A text of n
tokens takes n - 1 places: what is fed, each with the token that it has to predict. Attention sees
the places of its own text alone, so the loss is that of the texts one by one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.errors import expect


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The lengths that rows may be cut to, so that short ones cost little."""

    lengths: tuple[int, ...]
    """Ascending; every row fits into the last one."""
    sizes: Callable[[Any], Any]
    """(rows of a batch) -> the length that each row needs, int [rows]."""
    trim: Callable[[Any, int], Any]
    """(batch, length) -> the batch with rows cut to `length`; loses nothing where it suffices."""
    packed: Callable[[Any], Sequence[Any]] | None = None
    """(NumPy batch) -> batches that have several short rows in one, for a task's `nats` alone, each
    a tree of arrays [rows, length]."""

    def holding(self, sizes: np.ndarray) -> np.ndarray:
        """The least of the lengths that holds each of these sizes, int, like `sizes`.

        Raises ConfigError: none does.
        """
        lengths, longest = np.asarray(self.lengths), int(np.max(sizes, initial=0))
        expect("sizes", longest, longest <= lengths[-1], f"<= {lengths[-1]}, the last of `lengths`")
        return lengths[np.searchsorted(lengths, sizes)]

    def up_to(self, length: int) -> "Buckets":
        """The same buckets without those that are longer than `length`."""
        return dataclasses.replace(self, lengths=tuple(n for n in self.lengths if n <= length))


class Chunk(NamedTuple):
    """Some units of a lane, in a shape that comes again."""

    units: np.ndarray
    """Which units of the lane, int [<= units per chunk]; the rest of the chunk is padding."""
    batch: Any
    """Tree of arrays [units per chunk, group, ...]."""
    mask: np.ndarray
    """bool [units per chunk, group]."""
    length: int
    """The bucket that the rows were cut to; 0 where there are no buckets."""


def chunks(
    batch: Any,
    mask: np.ndarray,
    units_per_chunk: int,
    buckets: Buckets | None,
    few: int | None = None,
) -> Iterator[Chunk]:
    """All units of a lane, each in one chunk; a pure function of its arguments.

    Args:
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      few: units of the chunks of what does not fill a chunk; None: it is one, padded.
    Raises ConfigError: a row is longer than the last bucket.
    """
    units, sizes_of_chunks = np.arange(len(mask)), (units_per_chunk, few or units_per_chunk)
    if buckets is None:
        return (_chunk(batch, mask, *part) for part in _parts(units, *sizes_of_chunks))
    sizes = np.where(mask, np.asarray(buckets.sizes(batch)), -1)
    order = np.argsort(-sizes, axis=1, kind="stable")  # the longest rows first, padding last
    rows = units[:, None]
    batch = jax.tree.map(lambda leaf: leaf[rows, order], batch)
    mask, longest = mask[rows, order], sizes.max(axis=1, initial=0)
    return _by_length(batch, mask, longest, sizes_of_chunks, buckets)


def _by_length(batch, mask, longest, sizes_of_chunks, buckets):
    """Chunks of each length. The length of a unit is its own, whoever else is there."""
    needed = buckets.holding(longest)
    for length in buckets.lengths:
        for part in _parts(np.flatnonzero(needed == length), *sizes_of_chunks):
            chunk = _chunk(batch, mask, *part)
            yield chunk._replace(batch=buckets.trim(chunk.batch, length), length=length)


def _parts(units: np.ndarray, size: int, few: int) -> Iterator[tuple[np.ndarray, int]]:
    """(units, size of their chunk): full chunks, and what is left in chunks of `few`."""
    full = len(units) // size * size
    for some, each in ((units[:full], size), (units[full:], few)):
        for start in range(0, len(some), each):
            yield some[start : start + each], each


def _chunk(batch, mask, units, size) -> Chunk:
    def take(leaf):
        padding = [(0, size - len(units))] + [(0, 0)] * (leaf.ndim - 1)
        return np.pad(leaf[units], padding)

    return Chunk(units, jax.tree.map(take, batch), take(mask), 0)


def padded(lengths: np.ndarray, units_at_once: int, together: int) -> int:
    """What passes over units of these lengths [units] cost: the last pass of a length is padded, in
    each of the lanes that have so many units of it `together`."""
    values, counts = np.unique(lengths, return_counts=True)
    full, rest = np.divmod(counts, together)
    passes = full * -(-together // units_at_once) + -(-rest // units_at_once)
    return int(values @ passes * units_at_once)


def packed(
    batch: dict[str, Any], length_for: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """The texts of a batch, each in the first row that has room for it, the longest first.

    Args:
      batch: {tokens [texts, any], sizes [texts]}, NumPy; padding has size 0.
      length_for: (sizes of texts) -> the length of a row that such a text begins, no less.
    Returns: of each length of rows {tokens, targets, positions}, int32 [rows, length]: what is fed,
      what it predicts (-1: nothing), and its place in its text. A function of the batch.
    """
    fed = np.asarray(batch["sizes"]) - 1
    order = np.argsort(-fed, kind="stable")
    order = order[fed[order] > 0]
    length = length_for(batch["sizes"][order])  # of the row that it begins, if it begins one
    room, begun = np.zeros(len(order), int), np.zeros(len(order), int)
    rows, places = 0, []
    for text, own in zip(order, length, strict=True):
        row = int(np.argmax(room[:rows] >= fed[text])) if rows else 0
        if rows == 0 or room[row] < fed[text]:
            row, rows = rows, rows + 1
            room[row] = begun[row] = own
        places.append((text, row, begun[row] - room[row]))
        room[row] -= fed[text]
    return [_filled(batch, fed, places, begun, each) for each in np.unique(begun[:rows])]


def _filled(batch, fed, places, begun, length) -> dict[str, np.ndarray]:
    chosen = np.flatnonzero(begun == length)
    number = dict(zip(chosen.tolist(), range(len(chosen)), strict=True))
    found = {name: np.zeros((len(chosen), length), np.int32) for name in ("tokens", "positions")}
    found["targets"] = np.full((len(chosen), length), -1, np.int32)
    for text, row, first in places:
        if row in number:
            count, own = fed[text], batch["tokens"][text]
            where = number[row], slice(first, first + count)
            found["tokens"][where], found["targets"][where] = own[:count], own[1 : count + 1]
            found["positions"][where] = np.arange(count)
    return found
