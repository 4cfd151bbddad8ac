"""Tables in memory, written to files: a resumed run and `fedsim verify` need the data again.

A table is written once, as Parquet, under a keyed digest of its rows, into a directory that only
its owner can read. It is then a data source like any other.
"""

import hmac
import itertools
import json
import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
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
    sources,
)
from fedsim.errors import DataError, FileDamaged, expect
from fedsim.files import TABLES, cache_dir, own_directory, sha256_of

ROWS = 10_000
"""Rows that are written at a time."""
KEY, KEY_BYTES = "key", 32
"""The file with the key of the tables' names."""
MAX_S = 10.0  # that writing it takes


CHECKED = ("user_column", "text_column")
"""Settings that name columns of values; another names a column of chats, which the build checks."""


def source_of(
    data: Any,
    *,
    user_column: str | None = None,
    text_column: str | None = None,
    messages_column: str | None = None,
) -> str:
    """The setting `data` for data in memory or files.

    Args:
      data: a path, a list of paths, a pandas DataFrame or chunks of one, a `datasets.Dataset` or
        `IterableDataset`, dicts (a list or an iterator), or anything else that Arrow can read as a
        table, such as a polars DataFrame. It is read in parts.
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
        named["messages_column"] = messages_column
    else:
        named["text_column"] = Columns.text[0] if text_column is None else text_column
    if isinstance(data, list | tuple) and all(isinstance(x, str | os.PathLike) for x in data):
        return str(_joined([Path(file) for file in data], named))
    return str(_written(_batches(data, named), named))


def _joined(files: list[Path], named: Mapping[str, str]) -> Path:
    """One file with the rows of several Parquet files. Args: named: columns by their settings."""
    others = [file for file in files if file.suffix != ".parquet"]
    if others or not files:
        paths = ", ".join(map(str, others)) or "none"
        raise DataError.of("data", paths, "a list of Parquet files, or one pattern (*.csv)")
    paths = [path for file in files for path in sources.find_files(str(file))]
    tables = (pq.ParquetFile(file) for file in paths)
    return _written((b for table in tables for b in table.iter_batches(ROWS)), named)


def _batches(data: Any, named: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
    """The rows of a table in memory; only the named columns of a DataFrame, as others may hold
    anything."""
    kind = f"{type(data).__module__}.{type(data).__name__}"
    if kind.startswith("pandas."):
        for table in _of_pandas(data, named):
            yield from table.to_batches(ROWS)
        return
    if _are_rows(data):
        for table in _of_rows(data, named):
            yield from table.to_batches()
        return
    if kind.startswith("datasets."):
        if not hasattr(data, "iter"):
            raise DataError.of("data", type(data).__name__, "one of its splits")
        arrow = data.with_format("arrow")  # respects select() and shuffle()
        for table in arrow.iter(batch_size=ROWS):
            yield from table.to_batches()
        return
    try:
        table = pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        expected = "a path, a DataFrame, a data set, an Arrow table or a list of dicts"
        reason = readers.reason_of(error)
        raise DataError.of("data", kind, f"{expected} ({reason})") from None
    yield from table.to_batches(ROWS)


def _are_rows(data: Any) -> bool:
    """True for dicts, one by one; their data set in Arrow's format would keep parts in memory."""
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Mapping)
    return isinstance(data, Iterator) or type(data).__name__ == "IterableDataset"


def _of_pandas(data: Any, named: Mapping[str, str]) -> Iterator[pa.Table]:
    """The columns of a DataFrame, or of each chunk of `read_csv(chunksize=...)`."""
    name, first, user = type(data).__name__, None, named["user_column"]
    column = next(iter(named.values()))  # the user's, if there is one
    if name == "DataFrame":
        yield _of_frame(data, named)
        return
    if not (name.endswith("Reader") and hasattr(data, "__next__")):
        hint = "; reset_index() makes one of a Series"
        raise DataError.of("data", f"pandas {name}", f"a DataFrame, or chunks of one{hint}")
    try:
        for chunk in data:  # pandas guesses types per chunk: 007 may be 7 in one
            table = _of_frame(chunk, named)
            kind = table.schema.field(column).type
            first = first or kind
            if kind != first:
                got = f"{first} and {kind}; read them with dtype=str"
                raise DataError.of("user_column", user, f"one type in all chunks, got {got}")
            yield table
    except DataError:
        raise
    except (OSError, ValueError) as error:  # its message may contain texts of the file
        got = type(error).__name__
        raise DataError.of("data", f"pandas {name}", f"chunks to read, got a {got}") from None


def _of_frame(data: Any, named: Mapping[str, str]) -> pa.Table:
    """The columns of a DataFrame.

    Raises:
      DataError: a column is missing, or has values of several kinds.
    """
    columns = {}
    names = list(map(str, data.columns))
    for field, name in named.items():
        _expect_column(field, name, names, [*named.values()])
        if names.count(name) > 1:
            raise DataError.of(field, name, "one column of that name")
        values = data.iloc[:, names.index(name)]
        if field == "user_column" and values.dtype == object:
            values = values.map(_whole_as_text)
        if field not in CHECKED:
            values = values.astype(object).where(values.notna(), None)
        columns[name] = _as_array(field, name, values)
    return pa.table(columns)


def _of_rows(rows: Iterable[Any], named: Mapping[str, str]) -> Iterator[pa.Table]:
    """The columns of rows that are dicts, some rows at a time.

    Raises:
      DataError: a row is no dict, no row has a column, or a column has values of several kinds.
    """
    rows = iter(rows)
    while part := list(itertools.islice(rows, ROWS)):
        columns = {}
        for row in part:
            if not isinstance(row, Mapping):
                raise DataError.of("data", f"rows of type {type(row).__name__}", "rows as dicts")
        names = [*dict.fromkeys(key for row in part for key in row if isinstance(key, str))]
        for field, name in named.items():
            _expect_column(field, name, names, [*named.values()])
            values = [row.get(name) for row in part]  # as lines of JSON, which may lack a key
            if field == "user_column":
                values = [_whole_as_text(value) for value in values]
            columns[name] = _as_array(field, name, values)
        yield pa.table(columns)


def _as_array(field: str, name: str, values: Any) -> pa.Array:
    """A column of a table. Raises: DataError: it has values of several kinds."""
    if field not in CHECKED:
        return _as_json(field, name, values)
    try:
        return pa.array(values, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        kinds = " and ".join(sorted({type(each).__name__ for each in values}))
        raise DataError.of(field, name, f"one kind of value, got {kinds}") from error


def _as_json(field: str, name: str, values: Iterable[Any]) -> pa.Array:
    """Chats as texts, which are kept as they are, or with JSON. With the type of the first rows,
    Arrow would drop a key of turns that only later rows have.

    Raises:
      DataError: bytes are not UTF-8.
    """
    try:
        said = (None if is_missing(x) else x for x in values)
        cells = [
            x if x is None or isinstance(x, str) else json.dumps(x, default=_in_json) for x in said
        ]
        return pa.array(cells, pa.string())
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


def _expect_column(field: str, name: str, have: list[str], wanted: list[str]) -> None:
    if name not in have:
        raise DataError(f"{field}={name}: {expected_of(have, wanted)}", field=field)


def _written(batches: Iterator[pa.RecordBatch], named: Mapping[str, str]) -> Path:
    """Write the rows to a file that is named by its digest, with a key of the cache's own: names
    are in settings, and a plain digest would confirm a guess of someone's text.

    Raises:
      NotOurs: other users of the machine could change it.
    """
    home = own_directory(cache_dir() / TABLES)
    temporary = home / f".{os.getpid()}-{os.urandom(8).hex()}.tmp"
    try:
        _write(temporary, batches, named)
        name = hmac.digest(_key(home), sha256_of(temporary).encode(), "sha256").hex()[:32]
        os.replace(temporary, home / f"{name}.parquet")
    finally:
        temporary.unlink(missing_ok=True)
    return home / f"{name}.parquet"


def _key(home: Path) -> bytes:
    """256 bits from the operating system, which are kept."""
    path = home / KEY
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
    while len(key := path.read_bytes()) < KEY_BYTES:  # another process is writing it
        if time.time() - path.stat().st_mtime > MAX_S:
            raise FileDamaged(f"{path}: expected {KEY_BYTES} bytes; remove it")
        time.sleep(0.01)
    return key


def _write(path: Path, batches: Iterator[pa.RecordBatch], named: Mapping[str, str]) -> None:
    """Write the rows to `path`; the caller removes the file after an error.

    Raises:
      DataError: as `normalise`, or a row has no owner.
    """
    writer, rows = None, 0
    user, text = named["user_column"], named.get("text_column")
    chats = {field: name for field, name in named.items() if field not in CHECKED}
    try:
        for batch in batches:
            for field, name in named.items():
                _expect_column(field, name, batch.schema.names, [*named.values()])
            written = {}
            for field, name in chats.items():
                told = plain(batch[name])
                texts = told if is_string(told.type) else _as_json(field, name, told.to_pylist())
                written[name] = texts.cast(pa.string())
            columns = Columns.of(user, text or Columns.text)
            columns = columns if text else replace(columns, text=())
            batch = readers.with_plain_types(batch.select([*filter(None, (user, text))]))
            ids = normalise(batch, columns, rows)["user_id"]
            unowned = np.flatnonzero(is_blank(ids))
            if len(unowned):
                reason = f"row {rows + 1 + int(unowned[0])} has a null or empty one"
                raise DataError.of("user_column", user, f"a user id in every row; {reason}")
            written[user] = _as_texts(plain(batch[user]), ids)
            rows += len(batch)
            if text is not None:
                written[text] = batch[text]
            table = pa.table(written)
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


def _as_texts(owners: pa.Array, ids: pa.Array) -> pa.Array:
    """The column of owners as texts, given their ids.

    Written with the type of the first batch, a text 007 after numbers would become 7, another user.
    """
    if is_list(owners.type):
        return owners.cast(pa.list_(pa.string()))
    return owners.cast(pa.string()) if is_string(owners.type) else ids
