"""Columns of a source: their names, and their values as user ids, texts and order keys.

Rows of any file become record batches of `user_id`, `text` (strings) and, if requested, `order`.
Errors name the row, counted from 1.

The first line of a CSV file without a header is somebody's text, so an error shows the names of
columns only if all are as short as names are. Each value of an order is read by itself, so that no
value decides how the value of another user is read.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fedsim.data.building.messages import ALPACA, COMPLETION, MESSAGES, SAID, TOOLS
from fedsim.data.building.sorting import connect
from fedsim.data.building.user_ids import Rows, as_ids, call, is_missing, refused
from fedsim.data.store import SEPARATOR, owner_sets
from fedsim.errors import DataError, MissingColumn

NAME = re.compile(r"(?!.*[0-9]{3})[\w.:/#-]{1,40}")
MAX_SHOWN = 50  # names in an error
# Columns by which a form is known where none is named.
FORMS = (
    (MESSAGES, ("messages", TOOLS)),
    (MESSAGES, ("conversations", TOOLS)),
    (COMPLETION, ("prompt", "completion", TOOLS)),
    (ALPACA, ("instruction", "input", "output")),
)
MAY_LACK = {ALPACA: ("input",), MESSAGES: (TOOLS,), COMPLETION: (TOOLS,)}
"""Columns of a form that a file, or a record of JSON, may lack: null there."""
FIELDS = {MESSAGES: ("messages_column", TOOLS)}
FIELDS |= {COMPLETION: ("prompt_column", "completion_column", TOOLS)}
"""Settings that name the columns of a form."""
MARKS_OF_ROWS = ("label", "labels", "loss_mask", "completion_mask", "assistant_masks", "train")
"""Columns beside chats that may say what is not to be trained on."""
NOTHING = {"", "null", '""', "[]"}  # JSON of a value that says nothing

KINDS = "numbers", "times with a zone", "times without a zone", "seconds since 1970"
KINDS += ("milliseconds since 1970",)
NUMBERS, ZONED, LOCAL, *EPOCHS = KINDS
KEY = pa.struct([("kind", pa.int8()), ("major", pa.float64()), ("minor", pa.int64())])
"""Key of an order. A number is a float, and the exact rest of a whole one. A time is seconds since
1970 and nanoseconds. `kind` is an index of KINDS; rows are not sorted by it."""
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|Infinity)"
ZONE = r"( ?(Z|UTC|[+-][0-9]{2}(:?[0-9]{2})?))$"
CLOCK = r"([01][0-9]|2[0-3]):[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?"
TIME = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}([T ]{CLOCK}{ZONE[:-1]}?)?"
ORDER_QUERY = f"""
WITH known AS (FROM given SELECT *,
  if(regexp_full_match(value, '{NUMBER}'), value::DOUBLE + 0, NULL) AS number,
  CASE WHEN number >= 1e9 AND number < 4.2e9 THEN 3
    WHEN number >= 1e12 AND number < 4.2e12 THEN 4 WHEN number IS NOT NULL THEN 0
    WHEN regexp_full_match(value, '{TIME}') THEN if(regexp_matches(value[11:], '{ZONE}'), 1, 2)
    END AS kind,
  regexp_replace(value, '[.,][0-9]+', '') ||
    CASE WHEN kind = 1 THEN '' WHEN length(value) = 10 THEN ' 00:00Z' ELSE 'Z' END AS moment)
SELECT kind::TINYINT AS kind, CASE WHEN kind IN (1, 2)
    THEN epoch_us(TRY_CAST(moment AS TIMESTAMPTZ)) / 1e6 ELSE number END AS major,
  CASE WHEN kind IN (1, 2) THEN rpad(regexp_extract(value, '[.,]([0-9]+)', 1), 9, '0')::BIGINT
    WHEN regexp_full_match(value, '[+-]?[0-9]+') AND abs(number) < 1e34
    THEN (value::HUGEINT - number::HUGEINT)::BIGINT ELSE 0 END AS minor
FROM known
"""


def expected_of(found: Sequence[str]) -> str:
    """Rest of the error line about a missing column: the columns that a file has, if names."""
    if len(found) == 1 and (marks := re.findall("[;\t|]", found[0])):
        line = f"no such column; the columns are separated by {marks[0]!r}, not by a comma; "
        read = f"pandas.read_csv(FILE, sep={marks[0]!r}, dtype=str)"
        return f"{line}{read}.to_parquet(OUT) writes a file that can be read"
    if not all(NAME.fullmatch(name.strip()) for name in found):
        return (
            f"no such column among {len(found)}, whose names are not shown, for they may be a "
            "person's text; the first line of CSV must have the names of the columns"
        )
    return f"no such column, expected one of {', '.join(found[:MAX_SHOWN])}"


@dataclass(frozen=True)
class Columns:
    """Names of columns.

    A user column of lists, and the columns of `owners`, give a text to several users.

    Raises: DataError: a name has two roles, or a setting does not go with another.
    """

    user: str = "user_id"
    """"" if nobody asks who the user is."""
    text: tuple[str, ...] = ("text",)
    """One column, or those of a form of chats."""
    order: str | None = None
    owners: tuple[str, ...] = ()
    """If given, a text belongs to the users in any of these columns, not to `user`."""
    form: str = ""
    """Form of rows of chats, one of FORMS, whose columns are read as JSON; "" for texts."""

    def __post_init__(self):
        for name in self.owner:
            if name in self.text:
                raise DataError.of(self.fields[name], name, "a column other than text_column")

    def recognised(self, found: Sequence[str]) -> "Columns":
        """These columns, or those of a form of chats that a file has if no text column is named and
        none is there.

        Raises: DataError: other columns may say what is not to be trained on.
        """
        named = self.text != Columns.text or self.form or self.text[0] in found
        forms = (
            replace(self, form=form, text=names)
            for form, names in FORMS
            if set(names) - set(MAY_LACK.get(form, ())) <= set(found)
        )
        columns = self if named else next(forms, self)
        if marks := [name for name in MARKS_OF_ROWS if name in found and columns.form]:
            expected = "no such column, which may say what is not to be trained on: leave out such "
            expected += "rows, or mark turns with `train` of false, and drop or rename the column"
            raise DataError.of("column", marks[0], expected)
        return columns

    @property
    def owner(self) -> tuple[str, ...]:
        """Columns that name the owners of a row."""
        return self.owners or ((self.user,) if self.user else ())

    @property
    def fields(self) -> dict[str | None, str]:
        """The setting that names each column."""
        fields = {self.order: "order_column", **dict.fromkeys(self.text, "text_column")}
        fields |= zip(self.text, FIELDS.get(self.form, ()), strict=False)
        return fields | dict.fromkeys(self.owner, self.blamed.partition("=")[0])

    @property
    def names(self) -> list[str]:
        """Columns to read, without duplicates."""
        return list(dict.fromkeys((*self.owner, *self.text, *filter(None, [self.order]))))

    def in_file(self, found: Sequence[str]) -> list[str]:
        """Columns to read from a file. Args: found: columns of the file."""
        optional = MAY_LACK.get(self.form, ())
        return [name for name in self.names if name in found or name not in optional]

    @property
    def blamed(self) -> str:
        """Setting and value to name in an error about the user of a row."""
        if self.owners:
            return f"owners={','.join(self.owners)}"
        return f"user_column={self.user}"

    def check(self, found: Sequence[str]) -> None:
        """Check that a file has all columns once.

        Raises: DataError: a column is there twice. MissingColumn: a column is not there.
        """
        for name in self.in_file(found):
            if found.count(name) > 1:
                raise DataError(f"column {name}: expected one of that name, got several")
            if name not in found:
                field = self.fields[name]
                raise MissingColumn(f"{field}={name}: {expected_of(found)}", field=field)


def normalise(batch: pa.RecordBatch, columns: Columns, first_row: int) -> pa.RecordBatch:
    """Convert a batch to the columns user_id, text and order, as `columns` names them. The user_id
    of a row without owner is null or blank.

    Args:
      batch: rows as in the file, in columns that are `plain`; chats as JSON.
      first_row: number of rows of the file before the batch.
    Raises: DataError: a column has the wrong type, or text that is not UTF-8.
    """
    result = {}
    if columns.owner:
        result["user_id"] = _users(batch, columns, first_row)
    if columns.form and columns.text:
        rows = zip(*(batch[name].to_pylist() for name in columns.text), strict=True)
        rows = [[value or "null" for value in row] for row in rows]
        number = len(columns.text) - (TOOLS in columns.text)  # which say something
        said = [None if NOTHING.issuperset(row[:number]) else f"[{', '.join(row)}]" for row in rows]
        result["text"] = pa.array(said, pa.string())
    elif columns.text:
        (name,) = columns.text
        result["text"] = text_of(batch[name], f"text_column={name}", first_row)
    if columns.order is not None:
        field = f"order_column={columns.order}"
        result["order"] = keys_of(batch[columns.order], field, first_row)
    return pa.RecordBatch.from_pydict(result)


def plain(column: Any, name: str) -> pa.Array:
    """A column of values, or of lists of them, of a type that Arrow's functions take.

    Raises: DataError: values have fields inside. Their names are not shown: they may be personal.
    """
    kind = column.type
    if isinstance(column, pa.DictionaryArray):
        return plain(column.dictionary, name).take(column.indices)
    if pa.types.is_string_view(kind):  # which Parquet lacks
        return column.cast(pa.large_string())
    if pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(kind.value_type))
    if pa.types.is_nested(kind.value_type if is_list(kind) else kind):
        raise DataError(f"column {name}: expected values, or lists of them, got others inside")
    return column


def chats_as_json(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """The batch with the columns of chats as JSON, with bytes, which some files have, as texts, and
    without nulls in objects, which Arrow has for keys of other rows."""
    found = {name: batch[name] for name in batch.schema.names}
    for name in columns.text:
        chats = found[name].to_pylist() if name in found else [None] * len(batch)
        said = map(_without_nulls, chats)
        cells = [None if x is None else json.dumps(x, default=_as_text) for x in said]
        found[name] = pa.array(cells, pa.string())
    return pa.RecordBatch.from_pydict(found)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = (item for item in value.items() if item[0] in SAID or item[1] is not None)
    return {name: _without_nulls(inner) for name, inner in kept}


def _as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_blank(column: pa.Array) -> np.ndarray:
    """True for null, blank texts and the null \\N of databases, bool [rows]."""
    trimmed = call("utf8_trim_whitespace", column)
    blank = call("is_in", trimmed, value_set=pa.array(["", "\\N", None], column.type))
    return blank.to_numpy(zero_copy_only=False)


def is_list(kind: pa.DataType) -> bool:
    """True for types of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_string(kind: pa.DataType) -> bool:
    """True for Arrow's string types."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _users(batch: pa.RecordBatch, columns: Columns, first_row: int) -> pa.Array:
    """Owner of each row: an id, or an owner set as a string (see store.py); blank for nobody."""
    field, number = columns.blamed, len(batch)
    if columns.owners or is_list(batch[columns.user].type):
        pairs = [_owned(batch[name], field, first_row) for name in columns.owner]
    else:
        rows = range(first_row, first_row + number)
        return ids_of(batch[columns.user], field, rows)
    rows = np.concatenate([rows for rows, _ in pairs])
    return owner_sets(rows, pa.concat_arrays([ids for _, ids in pairs]), number)


def ids_of(column: pa.Array, field: str, rows: Rows) -> pa.Array:
    """User ids as strings; see `user_ids.as_ids`.

    Raises: DataError: the column has another type, or an id contains SEPARATOR.
    """
    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_string(kind) or numbers or pa.types.is_null(kind)):
        raise refused(field, f"strings or integers, got {kind}")
    column = _validate(column, field, rows[0] if len(rows) else 0)
    ids = as_ids(column, field, rows)
    joined = call("match_substring", ids, pattern=SEPARATOR)
    if joined.true_count:
        row = rows[joined.index(True).as_py()] + 1
        raise refused(field, f"ids without the control character 1F, got row {row}")
    return ids


def _owned(column: pa.Array, field: str, first_row: int) -> tuple[np.ndarray, pa.Array]:
    """(rows, owners) of a column of lists, or of cells, of which empty ones are left out."""
    rows, values = np.arange(len(column)), column
    if listed := is_list(column.type):
        sizes = call("fill_null", call("list_value_length", column), 0)
        rows, values = np.repeat(rows, sizes.to_numpy()), plain(call("list_flatten", column), field)
    ids = ids_of(values, field, first_row + rows)
    blank = is_blank(ids)
    if listed and blank.any():
        row = first_row + rows[blank.argmax()] + 1
        raise refused(field, f"owners with ids, got a null or empty one in row {row}")
    return rows[~blank], ids.filter(pa.array(~blank))


def text_of(column: pa.Array, field: str, first_row: int) -> pa.Array:
    """Texts. Raises: DataError: the column has another type, or text that is not UTF-8."""
    if not (is_string(column.type) or pa.types.is_null(column.type)):
        raise refused(field, f"strings, got {column.type}")
    return _validate(column.cast(pa.string()), field, first_row)


def _validate(column: pa.Array, field: str, first_row: int) -> pa.Array:
    """Check that strings are UTF-8, before another function fails on them."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        where = re.search(r"string index (\d+)", str(error))
        row = f" in row {first_row + int(where[1]) + 1}" if where else ""
        raise refused(field, f"UTF-8, got other bytes{row}") from None
    return column


def keys_of(column: pa.Array, field: str, first_row: int) -> pa.StructArray:
    """Order keys of the values of a column, of the type KEY; null for a missing value.

    Args: field, first_row: for errors: setting and column, and rows of the file before it.
    Raises: DataError: a value is of no kind, or values are of two kinds.
    """
    kind, tests = column.type, pa.types
    if tests.is_timestamp(kind) and kind.tz:  # pyright: ignore
        column = column.cast(pa.timestamp(kind.unit, "UTC"))  # pyright: ignore
    known = (tests.is_integer, tests.is_floating, tests.is_decimal, tests.is_date)
    if not any(test(kind) for test in (*known, is_string, tests.is_null, tests.is_timestamp)):
        raise refused(field, f"numbers, times or texts, got {kind}")
    texts = call("utf8_trim_whitespace", _validate(column.cast(pa.string()), field, first_row))
    texts = call("if_else", is_missing(texts), pa.scalar(None, pa.string()), texts)
    with connect() as connection:
        given = connection.from_arrow(pa.table({"value": texts}))
        found: Any = given.query("given", ORDER_QUERY)
        found = found.to_arrow_table().cast(pa.schema(list(KEY)))
    parts = [part.combine_chunks() for part in found.columns]
    bad = call("and", texts.is_valid(), call("or", parts[0].is_null(), parts[1].is_null()))
    if bad.true_count:  # it is not shown: it may be personal
        row = first_row + bad.index(True).as_py() + 1
        expected = "numbers or times as in 2020-01-31T10:00:00Z"
        raise refused(field, f"{expected}, got another text in row {row}")
    keys = pa.StructArray.from_arrays(parts, fields=list(KEY), mask=texts.is_null())
    expect_one_kind(kinds_of(keys), field)
    return keys


def kinds_of(keys: pa.StructArray) -> set[str]:
    """Kinds of the keys that are not missing: of KINDS."""
    keys = keys.drop_null()  # pyright: ignore
    return {KINDS[kind] for kind in keys.field("kind").unique().to_pylist()}


def expect_one_kind(found: Collection[str], field: str) -> None:
    """Raise DataError if an order has values of several kinds, such as seconds and milliseconds."""
    if len(kinds := _different(found)) > 1:
        raise refused(field, f"values of one kind, got {' and '.join(sorted(kinds))}")


def _different(kinds: Collection[str]) -> set[str]:
    """Kinds that cannot be compared; beside numbers of other sizes, those of EPOCHS are numbers."""
    return {kind for kind in kinds if NUMBERS not in kinds or kind not in EPOCHS}


def check_bound(bound: str, column: str, found: Collection[str]) -> None:
    """Raise DataError if a bound cannot be compared with values of some kinds. Without a zone it is
    in UTC."""
    own = kinds_of(keys_of(pa.array([bound]), "test_from", 0))
    if (own, found) != ({LOCAL}, {ZONED}) and len(_different({*own, *found})) > 1:
        expected = f"a value of order_column={column}, which holds {' and '.join(found)}"
        raise DataError.of("test_from", bound, expected)


def at_least(keys: pa.StructArray, bound: str) -> np.ndarray:
    """True for rows whose order is at least `bound`, bool [rows]; a missing order is not."""
    _, first, second = keys_of(pa.array([bound]), "test_from", 0).flatten()
    _, major, minor = keys.flatten()
    later = call("and", call("equal", major, first[0]), call("greater_equal", minor, second[0]))
    found = call("or", call("greater", major, first[0]), later)
    return found.fill_null(False).to_numpy(zero_copy_only=False)
