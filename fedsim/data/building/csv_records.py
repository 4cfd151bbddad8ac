"""Where a record of a CSV file ends must be certain: else one user is given the texts of others.

Arrow's reader takes a quotation that is never closed to the end of the file, and one that ends in
the middle of a field as if it went on. Python's, in its strict mode, takes neither. A file that was
written without quoting can pass both: a text begins with a quotation mark, one some lines later
ends with one, and all rows between become one text. So a quotation over several lines is refused
where the file reads as well without quoting. No message shows what a file holds: it is a user's.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from fedsim.data.building.text_format import NONE, Form
from fedsim.errors import DataError

MARK = '"'
MOST_CHARACTERS = 2**26  # of a record: a file of a few hundred kB may unpack to one of many GB


def check(file: Path, form: Form) -> None:
    """Raises: DataError: a quotation does not end where a field does or may be none, a record is
    too long or has not as many columns as the first line, or the first line comes again. Names the
    line in which the record begins."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with form.opened(file, errors="replace") as stream:
            _check(_Lines(stream), form, form.between(file))
    finally:
        csv.field_size_limit(before)


def _check(lines: "_Lines", form: Form, between: str) -> None:
    quoting = csv.QUOTE_NONE if form.quoting == NONE else csv.QUOTE_MINIMAL
    reader = csv.reader(lines, delimiter=between, strict=True, quoting=quoting)
    line, first, doubts = 0, [], _Doubts(0, between)
    try:
        for record in reader:
            if not first:
                first, doubts = record, _Doubts(len(record), between)
            elif record and len(record) != len(first):  # empty lines are no records
                raise DataError(_ragged(line + 1, len(first), len(record), between, form))
            elif len(first) > 1 and record == first:
                raise DataError(
                    f"line {line + 1}: expected the names of the columns once, in the first line, "
                    "and here they are again, as where files were joined"
                )
            if lines.quoted and form.quoting is None and len(first) > 1:
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
    """The lines of a file, and which of them the record that is read now has taken.

    Attributes: taken: the lines. quoted: whether a quotation mark is in them.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._done = stream, 0
        self.begin_record()

    def begin_record(self) -> None:
        """The next line is another record's."""
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
    """Whether a file reads as well without quoting, by its records with quotation marks.

    A record of several lines may hide rows: all its lines, or some between its first and its last,
    have as many columns as the first line of the file. Texts have commas, too, so that it counts
    only where nothing else shows that the file is quoted; texts have hardly any tabs.
    """

    def __init__(self, columns: int, between: str):
        self._columns, self._between = columns, between
        self._hiding: DataError | None = None  # what is said of the first record that may hide rows
        self._is_quoted = False  # a record shows it
        self._has_bare_marks = False  # inside fields that are not quoted: no program writes that

    def see(self, line: int, lines: list[str]) -> None:
        """A record with a quotation mark, which begins in that line.

        Raises: DataError: it may hide rows, and has tabs between its columns.
        """
        counts = [each.count(self._between) + 1 for each in lines if each.strip("\r\n")]
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
        bare = are_rows and any(MARK in each and not each.startswith(MARK) for each in fields)
        self._has_bare_marks |= bare
        self._is_quoted |= not bare and (doubled or not are_rows or line == 1)

    def settle(self) -> None:
        """Raises: DataError: a record may hide rows."""
        if self._hiding is not None and (self._has_bare_marks or not self._is_quoted):
            raise self._hiding

    def _refusal(self, first: int, last: int) -> DataError:
        return DataError(
            f"line {first}: expected a quotation that is certain; the one that begins here ends in "
            f"line {last}, and lines in it have {self._columns} columns, as the first line has: "
            "they may be rows of other users. Written without quoting: `fedsim data build "
            "--quoting none`; with: `--quoting minimal`"
        )


def _ragged(line: int, columns: int, found: int, between: str, form: Form) -> str:
    """What is said of a record with a wrong number of columns."""
    said = f"line {line}: expected {columns} columns, as in the first line, found {found}"
    if found < columns or form.quoting == NONE:
        return said
    mark = "a tab" if between == "\t" else f"'{between}'"
    return f"{said} (a text with {mark} in it stands between quotation marks)"
