"""Read users' text as Parquet, which other sources become: text files, directories of `datasets`.

Files are cut into parts, so that several processes can read them. Rows come in the order of the
file as checked batches. Errors name the file, the row and the reason.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.config import BuildConfig
from fedsim.data.building import text_files
from fedsim.data.building.columns import Columns, as_json, normalise, paths, pick, plain
from fedsim.data.building.text_files import PACKED
from fedsim.errors import DataError, printable
from fedsim.files import TOO_MANY_FILES, read_json

READ_ROWS, READ_BYTES = 65_536, 64 * 2**20  # of a batch, at most
PART_ROWS, PART_BYTES = 2**20, 128 * 2**20  # of a part, about
TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv")
SUFFIXES = (".parquet", *(f".{kind}{z}" for kind in TEXTS for z in ("", *PACKED)))
DEFAULTS = BuildConfig()
READING = pa.ArrowException, OSError, EOFError, ValueError, OverflowError
"""Errors of libraries that read a damaged file."""
STATE, SPLITS = "state.json", "dataset_dict.json"  # one of them is in a saved directory


@dataclass(frozen=True)
class Part:
    """Row groups of a Parquet file."""

    file: Path
    source: Path
    """The file or directory that the user has named; `file` has its rows."""
    start: int = 0
    end: int = 0
    """End of the row groups, exclusive."""
    first_row: int = 0
    """Number of rows of the source before the part."""


def kind_of(file: Path) -> str:
    """Format of a source: parquet, json, jsonl, csv, tsv, or saved; another suffix is no format."""
    return "saved" if file.is_dir() else text_files.kind_of(file)


def is_known(file: Path) -> bool:
    """True if a file's name says that it can be read. Capital letters are fine, but for .GZ."""
    kind = text_files.kind_of(file)
    return kind in TEXTS or kind == "parquet" and file.suffix not in PACKED


def is_saved(path: Path) -> bool:
    """True if `datasets.save_to_disk` wrote this directory."""
    return path.is_dir() and any((path / name).is_file() for name in (STATE, SPLITS))


def cut(
    file: Path,
    columns: Columns,
    scratch: Path,
    split: str | None = None,
    settings: BuildConfig = DEFAULTS,
) -> list[Part]:
    """Cut a file into parts, in order.

    Args:
      scratch: a directory for the rows of files that are not Parquet.
      split: split of a saved dictionary of data sets.
      settings: delimiter, encoding and quoting of text files.
    Raises:
      DataError: the file cannot be read, or lacks a column.
    """
    with complaints(file):
        if kind_of(file) == "parquet":
            return _cut_parquet(Part(file, file), columns)
        place = Path(mkdtemp(dir=scratch))
        if is_saved(file):
            return _as_parquet(file, _saved_batches(file, columns, split), columns, place)
        read = text_files.batches
        try:
            return _as_parquet(file, read(file, columns, settings, place), columns, place)
        except text_files.Halved:
            place = Path(mkdtemp(dir=scratch))
            mended = read(file, columns, settings, place, mended=True)
            return _as_parquet(file, mended, columns, place)


def _as_parquet(
    source: Path, batches: Iterable[pa.RecordBatch], columns: Columns, place: Path
) -> list[Part]:
    """Write the rows of a source as Parquet. A column whose type changes begins another file."""
    parts, rows, size, held = [], 0, 0, []

    def write() -> None:
        nonlocal rows, size, held
        table = pa.Table.from_batches(held)
        whole = Part(place / f"{rows:012d}.parquet", source, first_row=rows)
        rows, size, held = rows + len(table), 0, []
        pq.write_table(table, whole.file, row_group_size=READ_ROWS, compression="lz4")
        parts.extend(_cut_parquet(whole, columns))

    for batch in batches:
        if columns.form and kind_of(source) not in ("json", "jsonl"):
            batch = chats_as_json(batch, columns)
        batch = with_plain_types(batch)
        if held and (size >= PART_BYTES or batch.schema != held[0].schema):
            write()
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
        with complaints(part.source):
            batch = normalise(batch, columns, first_row, tally)
        yield first_row, batch


def raw(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part as `read` does, with the columns of the file; chats as JSON."""
    with complaints(part.source), pq.ParquetFile(part.file) as parquet:
        found = paths(parquet.schema_arrow)
        columns.check(found)
        names = columns.in_file(found)
        groups = list(range(part.start, part.end))
        about = [parquet.metadata.row_group(group) for group in groups]
        size, rows = (sum(getattr(x, n) for x in about) for n in ("total_byte_size", "num_rows"))
        fitting = max(1, min(READ_ROWS, READ_BYTES * rows // max(size, 1)))
        row = part.first_row
        for batch in parquet.iter_batches(fitting, row_groups=groups, columns=names):
            batch = pick(batch, names)
            step = max(1, len(batch) * READ_BYTES // max(batch.nbytes, 1))
            for start in range(0, len(batch), step):
                piece = batch.slice(start, step)
                if columns.form and part.file == part.source:
                    piece = chats_as_json(piece, columns)
                yield row + start, with_plain_types(piece)
            row += len(batch)


def chats_as_json(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of chats as JSON."""
    named = {name: batch[name] for name in batch.schema.names}
    for name, field in zip(columns.text, columns.text_fields, strict=True):
        chats = plain(named.get(name, pa.nulls(len(batch)))).to_pylist()
        named[name] = as_json(chats, f"{field}={name}")
    return pa.RecordBatch.from_pydict(named)


def names_in(
    files: Iterable[Path], split: str | None = None, settings: BuildConfig = DEFAULTS
) -> list[str]:
    """Names of the columns of the first file that has any; none if no file can be read."""
    for file in files:
        with suppress(DataError), complaints(file), TemporaryDirectory() as scratch:
            if is_saved(file):
                names = paths(pa.ipc.open_stream(_saved_files(file, split)[0]).schema)
            elif kind_of(file) == "parquet":
                names = paths(pq.read_schema(file))
            else:
                names = text_files.names_of(file, settings, Path(scratch))
            if names:
                return names
    return []


@contextmanager
def complaints(source: Path) -> Iterator[None]:
    """Turn errors of readers into one line that names the file."""
    try:
        yield
    except DataError as error:
        named = type(error)(printable(f"{error} (in {source})"))
        named.field, named.value = error.field, error.value
        raise named from None
    except (*READING, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
            raise  # the file itself is not at fault
        what = f"data={source}: expected a readable {kind_of(source)} file ({reason_of(error)})"
        raise DataError(printable(what), field="data") from None


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
    return pa.RecordBatch.from_pydict(
        {name: _plain(batch[name], name) for name in batch.schema.names}
    )


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
    if test.is_string_view(kind):  # which Parquet lacks
        return column.cast(pa.large_string())
    if test.is_fixed_size_list(kind) or test.is_list_view(kind):
        return column.cast(pa.list_(kind.value_type))
    if test.is_large_list_view(kind):
        return column.cast(pa.large_list(kind.value_type))
    return column


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
    return parts or [whole]


def splits_of(directory: Path) -> list[str]:
    """Names of the splits in a directory that `datasets.save_to_disk` wrote; none if it is one."""
    listed = read_json(directory / SPLITS)["splits"] if (directory / SPLITS).is_file() else []
    return [str(name) for name in listed]


def _saved_files(directory: Path, split: str | None) -> list[Path]:
    """The Arrow files of a directory that `datasets.save_to_disk` wrote."""
    try:
        if splits := splits_of(directory):
            split = split or ("train" if "train" in splits else None)
            if split is None or split not in splits:
                raise DataError.of("split", split, f"one of {', '.join(splits)}")
            directory = directory / split
        state = read_json(directory / STATE)
        names = [Path(each["filename"]).name for each in state["_data_files"]]
        if not names:
            raise LookupError
    except (LookupError, TypeError):
        raise ValueError(f"{STATE} or {SPLITS} lists no files") from None
    if state.get("_indices_data_files"):  # of versions before 2.0
        raise ValueError("expected it as datasets 2.0 or later saves it")
    return [directory / name for name in names]


def _saved_batches(
    directory: Path, columns: Columns, split: str | None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a directory that `datasets.save_to_disk` wrote."""
    for file in _saved_files(directory, split):
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            found = paths(stream.schema)
            columns.check(found)
            names = columns.in_file(found)
            yield from (pick(batch, names) for batch in stream)
