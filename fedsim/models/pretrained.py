"""Load and save models in Hugging Face's format, without torch.

A directory has config.json, model.safetensors (or several, and their index) and tokenizer.json; its
tokenizer_config.json makes `transformers` read the tokenizer.json unchanged. Loaded parameters are
float32, whatever they were, or as stored, to be frozen. Saved models can be read by `transformers`,
and have the side files of the model that they were trained from.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fedsim.data import Tokenizer
from fedsim.errors import ConfigError
from fedsim.files import expand_home, new_directory, read_object, write_json
from fedsim.models import families, frozen, model_files, serving_files
from fedsim.models.families import Place
from fedsim.models.model_files import ADAPTER, CONFIG, TOKENIZER, Stored, TensorError
from fedsim.models.transformer import Transformer, TransformerConfig

HUB = "hf:"
ROWS = 4096  # that `_same` compares at a time
WANTED = (*model_files.PATTERNS, model_files.INDEX, "model*.safetensors")


class Pretrained(NamedTuple):
    """A model with its parameters."""

    config: TransformerConfig
    """Its max_length is the longest sequence of the model."""
    params: Any
    """Nested dicts of NumPy arrays: float32, or as stored."""
    tokenizer: Path | None
    """Path of its tokenizer.json, if it has one."""
    files: Path | None = None
    """Directory of its side files; see model_files."""


def ignore(done: int, of: int) -> None:
    """Report to nobody."""


def load(
    source: str, heard: Callable[[int, int], None] = ignore, *, as_stored: bool = False
) -> Pretrained:
    """Load a Hugging Face directory, or hf:NAME[@REVISION] from the Hub.

    Args:
      heard: called with (number of arrays that are read, number of arrays).
      as_stored: keep matrices of a directory that are in bfloat16 as they are.
    Raises:
      ConfigError: there is no such model, its architecture is unsupported, or an array is missing.
    """
    source = expand_home("model", source)
    if source.startswith(HUB):
        return load_directory(download(source, "model", WANTED), heard, as_stored=as_stored)
    return load_directory(Path(source), heard, as_stored=as_stored)


def named(source: str) -> tuple[str, str | None]:
    """(name of a model in other tools, its revision) of hf:NAME[@REVISION] or of a path."""
    if not source.startswith(HUB):
        return source, None
    name, _, revision = source.removeprefix(HUB).partition("@")
    return name, revision or None


def is_directory(path: Path) -> bool:
    """True if a directory has a model in Hugging Face's format."""
    return (path / CONFIG).is_file() and "model_type" in read_object(path / CONFIG, "model")


def load_directory(
    directory: Path, heard: Callable[[int, int], None] = ignore, *, as_stored: bool = False
) -> Pretrained:
    """Load a model in Hugging Face's format. Args and Raises: as of `load`."""
    if not (directory / CONFIG).is_file():
        hint = "; adapters are for --adapter" if (directory / ADAPTER).is_file() else ""
        raise ConfigError.of("model", directory, f"a directory with a {CONFIG}{hint}")
    config = families.config_of(read_object(directory / CONFIG, "model"))
    tensors = model_files.read_directory(directory)
    params = from_tensors(str(directory), config, tensors, heard, as_stored=as_stored)
    tokenizer = directory / TOKENIZER
    return Pretrained(config, params, tokenizer if tokenizer.is_file() else None, directory)


def from_tensors(
    source: str,
    c: TransformerConfig,
    tensors: Mapping[str, np.ndarray | Stored],
    heard: Callable[[int, int], None] = ignore,
    *,
    as_stored: bool = False,
) -> Any:
    """Convert arrays under their Hugging Face names to parameters.

    Nothing is copied before all names, types and shapes are correct, so that memory is bounded by
    the size of the files.

    Args:
      source: the model, for errors.
      heard, as_stored: as of `load`.
    Returns:
      Nested dicts of arrays.
    Raises:
      TensorError: an array is missing, unknown or of another shape than the config says, or holds
        whole numbers (of a quantised model, whose scales are elsewhere).
    """
    arrays, shapes = _arrays_of(source, c, tensors), shapes_of(c)
    leaves = {}
    for number, (path, place) in enumerate(families.places(c), 1):
        kept = as_stored and path[-1] in frozen.CONTRACTED and arrays[path].dtype == frozen.BFLOAT16
        with np.errstate(over="ignore"):  # of float64
            array = np.asarray(arrays[path], arrays[path].dtype if kept else np.float32)
        array = array.T if place.transposed else array
        if place.columns is not None:
            array = array[..., place.first : place.first + shapes[path][-1]]
        leaves[path] = np.ascontiguousarray(
            array + np.float32(place.minus) if place.minus else array
        )
        heard(number, len(arrays))
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
        _expect_shape(source, path, shape, expected)
        arrays[path] = array
        used.add(stored_name)
    embedding = arrays["embed", "embedding"]
    unused = [name for name in tensors if name not in used and not families.is_buffer(name)]
    why = ""
    if c.tied and families.HEAD in unused:
        if _same(tensors[families.HEAD], embedding):
            unused.remove(families.HEAD)
        else:
            why = f"; {families.HEAD} is not the embedding, as tie_word_embeddings would have it"
    model_files.expect_none_left(source, unused, why)
    return arrays


def _same(a: np.ndarray | Stored, b: np.ndarray | Stored) -> bool:
    """True if two arrays have equal bits. Compares some rows at a time: both may be large."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = np.asarray(a), np.asarray(b)
    for i in range(0, len(a), ROWS):
        ours, theirs = (x[i : i + ROWS].view(np.uint8) for x in (a, b))
        if not np.array_equal(ours, theirs):
            return False
    return True


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


def _expect_shape(source: str, path: tuple[str, ...], shape: Any, expected: Any) -> None:
    if shape != expected:
        message = f"{'/'.join(path)} has shape {shape}: expected {expected}"
        raise TensorError(f"model={source}: {message}", field="model")


def save(
    directory: Path,
    c: TransformerConfig,
    params: Any,
    tokenizer: Path | None = None,
    files: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write a model in Hugging Face's format into a new directory, completely or not at all.

    Args:
      tokenizer: its tokenizer.json.
      files: directory of the model that it was trained from, whose side files are copied. Of its
        config.json, only the type of the weights changes.
      more: texts of further files, by name.
    Raises:
      ConfigError: the directory exists, or no family has the parts of the model.
      DataError: the tokenizer is invalid.
    """
    fields = _fields(c, files, tokenizer)
    tensors = to_tensors(dataclasses.replace(c, family=fields["model_type"]), params)
    with new_directory(directory) as temporary:
        model_files.write_directory(temporary, tensors)
        write_json(temporary / CONFIG, fields)
        copied = model_files.copy_side_files(files, temporary, but=(CONFIG,)) if files else []
        if tokenizer is not None and TOKENIZER not in copied:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        serving_files.complete(temporary)
        for name, text in (more or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")


def _fields(c: TransformerConfig, files: Path | None, tokenizer: Path | None) -> dict[str, Any]:
    """Fields of config.json: those of the model it was trained from, or new ones."""
    if files is not None and (files / CONFIG).is_file():
        fields = read_object(files / CONFIG, "model")
        kind = fields.get("model_type")
        if kind in families.TYPES and _is_of(fields, c):
            kept = {name: value for name, value in fields.items() if name not in OF_WEIGHTS}
            return {**kept, "architectures": [families.CLASSES[kind]], "dtype": "float32"}
    fields = families.fields_of(c)
    if tokenizer is not None:
        loaded = Tokenizer.load(tokenizer)
        fields |= {"bos_token_id": loaded.begin_id, "eos_token_id": loaded.end_id}
    return fields


OF_WEIGHTS = ("dtype", "torch_dtype", "auto_map")
"""Fields of config.json about the stored type of weights, and about code that is not copied."""


def _is_of(fields: dict[str, Any], c: TransformerConfig) -> bool:
    """True if a config.json describes a config."""
    return families.described(families.config_of(fields)) == families.described(c)


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


def download(source: str, field: str, files: Sequence[str]) -> Path:
    """Download files of hf:NAME[@REVISION], unless they are in the cache.

    Args:
      field: the setting that names the source.
      files: names or patterns; the first says what the repository must have.
    Raises:
      ConfigError: they cannot be downloaded.
    """
    import huggingface_hub

    name, revision = named(source)
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(files)
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        wanted = f"a repository with {files[0]} and safetensors ({reason})"
        raise ConfigError.of(field, source, wanted) from None
    return Path(snapshot)
