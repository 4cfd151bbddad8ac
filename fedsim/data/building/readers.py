"""Read users' text: Parquet, directories saved by `datasets`, and text files, which become Parquet.

Files are cut into parts, so that several processes can read them. Rows come in the order of the
file as checked batches. Errors name the file, the row and the reason.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.data.building import text_files
from fedsim.data.building.columns import Columns, as_json, normalise, paths, pick, plain
from fedsim.data.building.text_files import PACKED, TextFormat
from fedsim.data.store import SEPARATOR
from fedsim.errors import DataError, MissingColumn, printable
from fedsim.files import TOO_MANY_FILES
from fedsim.installation import optional

READ_ROWS, READ_BYTES = 65_536, 64 * 2**20  # of a batch, at most
PART_ROWS, PART_BYTES = 2**20, 128 * 2**20  # of a part, about
TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv")
SUFFIXES = (".parquet", *(f".{kind}{z}" for kind in TEXTS for z in ("", *PACKED)))
UTF8 = TextFormat()
SAVED = ("state.json", "dataset_dict.json")  # one of them is in a saved directory


@dataclass(frozen=True)
class Part:
    """A part of a file: row groups of Parquet, rows of a saved data set."""

    file: Path
    start: int = 0
    end: int | None = None
    """End of the part, exclusive; None is the end of the file."""
    first_row: int = 0
    """Number of rows of the source before the part."""
    split: str | None = None
    """Split of a saved dictionary of data sets."""
    text: Path | None = None
    """The text file that was written as `file`."""

    @property
    def source(self) -> Path:
        """The file that the user has named."""
        return self.text or self.file

    @property
    def kind(self) -> str:
        """Format of the source: parquet, json, jsonl, csv, tsv, or saved."""
        return "saved" if self.source.is_dir() else text_files.kind_of(self.source)


def is_known(file: Path) -> bool:
    """True if a file's name says that it can be read. Capital letters are fine, but for .GZ."""
    kind = text_files.kind_of(file)
    return kind in TEXTS or kind == "parquet" and file.suffix not in PACKED


def cut(
    file: Path,
    columns: Columns,
    scratch: Path,
    split: str | None = None,
    text_format: TextFormat = UTF8,
) -> list[Part]:
    """Cut a file into parts, in order. Equal files and columns give equal parts.

    Args:
      scratch: a directory that is made for the rows of a text file, and has to be kept.
    Raises:
      DataError: the file cannot be read, or lacks a column.
    """
    whole = Part(file, split=split)
    with complaints(whole):
        if whole.kind == "parquet":
            return _cut_parquet(whole, columns)
        if whole.kind == "saved":
            table = _load_saved(file, split)
            columns.check(paths(table.features.arrow_schema))
            bounds = [*range(0, len(table), PART_ROWS), len(table)]
            spans = zip(bounds[:-1], bounds[1:], strict=True)
            return [Part(file, low, high, low, split) for low, high in spans]
        try:
            return _as_parquet(file, columns, text_format, scratch)
        except text_files.Halved:
            return _as_parquet(file, columns, text_format, scratch, mended=True)


def _as_parquet(
    file: Path, columns: Columns, text_format: TextFormat, scratch: Path, mended: bool = False
) -> list[Part]:
    """Write the rows of a text file as Parquet. A column whose type changes begins another file."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    parts, rows, held = [], 0, []

    def write() -> None:
        nonlocal rows, held
        table = pa.Table.from_batches(held)
        whole = Part(scratch / f"{rows:012d}.parquet", first_row=rows, text=file)
        rows, held = rows + len(table), []
        pq.write_table(table, whole.file, row_group_size=READ_ROWS, compression="lz4")
        parts.extend(_cut_parquet(whole, columns))

    size = 0
    for batch in text_files.batches(file, columns, text_format, scratch, mended):
        if held and (size >= PART_BYTES or batch.schema != held[0].schema):
            write()
            size = 0
        held.append(batch)
        size += batch.nbytes
    if not held and not parts:
        nothing = {name: pa.nulls(0, pa.string()) for name in columns.names}
        held.append(pa.RecordBatch.from_pydict(nothing))
    if held:
        write()
    return parts


def read(
    part: Part, columns: Columns, tally: Counter[str] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part in order: (number of rows of the file before the batch, batch).

    Batches have the columns user_id, text and perhaps order; see `columns.normalise`.

    Args:
      tally: counts corrected user ids.
    Raises:
      DataError: names the file and the reason.
    """
    for first_row, batch in raw(part, columns):
        with complaints(part):
            batch = normalise(batch, columns, first_row, tally)
        yield first_row, batch


def raw(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part as `read` does, with the columns of the file; chats as JSON."""
    reader = _read_saved if part.kind == "saved" else _read_parquet
    with complaints(part):
        for first_row, batch in reader(part, columns):
            for start, piece in _small(batch):
                if columns.form and part.kind not in ("json", "jsonl"):
                    piece = chats_as_json(piece, columns)
                yield first_row + start, with_plain_types(piece)


def chats_as_json(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of chats as JSON."""
    absent = pa.nulls(len(batch), pa.string())
    named = dict.fromkeys(columns.text, absent)
    named |= {name: batch[name] for name in batch.schema.names}
    chats = {
        name: as_json(plain(named[name]).to_pylist(), f"{field}={name}")
        for name, field in zip(columns.text, columns.text_fields, strict=True)
    }
    return pa.RecordBatch.from_pydict(named | chats)


def names_in(
    files: Iterable[Path], split: str | None = None, text_format: TextFormat = UTF8
) -> list[str]:
    """Names of the columns of the first file that has any; none if no file can be read."""
    return next(filter(None, (_names_of(file, split, text_format) for file in files)), [])


def _names_of(file: Path, split: str | None, text_format: TextFormat) -> list[str]:
    part = Part(file, split=split)
    try:
        with complaints(part), TemporaryDirectory() as scratch:
            if part.kind == "saved":
                return paths(_load_saved(file, split).features.arrow_schema)
            if part.kind == "parquet":
                return paths(pq.read_schema(file))
            return text_files.names_of(file, text_format, Path(scratch))
    except DataError:  # which the build raises
        return []


class complaints:
    """Context manager that turns errors of readers into one line that names the file."""

    def __init__(self, part: Part):
        self.part = part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, DataError):
            named = DataError(printable(f"{error} (in {self.part.source})"))
            if isinstance(error, MissingColumn | text_files.Halved):
                named = type(error)(str(named))
            named.field = error.field
            raise named from None
        if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
            return  # the file itself is not at fault
        expected = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError)
        if isinstance(error, (*expected, RecursionError)):
            reason = reason_of(error)
            what = f"data={self.part.source}: expected a readable {self.part.kind} file ({reason})"
            raise DataError(printable(what)) from None


def reason_of(error: Exception) -> str:
    """First line of an error message of a library, without the values that it quotes."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, pa.ArrowException):
        reason = re.sub(r"'.*'|\".*\"|(?<=columns, got )(\d+).*", r"\1...", reason)
        reason = re.sub(r"(?<=Could not convert ).* (?=with type)", "a value ", reason)
    return reason


def with_plain_types(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert columns to types that all functions here support.

    Dictionaries and runs become their values, extension types their storage, and lists of fixed
    size lists.

    Raises:
      DataError: a column has fields inside. Their names are not shown: they may be personal.
    """
    names = batch.schema.names  # names of columns that a build has made begin with SEPARATOR
    columns = {
        name: batch[name] if name.startswith(SEPARATOR) else _plain(batch[name], name)
        for name in names
    }
    return pa.RecordBatch.from_pydict(columns)


def _plain(column: Any, name: str) -> pa.Array:
    kind, test = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage, name)
    inside = kind
    while test.is_nested(inside) and not (test.is_struct(inside) or test.is_union(inside)):
        inside = pa.struct([]) if test.is_map(inside) else inside.value_type
    if test.is_nested(inside):
        raise DataError(f"column {name}: expected values, or lists of them, got fields inside it")
    if test.is_dictionary(kind):
        if test.is_string_view(kind.value_type):  # for which Arrow cannot decode
            values = column.dictionary.cast(pa.large_string())
            column = pa.DictionaryArray.from_arrays(column.indices, values)
        return _plain(column.dictionary_decode(), name)
    if test.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(column), name)  # pyright: ignore
    if test.is_fixed_size_list(kind) or test.is_list_view(kind):
        return column.cast(pa.list_(kind.value_type))
    if test.is_large_list_view(kind):
        return column.cast(pa.large_list(kind.value_type))
    return column


def _small(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (start, slice) of a batch, in slices of at most READ_ROWS rows and about READ_BYTES."""
    rows = max(1, len(batch) * READ_BYTES // max(batch.nbytes, 1))
    for start in range(0, len(batch), min(rows, READ_ROWS)):
        yield start, batch.slice(start, min(rows, READ_ROWS))


def _cut_parquet(whole: Part, columns: Columns) -> list[Part]:
    with pq.ParquetFile(whole.file) as parquet:
        columns.check(paths(parquet.schema_arrow))
        about = parquet.metadata
        parts, start, rows, size, before = [], 0, 0, 0, whole.first_row
        for group in range(about.num_row_groups):
            rows += about.row_group(group).num_rows
            size += about.row_group(group).total_byte_size
            if rows >= PART_ROWS or size >= PART_BYTES or group == about.num_row_groups - 1:
                parts.append(replace(whole, start=start, end=group + 1, first_row=before))
                start, before, rows, size = group + 1, before + rows, 0, 0
    return parts or [replace(whole, end=0)]


def _read_parquet(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    with pq.ParquetFile(part.file) as parquet:
        found = paths(parquet.schema_arrow)
        columns.check(found)
        names = columns.in_file(found)
        groups = range(part.start, part.end or 0)
        about = [parquet.metadata.row_group(group) for group in groups]
        size = sum(group.total_byte_size for group in about)
        rows = sum(group.num_rows for group in about)
        fitting = max(1, min(READ_ROWS, READ_BYTES * rows // max(size, 1)))
        row = part.first_row
        for batch in parquet.iter_batches(fitting, row_groups=list(groups), columns=names):
            yield row, pick(batch, names)
            row += len(batch)


def _load_saved(directory: Path, split: str | None) -> Any:
    with optional():
        from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(directory))
    if isinstance(saved, DatasetDict):
        split = split or ("train" if "train" in saved else None)
        if split not in saved:
            raise DataError.of("split", split, f"one of {', '.join(map(str, saved))}")
        return saved[split]
    return saved


def _read_saved(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    table = _load_saved(part.file, part.split)
    found = paths(table.features.arrow_schema)
    columns.check(found)
    names = columns.in_file(found)
    table = table.select_columns(columns.outer(found)).with_format("arrow")
    end = len(table) if part.end is None else part.end
    whole = table.data  # before rows were selected
    step = max(1, min(READ_ROWS, READ_BYTES * len(whole) // max(whole.nbytes, 1)))
    for row in range(part.start, end, step):
        for batch in table[row : min(row + step, end)].combine_chunks().to_batches():
            yield row, pick(batch, names)
            row += len(batch)
