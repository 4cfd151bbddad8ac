"""Packing of rows into few static shapes, so that short rows cost little. On the host, in NumPy.

`chunks` splits a lane: each unit's rows are sorted by length, so that a pass has rows of about one
length; units are grouped by their longest row, and a chunk is trimmed to the bucket that holds it.

`packed` puts several short texts into one row, for a loss without gradients. A text of n tokens
takes n - 1 positions: the tokens that are fed, each with the token to predict. Attention sees only
the positions of the same text, so the loss is that of the texts one by one.

`in_shared_rows` does so for gradients, with the texts of one unit: a row has no text of another, so
that a unit's contribution stays its own.
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
    shared: tuple[int, ...] = ()
    """Ascending lengths of rows that the texts of one unit may share, as of `in_shared_rows`."""
    side_by_side: tuple[tuple[int, int], ...] = ()
    """(Tokens of a unit with padding, most units of a pass), ascending; units of more tokens are
    alone. Empty: a pass has as many units as its rows hold."""

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
    rows: int = 0
    """Rows of a pass; 0: those of the strategy."""


def chunks(
    batch: Any,
    mask: np.ndarray,
    units_per_chunk: int,
    buckets: Buckets | None,
    units_of_pass: Callable[[int], int] | None = None,
) -> Iterator[Chunk]:
    """Split a lane into chunks, each unit in one of them; a pure function of its arguments.

    Args:
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      units_per_chunk: units of a full chunk.
      buckets: lengths to which chunks are trimmed; None: not trimmed.
      units_of_pass: bucket -> units of a pass; None: those of the strategy.
    Raises: ConfigError: a row is longer than the last bucket.
    """
    units = np.arange(len(mask))
    if buckets is None:
        yield from _chunks(batch, mask, units, units_per_chunk)
        return
    sizes = np.where(mask, np.asarray(buckets.sizes(batch)), -1)
    order = np.argsort(-sizes, axis=1, kind="stable")  # the longest rows first, padding last
    rows = units[:, None]
    batch, mask = jax.tree.map(lambda leaf: leaf[rows, order], (batch, mask))
    needed = buckets.holding(sizes.max(axis=1, initial=0))  # of a unit, whoever the others are
    for length in buckets.lengths:
        at_once = units_of_pass(length) * mask.shape[1] if units_of_pass else 0
        for chunk in _chunks(batch, mask, np.flatnonzero(needed == length), units_per_chunk):
            trimmed = buckets.trim(chunk.batch, length)
            yield chunk._replace(batch=trimmed, length=length, rows=at_once)


def _chunks(batch: Any, mask: np.ndarray, units: np.ndarray, size: int) -> Iterator[Chunk]:
    """Yield some units in chunks of `size`, the last with padding."""
    for start in range(0, len(units), size):
        own = units[start : start + size]

        def take(leaf, own=own):
            padding = [(0, size - len(own))] + [(0, 0)] * (leaf.ndim - 1)
            return np.pad(leaf[own], padding)

        yield Chunk(own, jax.tree.map(take, batch), take(mask), 0)


def chunks_of_shared(
    batch: Any,
    mask: np.ndarray,
    lengths: tuple[int, ...],
    units_of_pass: Callable[[int], int],
    units_per_chunk: Callable[[int], int],
) -> Iterator[Chunk]:
    """Split a lane into chunks whose units' texts share rows; arguments as of `in_shared_rows`.

    Args:
      units_of_pass: length of a row -> units of a pass, if each has one row. Units of several rows
        are computed one at a time, row by row.
      units_per_chunk: units of a pass -> units of a chunk.
    """
    for units, made, real in in_shared_rows(batch, mask, lengths):
        length = made["tokens"].shape[-1]
        rows = units_of_pass(length) if real.shape[1] == 1 else 1
        for chunk in _chunks(made, real, np.arange(len(units)), units_per_chunk(rows)):
            yield chunk._replace(units=units[chunk.units], length=length, rows=rows)


def packed(batch: dict[str, Any], lengths: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Pack the texts of a batch into rows: each into the first row with room, longest first.

    Args:
      batch: {tokens [texts, any], sizes [texts]}, NumPy; padding has size 0. And perhaps trained,
        bool [texts, any]: tokens to predict; the others are only fed.
      lengths: of the row of each text, int [texts], >= size - 1.
    Returns: for each length of rows {tokens, targets, positions}, int32 [rows, length]: the fed
      token, the token to predict (-1: none), and its position in its text.
    """
    fed, made = np.maximum(np.asarray(batch["sizes"]) - 1, 0), []
    for length in np.unique(lengths[fed > 0]):
        own = np.flatnonzero((fed > 0) & (lengths == length))
        texts = {name: np.asarray(leaf)[own] for name, leaf in batch.items()}
        row, first = _first_fit(fed[own], length)
        made.append(_filled(texts, fed[own], row, first, (row.max() + 1, length))[0])
    return made


def _first_fit(fed: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Row of each text [n] and its first place there, the longest texts first."""
    row, first, used = np.zeros_like(fed), np.zeros_like(fed), np.zeros_like(fed)
    for text in np.argsort(-fed, kind="stable")[: np.count_nonzero(fed)]:
        row[text] = np.argmax(used + fed[text] <= length)
        first[text] = used[row[text]]
        used[row[text]] += fed[text]
    return row, first


def _filled(batch, fed, row, first, shape):
    """Put texts [n] into rows of a shape, from the first of their places there.

    Returns: ({tokens, targets, positions} as of `packed`; of each fed token its place, its text,
      and whether the next one is to be predicted).
    """
    text = np.repeat(np.arange(len(fed)), fed)
    at = np.arange(len(text)) - np.repeat(np.cumsum(fed) - fed, fed)
    place, following = (row[text], first[text] + at), batch["tokens"][text, at + 1]
    predicted = np.ones(len(at), bool)
    if "trained" in batch:
        predicted = batch["trained"][text, at + 1]
    made = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions")}
    made["targets"] = np.full(shape, -1, np.int32)
    made["tokens"][place] = batch["tokens"][text, at]
    made["positions"][place] = at
    made["targets"][place] = np.where(predicted, following, -1)
    return made, place, text, predicted


SHORT = 256
"""Tokens up to which all texts of a unit share one row. Attention in longer rows costs more than
the last row of several wastes."""


def shared_lengths(sizes: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Length of the rows that the texts of each unit share: a function of the unit's sizes.

    Args:
      sizes: tokens of each text, int [units, group]; 0 is padding.
      lengths: ascending; the last holds SHORT and the longest text.

    Returns: int [units]. A unit of more tokens has several such rows.
    """
    fed = np.maximum(sizes - 1, 0)
    total, longest = fed.sum(axis=1), fed.max(axis=1, initial=0)
    needed = np.where(total <= SHORT, total, np.maximum(longest, SHORT))
    return np.asarray(lengths)[np.searchsorted(lengths, needed)]


def in_shared_rows(
    batch: dict[str, np.ndarray], mask: np.ndarray, lengths: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]]:
    """Put the texts of each unit into rows of its own, one after another, with little padding.

    Args:
      batch: {tokens [units, group, any], sizes [units, group]}, NumPy; padding has size 0. And
        perhaps trained, bool [units, group, any]: tokens to predict; the others are only fed.
      mask: bool [units, group], true where a text is real.
      lengths: see `shared_lengths`.

    Yields:
      For each length, units of one row and units of several: (numbers of the units; {tokens,
      targets, positions}, int32 [units, rows, length], as of `packed`, and weights, float32: the
      mean over a unit's rows of the sums of weighted losses is the mean over its texts of the mean
      loss of a token; the mask of the rows). All of it is a function of the unit alone.
    """
    sizes = np.where(mask, np.asarray(batch["sizes"]), 0)
    fed, length = np.maximum(sizes - 1, 0), shared_lengths(sizes, lengths)
    row, first = np.zeros_like(fed), np.cumsum(fed, axis=1) - fed
    several = fed.sum(axis=1) > length
    for unit in np.flatnonzero(several):
        row[unit], first[unit] = _first_fit(fed[unit], length[unit])
    for rows, kind in ((1, ~several), (mask.shape[1], several)):
        for each in np.unique(length[kind]):
            units = np.flatnonzero(kind & (length == each))
            own = {name: np.asarray(leaf)[units] for name, leaf in batch.items()}
            places = mask[units], fed[units], row[units], first[units]
            yield units, *_in_rows(own, *places, rows, int(each))


def _in_rows(batch, mask, fed, row, first, rows, length):
    """Return (batch, mask) of `in_shared_rows`, from the places [units, group] of the texts."""
    units, texts = len(mask), {n: x.reshape(-1, x.shape[-1]) for n, x in batch.items()}
    places = (row + rows * np.arange(units)[:, None]).ravel(), first.ravel()
    made, place, text, predicted = _filled(texts, fed.ravel(), *places, (units * rows, length))
    predictions = np.bincount(text, predicted, mask.size).reshape(mask.shape)
    number = np.where(mask.any(axis=1), row.max(axis=1, initial=0) + 1, 0)
    share = number / np.maximum(1, mask.sum(axis=1))
    weights = share[:, None] / np.maximum(1, predictions)
    made["weights"] = np.zeros((units * rows, length), np.float32)
    made["weights"][place] = np.where(predicted, weights.ravel()[text], 0)
    made = {name: leaf.reshape(units, rows, length) for name, leaf in made.items()}
    return made, np.arange(rows) < number[:, None]
