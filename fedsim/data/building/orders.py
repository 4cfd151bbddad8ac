"""Keys that sort rows as the values of the order column do: numbers, or ISO 8601 times.

Each value is read by itself, so that no value decides how the value of another user is read. A
column with values of two kinds is refused, and so is a text of no kind: texts of dates do not sort
by time.
"""

from collections.abc import Iterable
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from fedsim.data.building.user_ids import call, is_missing, refused
from fedsim.errors import DataError

KINDS = NUMBERS, TIMES, LOCAL = "numbers", "times with a zone", "times without a zone"
KEY = pa.struct([("kind", pa.int8()), ("major", pa.float64()), ("minor", pa.int64())])
"""A number is a float, and the exact rest of a whole one. A time is seconds since 1970 and
nanoseconds. `kind` is an index of KINDS."""
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|Infinity)"
ZONE = r"( ?(Z|UTC|[+-][0-9]{2}(:?[0-9]{2})?))$"
CLOCK = r"([01][0-9]|2[0-3]):[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?"
TIME = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}([T ]{CLOCK}{ZONE[:-1]}?)?"
QUERY = f"""
WITH known AS (FROM given SELECT *,
  CASE WHEN regexp_full_match(value, '{NUMBER}') THEN 0
    WHEN regexp_full_match(value, '{TIME}') THEN if(regexp_matches(value[11:], '{ZONE}'), 1, 2)
    END AS kind,
  kind = 0 AS number, kind > 0 AS time, regexp_replace(value, '[.,][0-9]+', '') ||
    CASE WHEN kind = 1 THEN '' WHEN length(value) = 10 THEN ' 00:00Z' ELSE 'Z' END AS moment)
SELECT kind::TINYINT AS kind, CASE WHEN number THEN value::DOUBLE + 0
    WHEN time THEN epoch_us(TRY_CAST(moment AS TIMESTAMPTZ)) / 1e6 END AS major,
  CASE WHEN time THEN rpad(regexp_extract(value, '[.,]([0-9]+)', 1), 9, '0')::BIGINT
    WHEN regexp_full_match(value, '[+-]?[0-9]+') AND abs(value::DOUBLE) < 1e34
    THEN (value::HUGEINT - value::DOUBLE::HUGEINT)::BIGINT ELSE 0 END AS minor
FROM known
"""


def keys_of(column: pa.Array, field: str, first_row: int) -> pa.StructArray:
    """Keys of the values of a column, of the type KEY; null for a missing value.

    Args:
      field: setting and column, such as "order_column=when", for errors.
      first_row: number of rows of the file before the column, for errors.
    Raises:
      DataError: a value is of no kind, or values are of two kinds.
    """
    texts = call("utf8_trim_whitespace", _as_texts(column, field))
    texts = call("if_else", is_missing(texts), pa.scalar(None, pa.string()), texts)
    with duckdb.connect(config={"threads": 1}) as connection:
        given = connection.from_arrow(pa.table({"value": texts}))
        keys: Any = given.query("given", QUERY)
        keys = keys.to_arrow_table().cast(pa.schema(list(KEY)))
    kind, major, minor = (column.combine_chunks() for column in keys.columns)
    bad = call("and", texts.is_valid(), call("or", kind.is_null(), major.is_null()))
    if bad.true_count:  # it is not shown: it may be personal
        row = first_row + bad.index(True).as_py() + 1
        expected = "numbers or times as in 2020-01-31T10:00:00Z"
        raise refused(field, f"{expected}, got another text in row {row}")
    common_kind(kind.drop_null().unique().to_pylist(), field)
    missing = texts.is_null()
    return pa.StructArray.from_arrays([kind, major, minor], fields=list(KEY), mask=missing)


def _as_texts(column: pa.Array, field: str) -> pa.Array:
    kind, tests = column.type, pa.types
    if tests.is_timestamp(kind) and kind.tz:  # pyright: ignore
        column = column.cast(pa.timestamp(kind.unit, "UTC"))  # pyright: ignore
    strings = (tests.is_string, tests.is_large_string, tests.is_string_view, tests.is_null)
    numbers = (tests.is_integer, tests.is_floating, tests.is_decimal)
    if any(test(kind) for test in (*strings, *numbers, tests.is_date, tests.is_timestamp)):
        return column.cast(pa.string())
    raise refused(field, f"numbers, times or texts, got {kind}")


def kind_of(keys: pa.StructArray) -> int | None:
    """Kind of keys, an index of KINDS; None if all are missing."""
    kinds = keys.drop_null().field("kind")
    return kinds[0].as_py() if len(kinds) else None


def common_kind(kinds: Iterable[int | None], field: str) -> int | None:
    """The one kind among `kinds`; None if there is none. Raises: DataError: there are several."""
    distinct = sorted({kind for kind in kinds if kind is not None})
    if len(distinct) > 1:
        got = " and ".join(KINDS[kind] for kind in distinct)
        raise refused(field, f"values of one kind, got {got}")
    return distinct[0] if distinct else None


def check_bound(bound: str, column: str | None, kind: int | None) -> None:
    """Check that a bound can be compared with keys of a kind. Without a zone it is in UTC.

    Raises:
      DataError: it cannot.
    """
    own = kind_of(keys_of(pa.array([bound]), "test_from", 0))
    if kind is not None and (KINDS[own or 0], KINDS[kind]) != (LOCAL, TIMES) and own != kind:
        expected = f"a value of order_column={column}, which holds {KINDS[kind]}"
        raise DataError.of("test_from", bound, expected)


def at_least(keys: pa.StructArray, bound: str) -> np.ndarray:
    """True for rows whose order is at least `bound`, bool [rows]; a missing order is not."""
    _, first, second = keys_of(pa.array([bound]), "test_from", 0).flatten()
    _, major, minor = keys.flatten()
    later = call("and", call("equal", major, first[0]), call("greater_equal", minor, second[0]))
    found = call("or", call("greater", major, first[0]), later)
    return found.fill_null(False).to_numpy(zero_copy_only=False)
