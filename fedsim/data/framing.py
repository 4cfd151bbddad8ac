"""Token ids of texts become examples: a begin token, ids, and an end token if it fits.

Texts that are too long are cut, or split into examples that all start with the begin token.
Everything is arithmetic on whole batches: no Python object per text or token.
"""

from typing import NamedTuple

import numpy as np

LONG_TEXTS = ("cut", "split")


class Examples(NamedTuple):
    """Examples of texts."""

    lengths: np.ndarray
    """int64 [examples]: tokens of each."""
    values: np.ndarray
    """Their token ids end to end."""
    origin: np.ndarray
    """int64 [examples]: the text each comes from."""


def frame(
    lengths: np.ndarray,
    values: np.ndarray,
    *,
    begin_id: int,
    end_id: int,
    max_length: int,
    long_texts: str,
) -> Examples:
    """The examples of texts of `lengths` [texts] tokens whose ids lie end to end in `values`.

    An example has at most max_length tokens, begin token included. "split" loses no token; "cut"
    keeps the first max_length - 1 of a text. A text without tokens gives one example.
    """
    body = max_length - 1
    pieces = np.maximum(1, -(-lengths // body))
    if long_texts == "cut":
        pieces = np.minimum(pieces, 1)
    origin = np.repeat(np.arange(len(lengths)), pieces)
    start = (np.arange(len(origin)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * body
    left = lengths[origin] - start
    taken = np.minimum(left, body)
    ends = left < body
    counts = 1 + taken + ends
    first = np.cumsum(counts) - counts
    framed = np.empty(int(counts.sum()), values.dtype)
    copy(values, (np.cumsum(lengths) - lengths)[origin] + start, taken, framed, first + 1)
    framed[first] = begin_id
    framed[(first + counts - 1)[ends]] = end_id
    return Examples(counts, framed, origin)


def copy(source: np.ndarray, begin: np.ndarray, size: np.ndarray, target: np.ndarray, at) -> None:
    """target[at[i] : at[i] + size[i]] = source[begin[i] : begin[i] + size[i]] for every i."""
    skipped = np.cumsum(size) - size
    inside = np.arange(int(size.sum()))
    where = np.repeat(begin - skipped, size)
    where += inside
    inside += np.repeat(at - skipped, size)
    target[inside] = source[where]
