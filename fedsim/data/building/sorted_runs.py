"""First half of a build: parts of the sources become sorted runs of tokenised rows on disk.

A run is what fits in memory, sorted by owner and, within an owner, by the order column and then as
in the source. An owner is a user within a group (see splits.py). Three files make a run: its rows'
tokens, its owners with their numbers of rows and tokens, and the rows' order values if any. Parts
of small files are bundled, so that there are not too many runs to map at once. A bundle is done
when its record is there; a build that was killed does not do it again.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.data.building.columns import Columns, is_blank, is_token_list
from fedsim.data.building.orders import at_least
from fedsim.data.building.processes import kept_for_a_build
from fedsim.data.building.readers import PART_BYTES, Part, read
from fedsim.data.framing import frame
from fedsim.data.shards import token_dtype, write_stream
from fedsim.data.splits import EVAL_USERS, TEST, TRAIN, Holdout
from fedsim.data.text import Tokenizer
from fedsim.errors import DataError
from fedsim.files import write_json

RUN_ROWS, RUN_TOKENS = 2**20, 2**24  # a run is closed when it has as many
# What is counted of texts, and of their tokens.
FOUND = ("unowned", "empty", "long", "no_order", "tokens", "tokens_cut")
BUNDLE_BYTES, MOST_BUNDLES = 4 * 2**20, 4096  # of a bundle, about, and of a build where it can


@dataclass(frozen=True)
class Encoding:
    """How texts become rows: all that a worker needs to know besides the part."""

    directory: Path
    """Where runs go."""
    tokenizer: Path
    columns: Columns
    holdout: Holdout
    max_length: int
    long_texts: str


def bundled(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts in order, with small ones together."""
    files = [part.file for part in parts]
    sizes = [PART_BYTES if f.is_dir() else min(f.stat().st_size, PART_BYTES) for f in files]
    enough = max(BUNDLE_BYTES, sum(sizes) // MOST_BUNDLES)
    bundles, held = [], enough
    for part, size in zip(parts, sizes, strict=True):
        if held >= enough:
            bundles.append([])
            held = 0
        bundles[-1].append(part)
        held += size
    return bundles


def write_runs(
    item: tuple[int, Sequence[Part]], *, encoding: Encoding, report: Callable[[int], None]
) -> dict[str, Any]:
    """Writes the runs of a bundle. Returns its record: names of the runs and counts of texts.

    Raises: DataError: a token id beyond the vocabulary, and whatever is wrong with the file.
    """
    number, parts = item
    record_file = encoding.directory / f"part-{number:06d}.json"
    if record_file.exists():
        record = json.loads(record_file.read_text())
        report(record["rows"])
        return record
    record = {"runs": [], "rows": 0, **dict.fromkeys(FOUND, 0)}
    run = _Run(encoding)
    for part in parts:
        for first_row, batch in read(part, encoding.columns):
            record["rows"] += len(batch)
            found = run.add(batch, first_row, part.file)
            for name, number_found in zip(FOUND, found, strict=True):
                record[name] += number_found
            if run.is_full:
                run.write(f"run-{number:06d}-{len(record['runs']):06d}", record["runs"])
                run = _Run(encoding)
            report(len(batch))
    run.write(f"run-{number:06d}-{len(record['runs']):06d}", record["runs"])
    write_json(record_file, record)
    return record


class _Run:
    """Rows that wait to be sorted and written."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._users: list[pa.Array] = []
        self._is_test: list[np.ndarray] = []
        self._order: list[pa.Array] = []
        self._lengths: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._rows = self._tokens = 0

    @property
    def is_full(self) -> bool:
        return self._rows >= RUN_ROWS or self._tokens >= RUN_TOKENS

    def add(self, batch: pa.RecordBatch, first_row: int, file: Path) -> tuple[int, ...]:
        """Tokenises a batch. Returns how many rows had no user, no text, a long text, no order; how
        many tokens texts have, and how many of them are cut off (of huge texts those that are read,
        see `Tokenizer.encode`)."""
        encoding = self._encoding
        unowned = is_blank(batch["user_id"])
        blank = unowned | is_blank(batch["text"])
        kept = batch.filter(pa.array(~blank)) if blank.any() else batch
        tokenizer = _tokenizer(encoding.tokenizer)
        try:
            if is_token_list(kept["text"].type):
                lengths, values = _given_tokens(kept["text"], tokenizer.vocab_size)
            else:
                lengths, values = tokenizer.encode(kept["text"], encoding.long_texts == "cut")
        except _BadRow as bad:
            row = int(np.flatnonzero(~blank)[bad.row]) + first_row + 1
            raise DataError(
                f"text_column={encoding.columns.text[0]}: {bad} in row {row} of {file}"
            ) from None
        found = frame(
            lengths,
            values.astype(token_dtype(tokenizer.vocab_size), copy=False),
            begin_id=tokenizer.begin_id,
            end_id=tokenizer.end_id,
            max_length=encoding.max_length,
            long_texts=encoding.long_texts,
        )
        kept = kept.drop_columns(["text"])
        no_order = 0 if encoding.columns.order is None else kept["order"].null_count
        if len(found.origin) > len(kept):
            kept = kept.take(pa.array(found.origin))
        self._users.append(kept["user_id"])
        self._is_test.append(tests(kept, encoding.columns, encoding.holdout))
        if encoding.columns.order is not None:
            self._order.append(kept["order"])
        self._lengths.append(found.lengths)
        self._values.append(found.values)
        self._rows += len(found.lengths)
        self._tokens += len(found.values)
        long, tokens = int((lengths >= encoding.max_length).sum()), int(lengths.sum())
        cut = np.maximum(lengths - (encoding.max_length - 1), 0)
        num_cut = int(cut.sum()) if encoding.long_texts == "cut" else 0
        unread = int(unowned.sum()), int((blank & ~unowned).sum())
        return *unread, long, no_order, tokens, num_cut

    def write(self, name: str, names: list[str]) -> None:
        """Sorts and writes what there is and adds `name` to `names`."""
        if not self._rows:
            return
        users = encoded(self._users)
        order = pa.concat_arrays(self._order) if self._order else None
        ids, code = _owners(users, np.concatenate(self._is_test), self._encoding.holdout)
        rows = sort_rows(code, order)
        lengths = np.concatenate(self._lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(offsets, np.concatenate(self._values))
        tokens = tokens.take(pa.array(rows))
        lengths, code = lengths[rows], code[rows]
        first = np.flatnonzero(np.diff(code, prepend=-1))
        group, user = np.divmod(code[first], len(ids))
        owners = pa.table(
            {
                "group": pa.array(group, pa.int8()),
                "user_id": ids.take(pa.array(user)),
                "rows": np.diff(first, append=len(code)),
                "tokens": np.add.reduceat(lengths, first),
            }
        )
        directory = self._encoding.directory
        parts = [(lengths, tokens.flatten().to_numpy())]
        write_stream(directory / f"{name}.tokens", parts, parts[0][1].dtype)
        write_table(directory / f"{name}.owners", owners)
        if order is not None:
            write_table(
                directory / f"{name}.order", pa.table({"order": order.take(pa.array(rows))})
            )
        names.append(name)


def tests(batch: pa.RecordBatch, columns: Columns, holdout: Holdout) -> np.ndarray:
    """bool [rows]: whether a row is a test. Raises: DataError: test_from cannot be compared."""
    if holdout.test_from is None:
        return np.zeros(len(batch), bool)
    return at_least(batch["order"], holdout.test_from, columns.order, columns.order_format)


def sort_rows(code: np.ndarray, order: pa.Array | None) -> np.ndarray:
    """int64 [rows]: the rows sorted by code, then order (nulls last), then as they are."""
    if order is None:
        keys = code.astype(np.int64) << 32  # two numbers in one sort many times faster than pairs
        keys |= np.arange(len(code))
        keys.sort()
        keys &= 2**32 - 1
        return keys
    table = pa.table({"code": code} | {str(i): key for i, key in enumerate(order.flatten())})
    keys = [(name, "ascending") for name in table.column_names]
    return pc.sort_indices(table, sort_keys=keys).to_numpy().astype(np.int64)  # pyright: ignore


def write_table(path: Path, table: pa.Table) -> None:
    """An Arrow file that can be mapped; whole or absent."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    os.replace(temporary, path)


def read_table(path: Path) -> pa.Table:
    """What `write_table` wrote, mapped."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def encoded(ids: Sequence[pa.Array]) -> pa.DictionaryArray:
    """Ids end to end. Together they may take more than the 2 GiB which an array of strings can."""
    return pa.chunked_array(ids).dictionary_encode().unify_dictionaries().combine_chunks()


def _owners(
    users: pa.DictionaryArray, is_test: np.ndarray, holdout: Holdout
) -> tuple[pa.Array, np.ndarray]:
    """The distinct user ids, sorted, and each row's owner: group * users + user."""
    order = pc.sort_indices(users.dictionary)  # pyright: ignore
    ids = users.dictionary.take(order)
    rank = np.empty(len(ids), np.int64)
    rank[order.to_numpy()] = np.arange(len(ids))
    user = rank[users.indices.to_numpy()]
    group = np.where(is_test, TEST, TRAIN)
    if holdout.eval_users:
        held_out = np.fromiter(map(_taken(holdout), ids.to_pylist()), bool, len(ids))
        group = np.where(held_out[user], EVAL_USERS, group)
    return ids, group * len(ids) + user


class _BadRow(Exception):
    """What is wrong with a row of a batch."""

    def __init__(self, row: int, reason: str):
        super().__init__(reason)
        self.row = row


def _given_tokens(column: pa.Array, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ids of lists of token ids."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)  # pyright: ignore
    values = column.flatten()
    ends = np.cumsum(lengths)
    if values.null_count:
        where = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise _BadRow(int(np.searchsorted(ends, where, "right")), "a null token id")
    ids = values.to_numpy()
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise _BadRow(
            int(np.searchsorted(ends, bad[0], "right")),
            f"token id {ids[bad[0]]}, expected one in [0, {vocab_size})",
        )
    return lengths, ids


@kept_for_a_build
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.load(file)


@cache
def _taken(holdout: Holdout) -> Callable[[str], bool]:
    return lru_cache(2**20)(holdout.takes_user)


def training_texts(
    parts: Sequence[Part], columns: Columns, holdout: Holdout, every: int
) -> Iterator[str]:
    """What a tokenizer may learn from: one in `every` text of the users who are not held out."""
    takes_user, row = _taken(holdout), 0
    for part in parts:
        for _, batch in read(part, columns):
            if is_token_list(batch["text"].type):
                raise DataError("tokenizer: expected a text column to learn from, got token ids")
            wanted = np.flatnonzero((np.arange(row, row + len(batch)) % every) == 0)
            row += len(batch)
            batch = batch.take(pa.array(wanted))
            is_test = tests(batch, columns, holdout).tolist()
            users, texts = batch["user_id"].to_pylist(), batch["text"].to_pylist()
            for user, text, later in zip(users, texts, is_test, strict=True):
                if user and text and not later and not takes_user(user):
                    yield text
