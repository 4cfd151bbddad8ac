"""Second half of a build: DuckDB sorts the tokenised rows, which become the stores of the splits.

Rows are sorted by group and user, then by their order, then as in the sources. No two rows are
equal, so the result does not depend on threads or memory. Rows that do not fit in memory are
spilled to the directory of the build. DuckDB loads no extension from a network. Its messages are
not shown, for they may quote a person's text.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from fedsim.data.dataset import SplitRows
from fedsim.data.store import TokenWriter
from fedsim.errors import Interrupted
from fedsim.files import DISK_FULL
from fedsim.signals import raise_if_stopped

MAX_THREADS = 4
MEMORY, ROWS = 512 * 2**20, 2**19  # bytes and rows of a thread, in which DuckDB holds 122,880 rows
BLOCK_ROWS = 32_768


def connect(threads: int = 1, **config: Any) -> Any:
    """A connection of DuckDB that shows no bar of progress, which would go to stdout."""
    connection = duckdb.connect(config={"threads": threads, **config})
    with suppress(duckdb.InvalidInputException):  # in a notebook without ipywidgets
        connection.execute("SET enable_progress_bar = false")
    return connection


@contextmanager
def tokenised_rows(directory: Path, threads: int, row_bytes: int = 0) -> Iterator[Any]:
    """Yield a connection of DuckDB with a view `rows` of the files of rows in a directory.

    Args: threads: at most MAX_THREADS are used. row_bytes: of the tokens of a row, at most.
    Raises, also in its block:
      OSError: the disk is full.
      Interrupted: DuckDB failed, or needs more memory.
    """
    threads = min(threads, MAX_THREADS)
    config = {
        "memory_limit": f"{max(MEMORY, ROWS * row_bytes) * max(2, threads)}B",
        "temp_directory": str(directory / "spilled"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "arrow_large_buffer_size": True,
    }
    with plain_errors(), connect(threads, **config) as connection:
        files = glob.escape(str(directory)) + "/rows-*.parquet"
        connection.read_parquet(files, hive_partitioning=False).create_view("rows")
        yield connection


def owners_of(connection: Any) -> pa.Table:
    """Owners by group and user_id, with their numbers of rows (columns group, user_id, rows)."""
    query = 'SELECT "group", user_id, count(*) AS rows FROM rows GROUP BY ALL ORDER BY ALL'
    table = connection.sql(query).to_arrow_table()
    ids = table["user_id"].cast(pa.string())
    return table.set_column(1, "user_id", ids).combine_chunks()


def sorted_blocks(
    connection: Any, dtype: np.dtype, order: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all rows, sorted, in blocks: (lengths int64 [rows], token ids end to end). Args: order:
    True if rows have order keys."""
    keys = "COLUMNS('order.') NULLS LAST," if order else ""
    query = f'SELECT tokens FROM rows ORDER BY "group", user_id, {keys} place'
    for batch in connection.sql(query).to_arrow_reader(BLOCK_ROWS):
        column = batch["tokens"].cast(pa.large_binary())
        _, bounds, data = column.buffers()
        bounds = np.frombuffer(bounds, np.int64)[column.offset : column.offset + len(column) + 1]
        values = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
        yield np.diff(bounds) // dtype.itemsize, values.view(dtype)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise errors of DuckDB as OSError, Interrupted or KeyboardInterrupt, without its message."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, RuntimeError) as error:
        message = str(error)
        # A signal that comes while rows are read raises an error of no special type.
        if isinstance(error, duckdb.InterruptException) or message == "Query interrupted":
            raise KeyboardInterrupt from None
        full = [number for number in DISK_FULL if os.strerror(number) in message]
        if full or "temp_directory" in message or "offload" in message:
            number = (full or DISK_FULL)[0]
            raise OSError(number, os.strerror(number)) from None
        if isinstance(error, duckdb.OutOfMemoryException) or "Out of Memory" in message:
            raise Interrupted("expected more memory to sort rows in") from None
        raise Interrupted(f"rows could not be sorted ({type(error).__name__})") from None


def write_splits(
    blocks: Iterator[tuple[np.ndarray, np.ndarray]],
    counts: np.ndarray,
    splits: Mapping[str, SplitRows],
    directory: Path,
    dtype: np.dtype,
    marked: bool = False,
) -> None:
    """Write token ids and offsets of each split to the directory of its name in `directory`.

    Args:
      blocks: all rows, sorted, as `sorted_blocks` yields them.
      counts: int64 [owners], rows of each.
      splits: rows of each split.
      dtype: type of token ids on disk.
      marked: True if blocks have marked ids; see `store.MARKED`.
    """
    ends, start = np.cumsum(counts), 0
    with ExitStack() as stack:
        spans, writers = {}, {}
        for name, rows in splits.items():
            spans[name] = np.zeros((2, len(counts)), np.int64)
            spans[name][:, rows.owners] = rows.low, rows.high
            (directory / name).mkdir()
            writers[name] = stack.enter_context(TokenWriter(directory / name, dtype, marked))
        for lengths, values in blocks:
            row = np.arange(start, start + len(lengths))
            start += len(lengths)
            owner = np.searchsorted(ends, row, side="right")
            place = row - (ends - counts)[owner]
            for name, (low, high) in spans.items():
                inside = (place >= low[owner]) & (place < high[owner])
                writers[name].write(lengths[inside], values[np.repeat(inside, lengths)])
            raise_if_stopped()
