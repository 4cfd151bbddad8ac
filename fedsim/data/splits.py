"""Which users and examples are held out, and the external sort that deals rows to the splits."""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa

from fedsim.data.dataset import SPLITS
from fedsim.data.shards import DataError, StoreWriter

SORT_MEMORY = "1GB"
SORT_ROWS = 65_536  # rows a batch of the sorted stream; the stores cut their own batches
EVAL_SHARE, EVAL_CAP = 10, 32
TRAIN, EVAL_USERS, EVAL_EXAMPLES = range(len(SPLITS))


@dataclass(frozen=True)
class Holdout:
    """What is kept from training, for evaluation."""

    eval_users: float
    """Fraction of the users, drawn by a fixed hash of the id: the same users in every build."""
    eval_examples: bool
    """Also the first min(32, ceil(n / 10)) of a training user's n >= 2 examples (CC-News)."""

    def takes_user(self, user_id: str) -> bool:
        """Whether all of this user's examples are held out."""
        digest = hashlib.sha256(b"fedsim eval user\0" + user_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.eval_users * 2**64

    def num_eval_examples(self, num_examples: np.ndarray) -> np.ndarray:
        """int64 [users]: how many of each training user's first examples are held out."""
        tenth = np.minimum(EVAL_CAP, -(-num_examples // EVAL_SHARE))
        return np.where((num_examples >= 2) & self.eval_examples, tenth, 0)


def write_splits(
    scratch: Path,
    out: Path,
    vocab_size: int,
    holdout: Holdout,
    about: dict[str, object],
    report: Callable[[int, int], None],
) -> list[str]:
    """Sorts scratch/rows.parquet by user and writes the stores out/<split> that have rows.

    Args:
      about: goes into each store's metadata. report: called with (rows done, rows in all).
    Returns: the names of the splits written; "train" is always one of them.
    Raises: DataError: every user would be held out.
    """
    with _sorter(scratch) as con:
        users = con.sql("SELECT user_id, count(*) AS n FROM rows GROUP BY 1 ORDER BY 1")
        users = users.to_arrow_table()
        ids, counts = users["user_id"].combine_chunks(), users["n"].to_numpy()
        by_split = _count_by_split(ids, counts, holdout)
        writers = {
            split: StoreWriter(out / SPLITS[split], ids.filter(n > 0), n[n > 0], vocab_size)
            for split, n in enumerate(by_split)
            if n.any()
        }
        dealt = _deal(con, counts, by_split, report)
        for split, lengths, values in dealt:
            writers[split].add(lengths, values)
    for split, writer in writers.items():
        writer.close({**about, "split": SPLITS[split]})
    return [SPLITS[split] for split in writers]


@contextmanager
def _sorter(scratch: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A DuckDB that spills beside the scratch file, whose rows it calls `rows`."""
    with duckdb.connect(
        config={
            "memory_limit": SORT_MEMORY,
            "temp_directory": str(scratch / "spill"),
            "threads": min(4, os.cpu_count() or 1),  # more only take more memory
        }
    ) as con:
        con.read_parquet(glob.escape(str(scratch / "rows.parquet"))).create_view("rows")
        yield con


def _count_by_split(ids: pa.Array, counts: np.ndarray, holdout: Holdout) -> np.ndarray:
    """int64 [splits, users]: each user's rows in each split."""
    held_out = np.array([holdout.takes_user(user) for user in ids.to_pylist()])
    if held_out.all():
        raise DataError(
            f"eval_users={holdout.eval_users}: holds out all {len(ids)} users, expected to leave "
            "at least one for training"
        )
    eval_examples = np.where(held_out, 0, holdout.num_eval_examples(counts))
    by_split = np.zeros((len(SPLITS), len(counts)), np.int64)
    by_split[EVAL_USERS] = np.where(held_out, counts, 0)
    by_split[EVAL_EXAMPLES] = eval_examples
    by_split[TRAIN] = counts - by_split[EVAL_USERS] - eval_examples
    return by_split


def _deal(
    con: duckdb.DuckDBPyConnection,
    counts: np.ndarray,
    by_split: np.ndarray,
    report: Callable[[int, int], None],
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The sorted rows as (split, lengths [rows], token ids end to end), each split in order."""
    has_order = "order" in con.table("rows").columns
    key = 'user_id, "order" NULLS LAST, row' if has_order else "user_id, row"
    ends, total, done = np.cumsum(counts), int(counts.sum()), 0
    is_held_out = by_split[EVAL_USERS] > 0
    for batch in con.sql(f"SELECT tokens FROM rows ORDER BY {key}").to_arrow_reader(SORT_ROWS):
        row = np.arange(done, done + len(batch))
        user = np.searchsorted(ends, row, side="right")
        place = row - ends[user] + counts[user]  # 0 for a user's first row
        split = np.where(place < by_split[EVAL_EXAMPLES][user], EVAL_EXAMPLES, TRAIN)
        split = np.where(is_held_out[user], EVAL_USERS, split)
        for which in np.unique(split).tolist():
            rows = batch.column(0).filter(pa.array(split == which))
            yield which, np.diff(rows.offsets.to_numpy()), rows.flatten().to_numpy()
        done += len(batch)
        report(done, total)
