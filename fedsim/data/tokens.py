"""Reading rows of tokens by number, from arrays that are mapped into memory.

Nothing is kept per row, and nothing is shared between calls, so threads may read at the same time.
"""

from pathlib import Path

import numpy as np

from fedsim.data.framing import copy
from fedsim.data.store import HEADER_BYTES, OFFSETS, TOKENS, encode_header

KINDS = "<u2", "<u4"
BLOCK_ROWS = 16_384  # copied at a time: what fits in a processor's cache


class TokenReader:
    """Rows of token ids.

    Attributes: offsets: int64 [rows + 1]; row i has the ids values[offsets[i]:offsets[i + 1]].
    """

    def __init__(self, offsets: np.ndarray, values: np.ndarray):
        """Raises: ValueError: they do not belong together."""
        whole = offsets.ndim == values.ndim == 1 and offsets.dtype.str == "<i8" and len(offsets)
        whole = whole and values.dtype.str in KINDS
        if not whole or offsets[0] or offsets[-1] != len(values):
            raise ValueError(f"{OFFSETS} and {TOKENS}: cut off or damaged (not of one store)")
        self.offsets, self.values = offsets, values

    @classmethod
    def open(cls, directory: Path) -> "TokenReader":
        """The rows of a store in `directory`. Raises: ValueError: a file is cut off or damaged."""
        return cls(_mapped(directory / OFFSETS, ("<i8",)), _mapped(directory / TOKENS, KINDS))

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.offsets) - 1

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows in any order (-1 is padding), cut or zero-padded to `length`.

        Returns: tokens int32 [rows, length], sizes int32 [rows]: real tokens per row.
        """
        tokens = np.zeros((len(rows), length), np.int32)
        sizes = np.zeros(len(rows), np.int32)
        flat = tokens.reshape(-1)
        for low in range(0, len(rows), BLOCK_ROWS):
            real = low + np.flatnonzero(rows[low : low + BLOCK_ROWS] >= 0)
            begin = self.offsets[rows[real]]
            sizes[real] = size = np.minimum(self.offsets[rows[real] + 1] - begin, length)
            copy(self.values, begin, size, flat, real * length)
        return tokens, sizes

    def slice(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows low:high, whole: lengths int64 [rows], and a view of their ids end to end."""
        return self.lengths(low, high), self.values[self.offsets[low] : self.offsets[high]]

    def lengths(self, low: int, high: int) -> np.ndarray:
        """int64: tokens of each of the rows low:high."""
        return np.diff(self.offsets[low : high + 1])

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows]: tokens of rows in any order, 0 for -1."""
        sizes, real = np.zeros(len(rows), np.int64), rows >= 0
        sizes[real] = self.offsets[rows[real] + 1] - self.offsets[rows[real]]
        return sizes


def _mapped(file: Path, kinds: tuple[str, ...]) -> np.ndarray:
    """Mapped, with the header that TokenWriter gives so many items of one of these types."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            begins = opened.read(HEADER_BYTES)
        for kind in kinds:
            items, rest = divmod(size - HEADER_BYTES, np.dtype(kind).itemsize)
            if not rest and begins == encode_header(items, kind):
                return np.memmap(file, kind, "r", HEADER_BYTES, (items,)).view(np.ndarray)
    except OSError as error:
        raise ValueError(f"{file.name}: cannot be read ({error.strerror})") from None
    raise ValueError(f"{file.name}: cut off or damaged (no array of its size)")
