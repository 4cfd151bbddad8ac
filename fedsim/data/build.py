"""Build a data set that need not fit in memory, from files with a user column and a text column.

Files -> checked and tokenised in batches -> a scratch Parquet file -> external sort by user ->
splits. Everything happens in a directory beside `out`, which is renamed when it is complete, so
`out` is whole or absent. The same input and options give the same bytes, however many threads.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.dataset import Dataset
from fedsim.data.shards import FORMAT, DataError, fingerprint, token_dtype, write_json
from fedsim.data.sources import Columns, find_files, is_blank, read, survey
from fedsim.data.splits import Holdout, write_splits
from fedsim.data.text import LONG_TEXTS, Tokenizer

PROGRESS_EVERY_S = 5.0


def build(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    user_column: str = "user_id",
    text_column: str = "text",
    tokenizer: str | Path = "bytes",
    max_length: int = 128,
    long_texts: str = "cut",
    eval_users: float = 0.05,
    eval_examples: bool = True,
    order_column: str | None = None,
    progress: Callable[[str], None] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Dataset:
    """Builds `out` from files or globs and opens it.

    Args:
      tokenizer: "bytes", "wordpiece:SIZE" (trained on the texts of the users not held out), or a
        tokenizer.json or vocab.txt.
      max_length: tokens per example, begin token included; longer texts are "cut" or "split".
      eval_users: fraction of users held out of training, drawn by a hash of their ids.
      eval_examples: also hold out the first min(32, ceil(n / 10)) examples of each training user.
      order_column: sorts a user's examples; ties, and all without it, stay as in the sources.
      progress: is told in a line, every few seconds and at the end of a stage, how far it is.
      provenance: anything to record about where the sources came from.
    Raises: DataError: bad input, or `out` exists. Nothing is left behind.
    """
    out = Path(out).absolute()
    _check_options(max_length, long_texts, eval_users)
    _check_absent(out)
    columns = Columns(user_column, text_column, order_column)
    holdout = Holdout(eval_users, eval_examples)
    framing = {"max_length": max_length, "long_texts": long_texts}
    files = find_files(sources)
    num_rows = survey(files, columns)
    with _staging(out) as staging:
        tokens = Tokenizer.from_spec(tokenizer, lambda: _training_texts(files, columns, holdout))
        about = {"max_length": max_length, "tokenizer": _describe(tokens)}
        scratch = staging / "scratch"
        counts = _Tokenising(tokens, scratch, **framing).run(
            files, columns, partial(_Meter("tokenised", progress), total=num_rows)
        )
        splits = write_splits(
            scratch, staging, tokens.vocab_size, holdout, about, _Meter("sorted", progress)
        )
        shutil.rmtree(scratch)
        tokens.save(staging / "tokenizer.json")
        metadata = {
            "kind": "dataset",
            "format": FORMAT,
            "splits": splits,
            "tokenizer": _describe(tokens),
            "columns": asdict(columns),
            "rules": {**framing, **asdict(holdout)},
            "counts": {"rows": num_rows, **counts},
            "sources": [_identify(file) for file in files],
            "provenance": provenance or {},
        }
        write_json(staging / "metadata.json", metadata)
    return Dataset.open(out)


class _Meter:
    """Says how far a stage is, not too often."""

    def __init__(self, stage: str, say: Callable[[str], None] | None):
        self.stage, self.say, self.said_at = stage, say, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self.say and (done == total or time.monotonic() - self.said_at > PROGRESS_EVERY_S):
            self.said_at = time.monotonic()
            self.say(f"{self.stage} {done:,} of {total:,} rows")


def _check_options(max_length: int, long_texts: str, eval_users: float) -> None:
    if max_length < 2:
        raise DataError(f"max_length={max_length}: expected at least 2 tokens")
    if long_texts not in LONG_TEXTS:
        raise DataError(f"long_texts={long_texts}: expected one of {', '.join(LONG_TEXTS)}")
    if not 0 <= eval_users < 1:
        raise DataError(f"eval_users={eval_users}: expected a fraction in [0, 1)")


def _check_absent(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"out={out}: already exists, expected a new directory")


def _describe(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "trained_on_data": tokenizer.trained_on_data,
    }


def _identify(file: Path) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": fingerprint([file])}


@contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out`, or vanishes if anything goes wrong."""
    staging = out.parent / f".{out.name}.{uuid4().hex}.tmp"
    staging.mkdir(parents=True)
    try:
        yield staging
        try:
            os.rename(staging, out)
        except OSError:
            _check_absent(out)  # somebody else was faster
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _training_texts(files: Sequence[Path], columns: Columns, holdout: Holdout) -> Iterator[str]:
    """What a tokenizer may learn from: the texts of the users who are not held out."""
    takes_user = cache(holdout.takes_user)
    for file in files:
        for batch in read(file, columns):
            users, texts = batch["user_id"].to_pylist(), batch["text"].to_pylist()
            for user, text in zip(users, texts, strict=True):
                if text and not takes_user(user):
                    yield text


@dataclass
class _Tokenising:
    """Texts to rows of scratch/rows.parquet: user_id, perhaps order, tokens, row (its number)."""

    tokenizer: Tokenizer
    scratch: Path
    max_length: int
    long_texts: str
    num_rows: int = 0
    num_empty: int = 0
    num_long: int = 0

    def run(
        self, files: Sequence[Path], columns: Columns, report: Callable[[int], None]
    ) -> dict[str, int]:
        """Reads all `files`. Returns how many texts were empty (dropped) and long (cut or split).

        Raises: DataError: no text is left, or the order column changes its type on the way.
        """
        self.scratch.mkdir()
        batches = (batch for file in files for batch in read(file, columns))
        done, writer = 0, None
        with ExitStack() as stack:
            for batch in batches:
                rows = self._encode(batch)
                if writer is None:
                    path = self.scratch / "rows.parquet"
                    writer = stack.enter_context(pq.ParquetWriter(path, rows.schema))
                try:
                    writer.write_table(rows.cast(writer.schema))
                except pa.ArrowInvalid as error:
                    raise DataError(
                        f"order_column={columns.order}: expected one type, got {error}"
                    ) from None
                done += len(batch)
                report(done)
        if not self.num_rows:
            raise DataError(f"text_column={columns.text}: no user has text, expected at least one")
        return {"empty_texts_dropped": self.num_empty, "long_texts": self.num_long}

    def _encode(self, batch: pa.RecordBatch) -> pa.Table:
        """The examples of the texts of one batch."""
        kept = batch.filter(pa.array(~is_blank(batch["text"])))
        texts = self.tokenizer.encode_batch(kept["text"].to_pylist())
        framed = [list(self.tokenizer.frame(t, self.max_length, self.long_texts)) for t in texts]
        origin = np.repeat(np.arange(len(framed)), [len(examples) for examples in framed])
        examples = [example for text in framed for example in text]
        kind = pa.list_(pa.from_numpy_dtype(token_dtype(self.tokenizer.vocab_size)))
        first, self.num_rows = self.num_rows, self.num_rows + len(examples)
        self.num_empty += len(batch) - len(kept)
        self.num_long += sum(len(text) >= self.max_length for text in texts)
        columns = {name: kept[name].take(pa.array(origin)) for name in kept.schema.names}
        del columns["text"]
        columns["tokens"] = pa.array(examples, kind)
        columns["row"] = pa.array(np.arange(first, self.num_rows))
        return pa.table(columns)
