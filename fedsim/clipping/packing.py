"""Cutting a lane into chunks of few static shapes, so that short rows cost little.

On the host, in NumPy. A unit's rows are sorted by length, so that passes over some of them are of
one kind; units are sorted by their longest row, and a chunk is cut to the bucket that holds it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim.clipping.scan import Buckets


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
