"""Second half of a build: tokenised rows, sorted by DuckDB, become the stores of the splits.

Rows are sorted by group and user, then by their order, then as in the sources: no two are equal, so
that the result does not depend on threads or memory. What does not fit in memory goes to the
build's own directory. DuckDB loads nothing from a network, and what it says is not shown: it may
quote what it reads.
"""

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedsim.data.splits import SplitRows
from fedsim.data.store import TokenWriter
from fedsim.errors import Interrupted
from fedsim.files import DISK_FULL, TOO_MANY_FILES

MEMORY = 512 * 2**20  # bytes of a sort, for each thread; at least for two
MOST_THREADS = 4
BLOCK_ROWS = 32_768  # or pieces of rows, that are written at once


class Rows:
    """The tokenised rows in `directory`; a context manager."""

    def __init__(self, directory: Path, threads: int, order: bool):
        """order: whether rows have order keys."""
        self._spill, self._threads, self._order = (
            directory / "spilled",
            min(threads, MOST_THREADS),
            order,
        )
        self._source = (
            f"read_parquet('{glob.escape(str(directory)).replace(chr(39), 2 * chr(39))}"
            "/rows-*.parquet', hive_partitioning = false)"
        )

    def __enter__(self) -> "Rows":
        import duckdb  # takes a while

        with plain_errors():
            self.connection = duckdb.connect(
                config={
                    "memory_limit": f"{MEMORY * max(2, self._threads)}B",
                    "threads": self._threads,
                    "temp_directory": str(self._spill),
                    "autoinstall_known_extensions": False,
                    "autoload_known_extensions": False,
                    "arrow_large_buffer_size": True,
                }
            )
            self.connection.execute("SET enable_progress_bar = false")
        return self

    def __exit__(self, *_) -> None:
        self.connection.close()

    def owners(self, width: int) -> pa.Table:
        """All owners with their rows and tokens, sorted by group and user.

        Args: width: bytes of a token id. Raises: OSError: no space, or no more files may be open.
        """
        with plain_errors():
            found = self.connection.sql(
                'SELECT "group", user_id, count(*) FILTER (first) AS rows, '
                f"sum(octet_length(tokens))::BIGINT // {width} AS tokens "
                f"FROM {self._source} GROUP BY ALL ORDER BY ALL"
            )
            table = found.to_arrow_table()
        ids = table["user_id"].cast(pa.string())
        return table.set_column(1, "user_id", ids).combine_chunks()

    def blocks(self, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(lengths, token ids end to end) of all rows, as sorted; raises as `owners`."""
        names = ['"group"', "user_id", "place"]
        if self._order:
            names[2:2] = ["COLUMNS('order.') NULLS LAST"]
        with plain_errors():
            reader = self.connection.sql(
                f"SELECT first, tokens FROM {self._source} ORDER BY {', '.join(names)}"
            ).to_arrow_reader(BLOCK_ROWS)
        return _whole(_pieces(reader, dtype))


def _pieces(reader: Any, dtype: np.dtype) -> Iterator[list[np.ndarray]]:
    """Blocks of pieces of rows: whether they begin one, their lengths, and token ids end to end."""
    while True:
        with plain_errors():
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
        column: Any = batch["tokens"].cast(pa.large_binary())
        _, ends, data = column.buffers()
        ends = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
        values = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
        first = batch["first"].to_numpy(zero_copy_only=False)
        yield [first, np.diff(ends) // dtype.itemsize, values.view(dtype)]


def _whole(blocks: Iterator[list[np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(lengths, token ids end to end) of rows of which a block may have a part."""
    held = None
    for block in blocks:
        if held is not None:
            block = [np.concatenate(pair) for pair in zip(held, block, strict=True)]
        first, lengths, values = block
        starts = np.flatnonzero(first)
        last = int(starts[-1])  # it may go on in the next block
        size = int(lengths[:last].sum())
        if last:
            yield np.add.reduceat(lengths[:last], starts[:-1]), values[:size]
        held = first[last:], lengths[last:], values[size:]
    if held is not None:
        yield held[1].sum(keepdims=True), held[2]


@contextmanager
def plain_errors() -> Iterator[None]:
    """DuckDB's errors as the ones that a build knows what to do about."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, RuntimeError) as error:
        said = str(error)
        # A signal while DuckDB is at work is an error of no type of its own.
        if isinstance(error, duckdb.InterruptException) or said == "Query interrupted":
            raise KeyboardInterrupt from None
        for number in (*DISK_FULL, *TOO_MANY_FILES):
            if os.strerror(number) in said:
                raise OSError(number, os.strerror(number)) from None
        if "temp_directory" in said or "offload" in said:
            raise OSError(DISK_FULL[0], os.strerror(DISK_FULL[0])) from None
        if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory" in said:
            raise Interrupted("expected more memory to sort rows in") from None
        raise Interrupted(
            f"rows could not be sorted ({type(error).__name__}); if that comes again, remove the "
            "directory beside the output whose name ends in .building"
        ) from None


def write_splits(
    blocks: Iterator[tuple[np.ndarray, np.ndarray]],
    counts: np.ndarray,
    splits: Mapping[str, SplitRows],
    directory: Path,
    dtype: np.dtype,
    report: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """Writes token ids and offsets of each split, in a directory of its name in `directory`.

    Args: blocks: all rows, as sorted. counts: int64 [owners], rows of each.
    Returns: int64 [users of the split], their tokens, for each split.
    """
    ends, start = np.cumsum(counts), 0
    spans = {name: np.zeros((2, len(counts)), np.int64) for name in splits}
    tokens = {name: np.zeros(len(counts), np.int64) for name in splits}
    for name, rows in splits.items():
        spans[name][:, rows.owners] = rows.low, rows.high
        (directory / name).mkdir(exist_ok=True)
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(TokenWriter(directory / name, dtype)) for name in splits
        }
        for lengths, values in blocks:
            row = np.arange(start, start + len(lengths))
            start += len(lengths)
            owner = np.searchsorted(ends, row, side="right")
            place = row - (ends - counts)[owner]
            here = slice(owner[0], owner[-1] + 1)
            for name, (low, high) in spans.items():
                mine = (place >= low[owner]) & (place < high[owner])
                writers[name].write(lengths[mine], values[np.repeat(mine, lengths)])
                found = np.bincount(owner - owner[0], lengths * mine)
                tokens[name][here] += found.astype(np.int64)
            report(len(lengths))
    return {name: tokens[name][rows.owners] for name, rows in splits.items()}
