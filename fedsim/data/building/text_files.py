"""Text files: CSV and JSON, read by DuckDB's strict readers, every value as it is written.

It must be certain where a row of a CSV file ends: else a user is given the texts of others. So a
file that can be read both with and without quoting, with different rows, is refused. No error shows
a value of a file, for it may be personal; DuckDB's messages quote lines, and are never shown.
"""

import codecs
import csv
import glob
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.config import BuildConfig
from fedsim.data.building.columns import Columns
from fedsim.data.building.messages import HALVED
from fedsim.data.building.sorting import connect
from fedsim.data.building.user_ids import call, refused
from fedsim.errors import DataError

PACKED = {".gz": "gzip", ".zst": "zstd"}
MAX_BYTES = 2**26  # of a row: a file of a few hundred kB may unpack to one of many GB
BATCH_ROWS = 2048
HEAD_ROWS = 65_536  # of JSON, whose keys are looked at before it is read
PIECE = 2**20  # bytes that are read at a time
ENCODING = "expected UTF-8, which `iconv -f cp1252 -t utf-8 FILE` makes of another encoding"
TEXT = "a text (`messages_column` names chats)"
DAMAGED = "cut off or damaged; mend or delete it: expected JSON, a whole object in each line, or "
DAMAGED += "one list in a .json file"
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
    ("(?i)maximum|object_size|full read", f"expected rows of at most {MAX_BYTES:,} bytes"),
    ("duplicate key", "expected every key of an object once, got one twice"),
    ("Expected OBJECT", "expected a list of objects, or an object in each line"),
    ("surrogate", HALVED),
    ("(?i)gzip|zstd|compress|inflate", "the packed file ends too early, or is damaged"),
    ("JSON", DAMAGED),
)


class TextFile:
    """A CSV or JSON file that is read by DuckDB.

    Args:
      kind: csv, tsv, json or jsonl.
      settings: quoting.
    Raises: DataError: the file cannot be read. The error names the line and the reason.
    """

    names: list[str]
    """Names of the columns."""

    def __init__(self, file: Path, kind: str, settings: BuildConfig):
        self.file, self.quoting, self.packed = file, settings.quoting, PACKED.get(file.suffix)
        self.is_csv = kind in ("csv", "tsv")
        self.delimiter = "\t" if kind == "tsv" else ","
        self.connection = connect()
        with _plain_reasons():
            begin = next(self._pieces(), b"").removeprefix(codecs.BOM_UTF8)
            self.is_list = kind == "json" and begin.lstrip()[:1] == b"["
            self.names = self._header(begin) if self.is_csv else self._keys()

    def batches(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Yield the columns in small batches, in the order of the file.

        Values are texts, or lists of texts or whole numbers; chats are JSON. Raises: DataError.
        """
        with _plain_reasons():
            if self.names:  # else there are no rows of JSON
                columns.check(self.names)
            yield from self._csv(columns) if self.is_csv else self._json(columns)

    def _pieces(self, end: bool = False) -> Iterator[bytes]:
        """The file, or its end, which is more than a row may have; of a packed file all of it."""
        with pa.input_stream(str(self.file), compression=self.packed) as stream:
            if end and not self.packed:
                stream.seek(max(0, stream.size() - 4 * MAX_BYTES))
            while piece := stream.read(PIECE):
                yield piece

    def _expect_short_end(self) -> None:
        """DuckDB leaves out a last row that its buffer does not hold, without an error."""
        rest, last = 0, 0
        for piece in self._pieces(end=True):
            lines, end, after = piece.replace(b"\r", b"\n").rpartition(b"\n")
            if end:
                _, inner, line = lines.rstrip(b"\n").rpartition(b"\n")
                last = len(line) if inner else (rest + len(line)) or last
                rest = 0
            rest += len(after)
        if (rest or last) > MAX_BYTES:
            raise DataError(f"last line: expected rows of at most {MAX_BYTES:,} bytes")

    def _header(self, begin: bytes) -> list[str]:
        quoting = csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL
        # At most as long as the module takes one name to be.
        lines = io.StringIO(begin.decode("utf-8", "replace")[: csv.field_size_limit()], newline="")
        names = next(csv.reader(lines, delimiter=self.delimiter, quoting=quoting), [])
        if "\ufffd" in "".join(names):
            raise DataError(f"line 1: {ENCODING}")
        if not names:
            raise DataError("line 1: expected the names of the columns, got nothing")
        self.marked = '"' in lines.getvalue().partition("\n")[0]
        return names

    def _csv(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        wanted = columns.in_file(self.names)
        # DuckDB would take Text for text, so columns are named by their places.
        places = [f"c{i}" for i in range(len(self.names))]
        several = " OR ".join(rf"regexp_matches({place}, '[\r\n]')" for place in places)
        chosen = ", ".join(places[self.names.index(name)] for name in wanted)
        quote = "" if self.quoting == "none" else '"'
        query = f"SELECT {chosen}, {several} FROM {self._csv_rows('strict_mode=true')}"
        rows, lines = 0, False
        for batch in self._sql(query, columns=places, quote=quote).to_arrow_reader(BATCH_ROWS):
            lines = lines or bool(pc.any(batch.column(len(wanted))).as_py())  # pyright: ignore
            rows += len(batch)
            yield pa.RecordBatch.from_arrays(batch.columns[:-1], list(wanted))
        self._expect_short_end()
        # Without quoting, marks in the first line would be in names of columns.
        if lines and self.quoting is None and len(places) > 1 and not self.marked:
            self._expect_one_way(rows)

    def _csv_rows(self, rules: str) -> str:
        return (
            "read_csv($path, columns=$columns, delim=$delimiter, quote=$quote, escape=$quote, "
            f"{rules}, header=true, auto_detect=false, nullstr=$null, "
            f"compression='{self.packed or 'none'}', hive_partitioning=false, "
            f"max_line_size={MAX_BYTES}, buffer_size={2 * MAX_BYTES})"
        )

    def _expect_one_way(self, rows: int) -> None:
        """Refuse a file that can be read without quoting, with another number of rows."""
        # The reader that is not strict takes all line ends; a column more shows rows with too many.
        places = [f"c{i}" for i in range(len(self.names) + 1)]
        rows_of = self._csv_rows("strict_mode=false, null_padding=true")
        query = f"SELECT count(*), count({places[-2]}), count({places[-1]}) FROM {rows_of}"
        try:
            ((count, full, more),) = self._sql(query, columns=places).fetchall()
        except duckdb.Error:
            return
        if count == full and not more and count != rows:
            raise DataError(
                "expected a file that can be read in one way; with quotation marks around texts it "
                f"has {rows:,} rows, and {count:,} if they are characters as others: "
                "quoting=minimal or none"
            )

    def _keys(self) -> list[str]:
        head = f"SELECT json FROM read_json_objects({self._objects()}) LIMIT {HEAD_ROWS}"
        found = self._sql(f"SELECT DISTINCT unnest(json_keys(json)) FROM ({head}) ORDER BY ALL")
        return [name for (name,) in found.fetchall()]

    def _objects(self) -> str:
        form = "array" if self.is_list else "newline_delimited"
        return (  # a directory named user_id=1 names no user
            f"$path, format='{form}', compression='{self.packed or 'none'}', "
            f"hive_partitioning=false, maximum_object_size={MAX_BYTES}"
        )

    def _json(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        last = b"]"
        for piece in self._pieces(end=True) if self.is_list else ():
            last = piece.rstrip()[-1:] or last
        if last != b"]":
            raise DataError("expected ] after the last entry; is the file cut off?")
        chats = set(columns.text) - {*columns.owner, columns.order} if columns.form else set()
        wanted, values = columns.names, []
        for name in wanted:
            value = '"' + name.replace('"', '""') + '"'
            text = f"{value}::VARCHAR"
            if name not in chats:
                text = (  # NaN is a missing value, as pandas writes it
                    f"CASE json_type({value}) WHEN 'VARCHAR' THEN {value} ->> '$' "
                    f"WHEN 'DOUBLE' THEN nullif({text}, 'NaN') ELSE {text} END"
                )
            values += [text, f"json_type({value})"]
        query = f"SELECT {', '.join(values)} FROM read_json({self._objects()}, columns=$columns)"
        rows = 0
        for batch in self._sql(query, columns=wanted, kind="JSON").to_arrow_reader(BATCH_ROWS):
            made = {}
            for i, name in enumerate(wanted):
                made[name] = texts = batch.column(2 * i)
                if name not in chats and name != columns.order:
                    made[name] = _as_column(texts, batch.column(2 * i + 1), name, rows, columns)
            rows += len(batch)
            yield pa.RecordBatch.from_pydict(made)

    def _sql(
        self, query: str, *, columns: Sequence[str] = (), kind: str = "VARCHAR", quote: str = ""
    ) -> Any:
        known = {"columns": dict.fromkeys(columns, kind), "quote": quote, "null": "\0"}
        # DuckDB would take the name of a file for a pattern.
        known |= {"path": glob.escape(str(self.file)), "delimiter": self.delimiter}
        used = {name: value for name, value in known.items() if f"${name}" in query}
        return self.connection.sql(query, params=used)


@contextmanager
def _plain_reasons() -> Iterator[None]:
    """One line instead of DuckDB's message, with the line of the file."""
    try:
        yield
    except UnicodeError:
        raise DataError(ENCODING) from None
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # of the system
            raise
        said = str(error)
        known = ((re.search(pattern, said), line) for pattern, line in REASONS)
        known = (line.format(*found.groups()) for found, line in known if found)
        reason = next(known, "it cannot be read")
        if line := re.search(r"(?:Line: |in line |record/value )(\d+)", said):
            number = int(line[1]) - ("Malformed" in said)  # there it is the line after
            reason = f"{'entry' if 'record/value' in said else 'line'} {number}: {reason}"
        raise DataError(reason) from None


def _as_column(texts: pa.Array, kinds: pa.Array, name: str, row: int, columns: Columns) -> pa.Array:
    """Values of JSON as texts, or as lists of owners. Raises: DataError: they are others."""
    is_text = name in columns.text and name not in columns.owner
    bad = ["OBJECT", "BOOLEAN", *(["ARRAY"] if is_text else ())]
    others = call("is_in", kinds, value_set=pa.array(bad))
    if others.true_count:
        i, expected = others.index(True).as_py(), TEXT if is_text else "a text or a number"
        raise DataError(f"row {row + i + 1}, {name}: expected {expected}, got {kinds[i]}")
    if is_text:
        return texts
    whole = call("match_substring_regex", texts, pattern=r"^-?[0-9]+(\.0)?$")
    rounded = call("and", call("equal", kinds, pa.scalar("DOUBLE")), call("invert", whole))
    if rounded.true_count:
        i = rounded.index(True).as_py()
        line = f"text or whole numbers, got {texts[i].as_py()} in row {row + i + 1}"
        raise refused(columns.blamed, line)
    lists = call("equal", kinds, pa.scalar("ARRAY")).fill_null(False)
    if not lists.true_count:
        return texts
    values = []
    for i, (text, is_list) in enumerate(zip(texts.to_pylist(), lists.to_pylist(), strict=True)):
        value = json.loads(text) if is_list else [] if text is None else [text]
        if not all(x is None or type(x) in (int, str) for x in value):
            expected = "texts or whole numbers in lists"
            raise DataError(f"row {row + i + 1}, {name}: expected {expected}")
        values.append([x if x is None else str(x) for x in value])
    return pa.array(values, pa.list_(pa.string()))
