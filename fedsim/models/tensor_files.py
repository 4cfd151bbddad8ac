"""The safetensors format (Hugging Face): named arrays, memory-mapped; nothing in a file is code.

A file is the length of a header, the header in JSON (name -> type, shape, place), and bytes. Large
models are cut into several files, which an index names.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fedsim.errors import ConfigError
from fedsim.files import sync_directory

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    **{"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "I8": np.dtype("i1")},
    **{"I16": np.dtype("<i2"), "BOOL": np.dtype("?")},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
ALIGNMENT = 64
SHARD_BYTES = 5_000_000_000


class TensorError(ConfigError):
    """A file that is no safetensors file, or lacks an array; one line."""


def read_directory(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of model.safetensors, or of the files its index names; views of mapped memory.

    Raises: TensorError: a file is missing or damaged.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return read(single)
    if not index.is_file():
        raise TensorError(f"model={directory}: expected {SINGLE} or {INDEX} in it")
    try:
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(places.values()))
        wrong = [name for name in files if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorError(f"model={index}: expected an index of files ({error!r})") from None
    if wrong:
        raise TensorError(f"model={index}: expected names of files beside it, got {wrong[0]}")
    parts = {name: read(directory / name) for name in files}
    try:
        return {name: parts[file][name] for name, file in places.items()}
    except KeyError as error:
        raise TensorError(f"model={index}: expected {error} in the file it names") from None


def read(file: Path) -> dict[str, np.ndarray]:
    """All arrays of one file, as read-only views of mapped memory.

    Raises: TensorError: it is missing, cut off or damaged.
    """
    try:
        if not file.stat().st_size:
            raise ValueError("the header is cut off")
        data = np.memmap(file, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
            raise ValueError("the header is cut off")
        header = json.loads(data[8 : 8 + size].tobytes())
        header.pop("__metadata__", None)
        return {name: _view(data[8 + size :], name, about) for name, about in header.items()}
    except FileNotFoundError:
        raise TensorError(f"model={file}: expected a file that exists") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise TensorError(f"model={file}: expected a safetensors file ({reason})") from None


def _view(data: np.ndarray, name: str, about: dict[str, Any]) -> np.ndarray:
    if about["dtype"] not in DTYPES:
        raise ValueError(f"{name} has the type {about['dtype']}")
    dtype, shape = DTYPES[about["dtype"]], tuple(about["shape"])
    begin, end = about["data_offsets"]
    if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} is cut off, or of another size than its shape's")
    return data[begin:end].view(dtype).reshape(shape)


def write_directory(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write model.safetensors, or, where that would be large, several files and their index."""
    shards = list(_shards(tensors, shard_bytes))
    if len(shards) == 1:
        write(directory / SINGLE, shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(directory / name, shard)
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Mapping[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > size:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def write(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file. Equal arrays give equal bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what other tools ask for
    place = 0
    for name, tensor in tensors.items():
        offsets = [place, place + tensor.nbytes]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        place += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    sync_directory(file.parent)
