"""Reading users' text from files: parquet, JSONL (.gz) and CSV (.gz), checked before it is used.

Whatever the file, rows come as record batches of `user_id` (string), `text` (string) and, if asked
for, `order`. A row without a user is an error, for a row nobody owns is protected by nothing.
"""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fedsim.data.shards import DataError

READ_ROWS = 8_192
CSV_BLOCK = 16 * 2**20  # bytes; one row must fit
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
SHOWN_ROWS = 5


@dataclass(frozen=True)
class Columns:
    """Which columns of the source hold what."""

    user: str = "user_id"
    text: str = "text"
    order: str | None = None

    def __post_init__(self):
        if self.user == self.text:
            raise DataError(f"user_column={self.user}: expected a column other than text_column")

    @property
    def names(self) -> list[str]:
        """The columns to read, each once."""
        named = dict.fromkeys([self.user, self.text, self.order])
        return [name for name in named if name is not None]


def find_files(sources: Sequence[str | Path] | str | Path) -> list[Path]:
    """The files that `sources` (paths or globs) name, in the order given, a glob's sorted.

    Raises: DataError: nothing is there, or a file's extension is unknown.
    """
    sources = [sources] if isinstance(sources, str | Path) else sources
    files: dict[Path, None] = {}
    for source in sources:
        here = Path(source)
        found = [here] if here.is_file() else map(Path, sorted(glob.glob(str(source))))
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(f"data={source}: expected a file or glob that exists")
        files.update(dict.fromkeys(found))
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise DataError(f"data={file}: expected a file ending in {', '.join(SUFFIXES)}")
    if not files:
        raise DataError("data=[]: expected at least one file")
    return list(files)


def survey(files: Sequence[Path], columns: Columns) -> int:
    """Checks every user id before an hour is spent on tokenising. Returns the number of rows.

    Raises: DataError: a file cannot be read, lacks a column, has null or empty or float user ids;
      there are no rows at all.
    """
    total = 0
    for file in files:
        bad, first, rows = 0, [], 0
        for batch in read(file, columns):
            where = np.flatnonzero(is_blank(batch["user_id"]))
            bad += len(where)
            first += [rows + i + 1 for i in where[:SHOWN_ROWS].tolist()]
            rows += len(batch)
        if bad:
            shown = ", ".join(map(str, first[:SHOWN_ROWS])) + (", ..." if bad > SHOWN_ROWS else "")
            raise DataError(
                f"user_column={columns.user}: {bad} null or empty user ids in {file} "
                f"(rows {shown}); expected a user for every row"
            )
        total += rows
    if not total:
        raise DataError(f"data={files[0]}: expected at least one row, got an empty data set")
    return total


def is_blank(column: pa.Array) -> np.ndarray:
    """bool [rows]: null, empty, or white space only."""
    trimmed = pc.call_function("utf8_trim_whitespace", [column])
    blank = pc.call_function("equal", [trimmed, pa.scalar("")])
    return blank.fill_null(True).to_numpy(zero_copy_only=False)


def read(file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """The file's rows in order, in batches with columns user_id, text and perhaps order.

    Raises: DataError: naming the file and what is wrong with it.
    """
    kind = file.name.removesuffix(".gz").rpartition(".")[2]
    reader = {"parquet": _read_parquet, "jsonl": _read_jsonl, "csv": _read_csv}[kind]
    try:
        for batch in reader(file, columns):
            yield _normalise(batch, columns)
    except DataError as error:
        raise DataError(f"{error} (in {file})") from None
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"data={file}: expected a readable {kind} file ({reason})") from error


def _normalise(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    found = {"user_id": _as_user_ids(batch[columns.user], columns.user)}
    found["text"] = _as_text(batch[columns.text], columns.text)
    if columns.order is not None:
        found["order"] = batch[columns.order]
    for column in found.values():
        column.validate(full=True)  # invalid UTF-8, before anything else trips over it
    return pa.RecordBatch.from_pydict(found)


def _as_user_ids(column: pa.Array, name: str) -> pa.Array:
    """User ids as strings. Floats are refused: 1.0 and 1 would be two users, or one."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    kind = column.type
    if not (_is_string(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise DataError(f"user_column={name}: expected strings or integers, got {kind}")
    return column.cast(pa.string())


def _as_text(column: pa.Array, name: str) -> pa.Array:
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    if not (_is_string(column.type) or pa.types.is_null(column.type)):
        raise DataError(f"text_column={name}: expected strings, got {column.type}")
    return column.cast(pa.string())


def _is_string(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    )


def _check_columns(columns: Columns, found: Sequence[str]) -> None:
    for field in ("user", "text", "order"):
        name = getattr(columns, field)
        if name is not None and name not in found:
            raise DataError(
                f"{field}_column={name}: no such column, expected one of {', '.join(found)}"
            )


def _read_parquet(file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as parquet:
        _check_columns(columns, parquet.schema_arrow.names)
        yield from parquet.iter_batches(READ_ROWS, columns=columns.names)


def _read_csv(file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """User ids and texts are read as they are written: 007 is not 7."""
    read_options = pa_csv.ReadOptions(block_size=CSV_BLOCK)
    parse_options = pa_csv.ParseOptions(newlines_in_values=True)
    with pa_csv.open_csv(_open_stream(file), read_options, parse_options) as guess:
        _check_columns(columns, guess.schema.names)
        if pa.types.is_floating(guess.schema.field(columns.user).type):
            raise DataError(f"user_column={columns.user}: expected strings or integers, got floats")
    convert_options = pa_csv.ConvertOptions(
        include_columns=columns.names,
        column_types={columns.user: pa.string(), columns.text: pa.string()},
    )
    stream = _open_stream(file)
    with pa_csv.open_csv(stream, read_options, parse_options, convert_options) as reader:
        yield from reader


def _open_stream(file: Path) -> pa.NativeFile:
    return pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None)


def _read_jsonl(file: Path, columns: Columns) -> Iterator[pa.RecordBatch]:
    """One object a line, through json itself: Arrow's reader would take some texts for dates."""
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8-sig") as lines:
        records = _json_objects(lines)
        checked = False
        while rows := list(islice(records, READ_ROWS)):
            if not checked:
                _check_columns(columns, list(dict.fromkeys(key for row in rows for key in row)))
                checked = True
            yield pa.RecordBatch.from_pydict(
                {name: _json_column([row.get(name) for row in rows]) for name in columns.names}
            )


def _json_objects(lines: Any) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: expected an object, got {type(row).__name__}")
        yield row


def _json_column(values: list[Any]) -> pa.Array:
    """Numbers and strings mixed in one column become strings, except floats."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {int, str}:
        values = [None if value is None else str(value) for value in values]
    return pa.array(values)
