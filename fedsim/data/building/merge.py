"""Second half of a build: sorted runs become the shards of the splits, each by itself.

The owners of all runs are put together first; from then on it is known which rows every shard has,
so shards are made in any order and by any process, and a shard that is there is not made again.
Memory holds row numbers of some owners at a time, and tokens of a few record batches.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fedsim.data.building.processes import kept_for_a_build
from fedsim.data.building.sorted_runs import read_table, sort_rows, write_table
from fedsim.data.shards import BATCH_ROWS, write_stream
from fedsim.data.splits import SplitRows
from fedsim.data.tokens import TokenReader

OWNERS, RUNS_AT_ONCE = "all.owners", 16
SORTED_ROWS, TAKEN_TOKENS = 2**20, 2**22  # rows sorted and tokens read at a time, about


def collect_owners(directory: Path, runs: Sequence[str]) -> pa.Table:
    """All owners with their rows and tokens, sorted by group and user; also written for workers."""
    found, waiting = None, []
    for number, run in enumerate(runs, 1):
        waiting.append(read_table(directory / f"{run}.owners"))
        if number % RUNS_AT_ONCE == 0 or number == len(runs):
            tables = waiting if found is None else [found, *waiting]
            grouped = pa.concat_tables(tables).group_by(["group", "user_id"], use_threads=False)
            summed = grouped.aggregate([("rows", "sum"), ("tokens", "sum")])
            found = summed.rename_columns({"rows_sum": "rows", "tokens_sum": "tokens"})
            waiting = []
    assert found is not None, "a build without runs has no rows"
    owners = found.sort_by([("group", "ascending"), ("user_id", "ascending")]).combine_chunks()
    write_table(directory / OWNERS, owners)
    return owners


def index_run(run: str, *, directory: Path, report: Callable[[int], None]) -> None:
    """Writes which of all owners the run's owners are, and where their rows start in the run."""
    everyone = _all_owners(directory)
    owners = read_table(directory / f"{run}.owners").combine_chunks()
    index = np.empty(len(owners), np.int64)
    of_run, of_all = owners["group"].to_numpy(), everyone["group"].to_numpy()
    for group in np.unique(of_run):
        here = slice(*np.searchsorted(of_run, [group, group + 1]))
        there = slice(*np.searchsorted(of_all, [group, group + 1]))
        ids = owners["user_id"].chunk(0)[here]
        found = pc.index_in(ids, everyone["user_id"].chunk(0)[there])  # pyright: ignore
        index[here] = there.start + found.to_numpy()
    starts = np.concatenate([[0], np.cumsum(owners["rows"].to_numpy())])
    table = pa.table({"owner": np.append(index, len(everyone)), "start": starts})
    write_table(directory / f"{run}.index", table)


@kept_for_a_build
def _all_owners(directory: Path) -> pa.Table:
    return read_table(directory / OWNERS)


@dataclass(frozen=True)
class Shard:
    """One shard to write: rows start:end of a split."""

    file: Path
    tokens_file: Path
    """Where the tokens of each of its users are kept until the split is complete."""
    split: str
    start: int
    end: int


def write_shard(shard: Shard, *, merge: "Merge", report: Callable[[int], None]) -> None:
    """Writes a shard and its tokens_file: numbers of users, and their tokens in it, [2, users]."""
    if not shard.file.exists():
        rows = _opened(merge)
        split = merge.splits[shard.split]
        ends = np.cumsum(split.counts)
        first, last = np.searchsorted(ends, [shard.start, shard.end - 1], side="right")
        num_tokens = np.zeros(last + 1 - first, np.int64)
        blocks = rows.blocks(split, ends, shard, num_tokens, int(first), report)
        temporary = shard.file.with_name(f"{shard.file.name}.{os.getpid()}.tmp")
        write_stream(temporary, blocks, rows.reader.dtype)
        np.save(shard.tokens_file, np.stack([np.arange(first, last + 1), num_tokens]))
        os.replace(temporary, shard.file)
    else:
        report(shard.end - shard.start)


@dataclass(frozen=True, eq=False)
class Merge:
    """What a worker needs to know besides the shard. Pickles small: splits come from a file."""

    directory: Path
    runs: tuple[str, ...]
    order_column: str | None

    def save(self, splits: dict[str, SplitRows]) -> None:
        """Writes the splits for the workers."""
        arrays = {
            f"{name} {field}": getattr(rows, field)
            for name, rows in splits.items()
            for field in ("owners", "low", "high")
        }
        np.savez(self.directory / "splits.npz", allow_pickle=False, **arrays)

    @cached_property
    def splits(self) -> dict[str, SplitRows]:
        """The splits that `save` wrote."""
        with np.load(self.directory / "splits.npz") as found:
            names = dict.fromkeys(name.split()[0] for name in found.files)
            fields = ("owners", "low", "high")
            return {name: SplitRows(*(found[f"{name} {f}"] for f in fields)) for name in names}


@kept_for_a_build
def _open_runs(directory: Path, runs: tuple[str, ...], order_column: str | None) -> "_Runs":
    return _Runs(directory, runs, order_column)


def _opened(merge: Merge) -> "_Runs":
    return _open_runs(merge.directory, merge.runs, merge.order_column)


class _Runs:
    """All runs of a build, mapped; a row is named by its number in the runs end to end.

    There may be thousands, so none may hold a descriptor, as np.load's mappings do.
    """

    def __init__(self, directory: Path, runs: Sequence[str], order_column: str | None):
        self.reader = TokenReader([directory / f"{run}.tokens" for run in runs])
        tables = [read_table(directory / f"{run}.index").combine_chunks() for run in runs]
        self.index = [(table["owner"].to_numpy(), table["start"].to_numpy()) for table in tables]
        self.first = np.cumsum([0, *(int(starts[-1]) for _, starts in self.index)])
        self.order = None
        if order_column is not None:
            tables = [read_table(directory / f"{run}.order") for run in runs]
            self.order = [table["order"] for table in tables]
        rows_of_all = _all_owners(directory)["rows"].to_numpy()
        self.before = np.concatenate([[0], np.cumsum(rows_of_all)])
        self.mean_tokens = self.reader.num_tokens / max(self.reader.num_rows, 1)

    def _sorted(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        """(owner, row) of all rows of the owners low:high, by owner and in each owner's order."""
        owners, rows, order = [], [], []
        for number, (index, starts) in enumerate(self.index):
            begin, end = np.searchsorted(index, [low, high])
            if begin == end:
                continue
            start, stop = int(starts[begin]), int(starts[end])
            owners.append(np.repeat(index[begin:end], np.diff(starts[begin : end + 1])))
            rows.append(np.arange(start, stop) + self.first[number])
            if self.order is not None:
                order += self.order[number].slice(start, stop - start).chunks
        owner, row = np.concatenate(owners), np.concatenate(rows)
        values = None if self.order is None else pa.concat_arrays(order)
        place = sort_rows(owner - low, values)
        return owner[place], row[place]

    def blocks(
        self,
        split: SplitRows,
        ends: np.ndarray,
        shard: Shard,
        num_tokens: np.ndarray,
        first_user: int,
        report: Callable[[int], None],
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(lengths, token ids end to end) of a shard's rows; adds up its users' tokens."""
        at_once = BATCH_ROWS * max(1, int(TAKEN_TOKENS // (BATCH_ROWS * self.mean_tokens + 1)))
        row = shard.start
        for rows in _regrouped(self._rows_of(split, ends, shard.start, shard.end), at_once):
            lengths, values = self.reader.take(rows)
            user = np.searchsorted(ends, np.arange(row, row + len(rows)), side="right")
            num_tokens += np.bincount(user - first_user, lengths, len(num_tokens)).astype(np.int64)
            row += len(rows)
            self.reader.release()
            yield lengths, values
            report(len(rows))

    def _rows_of(
        self, split: SplitRows, ends: np.ndarray, start: int, end: int
    ) -> Iterator[np.ndarray]:
        """Row numbers of the rows start:end of a split, in order."""
        begins = ends - split.counts
        user, last = np.searchsorted(ends, [start, end - 1], side="right").tolist()
        while user <= last:
            weight = (
                self.before[split.owners[user : last + 1] + 1] - self.before[split.owners[user]]
            )
            stop = user + max(1, int(np.searchsorted(weight, SORTED_ROWS, side="right")))
            here = SplitRows(*(a[user:stop] for a in (split.owners, split.low, split.high)))
            low = np.maximum(here.low, start - begins[user:stop] + here.low)
            high = np.minimum(here.high, end - begins[user:stop] + here.low)
            if stop - user == 1 and self.order is None:
                yield from self._rows_of_one(int(here.owners[0]), int(low[0]), int(high[0]))
            else:
                yield self._rows_of_some(SplitRows(here.owners, low, high))
            user = stop

    def _rows_of_one(self, owner: int, low: int, high: int) -> Iterator[np.ndarray]:
        """The rows low:high of an owner, who may have more than memory holds: nothing to sort."""
        place = 0
        for number, (index, starts) in enumerate(self.index):
            at = int(np.searchsorted(index, owner))
            if index[at] != owner:
                continue
            start, rows = int(starts[at]), int(starts[at + 1] - starts[at])
            for row in range(max(low - place, 0), min(high - place, rows), SORTED_ROWS):
                stop = min(row + SORTED_ROWS, high - place, rows)
                yield np.arange(start + row, start + stop) + self.first[number]
            place += rows

    def _rows_of_some(self, wanted: SplitRows) -> np.ndarray:
        """The wanted rows of some owners."""
        owner, row = self._sorted(int(wanted.owners[0]), int(wanted.owners[-1]) + 1)
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        place = np.arange(len(owner)) - np.repeat(first, np.diff(first, append=len(owner)))
        which = np.searchsorted(wanted.owners, owner)
        inside = (place >= wanted.low[which]) & (place < wanted.high[which])
        return row[inside & (wanted.owners[which] == owner)]


def _regrouped(pieces: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same rows in pieces of `size`, the last one shorter."""
    held = np.zeros(0, np.int64)
    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) >= size:
            yield held[:size]
            held = held[size:]
    if len(held):
        yield held
