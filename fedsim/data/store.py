"""Files of a store: token ids and offsets of all rows, a table of users, and metadata.json.

tokens.npy holds the ids of all rows end to end, offsets.npy the index of the first id of each row,
both in NumPy's format, so that they can be mapped into memory. If only some tokens of a row are
trained on, as in chats, trained.npy says of each token whether it is. The bytes depend on the rows
alone, not on the blocks in which they are written, and JSON keys are sorted. `UserStore` in
users.py puts the files together.

If texts have several owners, the rows of a store are sorted by *owner set*: the texts of the same
users lie together, as the texts of one user do in other stores. While data is built, an owner set
is a string: the sorted ids with SEPARATOR between them. The owner set of one user is the user's id.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from fedsim.files import write_atomically, write_json

FORMAT = 2
SEPARATOR = "\x1f"
# The last two exist where texts have several owners.
TABLES = ("users.parquet", "owners.parquet", "people.parquet")
ARRAYS = OFFSETS, TOKENS, TRAINED = "offsets.npy", "tokens.npy", "trained.npy"
SETS = "num_owner_sets"  # field in the metadata of a store whose texts have several owners
KINDS = "<u2", "<u4"  # dtypes of token ids
FLAGS = "|u1"  # dtype of trained.npy: 1 for a token that is trained on
MARKED = np.dtype("<u4")  # dtype of marked ids while data is built: twice the id, + 1 if trained on


@dataclass(frozen=True)
class Owners:
    """The users who own the texts of each owner set.

    Attributes:
      num_users: number of users of all sets.
      starts: int64 [sets + 1].
      users: int32 [memberships]; set s is users[starts[s]:starts[s + 1]], sorted, none twice.
    """

    num_users: int
    starts: np.ndarray
    users: np.ndarray

    @property
    def num_sets(self) -> int:
        """Number of owner sets."""
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Number of owners of each set, int64 [sets]."""
        return np.diff(self.starts)

    @property
    def sets(self) -> np.ndarray:
        """Index of the set of each membership, int64 [memberships]."""
        return np.repeat(np.arange(self.num_sets), self.sizes)

    def users_of(self, number: int) -> np.ndarray:
        """The users of a set, int32."""
        return self.users[self.starts[number] : self.starts[number + 1]]

    def count(self, per_set: np.ndarray) -> np.ndarray:
        """Number of texts that each user owns, int64 [users]. Args: per_set: those of each set."""
        weights = np.repeat(per_set, self.sizes)
        return np.bincount(self.users, weights, self.num_users).astype(np.int64)


def owner_sets(rows: np.ndarray, ids: pa.Array, num_rows: int) -> pa.Array:
    """Owner sets of rows as strings.

    Args:
      rows: int64 [pairs], the row that ids[i] owns; pairs may repeat. A row without a pair gets "".
    """
    names, rank = _ranked(ids)
    pairs = np.unique(rows * len(names) + rank)
    row, place = np.divmod(pairs, max(len(names), 1))
    counts = np.bincount(row, minlength=num_rows)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    named = names.take(pa.array(place))
    lists = pa.ListArray.from_arrays(starts, named)
    return pc.binary_join(lists, SEPARATOR)  # pyright: ignore


def decided_by_texts(long_texts: str) -> str:
    """Start of an error line about a build setting that makes row counts depend on what texts say;
    "" if it does not. Of texts with several owners, the draw must depend only on who owns which."""
    return f"long_texts={long_texts}: expected cut" if long_texts != "cut" else ""


def is_shared(keys: pa.Array | pa.ChunkedArray) -> bool:
    """True if an owner set has several owners. Args: keys: owner sets as strings."""
    return bool(pc.any(pc.match_substring(keys, SEPARATOR)).as_py())  # pyright: ignore


def encode_owners(keys: pa.Array) -> tuple[pa.Buffer, pa.Buffer, int]:
    """Encode owner sets, given as strings, as two Parquet files.

    Returns: (owners.parquet: users of each set; people.parquet: their ids, sorted; their number).
    """
    lists = pc.split_pattern(keys, SEPARATOR)  # pyright: ignore
    people, rank = _ranked(lists.values)
    users = pa.ListArray.from_arrays(lists.offsets, rank.astype(np.int32))
    owners = pa.table({"owners": users})
    return _parquet(owners), _parquet(pa.table({"user_id": people})), len(people)


def _ranked(ids: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """(the different ids, sorted; the place of each id among them, int64 [ids])."""
    encoded = ids.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)  # pyright: ignore
    rank = np.empty(len(order), np.int64)
    rank[order.to_numpy()] = np.arange(len(order))
    return encoded.dictionary.take(order), rank[encoded.indices.to_numpy()]


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id below vocab_size: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets of rows of these lengths laid end to end, int64 [rows + 1]; the last is the total."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8")


class TokenWriter:
    """Write the rows of a store to a directory in pieces. A context manager."""

    def __init__(self, directory: Path, dtype: DTypeLike, marked: bool = False):
        """Open the files.

        Args:
          dtype: type of token ids on disk.
          marked: True if rows come as marked ids; see MARKED.
        """
        self._dtype, self._marked = np.dtype(dtype), marked
        self._rows = self._tokens = 0
        self._files = [(directory / name).open("wb") for name in ARRAYS[: 2 + marked]]

    def __enter__(self) -> "TokenWriter":
        self._write_headers()
        self._files[0].write(offsets_of(np.zeros(0)).data)
        return self

    def write(self, lengths: np.ndarray, values: np.ndarray) -> None:
        """Append rows of these lengths; `values`: their token ids, or marked ids, end to end."""
        self._files[0].write((self._tokens + offsets_of(lengths)[1:]).data)
        if self._marked:
            self._files[2].write((values & 1).astype(FLAGS).data)
            values = values >> 1
        self._files[1].write(np.ascontiguousarray(values, self._dtype).data)
        self._rows, self._tokens = self._rows + len(lengths), self._tokens + len(values)

    def __exit__(self, error, *_) -> None:
        try:
            if error is None:  # now with the real sizes: NumPy keeps the length of such headers
                self._write_headers()
                for file in self._files:  # a reset of the machine must not leave zeros in it
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files:
                file.close()

    def _write_headers(self) -> None:
        sizes, dtypes = (self._rows + 1, *[self._tokens] * 2), ("<i8", self._dtype.str, FLAGS)
        for file, size, dtype in zip(self._files, sizes, dtypes, strict=False):
            file.seek(0)
            header = {"descr": dtype, "fortran_order": False, "shape": (size,)}
            np.lib.format.write_array_header_1_0(file, header)


def map_array(file: Path, kinds: Sequence[str]) -> np.ndarray:
    """Map the array of one of these dtypes in a file that TokenWriter wrote.

    Raises: ValueError: the file is cut off or damaged. The line quotes nothing of it.
    """
    try:
        mapped = np.lib.format.open_memmap(file, mode="r")
        if (mapped.dtype.str, mapped.ndim) in ((kind, 1) for kind in kinds):
            if mapped.offset + mapped.nbytes == file.stat().st_size:
                return mapped.view(np.ndarray)
    except Exception:  # whatever NumPy raises about a damaged header
        pass
    raise ValueError(f"{file.name}: cut off or damaged (no array of its size)")


def fingerprint(directory: Path, marked: bool) -> str:
    """sha256 (hex) of the files of a store: its tables, offsets, tokens, and flags if any."""
    files = [directory / name for name in (*TABLES, *ARRAYS[: 2 + marked])]
    digest = hashlib.sha256()
    for path in filter(Path.is_file, files):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # adds to it
    return digest.hexdigest()


def close_store(
    directory: Path,
    keys: Sequence[str] | pa.Array,
    num_examples: np.ndarray,
    about: dict[str, Any],
    marked: bool = False,
) -> None:
    """Complete a directory of arrays with its tables and metadata.json.

    Args:
      keys: sorted ids of users, or owner sets as strings: row i of the first table.
      num_examples: int64 [users], or [sets].
      about: entries of the metadata, vocab_size and max_length among them.
      marked: True if only some tokens are trained on.
    """
    keys, offsets = pa.array(keys, pa.string()), map_array(directory / OFFSETS, ("<i8",))
    first = np.concatenate([[0], np.cumsum(num_examples)])
    columns = {
        "user_id": keys,
        "offset": pa.array(first[:-1], pa.int64()),
        "num_examples": pa.array(num_examples, pa.int32()),
        "num_tokens": pa.array(np.diff(offsets[first]), pa.int64()),
    }
    tables, about = [_parquet(pa.table(columns))], {**about, "num_users": len(keys)}
    if is_shared(keys):
        *others, about["num_users"] = encode_owners(keys)
        tables, about[SETS] = [*tables, *others], len(keys)
    if marked:
        about["trained"] = True
    for name, content in zip(TABLES, tables, strict=False):
        write_atomically(directory / name, content)
    metadata = {
        **about,
        "kind": "users",
        "format": FORMAT,
        "num_examples": len(offsets) - 1,
        "num_tokens": int(offsets[-1]),
        "dtype": token_dtype(about["vocab_size"]).name,
        "fingerprint": fingerprint(directory, marked),
    }
    write_json(directory / "metadata.json", metadata, sort_keys=True)
