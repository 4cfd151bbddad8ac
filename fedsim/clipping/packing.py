"""Packing of rows into few static shapes, so that short rows cost little. On the host, in NumPy.

`chunks` splits a lane: each unit's rows are sorted by length, so that a pass has rows of about one
length; units are grouped by their longest row, and a chunk is trimmed to the bucket that holds it.

`packed` puts several short texts into one row, for a loss without gradients. A text of n tokens
takes n - 1 positions: the tokens that are fed, each with the token to predict. Attention sees only
the positions of the same text, so the loss is that of the texts one by one.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.errors import expect


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Lengths to which rows may be trimmed, so that short rows cost little."""

    lengths: tuple[int, ...]
    """Ascending, tokens; every row fits into the last."""
    sizes: Callable[[Any], Any]
    """(rows of a batch) -> the length that each row needs, int [rows]."""
    trim: Callable[[Any, int], Any]
    """(batch, length) -> the batch with rows trimmed to `length`; lossless if `length` suffices."""
    packed: Callable[[Any], Sequence[Any]] | None = None
    """(NumPy batch) -> batches with several short texts in a row, trees of arrays [rows, length];
    only for a task's `nats`."""

    def holding(self, sizes: np.ndarray) -> np.ndarray:
        """Return the least length that holds each of these sizes, int, in the shape of `sizes`.

        Raises: ConfigError: a size is larger than the last length.
        """
        lengths, longest = np.asarray(self.lengths), int(np.max(sizes, initial=0))
        expect("sizes", longest, longest <= lengths[-1], f"<= {lengths[-1]}, the last of `lengths`")
        return lengths[np.searchsorted(lengths, sizes)]

    def up_to(self, length: int) -> "Buckets":
        """Return the same buckets without lengths above `length`."""
        return dataclasses.replace(self, lengths=tuple(n for n in self.lengths if n <= length))


class Chunk(NamedTuple):
    """Some units of a lane, in one of few static shapes."""

    units: np.ndarray
    """Numbers of the units in the lane, int [<= units per chunk]; the rest is padding."""
    batch: Any
    """Tree of arrays [units per chunk, group, ...]."""
    mask: np.ndarray
    """bool [units per chunk, group]."""
    length: int
    """The bucket to which the rows are trimmed; 0 without buckets."""


def chunks(
    batch: Any,
    mask: np.ndarray,
    units_per_chunk: int,
    buckets: Buckets | None,
    few: int | None = None,
) -> Iterator[Chunk]:
    """Split a lane into chunks, each unit in one of them; a pure function of its arguments.

    Args:
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      units_per_chunk: units of a full chunk.
      buckets: lengths to which chunks are trimmed; None: not trimmed.
      few: units of each chunk of the rest that does not fill a chunk; None: one padded chunk.
    Raises: ConfigError: a row is longer than the last bucket.
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
    """Yield the chunks of each length. A unit's length does not depend on other units."""
    needed = buckets.holding(longest)
    for length in buckets.lengths:
        for part in _parts(np.flatnonzero(needed == length), *sizes_of_chunks):
            chunk = _chunk(batch, mask, *part)
            yield chunk._replace(batch=buckets.trim(chunk.batch, length), length=length)


def _parts(units: np.ndarray, size: int, few: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (units, size of their chunk): full chunks, then the rest in chunks of `few`."""
    full = len(units) // size * size
    for part, step in ((units[:full], size), (units[full:], few)):
        for start in range(0, len(part), step):
            yield part[start : start + step], step


def _chunk(batch, mask, units, size) -> Chunk:
    def take(leaf):
        padding = [(0, size - len(units))] + [(0, 0)] * (leaf.ndim - 1)
        return np.pad(leaf[units], padding)

    return Chunk(units, jax.tree.map(take, batch), take(mask), 0)


def padded(lengths: np.ndarray, units_at_once: int, together: int) -> int:
    """Cost of passes over units: units times length, with the padding of each length's last pass.

    Args:
      lengths: of the units, int [units].
      units_at_once: units of a pass.
      together: units of a lane; each lane pads its last pass of a length.
    """
    values, counts = np.unique(lengths, return_counts=True)
    full, rest = np.divmod(counts, together)
    passes = full * -(-together // units_at_once) + -(-rest // units_at_once)
    return int(values @ passes * units_at_once)


def packed(
    batch: dict[str, Any], length_for: Callable[[np.ndarray], np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """Pack the texts of a batch into rows: each into the first row with room, longest first.

    Args:
      batch: {tokens [texts, any], sizes [texts]}, NumPy; padding has size 0. And perhaps trained,
        bool [texts, any]: tokens to predict; the others are only fed.
      length_for: (sizes of texts) -> the length of a row that such a text begins, >= size - 1.
    Returns: for each length of rows {tokens, targets, positions}, int32 [rows, length]: the fed
      token, the token to predict (-1: none), and its position in its text.
    """
    fed = np.asarray(batch["sizes"]) - 1
    order = np.argsort(-fed, kind="stable")
    order = order[fed[order] > 0]
    length = length_for(batch["sizes"][order])  # of the row that a text begins, if it begins one
    room, begun = np.zeros(len(order), int), np.zeros(len(order), int)
    rows, places = 0, []
    for text, longest in zip(order, length, strict=True):
        row = int(np.argmax(room[:rows] >= fed[text])) if rows else 0
        if rows == 0 or room[row] < fed[text]:
            row, rows = rows, rows + 1
            room[row] = begun[row] = longest
        places.append((text, row, begun[row] - room[row]))
        room[row] -= fed[text]
    return [_filled(batch, fed, places, begun, size) for size in np.unique(begun[:rows])]


def _filled(batch, fed, places, begun, length) -> dict[str, np.ndarray]:
    chosen = np.flatnonzero(begun == length)
    number = dict(zip(chosen.tolist(), range(len(chosen)), strict=True))
    filled = {name: np.zeros((len(chosen), length), np.int32) for name in ("tokens", "positions")}
    filled["targets"] = np.full((len(chosen), length), -1, np.int32)
    for text, row, first in places:
        if row in number:
            count, ids = fed[text], batch["tokens"][text]
            where = number[row], slice(first, first + count)
            filled["tokens"][where], targets = ids[:count], ids[1 : count + 1]
            if "trained" in batch:
                targets = np.where(batch["trained"][text, 1 : count + 1], targets, -1)
            filled["targets"][where] = targets
            filled["positions"][where] = np.arange(count)
    return filled
