"""UserStore: the tokenised text of many users, one row per example, rows sorted by user.

If texts have several owners, rows are sorted by owner set instead (see store.py), and statements
about users here are true of owner sets. A user owns the rows offsets[u]:offsets[u + 1], so a row
number alone names an example: samplers draw integers, and ids of users never leave the driver. Rows
are ragged on disk (flat arrays, memory-mapped, shared by all processes of a machine) and padded
when a batch is gathered. Small data in memory has the same arrays and is read by the same code.
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
    ARRAYS,
    FORMAT,
    MARKED,
    OFFSETS,
    SETS,
    TABLES,
    Owners,
    TokenReader,
    arrays_of,
    decode_owners,
    encode_array,
    encode_tables,
    fingerprint,
    offsets_of,
    owner_key,
    seal,
    token_dtype,
)
from fedsim.errors import DataError
from fedsim.files import expand_home

SCAN_ROWS = 2**18
BLOCK_TOKENS = 2**19
NEEDED = ("max_length", "vocab_size", "fingerprint", "num_tokens", "num_examples", "num_users")


def _reopened(path: Path, fingerprint: str) -> "UserStore":
    """The store in a directory, in another process, perhaps on another machine."""
    store = UserStore.open(path)
    if store.fingerprint != fingerprint:  # rows would be those of other users
        expected = "the data set of the driver, and there is another one here"
        raise DataError.of("data", path, expected)
    return store


class UserStore:
    """One split of users' tokenised text. Read-only; pickles as its path if it lies on disk.

    Attributes:
      num_users, num_examples, num_tokens: totals.
      offsets: int64 [num_users + 1]; user u owns the rows offsets[u]:offsets[u + 1]. Where texts
        have several owners: int64 [sets + 1], the rows of each owner set.
      max_length: maximum number of tokens of a row.
      vocab_size: upper bound of token ids, exclusive.
      fingerprint: sha256 (hex) of the table of users, offsets, tokens and flags.
      metadata: content of metadata.json.
      path: directory of the store, or None in memory.
    """

    def __init__(
        self, tables: Mapping[str, pa.Buffer], rows: TokenReader, metadata: dict[str, Any]
    ):
        """Open the tables of a store (Parquet, by their names), and the rows of all users.

        Raises:
          DataError: the files do not belong together.
        """
        self.path: Path | None = None
        self.metadata = metadata
        if missing := [name for name in NEEDED if name not in metadata]:
            raise DataError(f"metadata.json: expected {missing[0]}")
        self.max_length: int = metadata["max_length"]
        self.vocab_size: int = metadata["vocab_size"]
        self.fingerprint: str = metadata["fingerprint"]
        self.num_tokens: int = metadata["num_tokens"]
        self._tables, self._reader = tables, rows
        column = self._column("num_examples")
        # Arrow's to_numpy imports pandas, which takes longer than the rest of this function.
        counts = np.concatenate([np.zeros(0, np.int32), *map(np.from_dlpack, column.chunks)])
        self.offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_users: int = metadata["num_users"] if SETS in metadata else len(counts)
        self.num_examples = len(rows.offsets) - 1
        if not self.num_examples == self.offsets[-1] == metadata["num_examples"]:
            raise DataError.of(
                "num_examples",
                f"{metadata['num_examples']} in metadata.json",
                f"the {self.offsets[-1]} of users.parquet and the {self.num_examples} of {OFFSETS}",
            )

    @classmethod
    def open(cls, directory: str | Path) -> "UserStore":
        """Open the store in `directory`, memory-mapped. Reads the table of users, not the text.

        Raises:
          DataError: `directory` is not a store, or its files do not belong together.
        """
        path = Path(expand_home("data", directory)).absolute()
        metadata = read_metadata(path, "users")
        arrays = arrays_of(bool(metadata.get("trained")))
        tables = TABLES if SETS in metadata else TABLES[:1]
        existing = [name for name in (*TABLES, *ARRAYS) if (path / name).is_file()]
        if existing != [*tables, *arrays]:
            expected = f"{', '.join((*tables, *arrays))}, got {', '.join(existing) or 'none'}"
            raise DataError.of("data", path, expected)
        mapped = {name: pa.memory_map(str(path / name)).read_buffer() for name in tables}
        try:
            rows = TokenReader.open(path, arrays == ARRAYS)
        except ValueError as error:
            raise DataError(f"data={path}: {error}") from None
        store = cls(mapped, rows, metadata)
        store.path = path
        return store

    @classmethod
    def from_examples(
        cls,
        examples: Mapping[Any, Sequence[Sequence[int]]],
        max_length: int,
        vocab_size: int,
        trained: Mapping[Any, Sequence[Sequence[bool]]] | None = None,
    ) -> "UserStore":
        """Make a store in memory.

        Users are sorted by id, as on disk. A user without sequences keeps an empty slice.

        Args:
          examples: sequences of token ids of each user, by user id. The sequences of a tuple of ids
            belong to all of these users.
          max_length: maximum number of tokens of a sequence.
          vocab_size: upper bound of token ids, exclusive.
          trained: which tokens are trained on, in the form of `examples`; None: all.
        Raises:
          DataError: a sequence or a token id exceeds its bound, or two ids are equal as strings.
        """
        by_id = {owner_key(user): rows for user, rows in examples.items()}
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
        flags = None
        if trained is not None:
            flags_of = {owner_key(user): rows for user, rows in trained.items()}
            every = [flag for user in ids for row in flags_of[user] for flag in row]
            flags = np.array(every, bool).astype(np.uint8)
        counts = np.array([len(by_id[user]) for user in ids], np.int64)
        reader = TokenReader(offsets_of(lengths), tokens.astype(token_dtype(vocab_size)), flags)
        tables, numbers = encode_tables(pa.array(ids, pa.string()), counts, reader.offsets)
        digest = fingerprint([*tables.values(), *_encoded(reader)])
        about = {"max_length": max_length, "vocab_size": vocab_size, **numbers}
        metadata = seal(about, len(rows), len(tokens), digest, flags is not None)
        return cls(tables, reader, metadata)

    def check(self) -> None:
        """Compare the bytes of the store with its fingerprint. Takes a second per gigabyte or two.

        Raises:
          DataError: the store was changed since it was built.
        """
        parts: list[Any] = []
        if self.path is None:
            parts = [*self._tables.values(), *_encoded(self._reader)]
        else:
            parts = [self.path / name for name in (*self._tables, *arrays_of(self.is_flagged))]
        if fingerprint(parts) != self.fingerprint:
            where = self.path or "memory"
            raise DataError(f"data={where}: changed since it was built: another fingerprint")

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Gather the tokens of rows in any order, cut or zero-padded to `length`.

        Args:
          rows: int [rows]; -1 is padding.
          length: tokens per row of the result.
        Returns:
          (tokens int32 [rows, length], number of real tokens int32 [rows]).
        Raises:
          IndexError: a row is not in [-1, num_examples).
          DataError: the offsets are damaged.
        """
        tokens = np.zeros((len(rows), length), np.int32)
        return tokens, self._copy_rows(rows, self._reader.values, tokens)

    def trained(self, rows: np.ndarray, length: int) -> np.ndarray | None:
        """Which tokens of `gather` are trained on, bool [rows, length]; None if all are.

        Args and Raises: as of `gather`.
        """
        if self._reader.flags is None:
            return None
        found = np.zeros((len(rows), length), bool)
        self._copy_rows(rows, self._reader.flags, found)
        return found

    def _copy_rows(self, rows: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if rows.size and not -1 <= rows.min() <= rows.max() < self.num_examples:
            raise IndexError(
                f"rows in [{rows.min()}, {rows.max()}]: expected [-1, {self.num_examples})"
            )
        try:
            return self._reader.copy_rows(rows, values, out)
        except (ValueError, IndexError) as error:
            where = self.path or "memory"
            raise DataError(f"data={where}: {OFFSETS} is damaged ({error})") from None

    @property
    def is_flagged(self) -> bool:
        """True if only some tokens are trained on."""
        return self._reader.flags is not None

    def num_trained(self) -> int:
        """Number of tokens that are trained on. Reads the flags of all rows."""
        flags = self._reader.flags
        return self.num_tokens if flags is None else int(flags.sum(dtype=np.int64))

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Number of real tokens of rows in any order, int64 [rows]; 0 for -1. Reads no tokens."""
        return self._reader.sizes(np.asarray(rows, np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [num_examples]. Computed at each access."""
        return np.diff(self._reader.offsets).astype(np.int32)

    def length_counts(self) -> np.ndarray:
        """Number of rows of each length, int64 [max_length + 1]. Memory does not grow with rows."""
        counts, offsets = np.zeros(self.max_length + 1, np.int64), self._reader.offsets
        for low in range(0, self.num_examples, SCAN_ROWS):
            counts += np.bincount(
                np.diff(offsets[low : low + SCAN_ROWS + 1]), minlength=len(counts)
            )
        return counts

    def largest_id(self) -> int:
        """Largest token id of all rows; 0 without rows. Memory does not grow with rows."""
        return int(self._reader.values.max(initial=0))

    @functools.cached_property
    def owners(self) -> Owners | None:
        """Graph of users and owner sets; None if every text has one owner.

        Raises:
          DataError: the graph is damaged, or of another store.
        """
        if SETS not in self.metadata:
            return None
        try:
            graph = decode_owners(self._tables[TABLES[1]], self.num_users)
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"owners.parquet: cut off or damaged ({reason})") from None
        sets, users = len(self.offsets) - 1, graph.users
        if graph.num_sets != sets or not 0 <= users.min() <= users.max() < self.num_users:
            raise DataError(
                f"owners.parquet: expected the owners of {sets} owner sets among "
                f"{self.num_users} users"
            )
        return graph

    @property
    def examples_per_user(self) -> np.ndarray:
        """Number of texts that each user owns, alone or with others, int64 [num_users]."""
        per_set = np.diff(self.offsets)
        return per_set if self.owners is None else self.owners.count(per_set)

    def user_ids(self) -> list[str]:
        """Ids of the users [num_users], in the order of the store. Reads the file at each call."""
        return self._column("user_id", TABLES[2 if SETS in self.metadata else 0]).to_pylist()

    def owner_sets(self) -> list[str]:
        """Ids of the users, or owner sets as strings, whose rows `offsets` bounds."""
        return self._column("user_id").to_pylist()

    def blocks(self, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the rows low:high in order, as `TokenWriter` takes them, at most about BLOCK_TOKENS
        tokens at a time: (tokens of each row, token ids end to end, or marked ids)."""
        flags, rows = self._reader.flags, max(1, BLOCK_TOKENS // self.max_length)
        for start in range(low, high, rows):
            offsets = self._reader.offsets[start : min(start + rows, high) + 1]
            values = self._reader.values[offsets[0] : offsets[-1]]
            if flags is not None:
                values = values.astype(MARKED) * 2 + flags[offsets[0] : offsets[-1]]
            yield np.diff(offsets), values

    def _column(self, name: str, file: str = TABLES[0]) -> pa.ChunkedArray:
        try:
            with pq.ParquetFile(pa.BufferReader(self._tables[file])) as opened:
                return opened.read([name])[name]
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{file}: cut off or damaged ({reason})") from None

    def __reduce__(self):
        if self.path is not None:
            return _reopened, (self.path, self.fingerprint)
        return UserStore, (self._tables, self._reader, self.metadata)

    def __repr__(self) -> str:
        where = self.path or "memory"
        return f"UserStore({self.num_users} users, {self.num_examples} examples, {where})"


def _encoded(reader: TokenReader) -> list[pa.Buffer]:
    arrays = reader.offsets, reader.values, reader.flags
    return [encode_array(array) for array in arrays if array is not None]


def read_metadata(directory: Path, kind: str) -> dict[str, Any]:
    """Read metadata.json of a directory that fedsim built.

    Args:
      kind: "users" (a store) or "dataset".
    Raises:
      DataError: the file is missing, not written by fedsim, or of another kind or format version.
    """
    try:
        metadata = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        found = metadata["kind"], metadata["format"]
    except (OSError, ValueError, KeyError, TypeError):
        expected = "a directory built by fedsim (with its metadata.json)"
        raise DataError.of("data", directory, expected) from None
    if found != (kind, FORMAT):
        hint = ""
        if found[0] == kind and found[1] in range(1, FORMAT):
            hint = (
                ", built by an earlier version of fedsim; build it again with `fedsim data build`"
            )
        expected = f"kind {kind!r}, format {FORMAT}, got {found}{hint}"
        raise DataError.of("data", directory, expected)
    return metadata
