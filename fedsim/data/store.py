"""How a store is written: sorted rows in, token ids, offsets, users table and metadata out.

tokens.npy holds the ids of all rows end to end, offsets.npy where each row begins: NumPy's own
format, so that the files map into memory and say what they are. The bytes depend on the rows alone,
not on how the caller cut them into blocks, and JSON keys are sorted.
"""

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from fedsim.data import owners
from fedsim.files import write_json

FORMAT = 2
OFFSETS, TOKENS = "offsets.npy", "tokens.npy"
HEADER_BYTES = 128  # of both


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id below vocab_size."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [rows + 1]: where rows of so many tokens begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype("<i8")


class TokenWriter:
    """Writes the rows of a store to its directory in pieces; a context manager."""

    def __init__(self, directory: Path, dtype: DTypeLike):
        """Raises: OSError: there is no place."""
        self._dtype = np.dtype(dtype)
        self._rows = self._tokens = 0
        self._files = (directory / OFFSETS).open("wb"), (directory / TOKENS).open("wb")

    def __enter__(self) -> "TokenWriter":
        self._write_headers()
        self._files[0].write(offsets_of(np.zeros(0)).data)
        return self

    def write(self, lengths: np.ndarray, values: np.ndarray) -> None:
        """The next rows: tokens of each, and their ids end to end. Raises: OSError: no space."""
        self._files[0].write((self._tokens + offsets_of(lengths)[1:]).data)
        self._files[1].write(np.ascontiguousarray(values, self._dtype).data)
        self._rows, self._tokens = self._rows + len(lengths), self._tokens + len(values)

    def __exit__(self, error, *_) -> None:
        try:
            if error is None:  # the headers' length is the same for every number of items
                self._write_headers()
        finally:
            for file in self._files:
                file.close()

    def _write_headers(self) -> None:
        sizes = self._rows + 1, self._tokens
        for file, size, dtype in zip(self._files, sizes, ("<i8", self._dtype), strict=True):
            file.seek(0)
            file.write(encode_header(size, dtype))


def encode_header(size: int, dtype: DTypeLike) -> bytes:
    """HEADER_BYTES before `size` items, as numpy.save writes them."""
    file = io.BytesIO()
    about = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()


def encode_array(array: np.ndarray) -> pa.Buffer:
    """A file in memory: the same bytes that TokenWriter writes."""
    return pa.py_buffer(encode_header(len(array), array.dtype) + array.tobytes())


def encode_users(
    user_ids: Sequence[str] | pa.Array, num_examples: np.ndarray, num_tokens: np.ndarray
) -> pa.Buffer:
    """The users table as Parquet: row i is user i, sorted by user_id."""
    table = pa.table(
        {
            "user_id": pa.array(user_ids, pa.string()),
            "offset": pa.array(np.cumsum(num_examples) - num_examples, pa.int64()),
            "num_examples": pa.array(num_examples, pa.int32()),
            "num_tokens": pa.array(num_tokens, pa.int64()),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def fingerprint(parts: Iterable[pa.Buffer | Path]) -> str:
    """sha256 (hex) over buffers and files, end to end: the tables, then offsets and tokens."""
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
    about: dict[str, Any],
    num_examples: np.ndarray,
    num_tokens: np.ndarray,
    digest: str,
    people: int | None = None,
) -> dict[str, Any]:
    """A store's metadata: what the caller says `about` it, then its totals and fingerprint.

    Args: people: users where texts have several; num_examples and num_tokens are of owner sets.
    """
    shared = {} if people is None else {"num_users": people, "num_owner_sets": len(num_examples)}
    return {
        "kind": "users",
        "format": FORMAT,
        **about,
        "num_users": len(num_examples),
        "num_examples": int(num_examples.sum()),
        "num_tokens": int(num_tokens.sum()),
        "dtype": token_dtype(about["vocab_size"]).name,
        "fingerprint": digest,
        **shared,
    }


def close_store(
    directory: Path,
    user_ids: Sequence[str] | pa.Array,
    num_examples: np.ndarray,
    num_tokens: np.ndarray,
    about: dict[str, Any],
) -> None:
    """Completes a directory of tokens and offsets with its users table and metadata.json.

    Args: user_ids sorted, num_examples and num_tokens [users]; or the same of owner sets (see
      owners.py). about: goes into the metadata, with vocab_size and max_length in it.
    """
    tables = {"users.parquet": encode_users(user_ids, num_examples, num_tokens)}
    ids, people = pa.array(user_ids, pa.string()), None
    if owners.is_shared(ids):
        tables["owners.parquet"], tables["people.parquet"], people = owners.encode(ids)
    for name, table in tables.items():
        (directory / name).write_bytes(table)
    digest = fingerprint([directory / name for name in (*tables, OFFSETS, TOKENS)])
    metadata = seal(about, num_examples, num_tokens, digest, people)
    write_json(directory / "metadata.json", metadata, sort_keys=True)
