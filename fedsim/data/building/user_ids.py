"""User ids: one rule for all files.

Certain corrections are made: white space around an id is no part of it, words that stand for a
missing value (NULL, \\N) are nobody, and 7.0 is 7, as pandas writes whole numbers in a column with
gaps. The float 0.5 and the rounded 1.23E18 are refused. All other ids stay as they are: unknown is
one user; 007 and 7, Ann and ann, the texts 3.1 and 3.10 are two users each, and counted as ids that
look alike. Only a person can say which ids belong together.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.errors import DataError

# Values that pandas.read_csv reads as missing, and NaT, which pandas writes.
NOBODY = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"]
NOBODY += ["1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null"]
# Nulls of MySQL, Hive, PostgreSQL and their clients.
NOBODY += ["\\N", "(null)", "(NULL)", "[null]", "[NULL]"]
NAMELESS = ["-", "--", "?", "-1", "anon", "anonymous", "deleted", "[deleted]", "[removed]", "guest"]
NAMELESS += ["n.a.", "undefined", "unknown"]
"""Ids, in small letters, that often stand for several people. Each is one user."""
RULE = 7  # version of the rule: a change that gives other users gets another number
# By bits of a float: smaller whole numbers are certain.
EXACT = {16: 2**11, 32: 2**24, 64: 2**53}
CERTAIN = 2**52  # floats tell apart all numbers of digits that are less without their point
WHOLE, FRACTION = r"^[+-]?[0-9]+\.0*$", r"^[+-]?[0-9]*\.[0-9]+$"
# Large and small floats as programs write them, rounded: 1.5E18, 1,5E+18, 1e+18.
ROUNDED = r"^[+-]?([0-9]+[.,][0-9]*[eEdD][+-]?|[.,][0-9]+[eEdD][+-]?|[0-9]+[eEdD]\+)[0-9]+$"
GUID = r"^(?:urn:uuid:)?\{?([0-9a-f]{8})-?" + r"([0-9a-f]{4})-?" * 3 + r"([0-9a-f]{12})\}?$"
DIFFERENCES = (
    (r"[\s\pZ]+", ""),
    (GUID, r"\1\2\3\4\5"),
    (r"^0+([0-9])", r"\1"),
    (r"^([0-9]+\.(?:[0-9]*[1-9])?)0+$", r"\1"),
    (r"^([0-9]+)\.$", r"\1"),
)
"""Patterns and replacements for ids that look alike, after what `_fold` removes."""
PLAIN = "^[!-~]*$"  # texts in which `_fold` changes only capitals
Rows = Sequence[int] | np.ndarray


def as_ids(column: pa.Array, field: str, rows: Rows) -> pa.Array:
    """User ids as strings; null for a row without user.

    Args:
      column: strings, integers or floats.
      field: name of the setting and column, for errors.
      rows: number of each row, counted from 0, for errors.
    Raises: DataError: a float has a fraction, or so many digits that it may have been rounded.
    """
    if pa.types.is_floating(column.type):
        numbers = column.cast(pa.float64())
        numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)  # pyright: ignore
        least = float(EXACT[column.type.bit_width])
        fits = call("less", call("abs", numbers), pa.scalar(least))
        whole = call("and", fits, call("equal", numbers, call("floor", numbers)))
        _refuse(call("invert", whole), numbers, field, rows)
        return numbers.cast(pa.int64()).cast(pa.string())
    text = call("utf8_trim_whitespace", column.cast(pa.string()))
    nobody = is_missing(text)
    text = call("if_else", nobody, pa.scalar(None, pa.string()), text)
    whole = call("match_substring_regex", text, pattern=WHOLE)
    fraction = call("match_substring_regex", text, pattern=FRACTION)
    rounded = call("match_substring_regex", text, pattern=ROUNDED)
    short = call("replace_substring_regex", text, pattern=r"\.0*$", replacement="")
    _refuse(call("or", rounded, _uncertain(short, call("or", whole, fraction))), text, field, rows)
    return call("if_else", whole, short, text)


def _uncertain(text: pa.Array, number: pa.Array) -> pa.Array:
    """True where a text is a number of so many digits that a float may have rounded it."""
    digits = call("replace_substring_regex", text, pattern="^[^1-9]+|[^0-9]", replacement="")
    digits = call("if_else", call("equal", digits, pa.scalar("")), pa.scalar("0"), digits)
    digits = call("if_else", number, digits, pa.scalar("0"))
    first = call("utf8_slice_codeunits", digits, start=0, stop=17)  # fits 64 bits
    return call("greater_equal", first.cast(pa.int64()), pa.scalar(CERTAIN))


def like_nobody(ids: pa.Array) -> int:
    """Number of ids that often stand for several people."""
    return call("is_in", call("utf8_lower", ids), value_set=pa.array(NAMELESS)).true_count


def is_missing(texts: pa.Array | pa.ChunkedArray) -> Any:
    """True for texts that are empty or a word for a missing value."""
    return call("is_in", texts, value_set=pa.array(NOBODY))


def _fold(text: str) -> str:
    """Remove invisible characters and differences of width, form and capitals."""
    bare = (c for c in text if unicodedata.category(c) not in ("Cf", "Cc"))
    text = unicodedata.normalize("NFKC", "".join(bare)).casefold()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def look_alike_keys(ids: pa.Array) -> pa.Array:
    """For each id a text that ids have in common which differ only in what `_fold` removes and in
    DIFFERENCES."""
    others = call("invert", call("match_substring_regex", ids, pattern=PLAIN))
    folded = pa.array(map(_fold, ids.filter(others).to_pylist()), pa.string())
    key = call("replace_with_mask", call("ascii_lower", ids), others, folded)
    for pattern, instead in DIFFERENCES:
        key = call("replace_substring_regex", key, pattern=pattern, replacement=instead)
    return key


def look_alikes(ids: pa.Array) -> tuple[int, list[str]]:
    """(Number of ids that look like another one, two that look alike). Args: ids: all different."""
    keys = look_alike_keys(ids)
    found = keys.value_counts()
    several = found.filter(call("greater", found.field("counts"), 1))
    if not len(several):
        return 0, []
    alike = ids.filter(call("equal", keys, several.field("values")[0]))
    return call("sum", several.field("counts")).as_py(), alike[:2].to_pylist()


def _refuse(bad: pa.Array, values: pa.Array, field: str, rows: Rows) -> None:
    if bad.true_count:
        place = bad.index(True).as_py()
        got = f"got {values[place].as_py()} in row {rows[place] + 1}"
        hint = "ids that were read as floats are to be saved as text or integers"
        raise refused(field, f"text or whole numbers, {got}; {hint}")


def refused(column: str, expected: str) -> DataError:
    """The error about a column, named as in `order_column=when`, or about a setting alone."""
    field, _, name = column.partition("=")
    if not name:
        return DataError(f"{field}: expected {expected}", field=field)
    return DataError.of(field, name, expected)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call the Arrow function of that name; type checkers do not know most of them."""
    return getattr(pc, name)(*arguments, **options)
