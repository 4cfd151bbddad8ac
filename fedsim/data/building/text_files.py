"""Text files: CSV and JSON, read by DuckDB's strict readers, every value as it is written.

It must be certain where a row of a CSV file ends: else a user is given the texts of others. So a
file that can be read both with and without quoting, with different rows, is refused. No error shows
a value of a file, for it may be personal; DuckDB's messages quote lines, and are never shown.
"""

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.config import BuildConfig
from fedsim.data.building.columns import Columns
from fedsim.data.building.messages import HALVED
from fedsim.data.building.user_ids import call, refused
from fedsim.errors import DataError

NONE, MINIMAL = "none", "minimal"
PACKED = {".gz": "gzip", ".zst": "zstd"}
MAX_BYTES = 2**26  # of a row: a file of a few hundred kB may unpack to one of many GB
BATCH_ROWS = 2048
HEAD_ROWS = 65_536  # of JSON, whose keys are looked at before it is read
PIECE = 2**20  # characters that are copied at a time
# Pairs of halves of a character, lone halves, and other escapes, in JSON.
ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\."
)
ENCODING = "expected UTF-8; where it is of another encoding: encoding=cp1252"
TWICE = "expected every key of an object once, got one twice"
REASONS = (  # of DuckDB's messages, and what is said instead
    (
        r"Expected Number of Columns: (\d+) Found: (\d+)",
        "expected {0} columns, as in the first line, found {1}",
    ),
    (
        "unterminated quote",
        "expected every quotation to end where a column or a line does, so that it is certain "
        "whose text follows; without quoting: quoting=none",
    ),
    ("(?i)utf-8|unicode", ENCODING),
    ("state machine", "expected the same end of all lines, as `dos2unix` makes it"),
    ("(?i)maximum|object_size", f"expected rows of at most {MAX_BYTES:,} bytes"),
    (f"duplicate key|{TWICE}", TWICE),
    ("Expected OBJECT", "expected an object"),
    ("surrogate", HALVED),
    ("(?i)gzip|zstd|compress", "the packed file ends too early, or is damaged"),
    ("JSON", "expected JSON; a file of one list is named .json"),
)


def check_format(settings: BuildConfig) -> None:
    """Raise DataError if the delimiter or the encoding is invalid."""
    delimiter, encoding = settings.delimiter, settings.encoding
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise DataError.of("delimiter", delimiter, "one character, such as ; or |")
    try:
        "".encode(encoding)
        codecs.getincrementaldecoder(encoding)().decode(pa.py_buffer(b""))  # as Arrow
    except (AttributeError, LookupError, TypeError, ValueError):  # punycode takes only bytes
        expected = "an encoding of text that Python knows, such as cp1252"
        raise DataError.of("encoding", encoding, expected) from None


def kind_of(file: Path) -> str:
    """Kind of a file by its name, in small letters, without the suffix of a packed one."""
    name = file.name.removesuffix(file.suffix) if file.suffix in PACKED else file.name
    kind = name.rpartition(".")[2].lower()
    return "jsonl" if kind == "ndjson" else kind


def names_of(file: Path, settings: BuildConfig, scratch: Path) -> list[str]:
    """Names of the columns of a file. Names of fields inside others have a dot.

    Raises:
      DataError: the file cannot be read.
    """
    for mended in (False, True):
        try:
            with _saying_why():
                return _Reading(file, settings, scratch, mended).names
        except Halved:
            continue
    return []


def batches(
    file: Path, columns: Columns, settings: BuildConfig, scratch: Path, mended: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of a file in small batches, in the order of the file.

    Values are texts, or lists of texts or whole numbers; chats are JSON.

    Args:
      scratch: an existing directory for links and copies.
      mended: read a copy of a JSON file in which halves of characters are U+FFFD.
    Raises:
      DataError: names the line and the reason. Halved: a copy can be read.
    """
    with _saying_why():
        reading = _Reading(file, settings, scratch, mended)
        if reading.names:  # else there are no rows of JSON
            columns.check(reading.names)
        if reading.kind in ("csv", "tsv"):
            yield from reading.csv(columns.in_file(reading.names))
        else:
            yield from reading.json(columns)


class Halved(DataError):
    """A JSON file has halves of characters, or marks of byte order between lines."""


@contextmanager
def _saying_why() -> Iterator[None]:
    """One line instead of DuckDB's message, with the line of the file."""
    try:
        yield
    except UnicodeError:
        raise DataError(ENCODING) from None
    except duckdb.Error as error:
        said = str(error)
        known = ((re.search(pattern, said), line) for pattern, line in REASONS)
        known = (line.format(*found.groups()) for found, line in known if found)
        reason = next(known, "it cannot be read")
        line = re.search(r"(?:Line: |in line |record/value )(\d+)", said)
        if line:
            number = int(line[1]) - ("Malformed" in said)  # there it is the line after
            reason = f"{'entry' if 'record/value' in said else 'line'} {number}: {reason}"
        halved = "surrogate" in said or "byte order mark" in said
        raise (Halved if halved else DataError)(reason) from None


class _Reading:
    """One reading of a file."""

    def __init__(self, file: Path, settings: BuildConfig, scratch: Path, mended: bool = False):
        self.kind, self.settings = kind_of(file), settings
        self.packed = PACKED.get(file.suffix)
        self.delimiter = settings.delimiter or ("\t" if self.kind == "tsv" else ",")
        self.connection = duckdb.connect(config={"threads": 1})
        is_utf8 = codecs.lookup(settings.encoding).name in ("utf-8", "utf-8-sig")
        if is_utf8 and self._begins(file, 2) in (b"\xff\xfe", b"\xfe\xff"):
            raise DataError("it is UTF-16: encoding=utf-16")
        self.path = scratch / "text"  # DuckDB would take the name of a file for a pattern
        self.path.unlink(missing_ok=True)
        if is_utf8 and not mended:
            self.path.symlink_to(file.resolve())
        else:
            self._copy(file, "utf-8-sig" if is_utf8 else settings.encoding, mended)
            self.packed = None
        self.mended = mended
        if self.kind in ("csv", "tsv"):
            self.names = self._header()
        else:
            self.is_list = self.kind == "json" and self._begins(self.path).lstrip()[:1] == b"["
            self.names = self._keys()

    def _begins(self, file: Path, size: int = PIECE) -> bytes:
        with pa.input_stream(str(file), compression=self.packed) as stream:
            found = stream.read(size)
        return found.removeprefix(codecs.BOM_UTF8)

    def _copy(self, file: Path, encoding: str, mend: bool) -> None:
        """Write a copy in UTF-8; if `mend`, without halves of characters."""
        with pa.input_stream(str(file), compression=self.packed) as stream:
            text, rest = io.TextIOWrapper(stream, encoding, newline=""), ""  # pyright: ignore
            with self.path.open("w", encoding="utf-8", newline="") as copy:
                while piece := text.read(PIECE):
                    piece = rest + piece
                    end = max(map(piece.rfind, ",\n ")) + 1 if mend else len(piece)
                    piece, rest = piece[:end], piece[end:]  # no escape goes over the end
                    copy.write(_whole(piece) if mend else piece)
                copy.write(_whole(rest) if mend else rest)

    def _header(self) -> list[str]:
        quoting = csv.QUOTE_NONE if self.settings.quoting == NONE else csv.QUOTE_MINIMAL
        before = csv.field_size_limit(sys.maxsize)
        try:
            lines = io.StringIO(self._begins(self.path).decode("utf-8", "replace"), newline="")
            names = next(csv.reader(lines, delimiter=self.delimiter, quoting=quoting), [])
        finally:
            csv.field_size_limit(before)
        if "\ufffd" in "".join(names):
            raise DataError(f"line 1: {ENCODING}")
        if not names:
            raise DataError("line 1: expected the names of the columns, got nothing")
        self.marked = '"' in lines.getvalue().partition("\n")[0]
        return names

    def csv(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of a CSV file."""
        self._expect_short_end()
        # DuckDB would take Text for text, so columns are named by their places.
        places = [f"c{i}" for i in range(len(self.names))]
        several = " OR ".join(rf"regexp_matches({place}, '[\r\n]')" for place in places)
        chosen = ", ".join(places[self.names.index(name)] for name in wanted)
        quote = "" if self.settings.quoting == NONE else '"'
        query = f"SELECT {chosen}, {several} FROM {self._csv('strict_mode=true')}"
        rows, lines = 0, False
        for batch in self._sql(query, columns=places, quote=quote).to_arrow_reader(BATCH_ROWS):
            lines = lines or bool(pc.any(batch.column(len(wanted))).as_py())  # pyright: ignore
            batch = pa.RecordBatch.from_arrays(batch.columns[:-1], list(wanted))
            self._expect_no_header(batch, rows)
            rows += len(batch)
            yield batch
        # Without quoting, marks in the first line would be in names of columns.
        if lines and self.settings.quoting is None and len(places) > 1 and not self.marked:
            self._expect_quoted(rows)

    def _csv(self, rules: str) -> str:
        return (
            "read_csv($path, columns=$columns, delim=$delimiter, quote=$quote, escape=$quote, "
            f"{rules}, header=true, auto_detect=false, nullstr=$null, "
            f"compression='{self.packed or 'none'}', hive_partitioning=false, "
            f"max_line_size={MAX_BYTES}, buffer_size={2 * MAX_BYTES})"
        )

    def _expect_no_header(self, batch: pa.RecordBatch, rows: int) -> None:
        if len(self.names) == 1:
            return
        same = [pc.equal(batch[name], name) for name in batch.schema.names]  # pyright: ignore
        again = np.logical_and.reduce([each.to_numpy(zero_copy_only=False) for each in same])
        if again.any():
            raise DataError(
                f"row {rows + int(again.argmax()) + 1}: expected the names of the columns once, in "
                "the first line, and here they are again, as where files were joined"
            )

    def _expect_quoted(self, rows: int) -> None:
        """Refuse a file that can be read without quoting, with another number of rows.

        The reader that is not strict takes all kinds of line ends. A column more than there are
        shows rows with too many.
        """
        places = [f"c{i}" for i in range(len(self.names) + 1)]
        rows_of = self._csv("strict_mode=false, null_padding=true")
        query = f"SELECT count(*), count({places[-2]}), count({places[-1]}) FROM {rows_of}"
        try:
            ((count, full, more),) = self._sql(query, columns=places, quote="").fetchall()
        except duckdb.Error:
            return
        if count == full and not more and count != rows:
            raise DataError(
                "expected a file that can be read in one way; with quotation marks around texts it "
                f"has {rows:,} rows, and {count:,} if they are characters as others: "
                "quoting=minimal or none"
            )

    def _keys(self) -> list[str]:
        query = f"SELECT json FROM read_json_objects({self._json()}) LIMIT {HEAD_ROWS}"
        names: dict[str, None] = {}
        self.outer: set[str] = set()
        for batch in self._sql(query).to_arrow_reader(BATCH_ROWS):
            for text in batch.column(0).to_pylist():
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise DataError("expected a list of objects, or an object in each line")
                names |= dict.fromkeys(field_names(record))
                self.outer |= record.keys()
        return list(names)

    def _json(self) -> str:
        form = "array" if self.is_list else "newline_delimited"
        return (  # a directory named user_id=1 names no user
            f"$path, format='{form}', compression='{self.packed or 'none'}', "
            f"hive_partitioning=false, maximum_object_size={MAX_BYTES}"
        )

    def json(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        """The rows of a JSON file."""
        if self.is_list and self._ends_with() != b"]":
            raise DataError("expected ] after the last entry; is the file cut off?")
        chats = set(columns.text) - {*columns.owner, columns.order} if columns.form else set()
        wanted, values = columns.names, []
        outer = [name if name in self.outer else name.partition(".")[0] for name in wanted]
        for name, column in zip(wanted, outer, strict=True):
            value = _quoted(column)
            if column != name:  # which fields inside others may hold twice
                twice = f"len(json_keys({value})) > len(list_distinct(json_keys({value})))"
                value = f"if({twice}, error({_literal(TWICE)}), {value})"
            for inner in name.split(".")[1:] if column != name else ():
                value = f"json_extract({value}, {_literal(f'$.{_quoted(inner)}')})"
            text = f"{value}::VARCHAR"
            if name not in chats:
                text = (  # NaN is a missing value, as pandas writes it
                    f"CASE json_type({value}) WHEN 'VARCHAR' THEN {value} ->> '$' "
                    f"WHEN 'DOUBLE' THEN nullif({text}, 'NaN') ELSE {text} END"
                )
            values += [text, f"json_type({value})"]
        query = f"SELECT {', '.join(values)} FROM read_json({self._json()}, columns=$columns)"
        rows = 0
        for batch in self._sql(query, columns=outer, kind="JSON").to_arrow_reader(BATCH_ROWS):
            made = {}
            for i, name in enumerate(wanted):
                texts, kinds = batch.column(2 * i), batch.column(2 * i + 1)
                is_text = name in columns.text and name not in columns.owner
                halved = call("match_substring", texts.cast(pa.string()), pattern="\ufffd")
                if self.mended and not is_text and (at := _first(halved)) is not None:
                    raise DataError(f"row {rows + at + 1}, {name}: {HALVED}")  # two would be one
                if name not in chats and name != columns.order:
                    texts = _as_column(texts, kinds, name, rows, columns, is_text)
                made[name] = texts
            rows += len(batch)
            yield pa.RecordBatch.from_pydict(made)

    def _expect_short_end(self) -> None:
        """DuckDB leaves out a last row that its buffer does not hold, without an error."""
        rest, last = 0, 0
        for piece in self._end():
            lines, end, after = piece.replace(b"\r", b"\n").rpartition(b"\n")
            if end:
                _, inner, line = lines.rstrip(b"\n").rpartition(b"\n")
                last = len(line) if inner else (rest + len(line)) or last
                rest = 0
            rest += len(after)
        if (rest or last) > MAX_BYTES:
            raise DataError(f"last line: expected rows of at most {MAX_BYTES:,} bytes")

    def _ends_with(self) -> bytes:
        last = b""
        for piece in self._end():
            last = piece.rstrip()[-1:] or last
        return last

    def _end(self) -> Iterator[bytes]:
        """Pieces of the end of the file, more than a row can have; of a packed file, all pieces."""
        with pa.input_stream(str(self.path), compression=self.packed) as stream:
            if self.packed is None:
                stream.seek(max(0, stream.size() - 4 * MAX_BYTES))
            while piece := stream.read(PIECE):
                yield piece

    def _sql(
        self, query: str, *, columns: Sequence[str] = (), kind: str = "VARCHAR", quote: str = ""
    ) -> Any:
        known = {"columns": dict.fromkeys(columns, kind), "quote": quote, "null": "\0"}
        known |= {"path": str(self.path), "delimiter": self.delimiter}
        used = {name: value for name, value in known.items() if f"${name}" in query}
        return self.connection.sql(query, params=used)


def _whole(text: str) -> str:
    """JSON without halves of characters and marks of byte order."""
    text = ESCAPES.sub(lambda found: r"\ufffd" if len(found[0]) == 6 else found[0], text)
    return text.replace("\n\ufeff", "\n")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def field_names(record: dict[str, Any]) -> Iterator[str]:
    """Names of the fields of a record. Names of fields inside others have a dot."""
    for key, value in record.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in field_names(value))


def _first(flags: Any) -> int | None:
    """Index of the first true value, if any."""
    place = flags.fill_null(False).index(True).as_py()
    return None if place < 0 else place


def _as_column(
    texts: pa.Array, kinds: pa.Array, name: str, rows: int, columns: Columns, is_text: bool
) -> pa.Array:
    """Values of JSON as texts, or as lists of texts, or of whole numbers if `is_text`.

    Raises:
      DataError: a value is of another kind.
    """
    others = call("is_in", kinds, value_set=pa.array(["OBJECT", "BOOLEAN"]))
    if (i := _first(others)) is not None:
        expected = "a text" if is_text else "a text or a number"
        raise DataError(f"row {rows + i + 1}, {name}: expected {expected}, got {kinds[i]}")
    whole = call("match_substring_regex", texts, pattern=r"^-?[0-9]+(\.0)?$")
    rounded = call("and", call("equal", kinds, pa.scalar("DOUBLE")), call("invert", whole))
    if not is_text and (i := _first(rounded)) is not None:
        line = f"text or whole numbers, got {texts[i].as_py()} in row {rows + i + 1}"
        raise refused(columns.blamed, line)
    lists = call("equal", kinds, pa.scalar("ARRAY"))
    if _first(lists) is None:
        return texts
    values = []
    for i, (text, is_list) in enumerate(zip(texts.to_pylist(), lists.to_pylist(), strict=True)):
        value = json.loads(text) if is_list else text if text is None or is_text else [text]
        inside = value if isinstance(value, list) else [] if value is None else [()]
        if not all(x is None or type(x) is int or type(x) is str and not is_text for x in inside):
            expected = "whole numbers, which are tokens," if is_text else "texts or whole numbers"
            hint = " (of chats: messages_column)" if is_text else ""
            raise DataError(f"row {rows + i + 1}, {name}: expected {expected} in lists{hint}")
        values.append(value if is_text else [x if x is None else str(x) for x in inside])
    return pa.array(values, pa.list_(pa.int64() if is_text else pa.string()))
