"""How a store is written: sorted rows in, Arrow shards, users table and metadata out.

The bytes depend on the rows alone, not on how the caller cut them into pieces: record batches are
always BATCH_ROWS rows (at the usual 1,000 a large store has 100,000 batches, slow to open and
heavy in every process), buffers carry no null bitmap, and JSON keys are sorted.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.config import ConfigError

BATCH_ROWS = 16_384
SHARD_BYTES = 512 * 2**20
FORMAT = 1


class DataError(ConfigError):
    """A user's mistake about data: one line with the field, its value and what was expected."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that holds every id below vocab_size."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def token_schema(dtype: Any) -> pa.Schema:
    """One column, `tokens`: a list of uint16 or uint32."""
    return pa.schema({"tokens": pa.list_(pa.from_numpy_dtype(dtype))})


def token_batch(lengths: np.ndarray, values: np.ndarray) -> pa.RecordBatch:
    """Rows of `lengths` tokens [rows], whose ids lie end to end in `values`, as a record batch."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, np.ascontiguousarray(values))
    return pa.RecordBatch.from_arrays([column], schema=token_schema(values.dtype))


def encode_stream(lengths: np.ndarray, values: np.ndarray) -> pa.Buffer:
    """A whole shard in memory: the same bytes that StoreWriter would put in a file."""
    sink = pa.BufferOutputStream()
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    with pa.ipc.new_stream(sink, token_schema(values.dtype)) as stream:
        for start in range(0, len(lengths), BATCH_ROWS):
            end = min(start + BATCH_ROWS, len(lengths))
            stream.write(token_batch(lengths[start:end], values[ends[start] : ends[end]]))
    return sink.getvalue()


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
    """sha256 (hex) over buffers and files, end to end: the users table, then the shards."""
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
    about: dict[str, Any], num_examples: np.ndarray, num_tokens: np.ndarray, digest: str
) -> dict[str, Any]:
    """A store's metadata: what the caller says `about` it, then its totals and fingerprint."""
    return {
        "kind": "users",
        "format": FORMAT,
        **about,
        "num_users": len(num_examples),
        "num_examples": int(num_examples.sum()),
        "num_tokens": int(num_tokens.sum()),
        "dtype": np.dtype(token_dtype(about["vocab_size"])).name,
        "fingerprint": digest,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """The same content gives the same bytes."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


class StoreWriter:
    """Writes one store. Its users and their numbers of rows are known before the rows come."""

    def __init__(
        self,
        directory: Path,
        user_ids: Sequence[str] | pa.Array,
        num_examples: np.ndarray,
        vocab_size: int,
        shard_bytes: int = SHARD_BYTES,
    ):
        """`user_ids` sorted, `num_examples` [users] their rows; makes `directory`."""
        directory.mkdir(parents=True)
        self.directory, self.shard_bytes, self.vocab_size = directory, shard_bytes, vocab_size
        self.user_ids, self.num_examples = user_ids, num_examples
        self._dtype = token_dtype(vocab_size)
        self._ends = np.cumsum(num_examples, dtype=np.int64)  # row after each user's last
        self._tokens_at_end = np.zeros(len(num_examples), np.int64)
        self._rows = self._tokens = 0
        self._held: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_held = 0
        self._stream = self._sink = None
        self._paths: list[Path] = []

    def add(self, lengths: np.ndarray, values: np.ndarray) -> None:
        """The next rows, in order: `lengths` [rows] and their token ids end to end in `values`."""
        tokens = self._tokens + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        end = self._rows + len(lengths)
        first, last = np.searchsorted(self._ends, [self._rows, end], side="right")
        self._tokens_at_end[first:last] = tokens[self._ends[first:last] - self._rows]
        self._rows, self._tokens = end, int(tokens[-1])
        self._held.append((lengths, values.astype(self._dtype, copy=False)))
        self._num_held += len(lengths)
        while self._num_held >= BATCH_ROWS:
            self._write(BATCH_ROWS)

    def close(self, about: dict[str, Any]) -> None:
        """Writes what is held, the users table and metadata.json (`about` plus the totals)."""
        if self._num_held:
            self._write(self._num_held)
        self._end_shard()
        if self._rows != self.num_examples.sum():
            raise ValueError(f"rows={self._rows}: expected {self.num_examples.sum()}")
        names = [
            path.rename(path.with_name(f"{path.stem}-of-{len(self._paths):05d}.arrow")).name
            for path in self._paths
        ]
        num_tokens = np.diff(self._tokens_at_end, prepend=0)
        users = self.directory / "users.parquet"
        users.write_bytes(encode_users(self.user_ids, self.num_examples, num_tokens))
        digest = fingerprint([users, *(self.directory / name for name in names)])
        about = {**about, "vocab_size": self.vocab_size, "shards": names}
        metadata = seal(about, self.num_examples, num_tokens, digest)
        write_json(self.directory / "metadata.json", metadata)

    def _write(self, rows: int) -> None:
        """One record batch of the first `rows` held rows; a full shard is closed."""
        lengths, values = (np.concatenate(part) for part in zip(*self._held, strict=True))
        if self._stream is None or self._sink is None:
            self._paths.append(self.directory / f"data-{len(self._paths):05d}.part")
            self._sink = pa.OSFile(str(self._paths[-1]), "wb")
            self._stream = pa.ipc.new_stream(self._sink, token_schema(self._dtype))
        cut = int(lengths[:rows].sum(dtype=np.int64))
        self._stream.write(token_batch(lengths[:rows], values[:cut]))
        self._held = [(lengths[rows:], values[cut:])]
        self._num_held = len(lengths) - rows
        if self._sink.tell() >= self.shard_bytes:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._stream is not None and self._sink is not None:
            self._stream.close()
            self._sink.close()
        self._stream = self._sink = None
