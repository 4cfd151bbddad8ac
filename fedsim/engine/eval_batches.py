"""What an evaluation computes at once: few shapes of calls, so that little is compiled."""

from collections.abc import Iterator
from typing import Any

import jax

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
