"""Files of a store: token ids and offsets of all rows, a table of users, and metadata.json.

tokens.npy holds the ids of all rows end to end, offsets.npy the index of the first id of each row,
both in NumPy's format, so that they can be mapped into memory. If only some tokens of a row are
trained on, as in chats, trained.npy says of each token whether it is. The bytes depend on the rows
alone, not on the blocks in which they are written, and JSON keys are sorted. Reading keeps nothing
per row and shares nothing between calls, so that threads may read at the same time. `UserStore` in
users.py puts the files together.

If texts have several owners, the rows of a store are sorted by *owner set*: the texts of the same
users lie together, as the texts of one user do in other stores. While data is built, an owner set
is a string: the sorted ids with SEPARATOR between them. The owner set of one user is the user's id.
"""

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import DTypeLike
from scipy import sparse
from scipy.sparse import csgraph

from fedsim.files import write_atomically, write_json

SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Owners:
    """The users who own the texts of each owner set.

    Attributes:
      num_users: number of users of all sets.
      starts: int64 [sets + 1].
      users: int32 [memberships]. The users of set s are users[starts[s]:starts[s + 1]], sorted,
        without duplicates.
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
        """Number of texts that each user owns, int64 [users].

        Args:
          per_set: int64 [sets], texts of each set.
        """
        weights = np.repeat(per_set, self.sizes)
        return np.bincount(self.users, weights, self.num_users).astype(np.int64)

    def components(self, per_set: np.ndarray) -> tuple[int, int]:
        """(number of connected components, users of the largest). A shared text connects its users.

        Args:
          per_set: int64 [sets], texts of each set; sets without texts connect nobody.
        """
        there = np.repeat(per_set > 0, self.sizes)
        sets, users = self.sets[there], self.users[there].astype(np.int64)
        total = self.num_users + self.num_sets
        edges = sparse.coo_array((np.ones(len(sets), bool), (users, self.num_users + sets)))
        edges.resize((total, total))
        _, labels = csgraph.connected_components(edges, directed=False)
        counts = np.bincount(labels[: self.num_users])
        return int(np.count_nonzero(counts)), int(counts.max(initial=0))


def owner_sets(rows: np.ndarray, ids: pa.Array, num_rows: int) -> tuple[pa.Array, np.ndarray]:
    """Owner sets of rows as strings, and the number of owners of each row, int64 [num_rows].

    Args:
      rows: int64 [pairs], the row that ids[i] owns; pairs may repeat. A row without a pair gets "".
      ids: string [pairs].
    """
    names, rank = _ranked(ids)
    pairs = np.unique(rows * len(names) + rank)
    row, place = np.divmod(pairs, max(len(names), 1))
    counts = np.bincount(row, minlength=num_rows)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    named = names.take(pa.array(place))
    lists = pa.ListArray.from_arrays(starts, named)
    return pc.binary_join(lists, SEPARATOR), counts  # pyright: ignore


def decided_by_texts(long_texts: str) -> str:
    """Start of an error line about a build setting that makes row counts depend on what texts say;
    "" if it does not. Of texts with several owners, the draw must depend only on who owns which."""
    return f"long_texts={long_texts}: expected cut" if long_texts != "cut" else ""


def is_shared(keys: pa.Array | pa.ChunkedArray) -> bool:
    """True if an owner set has several owners. Args: keys: owner sets as strings."""
    several = pc.match_substring(keys, SEPARATOR)  # pyright: ignore
    return bool(pc.any(several).as_py())  # pyright: ignore


def encode_owners(keys: pa.Array) -> tuple[pa.Buffer, pa.Buffer, int]:
    """Encode owner sets, given as strings, as two Parquet files.

    Returns:
      (owners.parquet: row i has the user numbers of set i; people.parquet: row u has the id of user
      u, sorted; number of users).
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


def decode_owners(owners: pa.Buffer, num_users: int) -> Owners:
    """Decode the owners.parquet of `encode_owners`."""
    with pq.ParquetFile(pa.BufferReader(owners)) as table:
        lists = table.read(["owners"])["owners"].combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = lists.chunk(0) if lists.num_chunks else pa.array([], pa.list_(pa.int32()))
    starts = lists.offsets.to_numpy().astype(np.int64)
    return Owners(num_users, starts - starts[0], lists.flatten().to_numpy())


def owner_key(owner: Any) -> str:
    """The owner set of an id, or of a tuple of ids, as a string."""
    ids: Sequence[Any] = owner if isinstance(owner, tuple) else (owner,)
    return SEPARATOR.join(sorted(set(map(str, ids))))


def _parquet(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


FORMAT = 2
# The last two exist where texts have several owners.
TABLES = ("users.parquet", "owners.parquet", "people.parquet")
ARRAYS = OFFSETS, TOKENS, TRAINED = "offsets.npy", "tokens.npy", "trained.npy"
SETS = "num_owner_sets"  # field in the metadata of a store whose texts have several owners
HEADER_BYTES = 128  # of each array file
KINDS = "<u2", "<u4"  # dtypes of token ids
FLAGS = "|u1"  # dtype of trained.npy: 1 for a token that is trained on
MARKED = np.dtype("<u4")  # dtype of marked ids while data is built: twice the id, + 1 if trained on
BLOCK_ROWS = 16_384  # rows copied at a time: as many as fit in a processor's cache


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id below vocab_size: uint16 or uint32, little-endian."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets of rows laid end to end, int64 [rows + 1]; the last is their total length.

    Args:
      lengths: int [rows], tokens of each row.
    """
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8")


def arrays_of(marked: bool) -> tuple[str, ...]:
    """Names of the arrays of a store. Args: marked: True if only some tokens are trained on."""
    return ARRAYS if marked else ARRAYS[:2]


class TokenWriter:
    """Write the rows of a store to a directory in pieces. A context manager."""

    def __init__(self, directory: Path, dtype: DTypeLike, marked: bool = False):
        """Open the files.

        Args:
          dtype: type of token ids on disk.
          marked: True if rows come as marked ids; see MARKED.
        Raises:
          OSError: the files cannot be made.
        """
        self._dtype, self._marked = np.dtype(dtype), marked
        self._rows = self._tokens = 0
        self._files = [(directory / name).open("wb") for name in arrays_of(marked)]

    def __enter__(self) -> "TokenWriter":
        self._write_headers()
        self._files[0].write(offsets_of(np.zeros(0)).data)
        return self

    def write(self, lengths: np.ndarray, values: np.ndarray) -> None:
        """Append rows.

        Args:
          lengths: int [rows], tokens of each row.
          values: token ids of all rows end to end, or marked ids.
        Raises:
          OSError: the disk is full.
        """
        self._files[0].write((self._tokens + offsets_of(lengths)[1:]).data)
        if self._marked:
            self._files[2].write((values & 1).astype(FLAGS).data)
            values = values >> 1
        self._files[1].write(np.ascontiguousarray(values, self._dtype).data)
        self._rows, self._tokens = self._rows + len(lengths), self._tokens + len(values)

    def __exit__(self, error, *_) -> None:
        try:
            if error is None:  # now with their real sizes; the length of a header is fixed
                self._write_headers()
                for file in self._files:  # a reset of the machine must not leave zeros in it
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            for file in self._files:
                file.close()

    def _write_headers(self) -> None:
        headers = (self._rows + 1, "<i8"), (self._tokens, self._dtype), (self._tokens, FLAGS)
        for file, header in zip(self._files, headers, strict=False):  # the last may not exist
            file.seek(0)
            file.write(encode_header(*header))


def encode_header(size: int, dtype: DTypeLike) -> bytes:
    """Header of an array of `size` items, HEADER_BYTES long, as numpy.save writes it."""
    file = io.BytesIO()
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def encode_array(array: np.ndarray) -> pa.Buffer:
    """An array as a file in memory, in the bytes that TokenWriter writes."""
    return pa.py_buffer(encode_header(len(array), array.dtype) + array.tobytes())


class TokenReader:
    """Read rows of token ids by their number.

    Attributes:
      offsets: int64 [rows + 1]. Row i is values[offsets[i]:offsets[i + 1]].
      values: uint16 or uint32 [tokens].
      flags: uint8 [tokens], 1 for tokens that are trained on; None if all are.
    """

    def __init__(self, offsets: np.ndarray, values: np.ndarray, flags: np.ndarray | None = None):
        """Check the arrays. Raises: ValueError: the arrays do not belong together."""
        whole = offsets.ndim == values.ndim == 1 and offsets.dtype.str == "<i8" and len(offsets)
        whole = whole and values.dtype.str in KINDS
        if not whole or offsets[0] or offsets[-1] != len(values):
            raise ValueError(f"{OFFSETS} and {TOKENS}: cut off or damaged (not of one store)")
        if flags is not None and (flags.dtype.str, flags.shape) != (FLAGS, values.shape):
            raise ValueError(f"{TRAINED} and {TOKENS}: cut off or damaged (not of one store)")
        self.offsets, self.values, self.flags = offsets, values, flags

    @classmethod
    def open(cls, directory: Path, flagged: bool = False) -> "TokenReader":
        """Map the rows of the store in `directory`.

        Args:
          flagged: True if it has trained.npy.
        Raises:
          ValueError: a file is cut off or damaged.
        """
        offsets, values = _mapped(directory / OFFSETS, ("<i8",)), _mapped(directory / TOKENS, KINDS)
        return cls(offsets, values, _mapped(directory / TRAINED, (FLAGS,)) if flagged else None)

    def copy_rows(self, rows: np.ndarray, values: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy rows in any order, cut to the width of `out`.

        Args:
          rows: int64 [rows]; -1 is padding.
          values: `values` or `flags`.
          out: zeros [rows, length], to be filled.
        Returns:
          Number of items of each, int32 [rows].
        """
        length, flat = out.shape[1], out.reshape(-1)
        sizes = np.zeros(len(rows), np.int32)
        for low in range(0, len(rows), BLOCK_ROWS):
            real = low + np.flatnonzero(rows[low : low + BLOCK_ROWS] >= 0)
            begin = self.offsets[rows[real]]
            sizes[real] = size = np.minimum(self.offsets[rows[real] + 1] - begin, length)
            copy(values, begin, size, flat, real * length)
        return sizes

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of rows in any order, int64 [rows]; 0 for -1."""
        sizes, real = np.zeros(len(rows), np.int64), rows >= 0
        sizes[real] = self.offsets[rows[real] + 1] - self.offsets[rows[real]]
        return sizes


def _mapped(file: Path, kinds: tuple[str, ...]) -> np.ndarray:
    """Map the array in a file that TokenWriter wrote.

    Args:
      kinds: dtypes that the items may have.
    Raises:
      ValueError: the header does not match the size of the file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header = opened.read(HEADER_BYTES)
        for kind in kinds:
            items, rest = divmod(size - HEADER_BYTES, np.dtype(kind).itemsize)
            if not rest and header == encode_header(items, kind):
                return np.memmap(file, kind, "r", HEADER_BYTES, (items,)).view(np.ndarray)
    except OSError as error:
        raise ValueError(f"{file.name}: cannot be read ({error.strerror})") from None
    raise ValueError(f"{file.name}: cut off or damaged (no array of its size)")


def copy(source: np.ndarray, begin: np.ndarray, size: np.ndarray, target: np.ndarray, at) -> None:
    """Copy source[begin[i]:begin[i] + size[i]] to target[at[i]:at[i] + size[i]] for every i."""
    skipped = np.cumsum(size) - size
    inside = np.arange(int(size.sum()))
    where = np.repeat(begin - skipped, size)
    where += inside
    inside += np.repeat(at - skipped, size)
    target[inside] = source[where]


def encode_tables(
    keys: pa.Array, num_examples: np.ndarray, offsets: np.ndarray
) -> tuple[dict[str, pa.Buffer], dict[str, int]]:
    """The tables of a store, and the numbers of its users for its metadata.

    Args:
      keys: sorted ids of users, or owner sets as strings.
      num_examples: int64 [users], or [sets].
      offsets: int64 [examples + 1], of `offsets_of`.
    Returns:
      (Parquet files by name; row i of the first is user i, or set i. Fields of metadata.json.)
    """
    first = np.concatenate([[0], np.cumsum(num_examples)])
    table = pa.table(
        {
            "user_id": keys,
            "offset": pa.array(first[:-1], pa.int64()),
            "num_examples": pa.array(num_examples, pa.int32()),
            "num_tokens": pa.array(np.diff(offsets[first]), pa.int64()),
        }
    )
    tables, numbers = {TABLES[0]: _parquet(table)}, {"num_users": len(keys)}
    if is_shared(keys):
        owners, people, num_users = encode_owners(keys)
        tables |= {TABLES[1]: owners, TABLES[2]: people}
        numbers = {"num_users": num_users, SETS: len(keys)}
    return tables, numbers


def fingerprint(parts: Iterable[pa.Buffer | Path]) -> str:
    """sha256 (hex) of buffers and files, end to end: tables, offsets, tokens, and flags if any."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
        else:
            digest.update(part)
    return digest.hexdigest()


def seal(
    about: dict[str, Any], num_examples: int, num_tokens: int, digest: str, marked: bool = False
) -> dict[str, Any]:
    """Metadata of a store: the entries of `about`, then totals and the fingerprint.

    Args:
      about: vocab_size, max_length and the numbers of users among them.
      marked: True if only some tokens are trained on.
    """
    return {
        "kind": "users",
        "format": FORMAT,
        **about,
        "num_examples": num_examples,
        "num_tokens": num_tokens,
        "dtype": token_dtype(about["vocab_size"]).name,
        "fingerprint": digest,
        **({"trained": True} if marked else {}),
    }


def close_store(
    directory: Path,
    keys: Sequence[str] | pa.Array,
    num_examples: np.ndarray,
    about: dict[str, Any],
    marked: bool = False,
) -> None:
    """Complete a directory of arrays with its tables and metadata.json.

    Args:
      keys: sorted ids of users, or owner sets as strings.
      num_examples: int64 [users], or [sets].
      about: entries of the metadata, vocab_size and max_length among them.
      marked: True if only some tokens are trained on.
    """
    offsets = TokenReader.open(directory).offsets
    tables, numbers = encode_tables(pa.array(keys, pa.string()), num_examples, offsets)
    for name, table in tables.items():
        write_atomically(directory / name, table)
    digest = fingerprint([directory / name for name in (*tables, *arrays_of(marked))])
    num_rows, num_tokens = int(num_examples.sum()), int(offsets[-1])
    metadata = seal(about | numbers, num_rows, num_tokens, digest, marked)
    write_json(directory / "metadata.json", metadata, sort_keys=True)
