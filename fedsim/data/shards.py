"""How a store is written: sorted rows in, Arrow shards, users table and metadata out.

The bytes depend on the rows alone, not on how the caller cut them into blocks: record batches are
always BATCH_ROWS rows (at the usual 1,000 a large store has 100,000 batches, slow to open and
heavy in every process), buffers carry no null bitmap, and JSON keys are sorted.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from fedsim.data import owners
from fedsim.files import write_json

BATCH_ROWS = 16_384
SHARD_BYTES = 256 * 2**20
FORMAT = 1


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type that holds every id below vocab_size."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def token_schema(dtype: DTypeLike) -> pa.Schema:
    """One column, `tokens`: a list of uint16 or uint32."""
    return pa.schema({"tokens": pa.list_(pa.from_numpy_dtype(dtype))})


def token_batch(lengths: np.ndarray, values: np.ndarray) -> pa.RecordBatch:
    """Rows of `lengths` tokens [rows], whose ids lie end to end in `values`, as a record batch."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, np.ascontiguousarray(values))
    return pa.RecordBatch.from_arrays([column], schema=token_schema(values.dtype))


def encode_stream(lengths: np.ndarray, values: np.ndarray) -> pa.Buffer:
    """A whole shard in memory: the same bytes that `write_stream` puts in a file."""
    sink = pa.BufferOutputStream()
    _write_batches(sink, [(lengths, values)], values.dtype)
    return sink.getvalue()


def write_stream(
    file: Path, blocks: Iterable[tuple[np.ndarray, np.ndarray]], dtype: DTypeLike
) -> None:
    """A shard: blocks of rows (lengths [rows], their token ids end to end) in order.

    Raises: OSError: the disk is full.
    """
    with pa.OSFile(str(file), "wb") as sink:
        _write_batches(sink, blocks, dtype)


def _write_batches(
    sink: Any, blocks: Iterable[tuple[np.ndarray, np.ndarray]], dtype: DTypeLike
) -> None:
    """Record batches of exactly BATCH_ROWS rows, the last one shorter."""
    lengths, values = np.zeros(0, np.int64), np.zeros(0, dtype)
    with pa.ipc.new_stream(sink, token_schema(dtype)) as stream:
        for block in blocks:
            if len(lengths):
                block = np.concatenate([lengths, block[0]]), np.concatenate([values, block[1]])
            lengths, values = block
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            whole = len(lengths) // BATCH_ROWS * BATCH_ROWS
            for row in range(0, whole, BATCH_ROWS):
                end = row + BATCH_ROWS
                stream.write(token_batch(lengths[row:end], values[ends[row] : ends[end]]))
            lengths, values = lengths[whole:], values[ends[whole] :]
        if len(lengths):
            stream.write(token_batch(lengths, values))


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
        "dtype": np.dtype(token_dtype(about["vocab_size"])).name,
        "fingerprint": digest,
        **shared,
    }


def shard_rows(num_rows: int, num_tokens: int, width: int) -> int:
    """Rows of each shard but the last: whole record batches, about SHARD_BYTES in all."""
    per_batch = BATCH_ROWS * (4 + width * num_tokens / max(num_rows, 1))
    return BATCH_ROWS * max(1, int(SHARD_BYTES / per_batch))


def shard_names(number: int) -> list[str]:
    """The files of a store's shards, in order."""
    return [f"data-{shard:05d}-of-{number:05d}.arrow" for shard in range(number)]


def close_store(
    directory: Path,
    user_ids: Sequence[str] | pa.Array,
    num_examples: np.ndarray,
    num_tokens: np.ndarray,
    about: dict[str, Any],
) -> None:
    """Completes a directory of shards with its users table and metadata.json.

    Args: user_ids sorted, num_examples and num_tokens [users]; or the same of owner sets (see
      owners.py). about: goes into the metadata, with vocab_size and max_length in it.
    """
    names = sorted(path.name for path in directory.glob("data-*.arrow"))
    tables = {"users.parquet": encode_users(user_ids, num_examples, num_tokens)}
    ids, people = pa.array(user_ids, pa.string()), None
    if owners.is_shared(ids):
        tables["owners.parquet"], tables["people.parquet"], people = owners.encode(ids)
    for name, table in tables.items():
        (directory / name).write_bytes(table)
    digest = fingerprint([directory / name for name in (*tables, *names)])
    metadata = seal({**about, "shards": names}, num_examples, num_tokens, digest, people)
    write_json(directory / "metadata.json", metadata, sort_keys=True)
