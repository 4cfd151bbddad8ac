"""The safetensors format (Hugging Face): named arrays, memory-mapped; nothing in a file is code.

A file is the length of a header, the header in JSON (name -> type, shape, place), and bytes. Large
models are cut into several files, which an index names.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fedsim.errors import ConfigError, brief
from fedsim.files import read_object, sync_directory

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    **{"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "I8": np.dtype("i1")},
    **{"I16": np.dtype("<i2"), "BOOL": np.dtype("?")},
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000
MAX_AXES = 32
NAMED = 4  # in an error
ALIGNMENT = 64
SHARD_BYTES = 5_000_000_000


class TensorError(ConfigError):
    """A file that is no safetensors file, or lacks an array; one line."""


def read_directory(directory: Path) -> dict[str, np.ndarray]:
    """All arrays of model.safetensors, or of the files its index names; views of mapped memory.

    Raises: TensorError: a file is missing or damaged, or has an array that the index does not name.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return read(single)
    if not index.is_file():
        raise TensorError(f"model={directory}: expected {SINGLE} or {INDEX} in it")
    places = read_object(index, "model").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise TensorError(f"model={index}: expected a weight_map of arrays to files")
    found: dict[str, np.ndarray] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            message = f"expected names of files beside it, got {brief(file)}"
            raise TensorError(f"model={index}: {message}")
        tensors = read(directory / file)
        for name in tensors:
            if places.get(name) != file:
                message = f"expected the array {brief(name)} of {brief(file)} in it"
                raise TensorError(f"model={index}: {message}")
        found |= tensors
    for name, file in places.items():
        if name not in found:
            message = f"expected '{brief(name)}' in the file it names, {brief(file)}"
            raise TensorError(f"model={index}: {message}")
    return found


def read(file: Path) -> dict[str, np.ndarray]:
    """All arrays of one file, as read-only views of mapped memory.

    Raises: TensorError: it is missing, cut off or damaged, or has bytes of no array.
    """
    try:
        if not file.stat().st_size:
            raise ValueError("the header is cut off")
        data = np.memmap(file, np.uint8, "r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or size > min(MAX_HEADER, len(data) - 8):
            raise ValueError("the header is cut off")
        header = json.loads(data[8 : 8 + size].tobytes(), object_pairs_hook=_once)
        header.pop("__metadata__", None)
        data = data[8 + size :]
        found = {name: _view(data, name, about) for name, about in header.items()}
        _expect_covered(len(data), [about["data_offsets"] for about in header.values()])
        return found
    except FileNotFoundError:
        raise TensorError(f"model={file}: expected a file that exists") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = brief(" ".join(str(error).split()), 200)
        raise TensorError(f"model={file}: expected a safetensors file ({reason})") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ: of two arrays of one name, one would not be read."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError("a name twice in the header")
    return record


def _view(data: np.ndarray, name: str, about: dict[str, Any]) -> np.ndarray:
    if about["dtype"] not in DTYPES:
        raise ValueError(f"{brief(name)} has the type {brief(about['dtype'])}")
    dtype, shape = DTYPES[about["dtype"]], tuple(about["shape"])
    begin, end = about["data_offsets"]
    if len(shape) > MAX_AXES or not all(type(size) is int for size in (*shape, begin, end)):
        raise ValueError(f"{brief(name)} has a shape or place that is none")
    holds = 0 <= begin <= end <= len(data) and min(shape, default=0) >= 0
    if not holds or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{brief(name)} is cut off, or of another size than its shape's")
    return data[begin:end].view(dtype).reshape(shape)


def _expect_covered(size: int, places: list[tuple[int, int]]) -> None:
    """Raises ValueError unless each byte belongs to one array, as the format demands."""
    reached = 0
    for begin, end in sorted(places):
        if begin != reached:
            raise ValueError(f"bytes from {min(begin, reached)} on belong to no array, or to two")
        reached = end
    if reached != size:
        raise ValueError(f"bytes from {reached} on belong to no array")


def expect_none_left(source: str, names: Sequence[str], why: str = "") -> None:
    """Raises TensorError: a model's file has arrays `names` that the model has no place for.

    To leave them out would train another model than the one that was asked for.
    """
    if names:
        shown = ", ".join(brief(name) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        expected = f"only arrays that its settings have a place for, and {shown}{more}"
        verb = "have" if len(names) > 1 else "has"
        raise TensorError(f"model={source}: expected {expected} {verb} none{why}")


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
