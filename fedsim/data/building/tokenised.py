"""First half of a build: parts of the sources become tokenised rows on disk, in scratch Parquet.

A row has its owner, which is a user within a group (see dataset.py), its order keys if any, its
place among the rows of all sources, and its token ids as bytes, which sort faster than lists.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from fedsim.config import BuildConfig
from fedsim.data.building.columns import Columns, at_least, is_blank, kinds_of
from fedsim.data.building.messages import Bad, Chats, Examples, chat_examples
from fedsim.data.building.sources import Part, in_words, read
from fedsim.data.building.user_ids import call, like_nobody
from fedsim.data.chat import ChatTokenizer, Template
from fedsim.data.dataset import EVAL_USERS, TEST, TRAIN, is_held_out, limits
from fedsim.data.store import offsets_of, token_dtype
from fedsim.data.tokenizer import Tokenizer
from fedsim.data.users import copy
from fedsim.errors import DataError

SHOWN_ROWS, MAX_KINDS = 5, 10  # of faults in an error
DROPS = "; expected a user for every row; `rows_without_user='drop'` of `fedsim.data.build` leaves "
DROPS += "such rows out"  # nothing would protect whoever wrote them
PLACES = 2**40  # more than the rows of a part
GROUP_BYTES = 4 * 2**20  # of a row group, which a sorting thread reads at once


@dataclass(frozen=True)
class Encoding:
    """Settings by which texts become rows: the same for all parts."""

    directory: Path
    """Directory of the files of rows."""
    tokenizer: Path
    """Path of a tokenizer.json that another process has loaded without harm."""
    columns: Columns
    settings: BuildConfig
    chats: Chats | None = None
    """How rows of chats become examples; None if rows are texts."""


class Faults:
    """Faults of the rows of a file by kind, so that one error tells them all."""

    def __init__(self, source: str):
        self.source, self.numbers = source, Counter[str]()
        self.kinds: dict[str, tuple[str, str, list[int]]] = {}

    def add(self, said: str, remedy: str, rows: Sequence[int]) -> None:
        kind = re.sub(r"\bturn \d+", "a turn", said)
        if kind in self.kinds or len(self.kinds) < MAX_KINDS:
            *_, first = self.kinds.setdefault(kind, (said, remedy, []))
            first.extend(rows[: SHOWN_ROWS - len(first)])
            self.numbers[kind] += len(rows)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the faults at the end of this block, with the error that ends it, if any."""
        last = []
        try:
            yield
        except DataError as error:
            if not self.kinds:
                raise
            last = [str(error)]
        lines = []
        for kind, (said, remedy, rows) in self.kinds.items():
            number = self.numbers[kind]
            shown = ", ".join(map(str, rows)) + ", ..." * (number > SHOWN_ROWS)
            where = f"row {shown}" if number == 1 else f"{number:,} rows ({shown})"
            said = said if number == 1 else kind
            lines.append(f"{said} in {where} of {self.source}{remedy}")
        if lines:
            raise DataError("; also ".join(lines + last))


def write_rows(item: tuple[int, Part], *, encoding: Encoding) -> Counter[str]:
    """Write the rows of a part, whose number comes first. Without rows, there is no file.

    Returns: counts of source rows; of those that are unowned, empty or without an order (no_order);
      of batches with orders of each kind; of examples; of texts that spell special tokens; of users
      like nobody; and those of `chat_examples`.
    Raises: DataError: rows have no user or cannot be encoded, or `read` refuses a file.
    """
    number, part = item
    place, writer = number * PLACES, None
    counts: Counter[str] = Counter()
    columns, faults = encoding.columns, Faults(in_words(part.file))
    named = f"{columns.fields[columns.text[0]]}={columns.text[0]}"
    with ExitStack() as stack, faults.raised():
        for first_row, batch in read(part, columns, encoding.settings):
            unowned = is_blank(batch["user_id"])
            if unowned.any() and encoding.settings.rows_without_user == "refuse":
                rows = np.flatnonzero(unowned) + first_row + 1
                faults.add(f"{columns.blamed}: null or empty user ids", DROPS, rows.tolist())
            if faults.kinds and encoding.chats is None:  # nothing else can be wrong
                continue
            rows, bad = _tokenise(batch, unowned, encoding, counts)
            for row, (said, remedy) in bad.items():
                faults.add(f"{named}: {said}", remedy, [first_row + row + 1])
                if not remedy:  # the template is slow
                    return counts
            places = pa.array(place + np.arange(len(rows)))
            rows, place = rows.append_column("place", places), place + len(rows)
            if writer is None:
                file = encoding.directory / f"rows-{number:06d}.parquet"
                options = {"compression": "lz4", "use_dictionary": ["user_id"]}
                writer = stack.enter_context(pq.ParquetWriter(file, rows.schema, **options))
            writer.write_table(rows, max(1, len(rows) * GROUP_BYTES // max(rows.nbytes, 1)))
    return counts


def _tokenise(
    batch: pa.RecordBatch, unowned: np.ndarray, encoding: Encoding, counts: Counter[str]
) -> tuple[pa.Table, Bad]:
    """The rows of a batch, without those that cannot be encoded."""
    blank = unowned | is_blank(batch["text"])
    filled = np.flatnonzero(~blank)
    batch = batch.take(pa.array(filled))
    chats, tokenizer = encoding.chats, _tokenizer(encoding.tokenizer)
    spelled, bad = tokenizer.special_texts, {}
    if chats is None:
        encoded = tokenizer.encode(batch["text"])
        examples = frame(*encoded, tokenizer, encoding.settings, counts)
    else:
        spelled = {*spelled, *(json.dumps(text)[1:-1] for text in spelled)}
        of_chats = _chat_tokenizer(encoding.tokenizer, chats.template)
        examples, of_rows, bad = chat_examples(batch["text"].to_pylist(), chats, of_chats)
        counts.update(of_rows)
    counts.update(rows=len(blank), unowned=int(unowned.sum()), examples=len(examples.lengths))
    counts["empty"] += int((blank & ~unowned).sum())
    counts["user_ids_like_nobody"] += like_nobody(batch["user_id"])
    if pattern := "|".join(map(re.escape, sorted(spelled))):
        spelling = call("match_substring_regex", batch["text"], pattern=pattern)
        counts["spelling"] += spelling.true_count
    columns = {"user_id": batch["user_id"], "group": _groups(batch, encoding.settings)}
    if encoding.columns.order is not None:
        counts["no_order"] += batch["order"].null_count
        counts.update(kinds_of(batch["order"]))
        columns |= {f"order{i}": key for i, key in enumerate(batch["order"].flatten()[1:])}
    rows = pa.table(columns).take(pa.array(examples.origin))
    bounds = pa.py_buffer(offsets_of(examples.lengths * examples.values.itemsize))
    data = [None, bounds, pa.py_buffer(np.ascontiguousarray(examples.values))]
    tokens = pa.Array.from_buffers(pa.large_binary(), len(rows), data)
    return rows.append_column("tokens", tokens), {int(filled[row]): bad[row] for row in bad}


def frame(
    lengths: np.ndarray,
    values: np.ndarray,
    tokenizer: Tokenizer,
    settings: BuildConfig,
    tally: Counter[str],
) -> Examples:
    """Frame texts: a begin token before each, an end token if it fits; cut or split long texts.

    An example has at most max_length tokens, begin token included. "split" loses no token; "cut"
    keeps the first max_length - 1 tokens of a text. A text without tokens gives one example.

    Args:
      lengths: int64 [texts], tokens of each text.
      values: token ids of all texts end to end.
    """
    body, cuts = settings.max_length - 1, settings.long_texts == "cut"
    tally["long"] += int((lengths > body).sum())
    tally["tokens"] += int(lengths.sum())
    for most in limits(settings.max_length):
        tally[str(most)] += int((np.minimum(lengths, most - 1) if cuts else lengths).sum())
    values = values.astype(token_dtype(tokenizer.vocab_size), copy=False)
    number = np.ones_like(lengths) if cuts else np.maximum(1, -(-lengths // body))
    origin = np.repeat(np.arange(len(lengths)), number)
    start = (np.arange(len(origin)) - np.repeat(np.cumsum(number) - number, number)) * body
    left = lengths[origin] - start
    taken = np.minimum(left, body)
    ends = left < body
    counts = 1 + taken + ends
    first = np.cumsum(counts) - counts
    framed = np.empty(int(counts.sum()), values.dtype)
    copy(values, (np.cumsum(lengths) - lengths)[origin] + start, taken, framed, first + 1)
    framed[first] = tokenizer.begin_id
    framed[(first + counts - 1)[ends]] = tokenizer.end_id
    return Examples(counts, framed, origin)


def _groups(rows: pa.RecordBatch, rules: BuildConfig) -> pa.Array:
    """Group of each row, int8: TRAIN, EVAL_USERS or TEST of dataset.py."""
    group = np.full(len(rows), TRAIN)
    if rules.test_from is not None:
        group[at_least(rows["order"], rules.test_from)] = TEST
    if rules.eval_users:
        users = rows["user_id"].dictionary_encode()
        ids = users.dictionary.to_pylist()
        held_out = np.array([is_held_out(id_, rules.eval_users) for id_ in ids], bool)
        group[held_out[users.indices.to_numpy()]] = EVAL_USERS
    return pa.array(group, pa.int8())


@lru_cache(1)
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), file.name)


@lru_cache(1)
def _chat_tokenizer(file: Path, template: Template | None) -> ChatTokenizer:
    return ChatTokenizer(_tokenizer(file), template)
