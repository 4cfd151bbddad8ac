"""Weights of a model: safetensors files, and Hugging Face's format, without torch.

A directory has config.json, model.safetensors (or several, and their index) and tokenizer.json.
Arrays have names, and nothing in a file is code. Loaded parameters are float32, whatever they were,
or as stored, to be frozen. Saved models can be read by `transformers`, and have the side files and
the type of weights of the model that they were trained from.
"""

import dataclasses
import errno
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedsim.data import HUB, ChatTokenizer, Tokenizer, download, template_of
from fedsim.errors import BadChat, ConfigError, DataError, FileDamaged, brief
from fedsim.files import (
    MAX_JSON,
    expand_home,
    new_directory,
    read_object,
    sha256_of,
    write_atomically,
    write_json,
    write_with,
)
from fedsim.models import families, frozen
from fedsim.models.families import Place
from fedsim.models.transformer import Transformer, TransformerConfig

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # in place of CONFIG, where a directory has adapters alone
SIDE_FILES = (
    *(CONFIG, GENERATION, TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model"),
)


def side_files(directory: Path) -> list[str]:
    """Names of the side files in a directory.

    Raises: ConfigError: a file is larger than MAX_JSON.
    """
    names = [name for name in SIDE_FILES if (directory / name).is_file()]
    for path in (directory / name for name in names):
        if (size := path.stat().st_size) > MAX_JSON:
            raise ConfigError.of("model", path, f"at most {MAX_JSON} bytes, got {size}")
    return names


def check_side_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Compare side files with their sha256 (hex) at the start of a run.

    Raises: FileDamaged: a file is missing or was changed.
    """
    for name, sha256 in expected.items():
        path = directory / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise FileDamaged(f"{path}: was changed since the run was started")


def copy_side_files(directory: Path, out: Path, but: tuple[str, ...] = ()) -> list[str]:
    """Copy side files, except `but`, into the directory `out`. Returns: their names."""
    names = [name for name in side_files(directory) if name not in but]
    for name in names:
        write_atomically(out / name, (directory / name).read_bytes())
    return names


def add_end_tokens(directory: Path) -> None:
    """Add to the files of a new model what programs need to know the ends of its texts.

    Raises: ConfigError: a file is damaged.
    """
    if not (directory / TOKENIZER).is_file():
        return
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if not (directory / SETTINGS).is_file():
        # `transformers` then reads tokenizer.json unchanged, not by the kind of model.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {"bos_token": tokenizer.begin, "eos_token": tokenizer.end}
        settings |= {"pad_token": tokenizer.end, "clean_up_tokenization_spaces": False}
        write_json(directory / SETTINGS, settings)
    file = directory / GENERATION
    fields = {"bos_token_id": tokenizer.begin_id, "pad_token_id": tokenizer.end_id}
    if file.is_file():
        fields = read_object(file, "model")
    stored = fields.get("eos_token_id")
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    ends: list[int | None] = [tokenizer.end_id, *sorted(tokenizer.end_ids)]
    with suppress(BadChat, DataError):  # no template, or one that shows chats in another way
        ends.append(ChatTokenizer(tokenizer, template_of(tokenizer)).end_of_turn())
    if missing := [end for end in dict.fromkeys(ends) if end is not None and end not in ids]:
        write_json(file, {**fields, "eos_token_id": [*ids, *missing]})


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WANTED = (*SIDE_FILES, INDEX, "model*.safetensors")
DTYPES = {
    **{"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")},
    "BF16": np.dtype(jnp.bfloat16),
    **{"I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "U8": np.dtype("u1"), "I8": np.dtype("i1")},
    **{"I16": np.dtype("<i2"), "BOOL": np.dtype("?")},
}
LONGEST_NAME = 255  # bytes of a file's name
POINTER = b"version https://git-lfs"  # beginning of what a clone without git-lfs has for a file
FOR_OTHERS = {"format": "pt"}  # metadata that other tools expect
OF_WEIGHTS = ("dtype", "torch_dtype", "auto_map")
"""Fields of config.json about the stored type of weights, and about code that is not copied."""
FLOATS = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": frozen.BFLOAT16}


class TensorError(ConfigError):
    """A file is not a safetensors file, or lacks an array."""


class Stored:
    """An array in a file, with its `shape` and `dtype`. Every `np.asarray` reads it again."""

    def __init__(self, file: Path, opened: Any, name: str):
        """Read the shape and type. Raises: TensorError: models have no arrays of this type."""
        self._opened, self._name = opened, name
        about = opened.get_slice(name)
        self.shape, code = tuple(about.get_shape()), about.get_dtype()
        if code not in DTYPES:
            raise _no_file(file, f"{brief(name)} has the type {code}")
        self.dtype = DTYPES[code]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._opened.get_tensor(self._name), dtype)


def read_directory(directory: Path) -> dict[str, Stored]:
    """Open all arrays of model.safetensors, or of the files that its index names.

    Raises: TensorError: a file is missing or damaged.
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
        found |= read(directory / file)
    return found


def read(file: Path) -> dict[str, Stored]:
    """Open all arrays of a file.

    Raises: TensorError: the file is missing, cut off or damaged, or has bytes of no array.
    """
    if not file.is_file():  # reading a pipe would wait
        raise TensorError.of("model", file, "a file that exists")
    try:
        # A mapped file that is cut would kill the process.
        opened: Any = safe_open(file, "numpy", backend="pread")
    except (OSError, SafetensorError) as error:
        raise _no_file(file, error) from None
    return {name: Stored(file, opened, name) for name in opened.keys()}


def _no_file(file: Path, error: object) -> TensorError:
    reason = brief(" ".join(str(error).split()), 200)
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            reason = "this is a pointer of Git LFS: run `git lfs pull` where it was cloned"
    return TensorError.of("model", file, f"a safetensors file ({reason})")


def write(
    file: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str] = FOR_OTHERS
) -> None:
    """Write a file, completely or not at all. Equal arrays give equal bytes.

    Args:
      about: metadata of the file. The library does not keep their order.
    Raises: OSError: the file cannot be written.
    """
    # The library copies the memory of an array as it lies there, whatever its strides.
    rows_first = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}

    def save(path: Path) -> None:
        try:
            save_file(rows_first, path, dict(about))
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(file)) from None

    write_with(file, save)


class Pretrained(NamedTuple):
    """A model with its parameters."""

    config: TransformerConfig
    """Its max_length is the longest sequence of the model."""
    params: Any
    """Nested dicts of NumPy arrays: float32, or as stored."""
    tokenizer: Path | None
    """Path of its tokenizer.json, if it has one."""
    files: Path | None = None
    """Directory of its side files."""


def load(source: str, *, as_stored: bool = False) -> Pretrained:
    """Load a Hugging Face directory, or hf:NAME[@REVISION] from the Hub.

    Args:
      as_stored: keep matrices of a directory that are in bfloat16 as they are.
    Raises:
      ConfigError: there is no such model, its architecture is unsupported, or an array is missing.
    """
    source = expand_home("model", source)
    hub = source.startswith(HUB)
    directory = download(source, "model", WANTED) if hub else Path(source)
    if not (directory / CONFIG).is_file():
        hint = "; merge adapters into their model first" if (directory / ADAPTER).is_file() else ""
        raise ConfigError.of("model", directory, f"a directory with a {CONFIG}{hint}")
    config = families.config_of(read_object(directory / CONFIG, "model"))
    tensors = read_directory(directory)
    params = from_tensors(str(directory), config, tensors, as_stored=as_stored)
    tokenizer = directory / TOKENIZER
    return Pretrained(config, params, tokenizer if tokenizer.is_file() else None, directory)


def named(source: str) -> tuple[str, str | None]:
    """(name of a model in other tools, its revision) of hf:NAME[@REVISION] or of a path."""
    if not source.startswith(HUB):
        return source, None
    name, _, revision = source.removeprefix(HUB).partition("@")
    return name, revision or None


def is_directory(path: Path) -> bool:
    """True if a directory has a model in Hugging Face's format."""
    return (path / CONFIG).is_file() and "model_type" in read_object(path / CONFIG, "model")


def from_tensors(
    source: str,
    c: TransformerConfig,
    tensors: Mapping[str, np.ndarray | Stored],
    *,
    as_stored: bool = False,
) -> Any:
    """Convert arrays under their Hugging Face names to parameters.

    Nothing is copied before all names, types and shapes are correct, so that memory is bounded by
    the size of the files.

    Args:
      source: the model, for errors.
      as_stored: as of `load`.
    Returns:
      Nested dicts of arrays.
    Raises:
      TensorError: an array is missing, unknown or of another shape than the config says, holds
        whole numbers (of a quantised model, whose scales are elsewhere), or is not finite.
    """
    arrays, shapes = _arrays_of(source, c, tensors), shapes_of(c)
    leaves = {}
    for path, place in families.places(c):
        kept = as_stored and path[-1] in frozen.CONTRACTED and arrays[path].dtype == frozen.BFLOAT16
        with np.errstate(over="ignore"):  # of float64
            array = np.asarray(arrays[path], arrays[path].dtype if kept else np.float32)
        array = array.T if place.transposed else array
        if place.columns is not None:
            array = array[..., place.first : place.first + shapes[path][-1]]
        if not np.isfinite(array).all():  # nothing can be learned from there
            wanted = f"finite numbers in {place.name}, got nan or infinity"
            raise TensorError.of("model", source, wanted)
        array = array + np.float32(place.minus) if place.minus else array
        leaves[path] = np.ascontiguousarray(array)
    return traverse_util.unflatten_dict(leaves)


def _arrays_of(
    source: str, c: TransformerConfig, tensors: Mapping[str, np.ndarray | Stored]
) -> dict[tuple[str, ...], np.ndarray | Stored]:
    """The array that holds each parameter. Raises: TensorError: as `from_tensors`."""
    prefix = "" if any(name.startswith("transformer.") for name in tensors) else "transformer."
    arrays, used, shapes = {}, set(), shapes_of(c)
    for path, place in families.places(c):
        name = place.name
        # The files of the first GPT-2 have names without the prefix.
        stored_name = name if name in tensors else name.removeprefix(prefix)
        if stored_name not in tensors:
            raise TensorError.of("model", source, f"a tensor {name}, and there is none")
        array, expected = tensors[stored_name], shapes[path]
        if not jnp.issubdtype(array.dtype, jnp.floating):
            wanted = f"floating point numbers in {name}, got {array.dtype}"
            raise TensorError.of("model", source, wanted)
        if place.columns is not None:
            expected = (*expected[:-1], place.columns)
        shape = array.shape[::-1] if place.transposed else array.shape
        if shape != expected:
            wanted = f"{'/'.join(path)} of shape {expected}, got {shape}"
            raise TensorError.of("model", source, wanted)
        arrays[path] = array
        used.add(stored_name)
    embedding = arrays["embed", "embedding"]
    unused = [name for name in tensors if name not in used and not families.BUFFERS.search(name)]
    if c.tied and families.HEAD in unused:
        head = tensors[families.HEAD]
        if head.dtype == embedding.dtype and np.array_equal(np.asarray(head), embedding):
            unused.remove(families.HEAD)
    if unused:  # a model without them would be another model
        wanted = f"only arrays that its settings have a place for, and {brief(unused[0])} has none"
        raise TensorError.of("model", source, wanted)
    return arrays


def shapes_of(c: TransformerConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shape of every parameter. Blocks are alike, so that one is traced for any number of them."""
    one = Transformer(dataclasses.replace(c, num_layers=1))
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    params: Any = jax.eval_shape(one.init, jax.random.key(0), tokens)["params"]
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    shapes = {}
    for path, leaf in leaves.items():
        same = range(c.num_layers) if path[0] == "block_0" else ()
        shapes |= {(f"block_{i}", *path[1:]): leaf.shape for i in same} or {path: leaf.shape}
    return shapes


def save(
    directory: Path,
    c: TransformerConfig,
    params: Any,
    tokenizer: Path | None = None,
    files: Path | None = None,
    more: Mapping[str, str] | None = None,
    *,
    exact: bool = False,
) -> None:
    """Write a model in Hugging Face's format into a new directory, completely or not at all.

    Args:
      tokenizer: its tokenizer.json.
      files: directory of the model that it was trained from, whose side files are copied. Weights
        are rounded to the type that its config.json names.
      more: texts of further files, by name.
      exact: keep weights in float32 instead.
    Raises:
      ConfigError: the directory exists, or a model without a config.json is none of
        GPT-2.
      DataError: the tokenizer is invalid.
    """
    fields = _fields(c, files, tokenizer)
    if exact:
        fields["dtype"] = "float32"
    tensors = to_tensors(dataclasses.replace(c, family=fields["model_type"]), params)
    dtype = FLOATS[fields["dtype"]]
    tensors = {name: tensor.astype(dtype, copy=False) for name, tensor in tensors.items()}
    with new_directory(directory) as temporary:
        write(temporary / SINGLE, tensors)
        write_json(temporary / CONFIG, fields)
        copied = copy_side_files(files, temporary, but=(CONFIG,)) if files else []
        if tokenizer is not None and TOKENIZER not in copied:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        add_end_tokens(temporary)
        for name, text in (more or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")


def _fields(c: TransformerConfig, files: Path | None, tokenizer: Path | None) -> dict[str, Any]:
    """Fields of config.json: those of the model it was trained from, or new ones."""
    if files is not None and (files / CONFIG).is_file():
        fields = read_object(files / CONFIG, "model")
        known = fields.get("model_type") in families.TYPES
        if known and families.described(families.config_of(fields)) == families.described(c):
            kept = {name: value for name, value in fields.items() if name not in OF_WEIGHTS}
            dtype = str(fields.get("dtype") or fields.get("torch_dtype"))
            dtype = dtype if dtype in FLOATS else "float32"
            return {**kept, "dtype": dtype}
    fields = families.fields_of(c)
    if tokenizer is not None:
        loaded = Tokenizer.load(tokenizer)
        fields |= {"bos_token_id": loaded.begin_id, "eos_token_id": loaded.end_id}
    return fields


def to_tensors(c: TransformerConfig, params: Any) -> dict[str, np.ndarray]:
    """Convert parameters to arrays under their Hugging Face names, float32.

    Biases that the family has and the model lacks are zeros.
    """
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    parts: dict[Place, list[np.ndarray]] = {}
    for path, place in families.places(c):
        if path in leaves:
            array = np.asarray(leaves[path], np.float32)
        else:
            array = np.zeros(leaves[*path[:-1], "kernel"].shape[1], np.float32)
        array = array - np.float32(place.minus) if place.minus else array
        parts.setdefault(place._replace(first=0), []).append(array)
    tensors = {}
    for place, arrays in parts.items():
        array = np.concatenate(arrays, axis=-1)
        tensors[place.name] = np.ascontiguousarray(array.T if place.transposed else array)
    return tensors
