"""Tables in memory, written to a file: a resumed run and `fedsim verify` need the data again.

A table is written once, as Parquet, under a keyed digest of its rows, into a directory that only
its owner can read. It is then a data source like any other, which the same reader checks.
"""

import hmac
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data import TOOLS, Columns
from fedsim.errors import DataError, expect
from fedsim.files import TABLES, cache_dir, own_directory, sha256_of, write_atomically

TABLE = "a path, or a table: a DataFrame, a data set of one split, Arrow's, or dicts in a list"


def source_of(
    data: Any,
    *,
    user_column: str | None = None,
    text_column: str | None = None,
    messages_column: str | None = None,
) -> str:
    """The setting `data` for data in memory or files.

    Args:
      data: a path, a pandas DataFrame, a `datasets.Dataset`, a list of dicts, a dict of lists, or
        anything else that Arrow can read as a table, such as a polars DataFrame.
      user_column: column with the user of a row. Default: user_id.
      text_column: column with the text of a row. Default: text.
      messages_column: column with the chat of a row, instead of a text.

    Returns:
      `data` if it is a path, else the path of a Parquet file.

    Raises:
      ConfigError: the data are of another kind, or have no such columns.
    """
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    both = text_column is None or messages_column is None
    expect("text_column", text_column, both, f"none beside messages_column={messages_column}")
    named = {"user_column": user_column or Columns.user}
    if messages_column is not None:
        named |= {"messages_column": messages_column, TOOLS: TOOLS}
    else:
        named["text_column"] = text_column or Columns.text[0]
    return str(_written(_table(data, named)))


def _table(data: Any, named: Mapping[str, str]) -> pa.Table:
    """The named columns. Nobody else's column reaches the file."""
    names, column_of = _columns(data)
    columns = {}
    for field, name in named.items():
        if name not in names and field == TOOLS:
            continue
        if name not in names:
            raise DataError.of(field, name, f"one of the columns {', '.join(map(str, names))}")
        if names.count(name) > 1:
            raise DataError.of(field, name, "one column of that name")
        columns[name] = _array(field, name, column_of(name))
    if len({len(column) for column in columns.values()}) > 1:
        raise DataError.of("data", type(data).__name__, "columns of one length")
    return pa.table(columns)


def _columns(data: Any) -> tuple[list[str], Callable[[str], Any]]:
    """The names of a table's columns, and a function that returns one of them."""
    kind, library = type(data).__name__, type(data).__module__.partition(".")[0]
    if library == "datasets" and kind == "Dataset":
        data = data.with_format("arrow")[:]  # the rows as select() and shuffle() leave them
    if library == "pandas" and kind == "DataFrame":
        names = [str(name) for name in data.columns]  # without names they are numbered
        return names, lambda name: data.iloc[:, names.index(name)]
    if isinstance(data, Mapping):
        return list(data), data.__getitem__
    if isinstance(data, list | tuple) and data and all(isinstance(row, Mapping) for row in data):
        keys = [*dict.fromkeys(key for row in data for key in row)]
        return keys, lambda name: [row.get(name) for row in data]
    try:
        table = pa.table(data)
    except (pa.ArrowException, TypeError, ValueError):
        raise DataError.of("data", kind, TABLE) from None
    return table.column_names, lambda name: table.column(table.column_names.index(name))


def _array(field: str, name: str, values: Any) -> Any:
    """A column in Arrow. Values of several types are refused: 7 beside "7" may be one user."""
    if isinstance(values, pa.ChunkedArray):
        return values
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise DataError.of(field, name, "values of one type, texts in UTF-8") from None


def _written(table: pa.Table) -> Path:
    """Write a table to a file that is named by its digest, with a key of the cache's own."""
    # Names are in settings, and a plain digest would confirm a guess of someone's text.
    home = own_directory(cache_dir() / TABLES)
    temporary, key = home / f".{os.getpid()}-{os.urandom(8).hex()}.tmp", home / "key"
    if not key.exists():
        write_atomically(key, os.urandom(32), mode=0o600)
    try:
        pq.write_table(table, temporary)
        digest = hmac.digest(key.read_bytes(), sha256_of(temporary).encode(), "sha256")
        place = home / f"{digest.hex()[:32]}.parquet"
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    return place
