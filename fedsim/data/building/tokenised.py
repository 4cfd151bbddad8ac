"""First half of a build: parts of the sources become tokenised rows on disk, in scratch Parquet.

A row has its owner, which is a user within a group (see dataset.py), its order keys if any, its
place among the rows of all sources, and its token ids as bytes. A long row is written in several
pieces, because each thread of DuckDB holds 122,880 rows in memory, however long they are. Parts of
small files are bundled to limit the number of files.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.data.building.chats import Chats, chat_examples
from fedsim.data.building.columns import Columns, is_blank, is_token_list
from fedsim.data.building.orders import at_least
from fedsim.data.building.readers import PART_BYTES, READ_ROWS, Part, read
from fedsim.data.building.speakers import BadRow
from fedsim.data.chat import ChatTokenizer, Template
from fedsim.data.dataset import EVAL_USERS, TEST, TRAIN, Holdout
from fedsim.data.store import copy, offsets_of, token_dtype
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError

PIECE_BYTES = 512
PLACES = 2**40  # more than the rows of a bundle
GROUP_BYTES = 4 * 2**20  # of a row group, which a sorting thread reads at once
COUNTS = ("examples", "unowned", "empty", "long", "no_order", "tokens", "tokens_cut")
COUNTS += ("untrained", "skipped", "spelling")
BUNDLE_BYTES, MAX_BUNDLES = 4 * 2**20, 4096  # size of a bundle, and bundles of a build, about


@dataclass(frozen=True)
class Encoding:
    """Settings by which texts become rows: the same for all parts."""

    directory: Path
    """Directory of the files of rows."""
    tokenizer: Path
    """Path of tokenizer.json."""
    columns: Columns
    holdout: Holdout
    max_length: int
    long_texts: str
    chats: Chats | None = None
    """How rows of chats become examples; None if rows are texts."""


def bundled(parts: Sequence[Part]) -> list[list[Part]]:
    """Group parts, in order, so that small ones are together."""
    files = [part.file for part in parts]
    sizes = [PART_BYTES if f.is_dir() else min(f.stat().st_size, PART_BYTES) for f in files]
    enough = max(BUNDLE_BYTES, sum(sizes) // MAX_BUNDLES)
    bundles, held = [], enough
    for part, size in zip(parts, sizes, strict=True):
        if held >= enough:
            bundles.append([])
            held = 0
        bundles[-1].append(part)
        held += size
    return bundles


def write_rows(item: tuple[int, Sequence[Part]], *, encoding: Encoding) -> dict[str, int]:
    """Write the rows of a bundle.

    Args:
      item: number of the bundle, and its parts.
    Returns:
      The number of source rows, and COUNTS.
    Raises:
      DataError: a token id is not in the vocabulary, or `read` refuses a file.
    """
    number, parts = item
    record = {"rows": 0, **dict.fromkeys(COUNTS, 0)}
    with RowWriter(encoding.directory / f"rows-{number:06d}.parquet", number * PLACES) as rows:
        for part in parts:
            for first_row, batch in read(part, encoding.columns):
                table, counts = _tokenise(batch, encoding, first_row, part.source)
                rows.add(table)
                record["rows"] += len(batch)
                for name, count in zip(COUNTS, counts, strict=True):
                    record[name] += count
    return record


class RowWriter:
    """Write tokenised rows to a Parquet file; without rows, to no file. A context manager."""

    def __init__(self, file: Path, place: int):
        """Keep the settings. The file is made with the first row group.

        Args:
          place: number of the first row among all rows; increases from bundle to bundle.
        """
        self._file, self._place = file, place
        self._writer: pq.ParquetWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._held: list[pa.Table] = []

    def __enter__(self) -> "RowWriter":
        return self

    def add(self, table: pa.Table) -> None:
        """Append rows. They are held until they make a row group."""
        place = self._place + np.arange(len(table))
        self._place += len(table)
        self._held.append(table.append_column("place", pa.array(place)))
        if (
            sum(map(len, self._held)) >= READ_ROWS
            or sum(t.nbytes for t in self._held) > GROUP_BYTES
        ):
            self._write()

    def _write(self) -> None:
        table = pa.concat_tables(self._held)
        self._held = []
        if self._writer is None:
            self._sink = pa.OSFile(str(self._file), "wb")
            keys = [name for name in table.column_names if name != "tokens"]
            self._writer = pq.ParquetWriter(
                self._sink,
                table.schema,
                compression="lz4",
                use_dictionary=keys,  # pyright: ignore
            )
        self._writer.write_table(table, max(1, len(table) * GROUP_BYTES // max(table.nbytes, 1)))

    def __exit__(self, error, *_) -> None:
        try:
            if error is None and sum(map(len, self._held)):
                self._write()
            if error is None and self._writer is not None:
                self._writer.close()
        finally:
            if self._sink is not None:
                self._sink.close()


def _tokenise(
    batch: pa.RecordBatch, encoding: Encoding, first_row: int, file: Path
) -> tuple[pa.Table, tuple[int, ...]]:
    """Tokenise a batch.

    Returns:
      The rows, in pieces, and their COUNTS: rows; source rows without a user, without a text, with
      a long text, without an order; tokens of the texts, and tokens that were cut off; chats
      without a trained token, and those that cannot be encoded; texts that spell special tokens.
      Of a huge text, only tokens that were encoded are counted; see `Tokenizer.encode`.
    """
    unowned = is_blank(batch["user_id"])
    blank = unowned | is_blank(batch["text"])
    kept = batch.filter(pa.array(~blank)) if blank.any() else batch
    make = _of_texts if encoding.chats is None else _of_chats
    try:
        examples, long, tokens, num_cut, *unusable = make(kept, encoding)
    except BadRow as bad:
        row, columns = int(np.flatnonzero(~blank)[bad.row]) + first_row + 1, encoding.columns
        named = f"{columns.text_fields[0]}={columns.text[0]}"
        raise DataError(f"{named}: {bad} in row {row} of {file}") from None
    columns = {"user_id": kept["user_id"]}
    no_order = 0
    if encoding.columns.order is not None:
        no_order = kept["order"].null_count
        columns |= {f"order{i}": key for i, key in enumerate(kept["order"].flatten()[1:])}
    is_test = tests(kept, encoding.holdout)
    columns["group"] = _groups(kept["user_id"], is_test, encoding.holdout)
    row, sizes, columns["first"] = pieces(examples.lengths, examples.values.itemsize)
    if encoding.chats is not None or len(row) > len(kept):
        origin = pa.array(examples.origin[row])
        columns = {
            name: column if name == "first" else column.take(origin)
            for name, column in columns.items()
        }
    columns["tokens"] = as_bytes(sizes, examples.values)
    unread = int(unowned.sum()), int((blank & ~unowned).sum())
    spelling = 0 if is_token_list(kept["text"].type) else _spelling(kept["text"], encoding)
    counts = len(examples.lengths), *unread, long, no_order, tokens, num_cut, *unusable, spelling
    return pa.table(columns), counts


def _spelling(texts: pa.Array, encoding: Encoding) -> int:
    """Number of texts, or JSON of chats, that spell a special token."""
    spelled = _tokenizer(encoding.tokenizer).special_texts
    if encoding.chats is not None:
        spelled = {*spelled, *(json.dumps(text)[1:-1] for text in spelled)}
    pattern = "|".join(map(re.escape, sorted(spelled)))
    if not pattern:
        return 0
    return pc.match_substring_regex(texts, pattern).true_count  # pyright: ignore


def _of_texts(rows: pa.RecordBatch, encoding: Encoding) -> tuple[Any, ...]:
    """(examples of texts, then their counts from "long" to "skipped" without "no_order").

    Raises:
      BadRow: a token id is not in the vocabulary.
    """
    tokenizer, texts = _tokenizer(encoding.tokenizer), rows["text"]
    max_length = encoding.max_length
    if is_token_list(texts.type):
        lengths, values = _given_tokens(texts, tokenizer.vocab_size)
    else:
        lengths, values = tokenizer.encode(texts, encoding.long_texts == "cut")
    examples = frame(
        lengths,
        values.astype(token_dtype(tokenizer.vocab_size), copy=False),
        begin_id=tokenizer.begin_id,
        end_id=tokenizer.end_id,
        max_length=max_length,
        long_texts=encoding.long_texts,
    )
    cut = np.maximum(lengths - (max_length - 1), 0)
    num_cut = int(cut.sum()) if encoding.long_texts == "cut" else 0
    long = int((lengths >= max_length).sum())
    return examples, long, int(lengths.sum()), num_cut, 0, 0


def _of_chats(rows: pa.RecordBatch, encoding: Encoding) -> tuple[Any, ...]:
    """As `_of_texts`, of rows of chats. Raises: BadRow: one cannot be encoded."""
    assert encoding.chats is not None, "of chats"

    def refuse(row: int, reason: str) -> None:
        raise BadRow(row, reason)

    tokenizer = _chat_tokenizer(encoding.tokenizer, encoding.chats.template)
    texts = rows["text"].to_pylist()
    found = chat_examples(texts, encoding.chats, tokenizer, refuse)
    return found, found.long, found.tokens, found.cut, found.untrained, found.skipped


class Examples(NamedTuple):
    """Examples of texts."""

    lengths: np.ndarray
    """int64 [examples]: number of tokens of each."""
    values: np.ndarray
    """Token ids of all examples end to end."""
    origin: np.ndarray
    """int64 [examples]: index of the text that each comes from."""


def frame(
    lengths: np.ndarray,
    values: np.ndarray,
    *,
    begin_id: int,
    end_id: int,
    max_length: int,
    long_texts: str,
) -> Examples:
    """Frame texts: a begin token before each, an end token if it fits; cut or split long texts.

    An example has at most max_length tokens, begin token included. "split" loses no token; "cut"
    keeps the first max_length - 1 tokens of a text. A text without tokens gives one example. The
    work is arithmetic on a whole batch, without a Python object per text or token.

    Args:
      lengths: int64 [texts], tokens of each text.
      values: token ids of all texts end to end.
    """
    body = max_length - 1
    number = np.maximum(1, -(-lengths // body))
    if long_texts == "cut":
        number = np.minimum(number, 1)
    origin = np.repeat(np.arange(len(lengths)), number)
    start = (np.arange(len(origin)) - np.repeat(np.cumsum(number) - number, number)) * body
    left = lengths[origin] - start
    taken = np.minimum(left, body)
    ends = left < body
    counts = 1 + taken + ends
    first = np.cumsum(counts) - counts
    framed = np.empty(int(counts.sum()), values.dtype)
    copy(values, (np.cumsum(lengths) - lengths)[origin] + start, taken, framed, first + 1)
    framed[first] = begin_id
    framed[(first + counts - 1)[ends]] = end_id
    return Examples(counts, framed, origin)


def pieces(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray, pa.Array]:
    """Cut rows into pieces of at most PIECE_BYTES.

    Args:
      lengths: int64 [rows], tokens of each row.
      width: bytes of a token id.
    Returns:
      Of each piece: the index of its row, its number of tokens, True if it is the first of its row.
    """
    most = PIECE_BYTES // width
    number = np.maximum(1, -(-lengths // most))
    ends = np.cumsum(number)
    sizes = np.full(int(number.sum()), most)
    sizes[ends - 1] = lengths - (number - 1) * most
    first = np.zeros(len(sizes), bool)
    first[ends - number] = True
    return np.repeat(np.arange(len(lengths)), number), sizes, pa.array(first)


def _groups(users: pa.Array, is_test: np.ndarray, holdout: Holdout) -> pa.Array:
    """Group of each row, int8: TRAIN, EVAL_USERS or TEST of dataset.py."""
    group = np.where(is_test, TEST, TRAIN)
    if holdout.eval_users:
        unique = users.dictionary_encode()
        ids = unique.dictionary.to_pylist()
        held_out = np.fromiter(map(_taken(holdout), ids), bool, len(ids))
        group = np.where(held_out[unique.indices.to_numpy()], EVAL_USERS, group)
    return pa.array(group, pa.int8())


def as_bytes(lengths: np.ndarray, values: np.ndarray) -> pa.Array:
    """Token ids of each row as one binary value, which sorts faster than a list of numbers.

    Args:
      lengths: int64 [rows], tokens of each row.
      values: token ids of all rows end to end.
    """
    ends = pa.py_buffer(offsets_of(lengths * values.itemsize))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.large_binary(), len(lengths), [None, ends, data])


def tests(batch: pa.RecordBatch, holdout: Holdout) -> np.ndarray:
    """True for rows of the split "test", bool [rows]."""
    if holdout.test_from is None:
        return np.zeros(len(batch), bool)
    return at_least(batch["order"], holdout.test_from)


def _given_tokens(column: pa.Array, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ids of lists of token ids. Raises: BadRow: an id is null or out of range."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)  # pyright: ignore
    values = column.flatten()
    ends = np.cumsum(lengths)
    if values.null_count:
        where = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise BadRow(int(np.searchsorted(ends, where, "right")), "a null token id")
    ids = values.to_numpy()
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise BadRow(
            int(np.searchsorted(ends, bad[0], "right")),
            f"token id {ids[bad[0]]}, expected one in [0, {vocab_size})",
        )
    return lengths, ids


@lru_cache(1)
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer.load(file)


@lru_cache(1)
def _chat_tokenizer(file: Path, template: Template | None) -> ChatTokenizer:
    return ChatTokenizer(_tokenizer(file), template)


@cache
def _taken(holdout: Holdout) -> Callable[[str], bool]:
    return lru_cache(2**20)(holdout.takes_user)
