"""User ids: one rule for all files.

Certain corrections are made: white space around an id is no part of it, words that stand for a
missing value (NULL, \\N) are nobody, and 7.0 is 7, as pandas writes whole numbers in a column with
gaps. The float 0.5 and the rounded 1.23E18 are refused. Doubtful ids stay as they are and are
counted: 007 and 7, Ann and ann, the texts 3.1 and 3.10 are two users each, and unknown is one. Only
a person can say which other ids belong together.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.data.store import SEPARATOR
from fedsim.errors import DataError

# Values that pandas.read_csv reads as missing, and NaT, which pandas writes.
NOBODY = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"]
NOBODY += ["1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null"]
# Nulls of MySQL, Hive, PostgreSQL and their clients.
NOBODY += ["\\N", "(null)", "(NULL)", "[null]", "[NULL]"]
NAMELESS = ["-", "--", "?", "-1", "anon", "anonymous", "deleted", "[deleted]", "[removed]", "guest"]
NAMELESS += ["n.a.", "undefined", "unknown"]
"""Ids, in small letters, that often stand for several people. Each is one user."""
RULE = 6  # version of the rule: a change that gives other users gets another number
# By bits of a float: smaller whole numbers are certain.
EXACT = {16: 2**11, 32: 2**24, 64: 2**53}
CERTAIN = 2**52  # floats tell apart all numbers of digits that are less without their point
WHOLE, FRACTION = r"^[+-]?[0-9]+\.0*$", r"^[+-]?[0-9]*\.[0-9]+$"
# A comma or semicolon between two parts, or a list of texts with one of them.
LISTED = r"[^\s,;]\s*[,;][\s,;]*[^\s,;]|^\[\s*[\"'].*\]$"
# Large and small floats as programs write them, rounded: 1.5E18, 1,5E+18, 1e+18.
ROUNDED = r"^[+-]?([0-9]+[.,][0-9]*[eEdD][+-]?|[.,][0-9]+[eEdD][+-]?|[0-9]+[eEdD]\+)[0-9]+$"
LIKE_ROUNDED = r"^[+-]?[0-9][eE]-?[0-9]+$"  # 5e18, which may also be a name
# Differences of ids that look alike, beside those that `fold` removes: zeros in front or at the
# end, and the decimal comma.
ZEROS, COMMA = r"^0+([0-9])", r"^([0-9]+),([0-9]+)$"
EXCEL = r'^="(.*)"$'  # a text that Excel must not take for a number
GUID = r"^(?:urn:uuid:)?\{?" + r"([0-9a-f]{8})-?" + r"([0-9a-f]{4})-?" * 3 + r"([0-9a-f]{12})\}?$"
PLUS = r"^\+([0-9])"  # of a telephone: +49, 0049
# Letters of Cyrillic and Greek, and the Latin ones that they, or their capitals, look like.
HOMOGLYPHS = str.maketrans(
    "\u0430\u0432\u0435\u0456\u043a\u043c\u043d\u043e\u0440\u0441\u0442\u0443\u0445\u0455\u0458"
    "\u03b1\u03b2\u03b5\u03b6\u03b7\u03b9\u03ba\u03bc\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7",
    "abeikmhopctyxsj" + "abezhikmnoptyx",
)
ZEROS_AFTER = r"^([0-9]+\.(?:[0-9]*[1-9])?)0+$"
# Ignorable characters of Unicode that its categories Cf and Cc lack: variation selectors, fillers
# and joiners that are letters or marks by their category; the blank of Braille.
MARKS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
MAIL = r"^(?:mailto:|.*<)([^<>]+@[^<>]+)>?$"  # "Ann" <ann@x.org>, without white space: ann@x.org
PLAIN = "^[!-~]*$"  # texts in which `fold` changes only capitals

TRIMMED, SHORTENED, WORDS = "user_ids_trimmed", "user_ids_without_fraction", "words_for_nobody"
FRACTIONS, SEVERAL = "user_ids_like_fractions", "owners_like_several"
EXPONENTS, OF_MANY = "user_ids_like_exponents", "user_ids_like_nobody"
_SAID = {
    TRIMMED: "white space around the user id, which is no part of it",
    SHORTENED: "a user id like 7.0, which is 7",
    WORDS: "a word such as NA or None for a user, which is nobody",
    EXPONENTS: "a user id like 1E18, which stays a text: if a program rounded numbers so, it is "
    "several people",
    OF_MANY: "a user such as unknown, [deleted] or -1, who counts as one user: if that is nobody, "
    "leave such rows out",
    FRACTIONS: "a user id like 3.10, which stays a text: 3.1 is somebody else",
    SEVERAL: "an owner with a comma or semicolon inside, or a list as text, who is one user: if "
    "that is several, owners and owners_delimiter of `fedsim data build` make it so",
}
"""Names of counts of rows, and the end of the line that tells the user about them."""

Rows = Sequence[int] | np.ndarray


def as_ids(column: pa.Array, field: str, rows: Rows, tally: Counter[str]) -> pa.Array:
    """User ids as strings; null for a row without user.

    Args:
      column: strings, integers or floats.
      field: name of the setting and column, for errors.
      rows: number of each row, counted from 0, for errors.
      tally: counts corrections and doubtful ids, by the names of `_SAID`.
    Raises:
      DataError: a float has a fraction, or a number so many digits that a float may have rounded
        it.
    """
    lower = call("utf8_lower", call("utf8_trim_whitespace", column.cast(pa.string())))
    tally[OF_MANY] += call("is_in", lower, value_set=pa.array(NAMELESS)).true_count
    if pa.types.is_floating(column.type):
        least = EXACT[column.type.bit_width]
        numbers = column.cast(pa.float64())
        numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)  # pyright: ignore
        fits = call("less", call("abs", numbers), pa.scalar(float(least)))
        whole = call("and", fits, call("equal", numbers, call("floor", numbers)))
        _refuse(call("invert", whole), numbers, field, rows)
        tally[SHORTENED] += whole.true_count
        return numbers.cast(pa.int64()).cast(pa.string())
    given = column.cast(pa.string())
    text = call("utf8_trim_whitespace", given)
    nobody = is_missing(text)
    tally[TRIMMED] += call("and", call("not_equal", text, given), call("invert", nobody)).true_count
    tally[WORDS] += call("and", nobody, call("not_equal", text, pa.scalar(""))).true_count
    text = call("if_else", nobody, pa.scalar(None, pa.string()), text)
    whole = call("match_substring_regex", text, pattern=WHOLE)
    short = call("replace_substring_regex", text, pattern=r"\.0*$", replacement="")
    fraction = call("match_substring_regex", text, pattern=FRACTION)
    rounded = call("match_substring_regex", text, pattern=ROUNDED)
    number = call("or", whole, fraction)
    _refuse(call("or", rounded, _uncertain(short, number)), text, field, rows)
    tally[SHORTENED] += whole.true_count
    tally[FRACTIONS] += call("and", fraction, call("invert", whole)).true_count
    tally[EXPONENTS] += call("match_substring_regex", text, pattern=LIKE_ROUNDED).true_count
    return call("if_else", whole, short, text)


def _uncertain(text: pa.Array, number: pa.Array) -> pa.Array:
    """True where a text is a number of so many digits that a float may have rounded it."""
    digits = call("replace_substring_regex", text, pattern="^[^1-9]+|[^0-9]", replacement="")
    digits = call("if_else", call("equal", digits, pa.scalar("")), pa.scalar("0"), digits)
    digits = call("if_else", number, digits, pa.scalar("0"))
    first = call("utf8_slice_codeunits", digits, start=0, stop=17)  # fits 64 bits
    return call("greater_equal", first.cast(pa.int64()), pa.scalar(CERTAIN))


def fold(text: str) -> str:
    """Remove invisible characters and differences of width, form, script and capitals."""
    bare = (c for c in MARKS.sub("", text) if unicodedata.category(c) not in ("Cf", "Cc"))
    text = unicodedata.normalize("NFKC", "".join(bare)).casefold()
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return text.translate(HOMOGLYPHS)


def _folded(text: pa.Array) -> pa.Array:
    """Fold each different text once."""
    unique = text.dictionary_encode()
    values = unique.dictionary
    plain = call("match_substring_regex", values, pattern=PLAIN)
    others = pa.array(
        [fold(text) for text in values.filter(call("invert", plain)).to_pylist()], pa.string()
    )
    lower = call("ascii_lower", values)
    return call("replace_with_mask", lower, call("invert", plain), others).take(unique.indices)


def is_missing(texts: pa.Array | pa.ChunkedArray) -> Any:
    """True for texts that are empty or a word for a missing value."""
    return call("is_in", texts, value_set=pa.array(NOBODY))


def count_lists(ids: pa.Array, tally: Counter[str]) -> None:
    """Count ids that may be several in one cell, as addresses in the field To of a mail."""
    tally[SEVERAL] += call("match_substring_regex", ids, pattern=LISTED).true_count


def summary_lines(tally: Counter[str]) -> list[str]:
    """Lines for the user about corrected and doubtful ids."""
    rows = {
        name: "1 row has" if tally[name] == 1 else f"{tally[name]:,} rows have" for name in _SAID
    }
    return [f"{rows[name]} {what}" for name, what in _SAID.items() if tally[name]]


def counted(tally: Counter[str]) -> dict[str, int]:
    """Counts of corrected and doubtful ids that are not zero."""
    return {name: tally[name] for name in _SAID if tally[name]}


def lookalike_warning(number: int, examples: Sequence[str], what: str = "user") -> str:
    """Line for the user about the result of `look_alikes`."""
    names = " and ".join(map(repr, examples))
    return f"{number:,} {what} ids look like another one, as {names} do: a {what} each"


def look_alikes(ids: pa.Array) -> tuple[int, list[str]]:
    """Find users whose ids look like the id of another user.

    Such ids differ only in what `fold` removes, in white space, in zeros or a plus in front, in
    zeros after a point, in a decimal comma, or in how Excel or a GUID is written.

    Args:
      ids: different user ids, or owner sets as strings (see store.py).
    Returns:
      (number of such users, two of them that look alike).
    """
    people = pc.split_pattern(ids, SEPARATOR).flatten().unique()  # pyright: ignore
    key = look_alike_keys(people)
    counts = key.value_counts()
    several = counts.filter(pc.greater(counts.field("counts"), 1))  # pyright: ignore
    if not len(several):
        return 0, []
    alike = people.filter(call("equal", key, several.field("values")[0]))
    return int(pc.sum(several.field("counts")).as_py()), alike[:2].to_pylist()  # pyright: ignore


def look_alike_keys(ids: pa.Array) -> pa.Array:
    """For each id a text that ids which look alike have in common; see `look_alikes`."""
    key = _folded(ids)
    for pattern, instead in (
        (r"[\s\pZ]+", ""),
        (MAIL, r"\1"),
        (EXCEL, r"\1"),
        (GUID, r"\1\2\3\4\5"),
        (PLUS, r"\1"),
        (ZEROS, r"\1"),
        (COMMA, r"\1.\2"),
        (ZEROS_AFTER, r"\1"),
        (r"^([0-9]+)\.$", r"\1"),
    ):
        key = call("replace_substring_regex", key, pattern=pattern, replacement=instead)
    return key


def _refuse(bad: pa.Array, values: pa.Array, field: str, rows: Rows) -> None:
    if not bad.true_count:
        return
    place = bad.index(True).as_py()
    raise refused(
        field,
        f"text or whole numbers, got {values[place].as_py()} in row {rows[place] + 1}; ids that "
        "were read as floats are to be saved as text or integers",
    )


def refused(column: str, expected: str) -> DataError:
    """The error about a column, named as in `order_column=when`, or about a setting alone."""
    field, _, name = column.partition("=")
    if not name:
        return DataError(f"{field}: expected {expected}", field=field)
    return DataError.of(field, name, expected)


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Call the Arrow function of that name; type checkers do not know most of them."""
    return getattr(pc, name)(*arguments, **options)
