"""Columns of a source: their names, and their values as user ids, texts and order.

Rows of any file become record batches of `user_id` (string), `text` (string, or lists of token ids)
and, if requested, `order`. Errors name the row, counted from 1.

The first line of a CSV file without a header is somebody's text, so an error shows the names of
columns only if all are as short as names are.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.data.building.messages import ALPACA, COMPLETION, MESSAGES, BadRow, speakers_of
from fedsim.data.building.orders import keys_of
from fedsim.data.building.user_ids import Rows, as_ids, count_lists, refused
from fedsim.data.store import SEPARATOR, owner_sets
from fedsim.errors import DataError, MissingColumn

NAME = re.compile(r"(?!.*[0-9]{3})[\w.:/#-]+")
MAX_CHARACTERS, MAX_SHOWN = 40, 50  # of a name of a column, and names
TEXT_JOINT = "\n"
ID_JOINT = "/"
MAX_OWNERS = 1000  # of one text
# Columns by which a form is known where none is named.
FORMS = (
    (MESSAGES, ("messages",)),
    (MESSAGES, ("conversations",)),
    (COMPLETION, ("prompt", "completion")),
    (ALPACA, ("instruction", "input", "output")),
)
MAY_LACK = {ALPACA: ("input",)}
"""Columns of a form that a file, or a record of JSON, may lack: null there."""
BESIDE_CHATS = ("tools", "functions", "system", "system_prompt", "system_message", "history")
BESIDE_CHATS += ("image", "images", "video", "videos", "audio")
"""Columns that other programs give to a chat template or put before a prompt."""
MARKS_OF_ROWS = ("label", "labels", "loss_mask", "completion_mask", "assistant_masks", "train")
"""Columns beside chats and token ids that may say what is not to be trained on."""
TOKEN_IDS = "input_ids"
TEXTS = ("text", "messages", "conversations")
"""Columns that hold what people wrote, of which one is read."""
NOTHING = ("", "null", '""', "[]")  # JSON of a value that says nothing


def expected_of(found: Sequence[str], wanted: Sequence[str]) -> str:
    """Rest of the error line about a missing column: the columns of the file, if these are names.

    Args:
      found: columns of the file.
      wanted: requested columns.
    """
    inside = any("." in name for name in wanted)
    names = [name for name in found if inside or "." not in name]
    separated = len(found) == 1 and next((mark for mark in ";\t|" if mark in found[0]), "")
    if separated:
        return f"no such column; the columns are separated by {separated!r}, which delimiter names"
    if not all(len(name) <= MAX_CHARACTERS and NAME.fullmatch(name.strip()) for name in names):
        return (
            f"no such column among {len(names)}, whose names are not shown, for they may be a "
            "person's text; the first line of CSV must have the names of the columns"
        )
    shown = [name if name == name.strip() else repr(name) for name in names[:MAX_SHOWN]]
    return f"no such column, expected one of {', '.join(shown)}"


@dataclass(frozen=True)
class Columns:
    """Names of columns. Several user columns make one id together, several text columns a text.

    A user column of lists, and the columns of `owners`, give a text to several users.
    """

    user: tuple[str, ...] = ("user_id",)
    text: tuple[str, ...] = ("text",)
    order: str | None = None
    owners: tuple[str, ...] = ()
    """If given, a text belongs to the users in any of these columns, not to `user`."""
    owner_key: str | None = None
    """If given, a chat belongs to the users whom this key of its turns names, not to `user`."""
    owners_delimiter: str | None = None
    """Characters at each of which a cell of `owners` is split into several users."""
    form: str = ""
    """Form of rows of chats, one of FORMS, whose columns are read as JSON; "" for texts."""

    @classmethod
    def of(
        cls,
        user: str | Sequence[str],
        text: str | Sequence[str],
        *,
        owners: Sequence[str] = (),
        **others: Any,
    ) -> "Columns":
        """Make Columns from one name or several.

        Raises:
          DataError: a name is missing or has two roles, or a setting does not go with another.
        """
        user, text = ((x,) if isinstance(x, str) else tuple(x) for x in (user, text))
        columns = cls(user, text, owners=tuple(owners), **others)
        columns._check()
        return columns

    def recognised(self, found: Sequence[str]) -> "Columns":
        """These columns, or those of a form of chats if no text column is named and none is there.

        Args:
          found: columns of a file.
        """
        if self.text == Columns.text and not self.form and self.text[0] not in found:
            for form, names in FORMS:
                if set(names) - set(MAY_LACK.get(form, ())) <= set(found):
                    return replace(self, form=form, text=names)
        return self

    def _check(self) -> None:
        for field, names in (("user_column", self.user), ("text_column", self.text)):
            if not names or len(set(names)) < len(names):
                raise DataError.of(field, names, "at least one column, none twice")
        owners, delimiter = ",".join(self.owners), self.owners_delimiter
        if len(set(self.owners)) < len(self.owners):
            raise DataError.of("owners", owners, "no column twice")
        if owners and self.owner_key is not None:
            raise DataError.of("owners", owners, f"none beside owner_key={self.owner_key}")
        if delimiter is not None:
            if not delimiter or any(c.isalnum() or c == SEPARATOR for c in delimiter):
                expected = "characters between ids, such as , or ;"
                raise DataError.of("owners_delimiter", delimiter, expected)
            if not owners:
                raise DataError.of("owners_delimiter", delimiter, "it beside owners, or none")
        for name in self.owner:
            if name in self.text:
                field = self.blamed.partition("=")[0]
                raise DataError.of(field, name, "a column other than text_column")

    @property
    def owner(self) -> tuple[str, ...]:
        """Columns that name the owners of a row."""
        if self.owner_key is not None:
            return ()
        return self.owners or self.user

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The setting that names each text column."""
        if self.form == COMPLETION:
            return ("prompt_column", "completion_column")[: len(self.text)]
        return ("messages_column" if self.form == MESSAGES else "text_column",) * len(self.text)

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
        if self.owner_key is not None:
            return f"owner_key={self.owner_key}"
        if self.owners:
            return f"owners={','.join(self.owners)}"
        return f"user_column={','.join(self.user)}"

    def check(self, found: Sequence[str]) -> None:
        """Check that a file has all columns once.

        Args:
          found: columns of the file.
        Raises:
          DataError: a column is there twice. MissingColumn: a column is not there.
        """
        for name in self.names:
            if found.count(name) > 1:
                raise DataError(f"column {name}: expected one of that name, got several")
        named = [("owners" if self.owners else "user_column", name) for name in self.owner]
        named += zip(self.text_fields, self.text, strict=True)
        named += [("order_column", self.order)]
        needed = self.in_file(found)
        for field, name in named:
            if name in needed and name not in found:
                line = f"{field}={name}: {expected_of(found, self.names)}"
                raise MissingColumn(line, field=field)


def paths(schema: pa.Schema) -> list[str]:
    """Names of columns. Names of fields inside columns have a dot: user.id."""
    names = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            inner = paths(pa.schema(field.type.fields))
            names += [f"{field.name}.{name}" for name in inner]
    return names


def pick(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Select columns, or fields inside columns, by the names that `paths` gives."""
    picked = {}
    for name in names:
        outer, *inner = [name] if name in batch.schema.names else name.split(".")
        column = batch[outer]
        picked[name] = pc.struct_field(column, inner) if inner else column  # pyright: ignore
    return pa.RecordBatch.from_pydict(picked)


def normalise(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str] | None = None
) -> pa.RecordBatch:
    """Convert a batch to the columns user_id, text and order, as `columns` names them.

    The user_id of a row without owner is null or blank.

    Args:
      batch: rows as in the file.
      first_row: number of rows of the file before the batch.
      tally: counts corrected user ids; see `user_ids`.
    Raises:
      DataError: a column has the wrong type, or text that is not UTF-8.
    """
    result = {}
    if columns.owner or columns.owner_key is not None:
        tally = Counter() if tally is None else tally
        result["user_id"] = _users(batch, columns, first_row, tally)
    if columns.form and columns.text:
        result["text"] = _joined_json([batch[name] for name in columns.text])
        columns = replace(columns, text=())
    texts = [text_of(batch[name], f"text_column={name}", first_row, True) for name in columns.text]
    if len(texts) > 1 and any(is_token_list(text.type) for text in texts):
        raise DataError.of("text_column", columns.text, "one column of token ids")
    if len(texts) > 1:
        result["text"] = reduce(_join_texts, texts)
    elif texts:
        result["text"] = texts[0]
    if columns.order is not None:
        order, field = plain(batch[columns.order]), f"order_column={columns.order}"
        result["order"] = keys_of(_validate(order, field, first_row), field, first_row)
    return pa.RecordBatch.from_pydict(result)


def as_json(values: Sequence[Any], field: str) -> pa.Array:
    """Values as a column of JSON, null for null; bytes, which some files have for texts, as texts.

    Args:
      field: the setting that names the column, and the column, for errors.
    Raises:
      DataError: bytes are not UTF-8.
    """
    try:
        cells = [None if x is None else json.dumps(x, default=_as_text) for x in values]
    except UnicodeDecodeError:
        raise refused(field, "UTF-8, got other bytes") from None
    return pa.array(cells, pa.string())


def _as_text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _joined_json(columns: Sequence[pa.Array]) -> pa.Array:
    """The values of columns of JSON as one JSON list; null if none says anything."""
    rows = zip(*(column.to_pylist() for column in columns), strict=True)
    joined = []
    for row in rows:
        said = [value or "null" for value in row]
        joined.append(None if set(said) <= set(NOTHING) else f"[{', '.join(said)}]")
    return pa.array(joined, pa.string())


def _users(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str]
) -> pa.Array:
    """Owner of each row: an id, or an owner set as a string (see store.py); blank for nobody.

    Raises:
      DataError: a list has a null, an empty id or an id twice, or a row has too many owners.
    """
    if columns.owner_key is not None:
        pairs = [_speaking(batch, columns, first_row, tally)]
    elif columns.owners or len(columns.user) == 1 and is_list(batch[columns.user[0]].type):
        pairs = [_owned(batch, name, columns, first_row, tally) for name in columns.owner]
    else:
        rows = range(first_row, first_row + len(batch))
        parts = [ids_of(batch[name], f"user_column={name}", rows, tally) for name in columns.user]
        for part in parts:
            count_lists(part, tally)
        return _join_ids(parts)
    rows = np.concatenate([rows for rows, _ in pairs])
    keys, counts = owner_sets(rows, pa.concat_arrays([ids for _, ids in pairs]), len(batch))
    if len(bad := np.flatnonzero(counts > MAX_OWNERS)):
        got = f"got {counts[bad[0]]} in row {first_row + bad[0] + 1}"
        raise refused(columns.blamed, f"at most {MAX_OWNERS} owners of a text, {got}")
    return keys


def is_blank(column: pa.Array) -> np.ndarray:
    """True for null, empty and white-space texts and empty token lists, bool [rows]."""
    if is_token_list(column.type):
        blank = pc.equal(pc.list_value_length(column), 0)  # pyright: ignore
    else:
        trimmed = pc.call_function("utf8_trim_whitespace", [column])
        blank = pc.call_function("equal", [trimmed, pa.scalar("")])
    return blank.fill_null(True).to_numpy(zero_copy_only=False)


def is_list(kind: pa.DataType) -> bool:
    """True for types of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_token_list(kind: pa.DataType) -> bool:
    """True for types of lists of token ids."""
    return is_list(kind) and pa.types.is_integer(kind.value_type)  # pyright: ignore


def plain(column: pa.Array) -> pa.Array:
    """The column with a dictionary's numbers replaced by their values."""
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def is_string(kind: pa.DataType) -> bool:
    """True for Arrow's string types."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def ids_of(column: pa.Array, field: str, rows: Rows, tally: Counter[str]) -> pa.Array:
    """User ids as strings; see `user_ids.as_ids`.

    Raises:
      DataError: the column has another type, or an id contains SEPARATOR.
    """
    column = plain(column)
    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_string(kind) or numbers or pa.types.is_null(kind)):
        raise refused(field, f"strings or integers, got {kind}")
    column = _validate(column, field, rows[0] if len(rows) else 0)
    ids = as_ids(column, field, rows, tally)
    joined = pc.match_substring(ids, SEPARATOR).fill_null(False)  # pyright: ignore
    if joined.true_count:
        row = rows[joined.index(True).as_py()] + 1
        raise refused(field, f"ids without the control character 1F, got row {row}")
    return ids


def _speaking(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str]
) -> tuple[np.ndarray, pa.Array]:
    """(rows, speakers) of chats. Raises: DataError: a turn of a user does not say who speaks."""
    key, chats = columns.owner_key or "", columns.text[0]
    try:
        turns = speakers_of(batch[chats], key)
        ids = ids_of(turns.names, columns.blamed, first_row + turns.rows, tally)
        nobody = is_blank(ids)
        if len(bad := np.flatnonzero(nobody & turns.needed)):
            reason = f"expected a name of who speaks ({columns.blamed}) in turn "
            raise BadRow(int(turns.rows[bad[0]]), f"{reason}{turns.numbers[bad[0]]}")
    except BadRow as error:
        field, row = columns.text_fields[0], first_row + error.row + 1
        raise DataError(f"{field}={chats}: {error} in row {row}", field=field) from None
    return turns.rows[~nobody], ids.filter(pa.array(~nobody))


def _owned(
    batch: pa.RecordBatch, name: str, columns: Columns, first_row: int, tally: Counter[str]
) -> tuple[np.ndarray, pa.Array]:
    """(rows, owners) of one column of lists, or of cells, of which empty ones are left out."""
    column, field = plain(batch[name]), columns.blamed
    listed = is_list(column.type)
    if columns.owners_delimiter is not None and is_string(column.type):
        texts = _validate(column.cast(pa.string()), field, first_row)
        pattern = f"\\s*[{re.escape(columns.owners_delimiter)}]\\s*"
        column = pc.split_pattern_regex(pc.utf8_trim_whitespace(texts), pattern)  # pyright: ignore
    sizes, values = np.ones(len(column), np.int64), column
    if is_list(column.type):
        sizes = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)  # pyright: ignore
        values = column.flatten()
    if pa.types.is_nested(values.type):
        raise refused(field, f"lists of strings or integers, got {column.type}")
    rows = np.repeat(np.arange(len(column)), sizes)
    ids = ids_of(values, field, first_row + rows, tally)
    count_lists(ids, tally)
    blank = is_blank(ids)
    if listed and blank.any():
        row = first_row + rows[blank.argmax()] + 1
        raise refused(field, f"owners with ids, got a null or empty one in row {row}")
    _, counts = owner_sets(rows, ids, len(column)) if listed else ((), sizes)
    if len(bad := np.flatnonzero(counts < sizes)):
        row = first_row + bad[0] + 1
        raise refused(field, f"each owner of a text once, got one twice in row {row}")
    return rows[~blank], ids.filter(pa.array(~blank))


def _join_ids(parts: Sequence[pa.Array]) -> pa.Array:
    """Join ids with slashes. Null if a part is null or blank.

    Slashes inside the parts are escaped, so that different parts never make the same id.
    """
    if len(parts) == 1:
        return parts[0]
    escaped = []
    for part in parts:
        part = pc.replace_substring(part, "\\", "\\\\")  # pyright: ignore
        part = pc.replace_substring(part, ID_JOINT, "\\" + ID_JOINT)  # pyright: ignore
        blank = pa.array(is_blank(part))
        escaped.append(pc.if_else(blank, pa.scalar(None, pa.string()), part))  # pyright: ignore
    return pc.binary_join_element_wise(*escaped, ID_JOINT)  # pyright: ignore


def _join_texts(one: pa.Array, other: pa.Array) -> pa.Array:
    """Join texts with newlines. Null and empty texts are skipped."""
    one, other = one.fill_null(""), other.fill_null("")
    both = pc.binary_join_element_wise(one, other, TEXT_JOINT)  # pyright: ignore
    both = pc.if_else(pc.equal(other, ""), one, both)  # pyright: ignore
    return pc.if_else(pc.equal(one, ""), other, both)  # pyright: ignore


def text_of(column: pa.Array, field: str, first_row: int, tokens: bool = False) -> pa.Array:
    """Texts, or lists of token ids if `tokens`.

    Raises:
      DataError: the column has another type, or text that is not UTF-8.
    """
    column = plain(column)
    if tokens and is_token_list(column.type):
        return column
    if not (is_string(column.type) or pa.types.is_null(column.type)):
        expected = "strings, or lists of token ids" if tokens else "strings"
        raise refused(field, f"{expected}, got {column.type}")
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
