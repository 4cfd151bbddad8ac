"""Where a record of a CSV file ends must be certain: else one user is given the texts of others.

Arrow's reader takes a quotation that is never closed to the end of the file, and one that ends in
the middle of a field as if it went on. Python's, in its strict mode, takes neither.
"""

import csv
import sys
from pathlib import Path

from fedsim.data.building.form import Form
from fedsim.errors import DataError


def check(file: Path, form: Form) -> None:
    """Raises: DataError: a quotation does not end where a field does, naming the line it is in."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        with form.opened(file, errors="replace") as lines:
            reader, line = csv.reader(lines, delimiter=form.between(file), strict=True), 0
            try:
                for _ in reader:
                    line = reader.line_num
            except csv.Error as error:
                raise DataError(
                    f"line {line + 1}: expected every quotation to end where a column or a line "
                    f"does, so that it is certain whose text follows ({error})"
                ) from None
    finally:
        csv.field_size_limit(before)
