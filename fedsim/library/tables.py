"""Tables in memory, written to files: a resumed run and `fedsim verify` need the data again.

A table is written once, as Parquet, under a keyed digest of its rows, into a directory that only
its owner can read. It is then a data source like any other.
"""

import hmac
import itertools
import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data import (
    Columns,
    expected_of,
    is_blank,
    is_list,
    is_string,
    normalise,
    plain,
    readers,
)
from fedsim.errors import DataError, expect
from fedsim.files import TABLES, cache_dir, own_directory, sha256_of, write_atomically

ROWS = 10_000
"""Rows that are written at a time."""
MESSAGES = "messages_column"


def source_of(
    data: Any,
    *,
    user_column: str | None = None,
    text_column: str | None = None,
    messages_column: str | None = None,
) -> str:
    """The setting `data` for data in memory or files.

    Args:
      data: a path, a pandas DataFrame, a `datasets.Dataset` or `IterableDataset`, dicts (a list or
        an iterator), or anything else that Arrow can read as a table, such as a polars
        DataFrame or DuckDB's record batches. It is written in parts.
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
    named = {"user_column": Columns.user[0] if user_column is None else user_column}
    if messages_column is not None:
        named[MESSAGES] = messages_column
    else:
        named["text_column"] = Columns.text[0] if text_column is None else text_column
    return str(_written(_batches(data, named), named))


def _batches(data: Any, named: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The rows of a table. Args: named: columns by their settings; others may hold anything."""
    name, module = type(data).__name__, type(data).__module__
    if module.partition(".")[0] == "pandas":
        if name != "DataFrame":
            expected = "a DataFrame (reset_index() makes one of a Series), or the path of a file"
            raise DataError.of("data", f"pandas {name}", expected)
        tables: Iterable[pa.Table] = [_of_frame(data, named)]
    elif name in ("list", "tuple") and not _are_dicts(data):
        expected = "dicts in a list; several files are a pattern, such as 'posts/*.parquet'"
        raise DataError.of("data", name, expected)
    elif name == "LazyFrame":
        raise DataError.of("data", "polars LazyFrame", "a DataFrame, which collect() makes of it")
    elif isinstance(data, pa.RecordBatchReader) or module == "pyarrow._dataset":
        batches = data if isinstance(data, pa.RecordBatchReader) else data.to_batches()
        tables = (pa.Table.from_batches([batch]) for batch in batches)
    elif isinstance(data, Iterator) or name == "IterableDataset" or _are_dicts(data):
        # One by one: in Arrow's format, a data set would keep parts of itself in memory.
        tables = _of_rows(data, named)
    elif module.startswith("datasets."):
        if not hasattr(data, "iter"):
            raise DataError.of("data", name, "one of its splits")
        tables = data.with_format("arrow").iter(batch_size=ROWS)  # after select() and shuffle()
    else:
        try:
            tables = [pa.table(data)]
        except (pa.ArrowException, TypeError, ValueError) as error:
            expected = "a path, a DataFrame, a data set, an Arrow table or a list of dicts"
            reason = readers.reason_of(error)
            raise DataError.of("data", f"{module}.{name}", f"{expected} ({reason})") from None
    for table in tables:
        yield from table.to_batches(ROWS)


def _are_dicts(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Mapping)


def _of_frame(data: Any, named: Mapping[str, str]) -> pa.Table:
    """The columns of a DataFrame.

    Raises:
      DataError: a column is missing or there twice, or has values of several kinds.
    """
    names, columns = list(map(str, data.columns)), {}
    for field, name in named.items():
        _expect_column(field, name, names, named)
        if names.count(name) > 1:
            raise DataError.of(field, name, "one column of that name")
        columns[name] = _as_array(field, name, data.iloc[:, names.index(name)])
    return pa.table(columns)


def _of_rows(rows: Iterable[Any], named: Mapping[str, str]) -> Iterator[pa.Table]:
    """The columns of rows that are dicts, some rows at a time.

    Raises:
      DataError: a row is no dict, no row has a column, or a column has values of several kinds.
    """
    rows = iter(rows)
    while part := list(itertools.islice(rows, ROWS)):
        for row in part:
            if not isinstance(row, Mapping):
                raise DataError.of("data", f"rows of type {type(row).__name__}", "rows as dicts")
        names = [*dict.fromkeys(key for row in part for key in row if isinstance(key, str))]
        columns = {}
        for field, name in named.items():
            _expect_column(field, name, names, named)
            columns[name] = _as_array(field, name, [row.get(name) for row in part])
        yield pa.table(columns)


def _as_array(field: str, name: str, values: Any) -> pa.Array:
    """A column of a table. Raises: DataError: it has values of several kinds."""
    if field == MESSAGES:
        return _as_json(field, name, values)
    if field == "user_column" and getattr(values, "dtype", "object") == "object":
        values = [_whole_as_text(value) for value in values]
    try:
        return pa.array(values, from_pandas=True)
    except UnicodeEncodeError:  # half of a pair of surrogates
        if field == "user_column":
            raise DataError.of(field, name, "ids in UTF-8, got half of a surrogate pair") from None
        return pa.array([_in_utf_8(value) for value in values], from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        kinds = " and ".join(sorted({type(each).__name__ for each in values}))
        raise DataError.of(field, name, f"one kind of value, got {kinds}") from error


def _in_utf_8(value: Any) -> Any:
    """A text with U+FFFD for half of a surrogate pair, as in files."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_json(field: str, name: str, values: Iterable[Any]) -> pa.Array:
    """Chats as texts, which are kept as they are, or with JSON. With the type of the first rows,
    Arrow would drop a key of turns that only later rows have.

    Raises:
      DataError: bytes are not UTF-8.
    """
    try:
        cells = (None if is_missing(x) else x for x in values)
        texts = [x if isinstance(x, str | None) else json.dumps(x, default=_in_json) for x in cells]
        return pa.array(texts, pa.string())
    except UnicodeError:
        raise DataError.of(field, name, "UTF-8, got other characters") from None


def is_missing(value: Any) -> bool:
    """True for None, NaN or another missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, Hashable) and bool(value != value)  # no array, which has many


def _in_json(value: Any) -> Any:
    """A value that JSON does not have: NumPy's, a mapping, bytes as a text, or its text."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return value.decode() if isinstance(value, bytes) else str(value)


def _whole_as_text(owner: Any) -> Any:
    """A whole number as a text: 7 beside "7" is the same user, as in files."""
    whole = isinstance(owner, int | np.integer) and not isinstance(owner, bool)
    return str(owner) if whole else owner


def _expect_column(field: str, name: str, names: list[str], named: Mapping[str, str]) -> None:
    if name not in names:
        expected = expected_of(names, [*named.values()])
        raise DataError(f"{field}={name}: {expected}", field=field)


def _written(batches: Iterator[pa.RecordBatch], named: Mapping[str, str]) -> Path:
    """Write the rows to a file that is named by its digest, with a key of the cache's own: names
    are in settings, and a plain digest would confirm a guess of someone's text.

    Raises:
      NotOurs: other users of the machine could change it.
    """
    home = own_directory(cache_dir() / TABLES)
    temporary, key = home / f".{os.getpid()}-{os.urandom(8).hex()}.tmp", home / "key"
    if not key.exists():
        write_atomically(key, os.urandom(32), mode=0o600)
    try:
        _write(temporary, batches, named)
        digest = hmac.digest(key.read_bytes(), sha256_of(temporary).encode(), "sha256")
        place = home / f"{digest.hex()[:32]}.parquet"
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)
    return place


def _write(path: Path, batches: Iterator[pa.RecordBatch], named: Mapping[str, str]) -> None:
    """Write the rows to `path`; the caller removes the file after an error.

    Raises:
      DataError: as `normalise`, or a row has no owner.
    """
    writer, rows = None, 0
    try:
        for batch in batches:
            table = _as_read(batch, named, rows)
            rows += len(batch)
            if writer is None:
                writer = pq.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
    except pa.ArrowException as error:
        reason = readers.reason_of(error)
        line = f"data: expected rows with the same types ({reason})"
        raise DataError(line, field="data") from None
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise DataError("data: expected rows, found none", field="data")


def _as_read(batch: pa.RecordBatch, named: Mapping[str, str], row: int) -> pa.Table:
    """The named columns, owners and chats as texts. Args: row: number of rows before these."""
    for field, name in named.items():
        _expect_column(field, name, batch.schema.names, named)
    user, text, chat = named["user_column"], named.get("text_column"), named.get(MESSAGES)
    columns = replace(Columns.of(user, text or Columns.text), **({} if text else {"text": ()}))
    values = readers.with_plain_types(batch.select([*filter(None, (user, text))]))
    ids = normalise(values, columns, row)["user_id"]
    blank = np.flatnonzero(is_blank(ids))
    if len(blank):
        reason = f"row {row + 1 + int(blank[0])} has a null or empty one"
        raise DataError.of("user_column", user, f"a user id in every row; {reason}")
    found = {user: _as_texts(plain(values[user]), ids)}
    if text is not None:
        found[text] = values[text]
    if chat is not None:
        told = plain(batch[chat])
        texts = told if is_string(told.type) else _as_json(MESSAGES, chat, told.to_pylist())
        found[chat] = texts.cast(pa.string())
    return pa.table(found)


def _as_texts(owners: pa.Array, ids: pa.Array) -> pa.Array:
    """The column of owners as texts, given their ids.

    Written with the type of the first batch, a text 007 after numbers would become 7, another user.
    """
    if is_list(owners.type):
        return owners.cast(pa.list_(pa.string()))
    return owners.cast(pa.string()) if is_string(owners.type) else ids
