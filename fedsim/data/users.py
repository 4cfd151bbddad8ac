"""UserStore: the tokenised text of many users, one row per example, rows sorted by user.

Where texts have several owners, rows are sorted by owner set instead (see owners.py), and what is
said of users here is true of owner sets. A user owns the rows offsets[u]:offsets[u + 1], so an
example is named by its row number alone: the samplers draw plain integers and users' ids never
leave the driver. Rows are ragged on disk (flat arrays, memory-mapped, shared by all processes of a
machine) and padded when a batch is gathered. Small data in memory is the same arrays, read by the
same code. The files are store.py's.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.store import (
    FORMAT,
    OFFSETS,
    TOKENS,
    Owners,
    TokenReader,
    decode_owners,
    encode_array,
    encode_owners,
    encode_users,
    fingerprint,
    is_shared,
    of_ids,
    offsets_of,
    seal,
    token_dtype,
)
from fedsim.errors import DataError
from fedsim.files import expand_home

SCAN_ROWS = 2**18
TABLES = ("users.parquet", "owners.parquet", "people.parquet")  # the last two: of several owners
SETS = "num_owner_sets"  # in the metadata of a store whose texts have several owners


class UserStore:
    """One split of users' tokenised text. Read-only; cheap to pickle when it lies on disk.

    Attributes:
      num_users, num_examples, num_tokens: totals.
      offsets: int64 [num_users + 1]; user u owns rows offsets[u]:offsets[u + 1]. Where texts have
        several owners: the rows of each owner set.
      max_length: no row is longer, in tokens. vocab_size: every token id is below it.
      fingerprint: sha256 (hex) over the users table, offsets and tokens.
      metadata: the store's metadata.json. path: its directory, or None in memory.
    """

    def __init__(
        self,
        users: pa.Buffer,
        rows: TokenReader,
        metadata: dict[str, Any],
        graph: tuple[pa.Buffer, pa.Buffer] | None = None,
    ):
        """Open a users table (Parquet) and the rows of all users.

        Args: graph: who owns which owner set, and who the users are, as `encode_owners` writes it.
        """
        self.path: Path | None = None
        self.metadata = metadata
        _expect_names(metadata)
        self.max_length: int = metadata["max_length"]
        self.vocab_size: int = metadata["vocab_size"]
        self.fingerprint: str = metadata["fingerprint"]
        self.num_tokens: int = metadata["num_tokens"]
        self._users, self._reader, self._graph = users, rows, graph
        column = self._users_column("num_examples")
        # Arrow's own to_numpy imports pandas, which takes longer than all else here.
        counts = np.concatenate([np.zeros(0, np.int32), *map(np.from_dlpack, column.chunks)])
        self.offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_users: int = len(counts) if graph is None else metadata["num_users"]
        self.num_examples = self._reader.num_rows
        if not self.num_examples == self.offsets[-1] == metadata["num_examples"]:
            raise DataError.of(
                "num_examples",
                f"{metadata['num_examples']} in metadata.json",
                f"the {self.offsets[-1]} of users.parquet and the {self.num_examples} of {OFFSETS}",
            )

    @classmethod
    def open(cls, directory: str | Path) -> "UserStore":
        """The store in `directory`, memory-mapped: opening reads the users table, not the text.

        Raises: DataError: `directory` is not a store, or its files do not belong together.
        """
        path = Path(expand_home("data", directory)).absolute()
        metadata = read_metadata(path, "users")
        _expect_names(metadata)
        expected = [*TABLES[: 3 if SETS in metadata else 1], OFFSETS, TOKENS]
        found = [name for name in (*TABLES, OFFSETS, TOKENS) if (path / name).is_file()]
        if found != expected:
            raise DataError.of(
                "data", path, f"{', '.join(expected)}, got {', '.join(found) or 'none'}"
            )
        users, *graph = (pa.memory_map(str(path / name)).read_buffer() for name in expected[:-2])
        try:
            rows = TokenReader.open(path)
        except ValueError as error:
            raise DataError(f"data={path}: {error}") from None
        store = cls(users, rows, metadata, (graph[0], graph[1]) if graph else None)
        store.path = path
        return store

    @classmethod
    def from_examples(
        cls,
        examples: Mapping[Any, Sequence[Sequence[int]]],
        max_length: int,
        vocab_size: int,
    ) -> "UserStore":
        """A store in memory. `examples` maps a user id to that user's sequences of token ids.

        Users are sorted by id, as on disk; a user with no sequences keeps an empty slice. The
        sequences of a tuple of ids belong to all of these users.
        Raises: DataError: a sequence is longer than max_length, or an id is not below vocab_size.
        """
        by_id = {of_ids(user): rows for user, rows in examples.items()}
        if len(by_id) < len(examples):
            raise DataError("user_id: expected ids that differ as strings")
        ids = sorted(by_id)
        rows = [row for user in ids for row in by_id[user]]
        lengths = np.fromiter(map(len, rows), np.int32, len(rows))
        tokens = np.fromiter((t for row in rows for t in row), np.int64, lengths.sum())
        if lengths.max(initial=0) > max_length:
            raise DataError.of("length", lengths.max(), f"at most max_length={max_length}")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
            raise DataError.of("token", bad, f"an id in [0, {vocab_size})")
        counts = np.array([len(by_id[user]) for user in ids], np.int64)
        ends = offsets_of(lengths)
        users = encode_users(ids, counts, ends)
        reader = TokenReader(ends, tokens.astype(token_dtype(vocab_size)))
        keys, graph, people = pa.array(ids, pa.string()), None, None
        if is_shared(keys):
            *graph, people = encode_owners(keys)
        metadata = seal(
            {"max_length": max_length, "vocab_size": vocab_size},
            counts,
            len(tokens),
            fingerprint([users, *(graph or ()), encode_array(ends), encode_array(reader.values)]),
            people,
        )
        return cls(users, reader, metadata, (graph[0], graph[1]) if graph else None)

    def check(self) -> None:
        """Read everything once: is it what was built? Takes a second per gigabyte or two.

        Raises: DataError: a byte was changed since.
        """
        parts: list[Any] = [self._users, *(self._graph or ())]
        if self.path is not None:
            parts = [self.path / name for name in (*TABLES[: len(parts)], OFFSETS, TOKENS)]
        else:
            parts += [encode_array(self._reader.offsets), encode_array(self._reader.values)]
        if fingerprint(parts) != self.fingerprint:
            where = self.path or "memory"
            raise DataError(f"data={where}: changed since it was built: another fingerprint")

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of `rows` (1-D, in any order; -1 is padding), cut or zero-padded to `length`.

        Returns: tokens int32 [len(rows), length], sizes int32 [len(rows)]: real tokens per row.
        Raises: IndexError: a row is below -1 or not below num_examples.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and not -1 <= rows.min() <= rows.max() < self.num_examples:
            raise IndexError(
                f"rows in [{rows.min()}, {rows.max()}]: expected [-1, {self.num_examples})"
            )
        try:
            return self._reader.gather(rows, length)
        except (ValueError, IndexError) as error:
            where = self.path or "memory"
            raise DataError(f"data={where}: {OFFSETS} is damaged ({error})") from None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows]: the real tokens of rows in any order, 0 for -1. Reads no token."""
        return self._reader.sizes(np.asarray(rows, np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """int32 [num_examples]: tokens per row; made anew each time, four bytes an example."""
        parts = (self._reader.lengths(low, high) for low, high in self._scan())
        return np.concatenate([np.zeros(0, np.int32), *(p.astype(np.int32) for p in parts)])

    def length_counts(self) -> np.ndarray:
        """int64 [max_length + 1]: how many rows have each length, without a number per row."""
        counts = np.zeros(self.max_length + 1, np.int64)
        for low, high in self._scan():
            counts += np.bincount(self._reader.lengths(low, high), minlength=len(counts))
        return counts

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All rows in order, SCAN_ROWS at a time: lengths [rows] and token ids end to end."""
        for low, high in self._scan():
            yield self._reader.slice(low, high)

    def _scan(self) -> Iterator[tuple[int, int]]:
        for low in range(0, self.num_examples, SCAN_ROWS):
            yield low, min(low + SCAN_ROWS, self.num_examples)

    @functools.cached_property
    def owners(self) -> Owners | None:
        """Who owns the texts of each owner set; None where every text has one owner.

        Raises: DataError: it is damaged, or of another store.
        """
        if self._graph is None:
            return None
        try:
            found = decode_owners(self._graph[0], self.num_users)
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"owners.parquet: cut off or damaged ({reason})") from None
        sets, users = len(self.offsets) - 1, found.users
        if found.num_sets != sets or not 0 <= users.min() <= users.max() < self.num_users:
            raise DataError(
                f"owners.parquet: expected the owners of {sets} owner sets among "
                f"{self.num_users} users"
            )
        return found

    @property
    def examples_per_user(self) -> np.ndarray:
        """int64 [num_users]: texts that each user owns, alone or with others."""
        per_set = np.diff(self.offsets)
        return per_set if self.owners is None else self.owners.count(per_set)

    def user_ids(self) -> list[str]:
        """[num_users] the ids, in the order of the users; read from its table each time."""
        if self._graph is not None:
            return _column(self._graph[1], "user_id", TABLES[2]).to_pylist()
        return self._users_column("user_id").to_pylist()

    def _users_column(self, name: str) -> pa.ChunkedArray:
        return _column(self._users, name, TABLES[0])

    def __reduce__(self):
        if self.path is not None:
            return UserStore.open, (self.path,)
        return UserStore, (self._users, self._reader, self.metadata, self._graph)

    def __repr__(self) -> str:
        where = self.path or "memory"
        return f"UserStore({self.num_users} users, {self.num_examples} examples, {where})"


def _column(table: pa.Buffer, name: str, file: str) -> pa.ChunkedArray:
    try:
        with pq.ParquetFile(pa.BufferReader(table)) as opened:
            return opened.read([name])[name]
    except (pa.ArrowException, KeyError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{file}: cut off or damaged ({reason})") from None


def _expect_names(metadata: dict[str, Any]) -> None:
    names = ["max_length", "vocab_size", "fingerprint", "num_tokens", "num_examples"]
    if SETS in metadata:
        names.append("num_users")
    if missing := [name for name in names if name not in metadata]:
        raise DataError(f"metadata.json: expected {missing[0]}")


def read_metadata(directory: Path, kind: str) -> dict[str, Any]:
    """metadata.json of a directory fedsim built; `kind` is "users" (a store) or "dataset".

    Raises: DataError: it is missing, not fedsim's, or of another kind or format version.
    """
    file = directory / "metadata.json"
    try:
        metadata = json.loads(file.read_text(encoding="utf-8"))
        found = metadata["kind"], metadata["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError.of(
            "data", directory, "a directory built by fedsim (with its metadata.json)"
        ) from None
    if found[0] == kind and found[1] in range(1, FORMAT):
        raise DataError.of(
            "data",
            directory,
            f"format {FORMAT}, got format {found[1]}, built by an earlier version of fedsim; build "
            "it again with `fedsim data build`",
        )
    if found != (kind, FORMAT):
        raise DataError.of("data", directory, f"kind {kind!r}, format {FORMAT}, got {found}")
    return metadata
