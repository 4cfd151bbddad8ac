"""Text files: the format of CSV and JSON, the check of CSV records, and the parser of JSON.

It must be certain where a record of a CSV file ends: else a user is given the texts of others.
Arrow's reader extends a quotation that is never closed to the end of the file, and continues one
that ends in the middle of a field. Python's reader, in its strict mode, does neither. A file that
was written without quoting can pass both: a text begins with a quotation mark, a text some lines
later ends with one, and all rows between become one text. So a quotation over several lines is
refused if the file is also valid without quoting.

JSON is parsed by Python: Arrow's reader would convert some texts to dates. No error shows a value
of a file, for it may be personal.
"""

import codecs
import csv
import gzip
import json
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pyarrow as pa

from fedsim.data.building.columns import is_usual
from fedsim.data.building.speakers import HALF, HALVED
from fedsim.errors import DataError

NONE, MINIMAL = "none", "minimal"
MARK = '"'
MOST_CHARACTERS = 2**26  # of a record: a file of a few hundred kB may unpack to one of many GB
READ_CHARACTERS = 2**20  # of a JSON list, at a time


@dataclass(frozen=True)
class TextFormat:
    """Format of a text file that its name does not say.

    Raises:
      DataError: a setting is invalid.
    """

    delimiter: str | None = None
    """Delimiter of columns. None: a comma, or a tab in a file named .tsv."""
    encoding: str = "utf-8"
    quoting: str | None = None
    """Meaning of quotation marks in CSV. "none": characters like others. "minimal": they enclose
    fields with delimiters or line ends. None: as "minimal", but a file that is also valid without
    quoting is refused."""

    def __post_init__(self):
        one = self.delimiter is None or len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
        if not one:
            raise DataError.of("delimiter", self.delimiter, "one character, such as ; or |")
        if self.quoting not in (None, NONE, MINIMAL):
            raise DataError.of("quoting", self.quoting, f"{NONE} or {MINIMAL}")
        try:
            "".encode(self.encoding)
            codecs.getincrementaldecoder(self.encoding)().decode(pa.py_buffer(b""))  # as Arrow
        except (AttributeError, LookupError, TypeError, ValueError):  # punycode takes only bytes
            raise DataError.of(
                "encoding", self.encoding, "an encoding of text that Python knows, such as cp1252"
            ) from None

    def between(self, file: Path) -> str:
        """The delimiter of columns in a file."""
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if file.name.removesuffix(".gz").lower().endswith(".tsv") else ","

    @property
    def decoder(self) -> str:
        """The encoding to read with. UTF-8 may begin with a byte order mark."""
        utf8 = codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")
        return "utf-8-sig" if utf8 else self.encoding

    @property
    def has_lines(self) -> bool:
        """True if the bytes of a line end mean nothing else: a file can be cut after them."""
        return self.decoder == "utf-8-sig" or "\n{}".encode(self.encoding) == b"\n{}"

    def opened(self, file: Path, *, errors: str = "strict") -> TextIO:
        """Open a file as text. Line ends stay as they are."""
        opener = gzip.open if file.suffix == ".gz" else open
        return opener(file, "rt", encoding=self.decoder, errors=errors, newline="")


def check_csv(
    file: Path, text_format: TextFormat, names: Callable[[list[str]], None] = lambda _: None
) -> None:
    """Check that the end of every record of a CSV file is certain.

    Args:
      names: checks the names of the columns, before other records are looked at; not called where
        some are in another encoding.
    Raises:
      DataError: names the line in which a record begins. A quotation does not end where a field
        does, or may be none; a record is too long, or has another number of columns than the first
        line; or the first line is repeated.
    """
    before = csv.field_size_limit(sys.maxsize)
    try:
        with text_format.opened(file, errors="replace") as stream:
            _check(_Lines(stream), text_format, text_format.between(file), names)
    finally:
        csv.field_size_limit(before)


def _check(
    lines: "_Lines",
    text_format: TextFormat,
    between: str,
    names: Callable[[list[str]], None],
) -> None:
    quoting = csv.QUOTE_NONE if text_format.quoting == NONE else csv.QUOTE_MINIMAL
    reader = csv.reader(lines, delimiter=between, strict=True, quoting=quoting)
    line, first, doubts = 0, [], _Doubts(0, between)
    try:
        for record in reader:
            if not first:
                first, doubts = record, _Doubts(len(record), between)
                if record and "\ufffd" not in "".join(record):
                    names(record)
            elif record and len(record) != len(first):  # empty lines are no records
                raise DataError(_ragged(line + 1, len(first), len(record), between, text_format))
            elif len(first) > 1 and record == first:
                raise DataError(
                    f"line {line + 1}: expected the names of the columns once, in the first line, "
                    "and here they are again, as where files were joined"
                )
            if lines.quoted and text_format.quoting is None and len(first) > 1:
                doubts.see(line + 1, lines.taken)
            line = reader.line_num
            lines.begin_record()
    except csv.Error as error:
        raise DataError(
            f"line {line + 1}: expected every quotation to end where a column or a line does, so "
            f"that it is certain whose text follows ({error}); without quoting: `fedsim data build "
            "--quoting none`"
        ) from None
    doubts.settle()


class _Lines:
    """Lines of a file, with those of the record that is being read.

    Attributes:
      taken: lines of the record.
      quoted: True if the record has a quotation mark.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._done = stream, 0
        self.begin_record()

    def begin_record(self) -> None:
        """Begin the next record."""
        self._done += len(getattr(self, "taken", ()))
        self.taken: list[str] = []
        self._size, self.quoted = 0, False

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MOST_CHARACTERS - self._size + 1):
            self.taken.append(line)
            self._size += len(line)
            self.quoted = self.quoted or MARK in line
            if self._size > MOST_CHARACTERS:
                raise DataError(
                    f"line {self._done + 1}: expected a record of at most {MOST_CHARACTERS:,} "
                    "characters; is a quotation never closed, or the file no CSV?"
                )
            yield line


class _Doubts:
    """Evidence, from records with quotation marks, that a file is valid without quoting.

    A record of several lines may hide rows: all its lines, or some between its first and its last,
    have as many columns as the first line of the file. Texts have commas, too, so this counts only
    if no record shows that the file is quoted. Texts hardly ever have tabs.
    """

    def __init__(self, columns: int, between: str):
        self._columns, self._between = columns, between
        self._hiding: DataError | None = None  # the error about the first record that may hide rows
        self._is_quoted = False  # True once a record shows it
        self._has_bare_marks = False  # inside unquoted fields, which no program writes

    def see(self, line: int, lines: list[str]) -> None:
        """Add a record with a quotation mark. Args: line: the line in which it begins.

        Raises:
          DataError: the record may hide rows, and its delimiter is a tab.
        """
        counts = [text.count(self._between) + 1 for text in lines if text.strip("\r\n")]
        are_rows = all(count == self._columns for count in counts)
        doubled = MARK * 2 in "".join(lines)
        hides_rows = len(lines) > 1 and (are_rows or self._columns in counts[1:-1])
        if hides_rows and self._between == "\t":
            raise self._refusal(line, line + len(lines) - 1)
        if hides_rows:
            self._hiding = self._hiding or self._refusal(line, line + len(lines) - 1)
            self._is_quoted |= doubled
            return
        fields = lines[0].split(self._between)
        bare = are_rows and any(MARK in text and not text.startswith(MARK) for text in fields)
        self._has_bare_marks |= bare
        self._is_quoted |= not bare and (doubled or not are_rows or line == 1)

    def settle(self) -> None:
        """Decide at the end of the file. Raises: DataError: a record may hide rows."""
        if self._hiding is not None and (self._has_bare_marks or not self._is_quoted):
            raise self._hiding

    def _refusal(self, first: int, last: int) -> DataError:
        return DataError(
            f"line {first}: expected a quotation that is certain; the one that begins here ends in "
            f"line {last}, and lines in it have {self._columns} columns, as the first line has: "
            "they may be rows of other users. Written without quoting: `fedsim data build "
            "--quoting none`; with: `--quoting minimal`"
        )


def _ragged(line: int, columns: int, found: int, between: str, text_format: TextFormat) -> str:
    """Error line about a record with a wrong number of columns."""
    said = f"line {line}: expected {columns} columns, as in the first line, found {found}"
    if found < columns or text_format.quoting == NONE:
        return said
    mark = "a tab" if between == "\t" else f"'{between}'"
    return f"{said} (a text with {mark} in it stands between quotation marks)"


NOT_SPACE = re.compile(r"\S")
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
KINDS |= {int: "a number", float: "a number", type(None): "null"}
SCRIPT = re.compile(r"[\w.$ ]{1,100}=\s*[\[{]")
TELEGRAM = "exports of Telegram hold texts as lists of pieces, whose `text` is to be joined first"


class Record(NamedTuple):
    """An object of a JSON file."""

    size: int
    """Its length in characters or bytes."""
    number: int
    """Number of its line, or of its entry in the list, from 1."""
    fields: dict[str, Any]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. Raises: DataError: a key is there twice, so that its value is uncertain."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise DataError("expected every key of an object once, got one twice")
    return fields


_decoder = json.JSONDecoder(object_pairs_hook=_once)


def json_lines(lines: Iterator[bytes], before: int, encoding: str) -> Iterator[Record]:
    """Yield the object of each line that is not blank.

    Args:
      before: number of lines of the file before these.
    Raises:
      ValueError: names the line.
    """
    for number, line in enumerate(lines, before + 1):
        if line.isspace():
            continue
        try:
            if len(line) > MOST_CHARACTERS:
                raise ValueError(f"expected a line of at most {MOST_CHARACTERS:,} bytes")
            row = _decoder.decode(line.decode(encoding))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None
        yield Record(len(line), number, _expect_object(row, f"line {number}"))


def json_list(stream: TextIO) -> Iterator[Record]:
    """Yield the entries of a file that is one list. The list is never in memory as a whole.

    Raises:
      ValueError: names the entry.
    """
    text, at, number = "", 0, 0

    def next_character() -> str:
        """The next one that is not white space, now at `at`; empty at the end of the file."""
        nonlocal text, at
        while True:
            if found := NOT_SPACE.search(text, at):
                at = found.start()
                return text[at]
            text, at = stream.read(READ_CHARACTERS), 0
            if not text:
                return ""

    opening = next_character()
    assert opening == "[", "the caller has looked"
    at += 1
    while next_character() != "]":
        number += 1
        while True:
            try:
                row, end = _decoder.raw_decode(text, at)
                break
            except (DataError, RecursionError) as error:
                raise ValueError(f"entry {number}: {error}") from None
            except ValueError as error:
                if len(text) - at > MOST_CHARACTERS:
                    most = f"expected JSON of at most {MOST_CHARACTERS:,} characters"
                    raise ValueError(f"entry {number}: {most} ({error})") from None
                more = stream.read(max(READ_CHARACTERS, len(text) - at))
                if not more:
                    raise ValueError(f"entry {number}: {error}") from None
                text, at = text[at:] + more, 0
        yield Record(end - at, number, _expect_object(row, f"entry {number}"))
        at = end
        following = next_character()
        if following == ",":
            at += 1
        elif following != "]":
            raise ValueError(f"entry {number}: expected a comma or ] after it")
    at += 1
    if next_character():
        raise ValueError("expected nothing after the list")


def other_json(text: str, wanted: list[str]) -> str | None:
    """Describe a JSON file that is neither a list of objects nor has one object per line.

    Args:
      text: beginning of the file.
      wanted: columns to read.
    Returns:
      Its format and how to convert it; None if the format is not certain.
    """
    if SCRIPT.match(text):
        return "a script, as in an archive of Twitter: leave out what stands before its first ["
    try:
        first, end = _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        first, end = None, len(text)  # something else, or it goes on
    over_lines = "\n" in text[:end]
    if isinstance(first, dict) and not over_lines and not {*wanted}.isdisjoint(field_names(first)):
        return None
    key = _list_inside(text) if over_lines or first is not None else None
    if key is not None:
        hint = f": jq -c '.{key}[]' makes lines of it" if key.isalpha() and is_usual(key) else ""
        return f"one object around a list of objects, as in an export of Telegram{hint}"
    return (
        "objects over several lines: jq -c . makes lines of them" if over_lines and first else None
    )


def _list_inside(text: str) -> str | None:
    """Key of the first list of objects in the object that a text begins with, if any."""
    at = 1 if text.startswith("{") else len(text)
    try:
        while at < len(text):
            key, at = _decoder.raw_decode(text, _next(text, at))
            at = _next(text, _next(text, at) + 1)  # beyond the colon
            if text[at] == "[" and text[_next(text, at + 1)] == "{":
                return key if isinstance(key, str) else None
            _, at = _decoder.raw_decode(text, at)
            at = _next(text, at) + 1  # beyond the comma
    except (ValueError, IndexError, RecursionError):
        pass  # it is cut off here
    return None


def _next(text: str, at: int) -> int:
    """Index of the next character that is not white space."""
    match = NOT_SPACE.search(text, at)
    return match.start() if match else len(text)


def _expect_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        hint = "; a file of one list is named .json" if where == "line 1" and row else ""
        raise ValueError(f"{where}: expected an object, got {KINDS[type(row)]}{hint}")
    return row


def field_names(record: dict[str, Any]) -> Iterator[str]:
    """Names of the fields of a record. Names of fields inside others have a dot."""
    for key, value in record.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in field_names(value))


def field_value(record: dict[str, Any], name: str) -> Any:
    """Value of a field, or of a field inside others; None if there is none."""
    if name in record or "." not in name:
        return record.get(name)
    outer, _, inner = name.partition(".")
    return field_value(record[outer], inner) if isinstance(record.get(outer), dict) else None


def as_column(
    values: list[Any], name: str, where: tuple[str, list[int]], is_text: bool = False
) -> pa.Array:
    """Convert values to an Arrow array.

    Numbers beside strings become strings. Values beside lists become lists of one. In texts, half
    of a surrogate pair becomes U+FFFD.

    Args:
      name: name of the column, for errors.
      where: "line" or "entry", and its number for each value.
      is_text: True if the column holds texts, not ids.
    Raises:
      ValueError: values are of several kinds, or of a kind that makes no column. Names the first.
    """
    kinds = {type(value) for value in values} - {type(None)}
    refused = None
    if float in kinds and (is_text or str in kinds):  # JSON of pandas has NaN for what is missing
        values = [None if value != value else value for value in values]
        kinds = {type(value) for value in values} - {type(None)}
    if dict in kinds or list in kinds:
        refused = next((i for i, value in enumerate(values) if _has_no_place(value, is_text)), None)
    if list in kinds and kinds <= {int, str, list}:
        values = [[v] if isinstance(v, int | str) else v for v in values]
        kinds = {list}
    if str in kinds and kinds <= {int, float, str}:
        values = [None if value is None else str(value) for value in values]
        kinds = {str}
    if refused is None:
        try:
            return pa.array(values)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError):
            if is_text and kinds == {str}:
                return pa.array([v if v is None else HALF.sub("\ufffd", v) for v in values])
            refused = _first_refused(values, kinds)
    word, numbers = where
    reason = _reason(values[refused], kinds, is_text)
    raise ValueError(f"{word} {numbers[refused]}, {name}: {reason}")


def _has_no_place(value: Any, is_text: bool) -> bool:
    """True for an object, and for a list whose first value is neither an id nor a token."""
    if isinstance(value, list):
        value = next((item for item in value if item is not None), None)
        return isinstance(value, dict | list) or is_text and isinstance(value, str)
    return isinstance(value, dict)


def _first_refused(values: list[Any], kinds: set[type]) -> int:
    """Index of the value of the rarest kind, or of the first that Arrow cannot add to a column."""
    if len({KINDS[kind] for kind in kinds}) > 1:
        rare = min(kinds, key=lambda kind: sum(type(value) is kind for value in values))
        return next(i for i, value in enumerate(values) if type(value) is rare)

    def refused(count: int) -> bool:
        try:
            pa.array(values[:count])
        except (pa.ArrowException, UnicodeEncodeError, OverflowError):
            return True
        return False

    return bisect_left(range(1, len(values)), True, key=refused)


def _reason(value: Any, kinds: set[type], is_text: bool) -> str:
    """Reason why a value makes no column, without the value."""
    said = KINDS[type(value)]
    if isinstance(value, list):
        inside = {KINDS[type(item)] for item in value}
        if any(isinstance(item, str) and HALF.search(item) for item in value):
            return HALVED
        expected = "whole numbers, which are tokens," if is_text else "texts or whole numbers"
        known = is_text and inside & {KINDS[dict], KINDS[str]}
        hint = f" ({TELEGRAM}; of chats: --messages-column)" if known else ""
        return f"expected {expected} in a list, got {' and '.join(sorted(inside))}{hint}"
    if isinstance(value, str) and HALF.search(value):
        return HALVED
    if isinstance(value, int | float) and {KINDS[kind] for kind in kinds} == {said}:
        return "expected a number below 2^63, and below 2^53 beside fractions"
    return f"expected {'a text' if is_text else 'a text or a number'} as in other rows, got {said}"
