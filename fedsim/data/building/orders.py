"""Order and turn columns, which sort the rows of a user or of a conversation.

Each value is read by itself, so that no value decides how the value of another user is read. It
becomes a key, a few numbers that sort exactly as the values do:

- numbers: whole numbers of up to 34 digits, and floats; both are compared as numbers;
- times: ISO 8601 (2020-01-31, 2020-01-31T10:00:00.5+02:00) down to nanoseconds, in UTC;
- times without a zone, which are not compared with times;
- values in a given format: "utc" reads times without a zone as UTC, "text" compares texts character
  by character, and a pattern of strptime (%m/%d/%Y) reads other times.

Numbers, times and dates of a typed file are read by the schema of the file. A column with values of
two kinds is refused, and so is a text of no kind: texts of dates do not sort by time.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from fedsim.data.building.user_ids import call, is_missing, refused
from fedsim.errors import DataError

UTC_TIMES, TEXT = "utc", "text"
_FINER = ("nanoseconds", pa.int32())
NUMBERS, TIMES, LOCAL = "numbers", "times with a zone", "times without a zone"
CLOCK, TEXTS = "times of day", "texts"
KEYS: dict[str, pa.DataType] = {
    NUMBERS: pa.struct([("number", pa.float64()), ("rest", pa.int64())]),  # the value is their sum
    TIMES: pa.struct([("utc", pa.int64()), _FINER]),  # seconds since 1970
    LOCAL: pa.struct([("local", pa.int64()), _FINER]),
    CLOCK: pa.struct([("clock", pa.int64()), _FINER]),
    TEXTS: pa.struct([("text", pa.string())]),
}
"""The type of the keys of each kind of values."""
MOST = 10**34  # below, the remainder of a whole number after rounding to a float fits 64 bits
EXACT = 2**62  # below, int64 does not overflow in `_exact`
SHORT = 18  # digits that fit 64 bits
WHOLE = r"^[+-]?[0-9]+$"
NUMBER = r"(?i)^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?$|^[+-]?inf(inity)?$"
TIME = (
    r"^(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})(?:[T ](?P<time>[0-9]{2}:[0-9]{2})(?P<second>:[0-9]{2})?"
    r"(?:[.,](?P<fraction>[0-9]{1,9}))?(?: ?(?P<zone>Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?))?)?$"
)
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY = 86_400  # seconds


def check_format(field: str, form: str | None) -> None:
    """Check the format of a column.

    Args:
      field: name of the setting, for the error.
      form: "utc", "text", a pattern of strptime, or None.
    Raises:
      DataError: the format is none of these.
    """
    if form in (None, UTC_TIMES, TEXT):
        return
    try:
        if "%" in form and "%Z" not in form:  # %Z depends on the machine
            datetime.strptime(datetime(2001, 2, 3, 4, 5, 6, tzinfo=UTC).strftime(form), form)
            return
    except ValueError:
        pass
    raise DataError.of(
        field,
        form,
        "utc, text, or how times are written, as in %m/%d/%Y (see Python's strptime; not %Z)",
    )


def kind_of(keys: pa.Array) -> str | None:
    """Kind of keys (a name of KEYS); None if all keys are missing."""
    return next((kind for kind, of in KEYS.items() if keys.type == of), None)


def keys_of(column: pa.Array, field: str, first_row: int, form: str | None) -> pa.Array:
    """Keys of the values of a column.

    Args:
      field: setting and column, such as "order_column=when", for errors.
      first_row: number of rows of the file before the column, for errors.
      form: as of `check_format`.
    Returns:
      An array of a type of KEYS, null for a missing value; of type null if all values are missing.
    Raises:
      DataError: a value is of no kind, or values are of two kinds.
    """
    kind, as_written = column.type, form not in (None, UTC_TIMES)
    if kind in KEYS.values() or pa.types.is_null(kind):
        return column
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _Texts(column, field, first_row, form).keys()
    if as_written and pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return _Texts(column.cast(pa.string()), field, first_row, form).keys()
    if as_written:
        raise refused(field, f"texts, which {form} is the format of, got {kind}")
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_integer(kind):
        return _key(NUMBERS, *_exact(column.fill_null(0).to_numpy()), missing)
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64()).fill_null(np.nan).to_numpy()
        missing = np.isnan(values)
        values = np.where(missing, 0, values) + 0.0  # -0 is 0
        return _key(NUMBERS, values, np.zeros(len(values)), missing)
    if not pa.types.is_temporal(kind) or pa.types.is_interval(kind):
        raise refused(field, f"numbers, times or texts, got {kind}")
    whole = pa.int32() if pa.types.is_date32(kind) or pa.types.is_time32(kind) else pa.int64()
    values = column.cast(whole).fill_null(0).to_numpy().astype(np.int64)
    if pa.types.is_date32(kind):
        return _key(TIMES if form else LOCAL, values * DAY, np.zeros(len(values)), missing)
    per_second = PER_SECOND["ms" if pa.types.is_date64(kind) else kind.unit]  # pyright: ignore
    seconds, rest = np.divmod(values, per_second)
    found = TIMES if form or getattr(kind, "tz", None) else LOCAL
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        found = CLOCK
    return _key(found, seconds, rest * (10**9 // per_second), missing)


def common_kind(kinds: Iterable[str | None], field: str) -> str | None:
    """The one kind of keys among `kinds`; None if all are missing.

    Raises:
      DataError: there are several kinds.
    """
    distinct = sorted({kind for kind in kinds if kind is not None})
    if len(distinct) > 1:
        raise refused(field, f"values of one kind, got {' and '.join(distinct)}")
    return distinct[0] if distinct else None


def at_least(keys: pa.Array, bound: str, column: str | None, form: str | None) -> np.ndarray:
    """True for rows whose order is at least `bound`, bool [rows].

    A missing order is not. A bound without a zone is in UTC.

    Args:
      keys: result of `keys_of`.
      bound: a value in the format of the column or in ISO 8601.
      column: name of the column, for the error.
      form: as of `check_format`.
    Raises:
      DataError: the bound cannot be compared with the keys.
    """
    kind = kind_of(keys)
    if kind is None:
        return np.zeros(len(keys), bool)
    key = _bound(bound, kind, form)
    if key is None or kind == TEXTS:
        raise DataError.of(
            "test_from", bound, f"a value of order_column={column}, which holds {kind}"
        )
    (major, minor), (first, second) = keys.flatten(), key
    later = call("and", call("equal", major, first), call("greater_equal", minor, second))
    return _flags(call("or", call("greater", major, first), later))


def _bound(bound: str, kind: str, form: str | None) -> tuple[pa.Scalar, pa.Scalar] | None:
    """Key of a bound, for keys of one kind; None if it has no such key."""
    forms: list[str | None] = [] if form in (None, UTC_TIMES) else [form]
    forms.append(UTC_TIMES if kind == TIMES else None)
    for candidate in forms:
        text = f"1970-01-01T{bound}" if kind == CLOCK else bound
        try:
            keys = keys_of(pa.array([text]), "test_from", 0, candidate)
        except DataError:
            continue
        if kind_of(keys) == (LOCAL if kind == CLOCK else kind):
            one, other = keys.flatten()
            return one[0], other[0]
    return None


class _Texts:
    """Keys of a column of texts."""

    def __init__(self, column: pa.Array, field: str, first_row: int, form: str | None):
        self.field, self.first_row, self.form = field, first_row, form
        self.flag = f"`fedsim data build --{field.partition('_')[0]}-format"
        texts = call("utf8_trim_whitespace", column.cast(pa.string()))
        self.texts = call("if_else", is_missing(texts), pa.scalar(None, pa.string()), texts)
        self.missing = _flags(self.texts.is_null())

    def keys(self) -> pa.Array:
        """Convert the texts to keys; see `keys_of`."""
        if self.missing.all():
            return pa.nulls(len(self.texts))
        if self.form == TEXT:
            return pa.StructArray.from_arrays(
                [self.texts], names=["text"], mask=self.texts.is_null()
            )
        if self.form not in (None, UTC_TIMES):
            return self._by_pattern(self.form)
        number = _flags(call("match_substring_regex", self.texts, pattern=NUMBER))
        if self.form == UTC_TIMES:
            number[:] = False
        time = call("extract_regex", self.texts, pattern=TIME)
        others = ~(number | _flags(time.is_valid()) | self.missing)
        if others.any():
            raise self._refused(others)
        if number.any():
            self._expect_one(number, NUMBERS, "times")
            return self._numbers()
        zoned = _flags(call("not_equal", time.field("zone"), pa.scalar(""))) & ~self.missing
        if self.form is None and zoned.any():
            hint = f"; {self.flag} utc` takes those for UTC"
            self._expect_one(zoned, TIMES, LOCAL, hint)
        return self._times(time, TIMES if self.form or zoned.any() else LOCAL)

    def _refused(self, bad: np.ndarray) -> DataError:
        """The error about a text of no kind. It shows the row alone: the text may be personal."""
        row = self.first_row + int(bad.argmax()) + 1
        if self.form not in (None, UTC_TIMES):
            return refused(self.field, f"{self.form}, got another text in row {row}")
        number = "" if self.form else "numbers or "
        return refused(
            self.field,
            f"{number}times as in 2020-01-31T10:00:00Z, got another text in row {row}; "
            f"{self.flag}` says how others are written, as in %m/%d/%Y, or text",
        )

    def _expect_one(self, these: np.ndarray, kind: str, other: str, hint: str = "") -> None:
        """Check that all texts that are not missing are of one kind. Raises: DataError."""
        others = ~(these | self.missing)
        if others.any():
            first, second = (self.first_row + int(a.argmax()) + 1 for a in (these, others))
            raise refused(
                self.field,
                f"values of one kind, got {kind} in row {first} and {other} in row {second}{hint}",
            )

    def _numbers(self) -> pa.Array:
        texts = call("replace_substring_regex", self.texts, pattern=r"^\+", replacement="")
        whole = call("match_substring_regex", texts, pattern=WHOLE)
        short = call("and", whole, call("less_equal", call("utf8_length", texts), SHORT))
        nothing = pa.scalar(None, pa.string())
        number, rest = _exact(_filled(call("if_else", short, texts, nothing).cast(pa.int64())))
        floats = _flags(call("invert", whole))
        of_floats = _filled(call("if_else", whole, nothing, texts).cast(pa.float64()))
        number = np.where(floats, of_floats + 0.0, number)
        for i in np.flatnonzero(_flags(whole) & ~_flags(short)):
            value = int(texts[int(i)].as_py()) if len(texts[int(i)].as_py()) < 100 else MOST
            if abs(value) >= MOST:
                row = self.first_row + int(i) + 1
                raise refused(self.field, f"at most 34 digits, got more in row {row}")
            number[i], rest[i] = _pair(value)
        return _key(NUMBERS, number, rest, self.missing)

    def _times(self, found: Any, kind: str) -> pa.Array:
        """Keys of days, times, fractions of seconds and zones; some may be empty. See TIME."""

        def part(name: str, empty: str) -> Any:
            text = found.field(name)
            return call("if_else", call("equal", text, pa.scalar("")), pa.scalar(empty), text)

        moment = call(
            "binary_join_element_wise", found.field("day"), "T", part("time", "00:00"),
            part("second", ":00"), "",
        )  # fmt: skip
        moment = call("if_else", pa.array(self.missing), pa.scalar(None, pa.string()), moment)
        try:
            seconds = moment.cast(pa.timestamp("s"))
        except pa.ArrowInvalid:  # 31 February
            raise self._refused(np.array([not _is_moment(text) for text in moment])) from None
        fraction = call("utf8_rpad", part("fraction", "0"), width=9, padding="0")
        zone = call("replace_substring_regex", part("zone", "Z"), pattern="Z|UTC", replacement="+0")
        zone = call("replace_substring", zone, pattern=":", replacement="")
        hours = _filled(call("utf8_slice_codeunits", zone, 1, 3).cast(pa.int64()))
        minutes = call("utf8_slice_codeunits", zone, 3, 5)
        minutes = call("if_else", call("equal", minutes, pa.scalar("")), pa.scalar("0"), minutes)
        ahead = hours * 3600 + _filled(minutes.cast(pa.int64())) * 60
        ahead = np.where(_flags(call("starts_with", zone, pattern="-")), -ahead, ahead)
        nanoseconds = _filled(fraction.cast(pa.int64()))
        return _key(kind, _filled(seconds.cast(pa.int64())) - ahead, nanoseconds, self.missing)

    def _by_pattern(self, pattern: str) -> pa.Array:
        """Keys of times in the format of a pattern of strptime."""
        unique = self.texts.dictionary_encode()
        number = _filled(unique.indices)
        seconds = np.zeros(len(unique.dictionary), np.int64)
        microseconds, zoned = np.zeros_like(seconds), False
        for i, text in enumerate(unique.dictionary.to_pylist()):
            try:
                moment = datetime.strptime(text, pattern)
            except ValueError:
                raise self._refused((number == i) & ~self.missing) from None
            zoned = moment.tzinfo is not None
            since = moment - datetime(1970, 1, 1, tzinfo=UTC if zoned else None)
            seconds[i] = since.days * DAY + since.seconds
            microseconds[i] = since.microseconds
        kind = TIMES if zoned else LOCAL
        return _key(kind, seconds[number], microseconds[number] * 1000, self.missing)


def _is_moment(text: pa.Scalar) -> bool:
    try:
        text.cast(pa.timestamp("s"))
    except pa.ArrowInvalid:
        return False
    return True


def _key(kind: str, major: np.ndarray, minor: np.ndarray, missing: np.ndarray) -> pa.Array:
    fields: list[pa.Field] = [*KEYS[kind]]  # pyright: ignore
    pairs = zip((major, minor), fields, strict=True)
    values = [pa.array(each).cast(field.type) for each, field in pairs]
    return pa.StructArray.from_arrays(values, fields=fields, mask=pa.array(missing))


def _exact(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split whole numbers into floats and remainders: pairs that sort as the numbers do."""
    near = (values < EXACT) & (values > -EXACT)
    whole = np.where(near, values, 0).astype(np.int64)
    number = whole.astype(np.float64)
    rest = whole - number.astype(np.int64)
    for i in np.flatnonzero(~near):
        number[i], rest[i] = _pair(int(values[i]))
    return number, rest


def _pair(whole: int) -> tuple[float, int]:
    return float(whole), whole - int(float(whole))


def _flags(column: Any) -> np.ndarray:
    return column.fill_null(False).to_numpy(zero_copy_only=False).copy()


def _filled(column: Any) -> np.ndarray:
    return column.fill_null(0).to_numpy()
