"""Whose texts are: the graph of a store in which a text can have several owners.

The rows of such a store are sorted by *owner set*: all texts of the same users lie together, as in
other stores all texts of one user do. While data are built, an owner set is one string, the ids in
order with SEPARATOR between them, so that a text of one user is a text of that user's id, and a
build of such texts alone is the build that it always was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from scipy import sparse
from scipy.sparse import csgraph

SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Owners:
    """Which users own the texts of each owner set.

    Attributes:
      num_users: users of all sets.
      starts: int64 [sets + 1]; users: int32 [memberships]. Set s is owned by the users
        users[starts[s]:starts[s + 1]], ascending, each once.
    """

    num_users: int
    starts: np.ndarray
    users: np.ndarray

    @property
    def num_sets(self) -> int:
        """How many different sets of owners there are."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """int64 [sets]: owners of each set."""
        return np.diff(self.starts)

    @property
    def sets(self) -> np.ndarray:
        """int64 [memberships]: the set of each membership."""
        return np.repeat(np.arange(self.num_sets), self.sizes)

    def count(self, per_set: np.ndarray) -> np.ndarray:
        """int64 [users]: how many of `per_set` texts of each set [sets] a user owns."""
        weights = np.repeat(per_set, self.sizes)
        return np.bincount(self.users, weights, self.num_users).astype(np.int64)

    def components(self, per_set: np.ndarray) -> tuple[int, int]:
        """(connected components, users of the largest): users are joined by a text of both."""
        there = np.repeat(per_set > 0, self.sizes)
        sets, users = self.sets[there], self.users[there].astype(np.int64)
        total = self.num_users + self.num_sets
        edges = sparse.coo_array((np.ones(len(sets), bool), (users, self.num_users + sets)))
        edges.resize((total, total))
        _, labels = csgraph.connected_components(edges, directed=False)
        counts = np.bincount(labels[: self.num_users])
        return int(np.count_nonzero(counts)), int(counts.max(initial=0))


def joined(one: Owners, other: Owners) -> Owners:
    """The graph of two stores, one after the other: no user of the one is in the other."""
    starts = np.concatenate([one.starts, one.starts[-1] + other.starts[1:]])
    users = np.concatenate([one.users, one.num_users + other.users])
    return Owners(one.num_users + other.num_users, starts, users.astype(np.int32))


def together(rows: np.ndarray, ids: pa.Array, num_rows: int) -> tuple[pa.Array, np.ndarray]:
    """The owner sets of rows, each as one string, and how many owners each has, int64 [num_rows].

    Args: rows: int [pairs], whose owner ids[i] is; pairs may repeat. A row without gets "".
    """
    found = ids.dictionary_encode()
    order = pc.sort_indices(found.dictionary)  # pyright: ignore
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    pairs = np.unique(rows * len(order) + rank[found.indices.to_numpy()])
    row, place = np.divmod(pairs, max(len(order), 1))
    counts = np.bincount(row, minlength=num_rows)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    named = found.dictionary.take(order).take(pa.array(place))
    lists = pa.ListArray.from_arrays(starts, named)
    return pc.binary_join(lists, SEPARATOR), counts  # pyright: ignore


def decided_by_texts(long_texts: str, against: Sequence[str] = ()) -> str:
    """Which rule of a build makes what one text says decide how many rows there are, as the start
    of an error line; empty: none does.

    Where texts have several owners, who is drawn must follow from who owns which text alone.
    Args: against: sources whose near duplicates were left out, of data that fedsim 0.2 built.
    """
    if long_texts != "cut":
        return f"long_texts={long_texts}: expected cut"
    return f"against={','.join(against)}: expected none" if against else ""


def is_shared(keys: pa.Array | pa.ChunkedArray) -> bool:
    """Whether one of the owner sets, as strings, has several owners."""
    several = pc.match_substring(keys, SEPARATOR)  # pyright: ignore
    return bool(pc.any(several).as_py())  # pyright: ignore


def encode(keys: pa.Array) -> tuple[pa.Buffer, pa.Buffer, int]:
    """The graph of owner sets given as strings: owners.parquet (row i: the numbers of the owners of
    set i), people.parquet (row u: the id of user u; sorted), and how many users there are."""
    lists = pc.split_pattern(keys, SEPARATOR)  # pyright: ignore
    found = lists.values.dictionary_encode()
    order = pc.sort_indices(found.dictionary)  # pyright: ignore
    rank = np.empty(len(order), np.int32)
    rank[order.to_numpy()] = np.arange(len(order), dtype=np.int32)
    users = pa.ListArray.from_arrays(lists.offsets, rank[found.indices.to_numpy()])
    people = pa.table({"user_id": found.dictionary.take(order).cast(pa.string())})
    return _parquet(pa.table({"owners": users})), _parquet(people), len(people)


def decode(owners: pa.Buffer, num_users: int) -> Owners:
    """The graph that `encode` wrote."""
    with pq.ParquetFile(pa.BufferReader(owners)) as table:
        lists = table.read(["owners"])["owners"].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], pa.list_(pa.int32()))
    starts = lists.offsets.to_numpy().astype(np.int64)
    return Owners(num_users, starts - starts[0], lists.flatten().to_numpy())


def of_ids(owner: Any) -> str:
    """The owner set of one id, or of a tuple of ids, as a string."""
    ids: Sequence[Any] = owner if isinstance(owner, tuple) else (owner,)
    return SEPARATOR.join(sorted(set(map(str, ids))))


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()
