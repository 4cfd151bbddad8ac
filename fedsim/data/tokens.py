"""Reading rows of tokens by number from Arrow streams that are mapped into memory.

A row is found by arithmetic on what the batches' headers say, so a reader keeps a few numbers per
record batch and none per row. Rows are copied block by block with NumPy alone; nothing is shared
between calls, so threads may read at the same time.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from fedsim.data.arrow_stream import Batch, read_batches, read_kind
from fedsim.data.framing import copy

BLOCK_ROWS, BLOCK_TOKENS = 16_384, 2**21  # copied at a time: what fits in a processor's cache
READ_AT_ONCE = 16  # shards whose headers are read

_libc = ctypes.CDLL(None)


class TokenReader:
    """The rows of `shards` end to end: Arrow IPC streams with one column, a list of token ids.

    Attributes: num_rows, num_tokens: totals.
    """

    def __init__(self, shards: Sequence[pa.Buffer | Path]):
        """Reads the headers. Raises: pa.ArrowInvalid: a shard is cut off or damaged."""
        rows, tokens, table = [0], 0, []
        self._words: list[np.ndarray] = []  # each shard as int32: where the offsets lie
        self._values: list[np.ndarray] = []  # each shard as token ids
        self._maps: list[pa.Buffer] = []
        with ThreadPoolExecutor(READ_AT_ONCE) as threads:  # headers lie far apart on a disk
            read = list(threads.map(_read_headers, shards))
        for number, (data, kind, batches) in enumerate(read):
            if isinstance(shards[number], Path):
                self._maps.append(data)
            self._words.append(np.frombuffer(data, np.int32, data.size // 4))
            self._values.append(np.frombuffer(data, kind, data.size // kind.itemsize))
            for batch in batches:
                offsets = _items(batch.offsets_at, 4)
                table.append((number, offsets, _items(batch.values_at, kind.itemsize)))
                rows.append(batch.rows)
                tokens += batch.tokens
        self._first = np.cumsum(rows, dtype=np.int64)
        self._table = np.array(table, np.int64).reshape(-1, 3)
        self.num_rows, self.num_tokens = int(self._first[-1]), tokens

    def release(self) -> None:
        """Lets go of the pages that were read. They stay in the system's cache."""
        for data in self._maps:
            start, size = ctypes.c_void_p(data.address), ctypes.c_size_t(data.size)
            _libc.madvise(start, size, mmap.MADV_DONTNEED)

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows in any order (-1 is padding), cut or zero-padded to `length`.

        Returns: tokens int32 [rows, length], sizes int32 [rows]: real tokens per row.
        """
        tokens = np.zeros((len(rows), length), np.int32)
        sizes = np.zeros(len(rows), np.int32)
        flat = tokens.reshape(-1)
        for low in range(0, len(rows), BLOCK_ROWS):
            real = low + np.flatnonzero(rows[low : low + BLOCK_ROWS] >= 0)
            shard, begin, size = self._locate(rows[real])
            sizes[real] = size = np.minimum(size, length)
            self._copy(shard, begin, size, flat, real * length)
        return tokens, sizes

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows in any order, whole: lengths int64 [rows], and their token ids end to end."""
        shard, begin, size = self._locate(rows)
        ends = np.cumsum(size)
        flat = np.empty(int(ends[-1]) if len(ends) else 0, self.dtype)
        cuts = np.searchsorted(ends, np.arange(BLOCK_TOKENS, len(flat), BLOCK_TOKENS)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(rows)]):
            part = slice(low, high)
            self._copy(shard[part], begin[part], size[part], flat, ends[part] - size[part])
        return size, flat

    @property
    def dtype(self) -> np.dtype:
        """The type of the token ids."""
        return self._values[0].dtype if self._values else np.dtype(np.uint16)

    def lengths(self, start: int = 0, end: int | None = None) -> np.ndarray:
        """int64: tokens of each of the rows start:end."""
        return self._locate(np.arange(start, self.num_rows if end is None else end))[2]

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows]: tokens of rows in any order, 0 for -1."""
        sizes, real = np.zeros(len(rows), np.int64), rows >= 0
        sizes[real] = self._locate(rows[real])[2]
        return sizes

    def _locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each row's shard, where its tokens begin there, and how many they are."""
        batch = np.searchsorted(self._first, rows, side="right") - 1
        shard, offsets_at, values_at = self._table[batch].T
        offsets_at = offsets_at + (rows - self._first[batch])
        begin, end = np.empty((2, len(rows)), np.int64)
        for number, which in _groups(shard):
            at = offsets_at[which]
            begin[which], end[which] = self._words[number][at], self._words[number][at + 1]
        return shard, begin + values_at, end - begin

    def _copy(self, shard, begin, size, flat: np.ndarray, at: np.ndarray) -> None:
        """Copies row i's size[i] tokens to flat[at[i]:]."""
        for number, which in _groups(shard):
            copy(self._values[number], begin[which], size[which], flat, at[which])


def _groups(shard: np.ndarray):
    """(shard number, the rows that lie in it) for each shard there is."""
    if not len(shard):
        return
    if shard[0] == shard[-1] and (shard == shard[0]).all():
        yield int(shard[0]), slice(None)
        return
    order = np.argsort(shard.astype(np.uint16), kind="stable")
    bounds = np.flatnonzero(np.diff(shard[order], prepend=-1, append=-1))
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        yield int(shard[order[low]]), order[low:high]


def _read_headers(shard: pa.Buffer | Path) -> tuple[pa.Buffer, np.dtype, list[Batch]]:
    """What holds a shard's bytes, the type of its token ids, and where its rows lie."""
    if not isinstance(shard, Path):

        def cut(at, size):
            return shard.slice(at, min(size, shard.size - at)).to_pybytes()

        return shard, *_scan(cut, shard.size)
    data = pa.memory_map(str(shard)).read_buffer()  # Python's own mmap holds a descriptor
    if not data.size:
        raise pa.ArrowInvalid("empty file")
    with shard.open("rb") as file:
        # Read, not mapped: a page of the mapping per header would stay in every process.
        return data, *_scan(lambda at, size: os.pread(file.fileno(), size, at), data.size)


def _scan(read: Callable[[int, int], bytes], size: int) -> tuple[np.dtype, list[Batch]]:
    return np.dtype(read_kind(read).to_pandas_dtype()), list(read_batches(read, size))


def _items(place: int, width: int) -> int:
    """A place in bytes as one in items of `width` bytes."""
    if place % width:
        raise pa.ArrowInvalid("expected aligned record batches")
    return place // width
