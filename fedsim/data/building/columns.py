"""Which columns of a source hold what, and how they become user ids, texts and an order.

Whatever the file, rows come out as record batches of `user_id` (string), `text` (string, or lists
of token ids) and, if asked for, `order`. Every complaint names the row, counted from 1.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.data.building.orders import KEYS, check_format, keys_of
from fedsim.data.building.user_ids import (
    Rows,
    as_ids,
    count_lists,
    refused,
    registrable_domain,
    steps_of,
)
from fedsim.data.store import SEPARATOR, owner_sets
from fedsim.errors import DataError, MissingColumn

USUAL = frozenset(
    """
    account actor address age answer article at author authors bcc bio body by category cc channel
    chat city code comment comments completion content contents context conversation count country
    created creation data date dataset day description dialog dialogue doc document documents domain
    edited email entities file first forum from full group handle hash header host hour html id ids
    idx index info input instruction item items key kind label labels lang language last length
    likes line link links list location lower mail markdown member message messages meta metadata
    metrics mime minute model modified month name names nick nickname node note num number of
    order org origin output owner owners page paragraph parent part participant path people person
    phone place platform post posted posts preview profile prompt published query question questions
    quote rating reaction reactions reason receiver recipient record ref region replies reply repo
    response responses retweet review revision role room root row rows score screen section sender
    sentence sentences sequence series service session site size source speaker speech split state
    status stream subject summary tag tags target team text texts thread time timestamp title to
    token tokens topic tweet turn turns type uid unix updated uri url user username users utc utt
    utterance uuid value values verified version views votes web when where who word words year
    """.split()
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
NAME = re.compile(r"[\w.:/# -]+")
MOST_CHARACTERS, MOST_WORDS = 60, 5  # of a name
MOST_SHOWN = 50


def is_usual(name: str) -> bool:
    """Whether a name is made of words that names of columns are usually made of."""
    words = [word.lower() for word in WORD.findall(name)]
    fits = len(name) <= MOST_CHARACTERS and NAME.fullmatch(name) and not re.search(r"\d{3}", name)
    return bool(fits) and 0 < len(words) <= MOST_WORDS and USUAL.issuperset(words)


def expected_of(found: Sequence[str], wanted: Sequence[str]) -> str:
    """What is said of a column that is not there: those `found`, if they may be shown.

    Args: wanted: the columns that were asked for.
    """
    header = not set(wanted).isdisjoint(found)
    shown = [name for name in found if is_usual(name) or header and "." not in name][:MOST_SHOWN]
    hidden = len(found) - len(shown)
    if hidden:
        whose = "1 whose name is" if hidden == 1 else f"{hidden} whose names are"
        shown = [", ".join(shown)] if shown else []
        shown.append(f"{whose} not shown, for it may be a person's text")
    separated = len(found) == 1 and next((s for s in ";\t|" if s in found[0]), "")
    hint = ""
    if separated:
        hint = f"; columns are separated by {separated!r}: `fedsim data build --delimiter`"
    elif hidden and not header:
        hint = "; the first line of CSV must have the names of the columns"
    listed = (" and " if hidden else ", ").join(shown)
    return f"no such column, expected one of {listed}{hint}"


TEXT_JOINT = "\n"
ID_JOINT = "/"
MOST_OWNERS = 1000  # of one text


@dataclass(frozen=True)
class Columns:
    """Names of columns. Several user columns make one id owner_sets, several text columns a text.

    A user column of lists, and the columns of `owners`, give a text to several users.
    """

    user: tuple[str, ...] = ("user_id",)
    text: tuple[str, ...] = ("text",)
    order: str | None = None
    url: str | None = None
    """If given, the user is the registrable domain of this column's URL, not `user`."""
    owners: tuple[str, ...] = ()
    """If given, a text belongs to the users in any of these columns, not to `user`."""
    conversation: str | None = None
    """If given, a text belongs to whom it is said to, too; see `conversations`."""
    turn: str | None = None
    """Where in its conversation a row is."""
    owners_delimiter: str | None = None
    """Characters at each of which a cell of `owners` is split into several users."""
    order_format: str | None = None
    """How the order is written; see `orders`."""
    turn_format: str | None = None
    normalise_ids: tuple[str, ...] = ()
    """What is done to ids first; see `user_ids.MARKS`."""
    order_as: str | None = None
    """Which kind of values the order has, in all of the data; see `orders.KEYS`."""

    @classmethod
    def of(
        cls,
        user: str | Sequence[str],
        text: str | Sequence[str],
        order: str | None = None,
        url: str | None = None,
        owners: str | Sequence[str] = (),
        conversation: str | None = None,
        turn: str | None = None,
        owners_delimiter: str | None = None,
        order_format: str | None = None,
        turn_format: str | None = None,
        normalise_ids: str | Sequence[str] = (),
    ) -> "Columns":
        """Columns from one name or several. Raises: DataError: none, or a column has two roles."""
        names = (_names(user), _names(text), order, url, _names(owners))
        formats = order_format, turn_format
        found = cls(*names, conversation, turn, owners_delimiter, *formats, steps_of(normalise_ids))
        found._check_delimiter()
        for field, form, column in zip(("order", "turn"), formats, (order, turn), strict=True):
            check_format(f"{field}_format", form)
            if form is not None and column is None:
                raise DataError.of(f"{field}_format", form, f"it beside {field}_column")
        if (conversation is None) != (turn is None):
            raise DataError.of("turn_column", turn, "it beside conversation_column, or none")
        if conversation is not None and (found.owners or url is not None):
            raise DataError.of("conversation_column", conversation, "the speaker's user_column")
        for field, names in (("user_column", found.user), ("text_column", found.text)):
            if not names or len(set(names)) < len(names):
                raise DataError.of(field, names, "at least one column, none twice")
        shown = ",".join(found.owners)
        if len(set(found.owners)) < len(found.owners):
            raise DataError.of("owners", shown, "no column twice")
        if found.owners and url is not None:
            raise DataError.of("owners", shown, f"none beside url_column={url}")
        for name in found.owner:
            if name in found.text:
                field = found.blamed.partition("=")[0]
                raise DataError.of(field, name, "a column other than text_column")
        return found

    def _check_delimiter(self) -> None:
        given = self.owners_delimiter
        if given is None:
            return
        if not given or any(c.isalnum() or c == SEPARATOR for c in given):
            raise DataError.of("owners_delimiter", given, "characters between ids, such as , or ;")
        if not self.owners:
            raise DataError.of("owners_delimiter", given, "it beside owners, or none")

    @property
    def owner(self) -> tuple[str, ...]:
        """The columns that say whose a row is."""
        return self.owners or (self.user if self.url is None else (self.url,))

    @property
    def names(self) -> list[str]:
        """The columns to read, each once."""
        single = filter(None, (self.order, self.conversation, self.turn))
        return list(dict.fromkeys((*self.owner, *self.text, *single)))

    def outer(self, found: Sequence[str]) -> list[str]:
        """The columns among those `found` that hold them."""
        names = [name if name in found else name.partition(".")[0] for name in self.names]
        return list(dict.fromkeys(names))

    @property
    def blamed(self) -> str:
        """The flag and value that a row without a user is about."""
        if self.owners:
            return f"owners={','.join(self.owners)}"
        return f"url_column={self.url}" if self.url else f"user_column={','.join(self.user)}"

    def check(self, found: Sequence[str]) -> None:
        """Raises: DataError: a column is not among those `found`, or is there twice."""
        for name in self.names:
            if found.count(name) > 1:
                raise DataError(f"column {name}: expected one of that name, got several")
        named = {"user": () if self.url or self.owners else self.user, "text": self.text}
        named |= {"order": (self.order,), "url": (self.url,)}
        named |= {"conversation": (self.conversation,), "turn": (self.turn,)}
        for field, names in named.items():
            for name in names:
                if name is not None and name not in found:
                    line = f"{field}_column={name}: {expected_of(found, self.names)}"
                    raise MissingColumn(line, field=f"{field}_column")
        for name in self.owners:
            if name not in found:
                line = f"owners={name}: {expected_of(found, self.names)}"
                raise MissingColumn(line, field="owners")


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def paths(schema: pa.Schema) -> list[str]:
    """The names of columns, those inside others with a dot: user.id."""
    found = []
    for field in schema:
        found.append(field.name)
        if pa.types.is_struct(field.type):
            inner = paths(pa.schema(field.type.fields))
            found += [f"{field.name}.{name}" for name in inner]
    return found


def pick(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The columns of these names, those inside others, too; see `paths`."""
    found = {}
    for name in names:
        outer, *inner = [name] if name in batch.schema.names else name.split(".")
        column = batch[outer]
        found[name] = pc.struct_field(column, inner) if inner else column  # pyright: ignore
    return pa.RecordBatch.from_pydict(found)


def normalise(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str] | None = None
) -> pa.RecordBatch:
    """The batch as user_id, text (each if columns are named that have it) and perhaps order.

    A row nobody owns has a user_id that is null or blank.

    Args: tally: counts what was put right of user ids; see `user_ids`.
    Raises: DataError: a column has another type than it should, or text that is not UTF-8.
    """
    found = {}
    if columns.owner:
        tally = Counter() if tally is None else tally
        found["user_id"] = _users(batch, columns, first_row, tally)
    texts = [text_of(batch[name], f"text_column={name}", first_row, True) for name in columns.text]
    if len(texts) > 1:
        if any(is_token_list(text.type) for text in texts):
            raise DataError.of("text_column", columns.text, "one column of token ids")
        found["text"] = reduce(_join_texts, texts)
    elif texts:
        found["text"] = texts[0]
    if columns.order is not None:
        order, field = plain(batch[columns.order]), f"order_column={columns.order}"
        keys = keys_of(_validate(order, field, first_row), field, first_row, columns.order_format)
        if pa.types.is_null(keys.type) and columns.order_as is not None:
            keys = keys.cast(KEYS[columns.order_as])
        found["order"] = keys
    return pa.RecordBatch.from_pydict(found)


def _users(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str]
) -> pa.Array:
    """Whose each row is: an id, or a set of owners as one string."""
    lists = len(columns.user) == 1 and is_list(plain(batch[columns.owner[0]]).type)
    if columns.owners or (columns.url is None and lists):
        return _owner_sets(batch, columns, first_row, tally)
    if columns.url is not None:
        return _as_domains(text_of(batch[columns.url], f"url_column={columns.url}", first_row))
    rows = range(first_row, first_row + len(batch))
    how = columns.normalise_ids
    return _join_ids(
        [ids_of(batch[name], f"user_column={name}", rows, tally, how) for name in columns.user]
    )


def is_blank(column: pa.Array) -> np.ndarray:
    """bool [rows]: null, empty, or white space only; of token lists: null or empty."""
    if is_token_list(column.type):
        blank = pc.equal(pc.list_value_length(column), 0)  # pyright: ignore
    else:
        trimmed = pc.call_function("utf8_trim_whitespace", [column])
        blank = pc.call_function("equal", [trimmed, pa.scalar("")])
    return blank.fill_null(True).to_numpy(zero_copy_only=False)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def is_token_list(kind: pa.DataType) -> bool:
    """Whether a text column holds token ids instead of text."""
    return is_list(kind) and pa.types.is_integer(kind.value_type)  # pyright: ignore


def plain(column: pa.Array) -> pa.Array:
    """The column with its values in the place of a dictionary's numbers."""
    return column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column


def is_string(kind: pa.DataType) -> bool:
    """Whether `kind` is one of Arrow's string types."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def ids_of(
    column: pa.Array, field: str, rows: Rows, tally: Counter[str], how: Sequence[str] = ()
) -> pa.Array:
    """Ids as strings; see `user_ids`. Raises: DataError: it has no ids."""
    column = plain(column)
    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_string(kind) or numbers or pa.types.is_null(kind)):
        raise refused(field, f"strings or integers, got {kind}")
    column = _validate(column, field, rows[0] if len(rows) else 0)
    ids = as_ids(column, field, rows, tally, how)
    joined = pc.match_substring(ids, SEPARATOR).fill_null(False)  # pyright: ignore
    if joined.true_count:
        row = rows[joined.index(True).as_py()] + 1
        raise refused(field, f"ids without the control character 1F, got row {row}")
    return ids


def _owner_sets(
    batch: pa.RecordBatch, columns: Columns, first_row: int, tally: Counter[str]
) -> pa.Array:
    """Each row's set of owners as one string (see data/owners.py), blank where there is none.

    Raises: DataError: a list with a null, an empty id or an id twice, or too many owners.
    """
    parts = [_owned(batch, name, columns, first_row, tally) for name in columns.owner]
    rows = np.concatenate([rows for rows, _ in parts])
    ids = pa.concat_arrays([ids for _, ids in parts])
    keys, counts = owner_sets(rows, ids, len(batch))
    if len(bad := np.flatnonzero(counts > MOST_OWNERS)):
        raise refused(
            columns.blamed,
            f"at most {MOST_OWNERS} owners of a text, got {counts[bad[0]]} in row "
            f"{first_row + bad[0] + 1}",
        )
    return keys


def _owned(
    batch: pa.RecordBatch, name: str, columns: Columns, first_row: int, tally: Counter[str]
) -> tuple[np.ndarray, pa.Array]:
    """(row, owner) of one column: lists, or single ids, of which null and blank ones are nobody."""
    column, field = plain(batch[name]), columns.blamed
    if not is_list(column.type):
        rows, parts = _split(column, field, first_row, columns.owners_delimiter)
        ids = ids_of(parts, field, first_row + rows, tally, columns.normalise_ids)
        kept = np.flatnonzero(~is_blank(ids))
        count_lists(ids, tally)
        return rows[kept], ids.take(pa.array(kept))
    sizes = pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)  # pyright: ignore
    rows, values = np.repeat(np.arange(len(column)), sizes), column.flatten()
    if pa.types.is_list(values.type) or pa.types.is_nested(values.type):
        raise refused(field, f"lists of strings or integers, got {column.type}")
    if len(bad := np.flatnonzero(sizes > MOST_OWNERS)):
        raise refused(
            field,
            f"at most {MOST_OWNERS} owners of a text, got {sizes[bad[0]]} in row "
            f"{first_row + bad[0] + 1}",
        )
    ids = ids_of(values, field, first_row + rows, tally, columns.normalise_ids)
    count_lists(ids, tally)
    blank = is_blank(ids)
    if blank.any():
        row = first_row + rows[blank.argmax()] + 1
        raise refused(field, f"owners with ids, got a null or empty one in row {row}")
    _, counts = owner_sets(rows, ids, len(column))
    if len(bad := np.flatnonzero(counts < sizes)):
        row = first_row + bad[0] + 1
        raise refused(field, f"each owner of a text once, got one twice in row {row}")
    return rows, ids


def _split(
    column: pa.Array, field: str, first_row: int, delimiter: str | None
) -> tuple[np.ndarray, pa.Array]:
    """(row, id) of a column of single ids, or of texts with several ids in each."""
    if delimiter is None or not is_string(column.type):
        return np.arange(len(column)), column
    texts = _validate(column.cast(pa.string()), field, first_row)
    pattern = f"[{re.escape(delimiter)}]"
    lists = pc.split_pattern_regex(texts, pattern)  # pyright: ignore
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy().astype(np.int64)  # pyright: ignore
    parts = pc.call_function("utf8_trim_whitespace", [lists.flatten()])
    return np.repeat(np.arange(len(column)), sizes), parts


def _join_ids(parts: Sequence[pa.Array]) -> pa.Array:
    """One id of several: joined by slashes, with the parts' own slashes escaped so that other parts
    never make the same id. Null if a part is null or blank."""
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
    """Texts joined; nulls and empty ones are skipped."""
    one, other = one.fill_null(""), other.fill_null("")
    both = pc.binary_join_element_wise(one, other, TEXT_JOINT)  # pyright: ignore
    both = pc.if_else(pc.equal(other, ""), one, both)  # pyright: ignore
    return pc.if_else(pc.equal(one, ""), other, both)  # pyright: ignore


def _as_domains(urls: pa.Array) -> pa.Array:
    unique = urls.dictionary_encode()
    domains = [registrable_domain(url) for url in unique.dictionary.to_pylist()]
    return pa.array(domains, pa.string()).take(unique.indices)


def text_of(column: pa.Array, field: str, first_row: int, tokens: bool = False) -> pa.Array:
    """Texts, or lists of token ids. Raises: DataError: it has neither, or no UTF-8."""
    column = plain(column)
    if tokens and is_token_list(column.type):
        return column
    if not (is_string(column.type) or pa.types.is_null(column.type)):
        expected = "strings, or lists of token ids" if tokens else "strings"
        raise refused(field, f"{expected}, got {column.type}")
    return _validate(column.cast(pa.string()), field, first_row)


def _validate(column: pa.Array, field: str, first_row: int) -> pa.Array:
    """The column, if its strings are UTF-8; before anything else trips over them."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        where = re.search(r"string index (\d+)", str(error))
        row = f" in row {first_row + int(where[1]) + 1}" if where else ""
        raise refused(field, f"UTF-8, got other bytes{row}") from None
    return column
