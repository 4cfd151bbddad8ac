"""Read users' text: Parquet, JSON, JSONL, CSV (.gz), and directories saved by `datasets`.

A file is cut into parts if its format allows it, so that several processes can read it. Rows come
in the order of the file as checked batches. Errors name the file, the row and the reason.
"""

import contextlib
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from fedsim.data.building import text_files
from fedsim.data.building.columns import Columns, as_json, normalise, paths, pick, plain
from fedsim.data.building.text_files import NONE, TextFormat
from fedsim.data.store import SEPARATOR
from fedsim.errors import DataError, printable
from fedsim.files import TOO_MANY_FILES
from fedsim.installation import optional

READ_ROWS, READ_BYTES = 65_536, 64 * 2**20  # of a batch, at most
PART_ROWS, PART_BYTES = 2**20, 128 * 2**20  # of a part, about
CSV_BLOCKS = tuple(16 * 2**20 * 8**i for i in range(3))  # bytes; one row must fit
TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv")
SUFFIXES = (".parquet", *(f".{kind}{z}" for kind in TEXTS for z in ("", ".gz")))
OTHER = "; where it is of another encoding: `fedsim data build --encoding cp1252`"
UTF8 = TextFormat()
SAVED = ("state.json", "dataset_dict.json")  # one of them is in a saved directory


@dataclass(frozen=True)
class Part:
    """A part of a file: row groups of Parquet, bytes of JSONL, rows of a saved data set."""

    file: Path
    start: int = 0
    end: int | None = None
    """End of the part, exclusive; None is the end of the file."""
    first_row: int = 0
    """Number of rows (lines of JSONL) of the file before the part."""
    split: str | None = None
    """Split of a saved dictionary of data sets."""
    text_format: TextFormat = UTF8

    @property
    def kind(self) -> str:
        """Format of the file: parquet, json, jsonl, csv, tsv, or saved."""
        return "saved" if self.file.is_dir() else _suffix(self.file)


def is_known(file: Path) -> bool:
    """True if a file's name says that it can be read. Capital letters are fine, but for .GZ."""
    packed, kind = file.suffix == ".gz", _suffix(file)
    return kind in TEXTS or kind == "parquet" and not packed


def _suffix(file: Path) -> str:
    kind = file.name.removesuffix(".gz").rpartition(".")[2].lower()
    return "jsonl" if kind == "ndjson" else kind


def cut(
    file: Path, columns: Columns, split: str | None = None, text_format: TextFormat = UTF8
) -> list[Part]:
    """Cut a file into parts, in order. Equal files and columns give equal parts.

    Raises:
      DataError: the file cannot be read, or lacks a column.
    """
    whole = Part(file, split=split, text_format=text_format)
    with complaints(whole):
        if whole.kind == "parquet":
            return _cut_parquet(file, columns)
        if whole.kind == "saved":
            table = _load_saved(file, split)
            columns.check(paths(table.features.arrow_schema))
            bounds = [*range(0, len(table), PART_ROWS), len(table)]
            spans = zip(bounds[:-1], bounds[1:], strict=True)
            return [Part(file, low, high, low, split) for low, high in spans]
        if text_format.decoder == UTF8.decoder and _is_utf16(file):
            raise ValueError(f"it is UTF-16{OTHER.replace('cp1252', 'utf-16')}")
        if whole.kind in ("csv", "tsv"):
            text_files.check_csv(file, text_format, columns.check)
        if whole.kind == "jsonl" and file.suffix != ".gz" and text_format.has_lines:
            return _cut_lines(file, text_format)
    return [whole]


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
    readers = {
        "parquet": _read_parquet,
        "json": _read_json,
        "jsonl": _read_jsonl,
        "csv": _read_csv,
        "tsv": _read_csv,
        "saved": _read_saved,
    }
    with complaints(part):
        for first_row, batch in readers[part.kind](part, columns):
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


class _Found(Exception):
    """The names of the columns of a file."""


class _Asking(Columns):
    """Columns that a reader is asked for, to know which there are."""

    def check(self, found: Sequence[str]) -> None:
        """Hand out the names. Raises: _Found: with them."""
        raise _Found(list(found))


def names_in(
    files: Iterable[Path], columns: Columns, split: str | None, text_format: TextFormat
) -> list[str]:
    """Names of the columns of the first file that has any; none if no file can be read.

    Args:
      columns: those that are known to be wanted, which tell a line of JSON from another object.
    """
    asking = _Asking(**vars(columns))
    found = (_names_of(Part(file, split=split, text_format=text_format), asking) for file in files)
    return next(filter(None, found), [])


def _names_of(part: Part, asking: _Asking) -> list[str]:
    try:
        if part.kind in ("csv", "tsv"):  # Arrow would read a block, and refuse its records
            with complaints(part):
                text_files.check_csv(part.file, part.text_format, asking.check)
        next(raw(part, asking), None)
    except _Found as found:
        return found.args[0]
    except DataError:  # which the build raises
        pass
    return []


class complaints:
    """Context manager that turns errors of readers into one line that names the file."""

    def __init__(self, part: Part):
        self.part = part

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, DataError):
            named = type(error)(printable(f"{error} (in {self.part.file})"))
            named.field = error.field
            raise named from None
        if isinstance(error, OSError) and error.errno in TOO_MANY_FILES:
            return  # the file itself is not at fault
        expected = (pa.ArrowException, OSError, EOFError, ValueError, OverflowError)
        expected += (zlib.error, RecursionError)
        if isinstance(error, expected):
            reason = reason_of(error)
            if isinstance(error, UnicodeError) or "utf8" in reason.lower().replace("-", ""):
                reason += OTHER
            what = f"data={self.part.file}: expected a readable {self.part.kind} file ({reason})"
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


def _is_utf16(file: Path) -> bool:
    """True if a file begins with a byte order mark of UTF-16, as tables exported as Unicode do."""
    opener = gzip.open if file.suffix == ".gz" else open
    with contextlib.suppress(OSError, EOFError, zlib.error), opener(file, "rb") as opened:
        return opened.read(2) in (b"\xff\xfe", b"\xfe\xff")
    return False


def _small(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (start, slice) of a batch, in slices of at most READ_ROWS rows and about READ_BYTES."""
    rows = max(1, len(batch) * READ_BYTES // max(batch.nbytes, 1))
    for start in range(0, len(batch), min(rows, READ_ROWS)):
        yield start, batch.slice(start, min(rows, READ_ROWS))


def _cut_parquet(file: Path, columns: Columns) -> list[Part]:
    with pq.ParquetFile(file) as parquet:
        columns.check(paths(parquet.schema_arrow))
        about = parquet.metadata
        parts, start, rows, size, before = [], 0, 0, 0, 0
        for group in range(about.num_row_groups):
            rows += about.row_group(group).num_rows
            size += about.row_group(group).total_byte_size
            if rows >= PART_ROWS or size >= PART_BYTES or group == about.num_row_groups - 1:
                parts.append(Part(file, start, group + 1, before))
                start, before, rows, size = group + 1, before + rows, 0, 0
    return parts or [Part(file, 0, 0)]


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


def _read_csv(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read all values as texts: 007 is not 7."""
    between = part.text_format.between(part.file)
    marks = part.text_format.quoting != NONE
    parse_options = pa_csv.ParseOptions(
        delimiter=between, quote_char=marks and text_files.MARK, newlines_in_values=marks
    )
    done = 0
    for block_size in CSV_BLOCKS:  # a row must fit in a block
        read_options = pa_csv.ReadOptions(block_size=block_size, encoding=part.text_format.encoding)
        try:
            with pa_csv.open_csv(pa.input_stream(part.file), read_options, parse_options) as guess:
                columns.check(guess.schema.names)
                names = columns.in_file(guess.schema.names)
            as_written = {name: pa.string() for name in names}
            convert = pa_csv.ConvertOptions(include_columns=names, column_types=as_written)
            stream = pa.input_stream(part.file)
            with pa_csv.open_csv(stream, read_options, parse_options, convert) as reader:
                row = 0
                for batch in reader:
                    skipped = min(max(done - row, 0), len(batch))
                    row += len(batch)
                    if skipped < len(batch):
                        yield row - len(batch) + skipped, batch.slice(skipped)
                        done = row
            return
        except pa.ArrowInvalid as error:
            if "straddling" not in str(error) or block_size == CSV_BLOCKS[-1]:
                raise


def _cut_lines(file: Path, text_format: TextFormat) -> list[Part]:
    """Cut a JSONL file at line ends, and count the lines before each part."""
    parts, start, lines, size = [], 0, 0, file.stat().st_size
    with file.open("rb") as stream:
        while start < size:
            stream.seek(min(start + PART_BYTES, size))
            while (piece := stream.readline(2**20)) and not piece.endswith(b"\n"):
                pass  # a line may be larger than memory
            end = stream.tell() if stream.tell() < size else size
            parts.append(Part(file, start, end, lines, text_format=text_format))
            stream.seek(start)
            lines += sum(block.count(b"\n") for block in _blocks(stream, end - start))
            start = end
    return parts or [Part(file, text_format=text_format)]


def _blocks(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size and (block := stream.read(min(size, 2**24))):
        size -= len(block)
        yield block


def _read_jsonl(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read one object per line."""
    encoding = part.text_format.decoder
    if part.text_format.has_lines:
        opener = gzip.open if part.file.suffix == ".gz" else open
        stream: Any = opener(part.file, "rb")
    else:
        stream, encoding = part.text_format.opened(part.file), "utf-8"
    with stream:
        stream.seek(part.start)
        records = text_files.json_lines(_lines(stream, part), part.first_row, encoding)
        yield from _batches(records, columns, part.first_row, "line", checked=part.start > 0)


def _read_json(part: Part, columns: Columns) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read one list of objects, or one object per line."""
    with part.text_format.opened(part.file) as stream:
        begins = ""
        while not begins and (text := stream.read(text_files.READ_CHARACTERS)):
            begins = text.lstrip()
        if begins.startswith("["):
            stream.seek(0)
            yield from _batches(text_files.json_list(stream), columns, 0, "entry")
            return
    if hint := text_files.other_json(begins, columns.names):
        raise ValueError(f"expected a list of objects, or one object a line, got {hint}")
    yield from _read_jsonl(part, columns)


def _batches(
    records: Iterator[text_files.Record],
    columns: Columns,
    row: int,
    word: str,
    *,
    checked: bool = False,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches of records. Args: word: "line" or "entry", the kind of a record in errors."""
    texts = set(columns.text) - {*columns.owner, columns.order}
    while rows := _some(records):
        if not checked:
            names = dict.fromkeys(
                name for record in rows for name in text_files.field_names(record.fields)
            )
            columns.check(list(names))
            checked = True
        where = word, [record.number for record in rows]
        arrays = {}
        for name in columns.names:
            values = [text_files.field_value(record.fields, name) for record in rows]
            if columns.form and name in texts:
                arrays[name] = as_json(values, name)
            else:
                arrays[name] = text_files.as_column(values, name, where, name in texts)
        yield row, pa.RecordBatch.from_pydict(arrays)
        row += len(rows)


def _some(records: Iterator[text_files.Record]) -> list[text_files.Record]:
    """The next records, as many as a batch holds."""
    rows, size = [], 0
    for record in records:
        rows.append(record)
        size += record.size
        if size >= READ_BYTES or len(rows) == READ_ROWS:
            break
    return rows


def _lines(stream: Any, part: Part) -> Iterator[bytes]:
    """Yield the lines of a part. A line that is too long is cut, but stays longer than allowed."""
    left = -1 if part.end is None else part.end - part.start
    while left and (line := stream.readline(text_files.MOST_CHARACTERS + 1)):
        left -= len(line) if left > 0 else 0
        yield line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
