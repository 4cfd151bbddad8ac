"""Tables in memory, written to a file: a resumed run and `fedsim verify` need the data again.

A table is written once, as Parquet, under a keyed digest of its rows, into a directory that only
its owner can read. It is then a data source like any other, which the same reader checks.
"""

import functools
import hmac
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.building.columns import Columns
from fedsim.errors import DataError
from fedsim.files import TABLES, cache_dir, own_directory, sha256_of, write_atomically

TABLE = "a path, or a table: a DataFrame, a data set of one split, Arrow's, or dicts in a list"
UNFIT = pa.ArrowException, OverflowError, TypeError, ValueError


def source_of(data: Any, columns: Columns) -> str:
    """The setting `data` for data in memory or files.

    Args:
      data: a path, a pandas DataFrame, a `datasets.Dataset`, a list of dicts, a dict of lists, or
        anything else that Arrow can read as a table, such as a polars DataFrame.
      columns: those to read. As in files, columns of chats are recognised if none of texts is
        named or there.

    Returns: `data` if it is a path, else the path of a Parquet file.

    Raises: ConfigError: the data are of another kind, or have no such columns.
    """
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    return str(_written(_table(data, columns)))


def _table(data: Any, columns: Columns) -> pa.Table:
    """The columns that are read. Nobody else's column reaches the file."""
    names, column_of = _columns(data)
    if not names:
        raise DataError.of("data", f"an empty {type(data).__name__}", "rows")
    columns, found = columns.recognised(names), {}
    for name in columns.in_file(names):
        field = columns.fields[name]
        if name not in names:
            raise DataError.of(field, name, f"one of the columns {', '.join(map(str, names))}")
        if names.count(name) > 1:
            raise DataError.of(field, name, "one column of that name")
        found[name] = _array(field, name, column_of(name))
    if len({len(column) for column in found.values()}) > 1:
        raise DataError.of("data", type(data).__name__, "columns of one length")
    return pa.table(found)


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
    if isinstance(data, list | tuple) and all(isinstance(row, Mapping) for row in data):
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
    except UNFIT:
        got = _difference(values if isinstance(values, Iterable) else ())
        raise DataError.of(field, name, f"values of one type, texts in UTF-8{got}") from None


def _difference(rows: Iterable[Any]) -> str:
    """The end of an error line: the first row of another type than those before, and the types."""
    known = pa.null()
    for number, row in enumerate(rows, 1):
        try:
            known = _merged(known, row)
        except UNFIT as error:  # of lists and structs, it names the types inside last
            kinds = re.findall(r"types: (\w+).*? vs (\w+)", str(error))
            got = "{1} in place of {0}".format(*kinds[-1]) if kinds else "others"
            return f", got {got} in row {number}"
    return ""


def _merged(known: pa.DataType, value: Any) -> pa.DataType:
    """The type that a value and others of a known type have together. Raises: one of UNFIT."""
    try:
        own = pa.array([value], from_pandas=True).type
    except UNFIT:  # if it has values of several types, this raises an error that names them
        functools.reduce(_merged, value if isinstance(value, list) else (), pa.null())
        raise
    both = [pa.schema({"": kind}) for kind in (known, own)]
    return pa.unify_schemas(both, promote_options="permissive").field(0).type


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
