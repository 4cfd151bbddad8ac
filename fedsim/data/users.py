"""UserStore: the tokenised text of many users, one row per example, rows sorted by user.

If texts have several owners, rows are sorted by owner set instead (see store.py), and statements
about users here are true of owner sets. A user owns the rows offsets[u]:offsets[u + 1], so a row
number alone names an example: samplers draw integers, and ids of users never leave the driver. Rows
are ragged on disk (flat arrays, memory-mapped, shared by all processes of a machine) and padded
when a batch is gathered. Reading keeps nothing per row and shares nothing between calls, so that
threads may read at once.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.store import (
    ARRAYS,
    FLAGS,
    FORMAT,
    KINDS,
    MARKED,
    OFFSETS,
    SETS,
    TABLES,
    Owners,
    fingerprint,
    map_array,
)
from fedsim.errors import DataError
from fedsim.files import expand_home

BLOCK_ROWS = 16_384  # rows copied at a time: as many as fit in a processor's cache
BLOCK_TOKENS = 2**19


def copy(source: np.ndarray, begin: np.ndarray, size: np.ndarray, target: np.ndarray, at) -> None:
    """Copy source[begin[i]:begin[i] + size[i]] to target[at[i]:at[i] + size[i]] for every i."""
    skipped = np.cumsum(size) - size
    inside = np.arange(int(size.sum()))
    where = np.repeat(begin - skipped, size)
    where += inside
    inside += np.repeat(at - skipped, size)
    target[inside] = source[where]


def _reopened(path: Path, fingerprint: str) -> "UserStore":
    store = UserStore(path)
    if store.fingerprint != fingerprint:  # rows would be those of other users
        raise DataError.of("data", path, "the data set of the driver; there is another one here")
    return store


class UserStore:
    """One split of users' tokenised text. Read-only; pickles as its path.

    Attributes:
      num_users, num_examples, num_tokens: totals.
      offsets: int64 [num_users + 1]; user u owns the rows offsets[u]:offsets[u + 1]. Where texts
        have several owners: int64 [sets + 1], the rows of each owner set.
      max_length: maximum number of tokens of a row.
      vocab_size: upper bound of token ids, exclusive.
      fingerprint: sha256 (hex) of the table of users, offsets, tokens and flags.
      metadata: content of metadata.json.
      path: directory of the store.
    """

    def __init__(self, directory: str | Path):
        """Open the store in `directory`, memory-mapped. Reads the table of users, not the text.

        Raises: DataError: `directory` is not a store, or its files do not belong together.
        """
        self.path = path = Path(expand_home("data", directory)).absolute()
        self.metadata = metadata = read_metadata(path, "users")
        tables = TABLES if SETS in metadata else TABLES[:1]
        arrays = ARRAYS if metadata.get("trained") else ARRAYS[:2]
        existing = [name for name in (*TABLES, *ARRAYS) if (path / name).is_file()]
        if existing != [*tables, *arrays]:
            expected = f"{', '.join((*tables, *arrays))}, got {', '.join(existing) or 'none'}"
            raise DataError.of("data", path, expected)
        kinds = ("<i8",), KINDS, (FLAGS,)
        try:
            mapped = [*map(map_array, (path / name for name in arrays), kinds)]
        except ValueError as error:
            raise DataError(f"data={path}: {error}") from None
        self._rows, self._values = mapped[:2]
        self._flags: np.ndarray | None = mapped[2] if len(mapped) > 2 else None
        self.max_length: int = metadata["max_length"]
        self.vocab_size: int = metadata["vocab_size"]
        self.fingerprint: str = metadata["fingerprint"]
        self.num_tokens: int = metadata["num_tokens"]
        self.num_users: int = metadata["num_users"]
        column = self._column("num_examples")
        # Arrow's to_numpy imports pandas, which takes longer than the rest of this function.
        counts = np.concatenate([np.zeros(0, np.int32), *map(np.from_dlpack, column.chunks)])
        self.offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_examples = len(self._rows) - 1
        rows = {self.num_examples, self.offsets[-1], metadata["num_examples"]}
        tokens = {self._rows[-1], self.num_tokens, *map(len, mapped[1:])}
        if len(rows) > 1 or len(tokens) > 1:
            raise DataError.of("data", path, "files of one store, got other sizes")

    def check(self) -> None:
        """Compare the files of the store with its fingerprint; a second per gigabyte or two.

        Raises: DataError: the store was changed since it was built.
        """
        if fingerprint(self.path, self.is_flagged) != self.fingerprint:
            raise DataError(f"data={self.path}: changed since it was built: another fingerprint")

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Gather the tokens of rows in any order, cut or zero-padded to `length`; -1 is padding.

        Returns: (tokens int32 [rows, length], number of real tokens int32 [rows]).
        """
        tokens = np.zeros((len(rows), length), np.int32)
        return tokens, self._copy_rows(rows, self._values, tokens)

    def trained(self, rows: np.ndarray, length: int) -> np.ndarray | None:
        """Which tokens of `gather` are trained on, bool [rows, length]; None if all are."""
        if self._flags is None:
            return None
        flags = np.zeros((len(rows), length), bool)
        self._copy_rows(rows, self._flags, flags)
        return flags

    def _copy_rows(self, rows: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows of `values` to `out`, zeros [rows, length]. Returns their sizes, int32."""
        rows = np.asarray(rows, np.int64)
        length, flat, sizes = out.shape[1], out.reshape(-1), np.zeros(len(rows), np.int32)
        try:
            for low in range(0, len(rows), BLOCK_ROWS):
                real = low + np.flatnonzero(rows[low : low + BLOCK_ROWS] >= 0)
                begin = self._rows[rows[real]]
                sizes[real] = size = np.minimum(self._rows[rows[real] + 1] - begin, length)
                copy(values, begin, size, flat, real * length)
        except (ValueError, IndexError) as error:
            raise DataError(f"data={self.path}: no such rows in {OFFSETS} ({error})") from None
        return sizes

    @property
    def is_flagged(self) -> bool:
        """True if only some tokens are trained on."""
        return self._flags is not None

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Number of real tokens of rows in any order, int64 [rows]; 0 for -1. Reads no tokens."""
        rows = np.asarray(rows, np.int64)
        return np.where(rows >= 0, self._rows[rows + 1] - self._rows[rows], 0)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [num_examples]. Computed at each access."""
        return np.diff(self._rows).astype(np.int32)

    def largest_id(self) -> int:
        """Largest token id of all rows; 0 without rows. Memory does not grow with rows."""
        return int(self._values.max(initial=0))

    @functools.cached_property
    def owners(self) -> Owners | None:
        """Graph of users and owner sets; None if every text has one owner. Raises: DataError: it is
        damaged, or of another store."""
        if SETS not in self.metadata:
            return None
        lists = pa.concat_arrays(self._column("owners", TABLES[1]).chunks)
        users, sets = lists.flatten().to_numpy(), len(self.offsets) - 1
        if len(lists) != sets or not 0 <= users.min() <= users.max() < self.num_users:
            expected = f"the owners of {sets} owner sets among {self.num_users} users"
            raise DataError(f"{TABLES[1]}: expected {expected}")
        return Owners(self.num_users, lists.offsets.to_numpy().astype(np.int64), users)

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
        rows = max(1, BLOCK_TOKENS // self.max_length)
        for start in range(low, high, rows):
            offsets = self._rows[start : min(start + rows, high) + 1]
            values = self._values[offsets[0] : offsets[-1]]
            if self._flags is not None:
                values = values.astype(MARKED) * 2 + self._flags[offsets[0] : offsets[-1]]
            yield np.diff(offsets), values

    def _column(self, name: str, file: str = TABLES[0]) -> pa.ChunkedArray:
        try:
            with pq.ParquetFile(self.path / file, memory_map=True) as opened:
                return opened.read([name])[name]
        except (pa.ArrowException, KeyError, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{file}: cut off or damaged ({reason})") from None

    def __reduce__(self):
        return _reopened, (self.path, self.fingerprint)


def read_metadata(directory: Path, kind: str) -> dict[str, Any]:
    """Read metadata.json of a directory that fedsim built, of a kind: "users" or "dataset".

    Raises: DataError: the file is missing, not written by fedsim, or of another kind or format.
    """
    try:
        metadata = json.loads((directory / "metadata.json").read_text(encoding="utf-8"))
        found = metadata["kind"], metadata["format"]
    except (OSError, ValueError, KeyError, TypeError):
        expected = "a directory built by fedsim (with its metadata.json)"
        raise DataError.of("data", directory, expected) from None
    if found != (kind, FORMAT):
        expected = f"kind {kind!r}, format {FORMAT}, got {found}: `fedsim data build` builds one"
        raise DataError.of("data", directory, expected)
    return metadata
