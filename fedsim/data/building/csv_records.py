"""Where a record of a CSV file ends must be certain: else one user is given the texts of others.

Arrow's reader takes a quotation that is never closed to the end of the file, and one that ends in
the middle of a field as if it went on. Python's, in its strict mode, takes neither. Of a record
with too many or too few columns Arrow says the text, which is a user's; here it is the line.
"""

import csv
import sys
from pathlib import Path

from fedsim.data.building.form import Form
from fedsim.errors import DataError


def check(file: Path, form: Form) -> None:
    """Raises: DataError: a quotation does not end where a field does, or a record has not as many
    columns as the first line, naming the line it begins in."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with form.opened(file, errors="replace") as lines:
            between = form.between(file)
            reader, line, columns = csv.reader(lines, delimiter=between, strict=True), 0, 0
            try:
                for record in reader:
                    columns = columns or len(record)
                    if record and len(record) != columns:  # empty lines are no records
                        raise DataError(_ragged(line + 1, columns, len(record), between))
                    line = reader.line_num
            except csv.Error as error:
                raise DataError(
                    f"line {line + 1}: expected every quotation to end where a column or a line "
                    f"does, so that it is certain whose text follows ({error})"
                ) from None
    finally:
        csv.field_size_limit(before)


def _ragged(line: int, columns: int, found: int, between: str) -> str:
    """What is said of a record with a wrong number of columns."""
    said = f"line {line}: expected {columns} columns, as in the first line, found {found}"
    if found < columns:
        return said
    mark = "a tab" if between == "\t" else f"'{between}'"
    return f"{said} (a text with {mark} in it stands between quotation marks)"
