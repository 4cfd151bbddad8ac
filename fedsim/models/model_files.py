"""Files of a model: arrays in safetensors files, and side files beside them.

Arrays have names, and nothing in a file is code. The library `safetensors` reads and writes a file.
Large models are split into several files, which an index names.

Side files are the tokenizer, the chat template and the generation settings. Training does not
change them, and programs that serve the trained model need them unchanged.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsim.errors import ConfigError, FileDamaged, brief
from fedsim.files import (
    MOST_JSON,
    read_object,
    sha256_of,
    write_atomically,
    write_json,
    write_with,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    **{"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")},
    "BF16": np.dtype(jnp.bfloat16),
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "I8": np.dtype("i1")},
    **{"I16": np.dtype("<i2"), "BOOL": np.dtype("?")},
}
NAMED = 4  # arrays that an error names, at most
SHARD_BYTES = 5_000_000_000
LONGEST_NAME = 255  # bytes of a file's name
FOR_OTHERS = {"format": "pt"}  # metadata that other tools expect


class TensorError(ConfigError):
    """A file is not a safetensors file, or lacks an array."""


class Stored:
    """An array in a file, with its `shape` and `dtype`. Every `np.asarray` reads it again."""

    def __init__(self, file: Path, opened: Any, name: str):
        """Read the shape and type. Raises: TensorError: models have no arrays of this type."""
        self._file, self._opened, self._name = file, opened, name
        about = opened.get_slice(name)
        self.shape, code = tuple(about.get_shape()), about.get_dtype()
        if code not in DTYPES:
            raise _no_file(file, f"{brief(name)} has the type {code}")
        self.dtype = DTYPES[code]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        try:
            return np.asarray(self._opened.get_tensor(self._name), dtype)
        except (OSError, SafetensorError) as error:  # the file was cut after it was opened
            raise _no_file(self._file, error) from None


def read_directory(directory: Path) -> dict[str, Stored]:
    """Open all arrays of model.safetensors, or of the files that its index names.

    Raises:
      TensorError: a file is missing or damaged, or index and files have different arrays.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return read(single)
    if not index.is_file():
        raise TensorError.of("model", directory, f"{SINGLE} or {INDEX} in it")
    places = read_object(index, "model").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise TensorError.of("model", index, "a weight_map of arrays to files")
    found: dict[str, Stored] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or len(file.encode(errors="replace")) > LONGEST_NAME:
            wanted = f"names of files beside it, got {brief(file)}"
            raise TensorError.of("model", index, wanted)
        tensors = read(directory / file)
        for name in tensors:
            if places.get(name) != file:
                wanted = f"the array {brief(name)} of {brief(file)} in it"
                raise TensorError.of("model", index, wanted)
        found |= tensors
    for name, file in places.items():
        if name not in found:
            wanted = f"'{brief(name)}' in the file it names, {brief(file)}"
            raise TensorError.of("model", index, wanted)
    return found


def read(file: Path) -> dict[str, Stored]:
    """Open all arrays of a file.

    Raises:
      TensorError: the file is missing, cut off or damaged, or has bytes of no array.
    """
    if not file.is_file():  # reading a pipe would wait
        raise TensorError.of("model", file, "a file that exists")
    try:
        opened: Any = safe_open(
            file, "numpy", backend="pread"
        )  # a mapped file that is cut kills the process
        _expect_names_once(file)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise _no_file(file, error) from None
    return {name: Stored(file, opened, name) for name in opened.keys()}


def _expect_names_once(file: Path) -> None:
    """Check that names are unique: of two equal names, the library reads the second.

    Raises:
      ValueError: a name is there twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name twice in the header")

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        json.loads(opened.read(size), object_pairs_hook=once)


def _no_file(file: Path, error: object) -> TensorError:
    reason = brief(" ".join(str(error).split()), 200)
    return TensorError.of("model", file, f"a safetensors file ({reason})")


def expect_none_left(source: str, names: Sequence[str], why: str = "") -> None:
    """Check that no arrays are left over: a model without them would be another model.

    Args:
      source: the file, for the error.
      names: arrays of the file that the model has no place for.
      why: end of the error line.
    Raises:
      TensorError: there are such arrays.
    """
    if names:
        shown = ", ".join(brief(name) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        expected = f"only arrays that its settings have a place for, and {shown}{more}"
        verb = "have" if len(names) > 1 else "has"
        raise TensorError.of("model", source, f"{expected} {verb} none{why}")


def write_directory(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write model.safetensors, or several files of at most `shard_bytes` and their index."""
    from huggingface_hub import split_state_dict_into_shards_factory as split

    shards = split(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in shards.filename_to_tensors.items():
        write(directory / file, {name: tensors[name] for name in names})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        write_json(directory / INDEX, index)


def write(
    file: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str] = FOR_OTHERS
) -> None:
    """Write a file, completely or not at all. Equal arrays give equal bytes.

    Args:
      about: metadata of the file. The library does not keep their order.
    Raises:
      OSError: the file cannot be written.
    """
    # The library copies the memory of an array as it lies there, whatever its strides.
    rows_first = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}

    def save(path: Path) -> None:
        try:
            save_file(rows_first, path, dict(about))
        except SafetensorError as error:
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from None
            raise

    write_with(file, save)


CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION, SPECIAL = "generation_config.json", "special_tokens_map.json"
ADAPTER = "adapter_config.json"  # in place of CONFIG, where a directory has adapters alone
SIDE_FILES = (
    *(CONFIG, GENERATION, TOKENIZER, SETTINGS, SPECIAL),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model", "spiece.model"),
)
TEMPLATES = "additional_chat_templates"
PATTERNS = (*SIDE_FILES, f"{TEMPLATES}/*.jinja")


def side_files(directory: Path) -> list[str]:
    """Names of the side files in a directory.

    Raises:
      ConfigError: a file is larger than MOST_JSON.
    """
    more = (f"{TEMPLATES}/{path.name}" for path in directory.glob(f"{TEMPLATES}/*.jinja"))
    names = [name for name in (*SIDE_FILES, *sorted(more)) if (directory / name).is_file()]
    for name in names:
        size = (directory / name).stat().st_size
        if size > MOST_JSON:
            expected = f"at most {MOST_JSON} bytes, got {size}"
            raise ConfigError.of("model", directory / name, expected)
    return names


def side_file_digests(directory: Path) -> dict[str, str]:
    """sha256 (hex) of each side file in a directory."""
    return {name: sha256_of(directory / name) for name in side_files(directory)}


def check_side_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Compare side files with the result of `side_file_digests`.

    Raises:
      FileDamaged: a file is missing or was changed.
    """
    for name, sha256 in expected.items():
        path = directory / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise FileDamaged(f"{path}: was changed since the run was started")


def copy_side_files(directory: Path, out: Path, but: tuple[str, ...] = ()) -> list[str]:
    """Copy side files, except `but`, into the directory `out`. Returns: their names."""
    names = [name for name in side_files(directory) if name not in but]
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        write_atomically(out / name, (directory / name).read_bytes())
    return names
