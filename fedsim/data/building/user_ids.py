"""How ids of users are read: one rule, whatever the file.

What is certain is put right: white space around an id is no part of it, the words that stand for a
missing value are nobody, and 7.0 is 7, which pandas writes for whole numbers in a column with gaps.
What is not is refused, as the float 0.5 and the rounded 1.23E18 are, or stays as it is and is
counted: 007 and 7, Ann and ann, the texts 3.1 and 3.10 are two users each. What else is one user is
for a person to say: see STEPS.
"""

import ipaddress
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from encodings.idna import nameprep
from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from publicsuffixlist import PublicSuffixList

from fedsim.data.store import SEPARATOR
from fedsim.errors import DataError

# What pandas.read_csv takes for a missing value, and NaT, which pandas writes.
NOBODY = ["", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"]
NOBODY += ["1.#QNAN", "<NA>", "N/A", "NA", "NULL", "NaN", "NaT", "None", "n/a", "nan", "null"]
RULE = 4  # another number where another rule gives other users
EXACT = {16: 2**11, 32: 2**24, 64: 2**53}  # by a float's bits: whole numbers below are themselves
DIGITS = 15  # so many are always below 2^53
WHOLE, FRACTION = r"^[+-]?[0-9]+\.0*$", r"^[+-]?[0-9]*\.[0-9]+$"
LISTED = r"[^\s,;]\s*[,;][\s,;]*[^\s,;]"  # two parts
# As programs write floats that are large or small, and have rounded: 1.5E18, 1,5E+18, 1e+18.
ROUNDED = r"^[+-]?([0-9]+[.,][0-9]*[eEdD][+-]?|[.,][0-9]+[eEdD][+-]?|[0-9]+[eEdD]\+)[0-9]+$"
LIKE_ROUNDED = r"^[+-]?[0-9][eE]-?[0-9]+$"  # or a name: 5e18
# What two ids may differ in that looks alike, beside what FOLDED makes one: zeros in front or at
# the end, and the decimal comma.
ZEROS, COMMA = r"^0+([0-9])", r"^([0-9]+),([0-9]+)$"
ZEROS_AFTER = r"^([0-9]+\.(?:[0-9]*[1-9])?)0+$"
# Format and control characters, and what else Unicode calls ignorable: variation selectors, fillers
# and joiners that are letters or marks by their category; the blank of Braille.
MARKS = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
MAIL = r"^(?:mailto:|.*<)([^<>]+@[^<>]+)>?$"  # "Ann" <ann@x.org>, without white space: ann@x.org
PLAIN = "^[!-~]*$"  # of which only capitals are folded

STEPS = ("strip-marks", "nfkc", "casefold")
"""What may be done to all ids: characters that one does not see go; those that look alike, as full
and half width ones do, are one (Unicode's NFKC); capitals are small letters. In this order."""

TRIMMED, SHORTENED, WORDS = "user_ids_trimmed", "user_ids_without_fraction", "words_for_nobody"
FRACTIONS, SEVERAL = "user_ids_like_fractions", "owners_like_several"
NORMALISED, EXPONENTS = "user_ids_normalised", "user_ids_like_exponents"
_SAID = {
    TRIMMED: "white space around the user id, which is no part of it",
    SHORTENED: "a user id like 7.0, which is 7",
    WORDS: "a word such as NA or None for a user, which is nobody",
    NORMALISED: "a user id that normalise_ids changed",
    EXPONENTS: "a user id like 1E18, which stays a text: if a program rounded numbers so, it is "
    "several people",
    FRACTIONS: "a user id like 3.10, which stays a text: 3.1 is somebody else",
    SEVERAL: "an owner with a comma or semicolon inside, who is one user: if that is a list, "
    "`fedsim data build --owners-delimiter ,` makes it several",
}
"""What is counted of rows, and what a person is told that they have."""

Rows = Sequence[int] | np.ndarray


def as_ids(
    column: pa.Array, field: str, rows: Rows, tally: Counter[str], how: Sequence[str] = ()
) -> pa.Array:
    """Ids as strings; null where a row is nobody's.

    Args:
      rows: the row of each, counted from 0.
      tally: counts what was put right, by the names of `_SAID`.
      how: those of STEPS that are done to texts.
    Raises: DataError: numbers with a fraction, or so large that a float has rounded them.
    """
    if pa.types.is_floating(column.type):
        least = EXACT[column.type.bit_width]
        numbers = column.cast(pa.float64())
        numbers = pc.if_else(pc.is_nan(numbers), pa.scalar(None, pa.float64()), numbers)  # pyright: ignore
        fits = call("less_equal", call("abs", numbers), pa.scalar(float(least)))
        whole = call("and", fits, call("equal", numbers, call("floor", numbers)))
        _refuse(call("invert", whole), numbers, field, rows)
        tally[SHORTENED] += _count(whole)
        return numbers.cast(pa.int64()).cast(pa.string())
    given = column.cast(pa.string())
    text = call("utf8_trim_whitespace", given)
    nobody = is_missing(text)
    tally[TRIMMED] += _count(call("and", call("not_equal", text, given), call("invert", nobody)))
    tally[WORDS] += _count(call("and", nobody, call("not_equal", text, pa.scalar(""))))
    text = call("if_else", nobody, pa.scalar(None, pa.string()), text)
    if how:
        text = _normalised(text, how, tally)
    whole = call("match_substring_regex", text, pattern=WHOLE)
    short = call("replace_substring_regex", text, pattern=r"\.0*$", replacement="")
    long = call("greater", call("utf8_length", short), pa.scalar(DIGITS))
    fraction = call("match_substring_regex", text, pattern=FRACTION)
    rounded = call("match_substring_regex", text, pattern=ROUNDED)
    number = call("or", whole, fraction)
    _refuse(call("or", rounded, call("and", number, long)), text, field, rows)
    tally[SHORTENED] += _count(whole)
    tally[FRACTIONS] += _count(call("and", fraction, call("invert", whole)))
    tally[EXPONENTS] += _count(call("match_substring_regex", text, pattern=LIKE_ROUNDED))
    return call("if_else", whole, short, text)


def _normalised(text: pa.Array, how: Sequence[str], tally: Counter[str]) -> pa.Array:
    """Texts after these steps; null where nothing or a word for a missing value is left."""
    before = [step for step in how if step != "casefold"]  # a person may be called NAN
    bare = call("utf8_trim_whitespace", _folded(text, before))
    bare = call("if_else", is_missing(bare), pa.scalar(None, pa.string()), bare)
    found = call("utf8_trim_whitespace", _folded(bare, how))
    tally[NORMALISED] += _count(call("not_equal", found, text))
    return found


def _folded(text: pa.Array, how: Sequence[str]) -> pa.Array:
    """Texts after these steps."""
    unique = text.dictionary_encode()
    found = unique.dictionary
    plain = call("match_substring_regex", found, pattern=PLAIN)
    others = pa.array(
        [fold(each, how) for each in found.filter(call("invert", plain)).to_pylist()], pa.string()
    )
    lower = call("ascii_lower", found) if "casefold" in how else found
    return call("replace_with_mask", lower, call("invert", plain), others).take(unique.indices)


def fold(text: str, how: Sequence[str]) -> str:
    """A text after these steps; doing them again changes nothing."""
    if "strip-marks" in how:
        text = "".join(
            c for c in MARKS.sub("", text) if unicodedata.category(c) not in ("Cf", "Cc")
        )
    if "nfkc" in how:
        text = unicodedata.normalize("NFKC", text)
    if "casefold" in how:
        text = text.casefold()
        text = unicodedata.normalize("NFKC", text).casefold() if "nfkc" in how else text
    return unicodedata.normalize("NFKC", text) if "nfkc" in how else text


def steps_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Which of STEPS are to be done, in their order. Raises: DataError: there is no such one."""
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
    for name in names:
        if name not in STEPS:
            shown = given if isinstance(given, str) else ",".join(given)
            raise DataError.of("normalise_ids", shown, f"some of {', '.join(STEPS)}")
    return tuple(step for step in STEPS if step in names)


def is_missing(texts: pa.Array | pa.ChunkedArray) -> Any:
    """bool: texts that are empty, or a word for a missing value."""
    return call("is_in", texts, value_set=pa.array(NOBODY))


def count_lists(ids: pa.Array, tally: Counter[str]) -> None:
    """Counts ids that may be several in one cell, as addresses in the field To of a mail."""
    tally[SEVERAL] += _count(call("match_substring_regex", ids, pattern=LISTED))


def told(tally: Counter[str]) -> list[str]:
    """What a person is told of rows that were counted."""
    rows = {
        name: "1 row has" if tally[name] == 1 else f"{tally[name]:,} rows have" for name in _SAID
    }
    return [f"{rows[name]} {what}" for name, what in _SAID.items() if tally[name]]


def counted(tally: Counter[str]) -> dict[str, int]:
    """What was counted, of what there is any."""
    return {name: tally[name] for name in _SAID if tally[name]}


def told_alike(number: int, examples: Sequence[str]) -> str:
    """What a person is told of what `look_alikes` found."""
    names = " and ".join(map(repr, examples))
    return f"{number:,} user ids look like another one, as {names} do: a user each"


def look_alikes(ids: pa.Array) -> tuple[int, list[str]]:
    """How many users have an id that differs from another's only in what STEPS make one, in white
    space, zeros in front or after a point, or a decimal comma; and two of them that do.

    Args: ids: each user once, or each set of owners (see data/owners.py).
    """
    people = pc.split_pattern(ids, SEPARATOR).flatten().unique()  # pyright: ignore
    key = _folded(people, STEPS)
    for pattern, instead in (
        (r"[\s\pZ]+", ""),
        (MAIL, r"\1"),
        (ZEROS, r"\1"),
        (COMMA, r"\1.\2"),
        (ZEROS_AFTER, r"\1"),
        (r"^([0-9]+)\.$", r"\1"),
    ):
        key = call("replace_substring_regex", key, pattern=pattern, replacement=instead)
    counts = key.value_counts()
    several = counts.filter(pc.greater(counts.field("counts"), 1))  # pyright: ignore
    if not len(several):
        return 0, []
    alike = people.filter(call("equal", key, several.field("values")[0]))
    return int(pc.sum(several.field("counts")).as_py()), alike[:2].to_pylist()  # pyright: ignore


def _refuse(bad: pa.Array, values: pa.Array, field: str, rows: Rows) -> None:
    if not _count(bad):
        return
    place = bad.index(True).as_py()
    raise refused(
        field,
        f"text or whole numbers, got {values[place].as_py()} in row {rows[place] + 1}; ids that "
        "were read as floats are to be saved as text or integers",
    )


def refused(column: str, expected: str) -> DataError:
    """The error about a column, which is named as in `order_column=when`, or by a field alone."""
    field, _, name = column.partition("=")
    if not name:
        return DataError(f"{field}: expected {expected}", field=field)
    return DataError.of(field, name, expected)


def _count(flags: pa.Array) -> int:
    return flags.true_count


def call(name: str, *arguments: Any, **options: Any) -> Any:
    """Arrow's function of that name, most of which type checkers do not know."""
    return getattr(pc, name)(*arguments, **options)


WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
INVISIBLE = "".join(map(chr, range(33)))  # what browsers leave out around a URL
LEFT_OUT = str.maketrans("", "", "\t\r\n")  # and in it
# Python's codec, of IDNA 2003, takes straße.de for strasse.de, which is another registrant's.
LETTERS_OF_THEIR_OWN, DOTS = re.compile("([ßς])"), re.compile("[.\u3002\uff0e\uff61]")
LABEL_BYTES = 63


def list_version() -> str:
    """The version of the public suffix list."""
    return f"publicsuffixlist {version('publicsuffixlist')}"


def host_of(url: str | None) -> str | None:
    """The host in lower case and punycode, without port, user or trailing dot; None if none."""
    try:
        host = split_url(url).hostname
    except ValueError:
        return None
    return clean_host(host) if host else None


def split_url(url: str | None) -> SplitResult:
    """The parts of a URL, which may have no scheme; it may have another URL in it, with one."""
    url = (url or "").strip().strip(INVISIBLE).translate(LEFT_OUT)
    return urlsplit(url if WITH_SCHEME.match(url) else f"//{url}")


def registrable_domain(url: str | None) -> str | None:
    """The domain that someone registered, such as bbc.co.uk; an IP address is its own owner.

    None where nobody can be named: no host, localhost, a bare public suffix such as com.
    """
    host = host_of(url)
    return _owner(host) if host else None


@lru_cache(2**16)
def clean_host(host: str) -> str | None:
    """A host in lower case and punycode, without trailing dots; None if it cannot be one."""
    host = host.lower()
    try:
        return (host if host.isascii() else _punycode(host)).rstrip(".")
    except UnicodeError:
        return None


def _punycode(host: str) -> str:
    """Raises: UnicodeError: it is no name of a host."""
    if not LETTERS_OF_THEIR_OWN.search(host):
        return host.encode("idna").decode()
    return ".".join(map(_label, DOTS.split(host)))


def _label(label: str) -> str:
    if not LETTERS_OF_THEIR_OWN.search(label):
        return label.encode("idna").decode()
    pieces = LETTERS_OF_THEIR_OWN.split(label)  # every other one is such a letter
    pieces[::2] = map(nameprep, pieces[::2])
    found = f"xn--{''.join(pieces).encode('punycode').decode()}"
    if len(found) > LABEL_BYTES:
        raise UnicodeError("the label is too long")
    return found


def address_of(host: str) -> str | None:
    """The address that a host is, in its shortest form; None if it is a name."""
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return None


@lru_cache(2**16)
def _owner(host: str) -> str | None:
    return address_of(host) or _suffixes().privatesuffix(host)


@cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList()
