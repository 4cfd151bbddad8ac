"""Models that others made, and models for others: Hugging Face directories, without torch.

A directory has config.json, model.safetensors (or several, and their index) and tokenizer.json,
beside which tokenizer_config.json has `transformers` take it as it is. What is loaded is float32
whatever it was; what is saved is read by `transformers`, and has the files of the model that it was
trained from.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fedsim.data import Tokenizer
from fedsim.errors import ConfigError
from fedsim.files import expand_home, read_object
from fedsim.models import families, gguf_files, model_files
from fedsim.models.model_files import CONFIG, SETTINGS, TOKENIZER, Stored, TensorError
from fedsim.models.transformer import Transformer, TransformerConfig

HUB = "hf:"
ROWS = 4096  # compared at a time
WANTED = (*model_files.PATTERNS, model_files.INDEX, "model*.safetensors")


class Pretrained(NamedTuple):
    """A model with its parameters."""

    config: TransformerConfig
    """Its max_length is the longest the model was made for."""
    params: Any
    """Nested dicts of float32 NumPy arrays."""
    tokenizer: Path | None
    """Its tokenizer.json."""
    files: Path | None = None
    """The directory with what else belongs to it: see side_files."""


def ignore(done: int, of: int) -> None:
    """Tells nobody."""


def load(source: str, heard: Callable[[int, int], None] = ignore) -> Pretrained:
    """A Hugging Face directory, `hf:NAME` or `hf:NAME@REVISION` from the Hub, or a GGUF file.

    Args: heard: told how many of how many arrays are read.
    Raises: ConfigError: there is none, it is of an unsupported architecture, or lacks an array.
    """
    source = expand_home("model", source)
    if source.startswith(HUB):
        return load_directory(_download(source), heard)
    if Path(source).suffix == gguf_files.SUFFIX:
        config, params, files = gguf_files.load(Path(source), heard)
        check_shapes(source, config, params)
        return Pretrained(config, params, files and files / TOKENIZER, files)
    return load_directory(Path(source), heard)


def named(source: str) -> tuple[str, str | None]:
    """(What other tools call the model, its revision there) of `hf:NAME[@REVISION]`, or of a
    place in the file system, which has none."""
    if not source.startswith(HUB):
        return source, None
    name, _, revision = source.removeprefix(HUB).partition("@")
    return name, revision or None


def is_directory(path: Path) -> bool:
    """Whether a model of Hugging Face's format lies there."""
    return (path / CONFIG).is_file() and "model_type" in read_object(path / CONFIG, "model")


def load_directory(directory: Path, heard: Callable[[int, int], None] = ignore) -> Pretrained:
    """A model in Hugging Face's format. Args: heard: as of `load`."""
    if not (directory / CONFIG).is_file():
        raise ConfigError.of("model", directory, f"a directory with a {CONFIG}")
    config = families.config_of(read_object(directory / CONFIG, "model"))
    tensors = model_files.read_directory(directory)
    params = from_tensors(str(directory), config, tensors, heard)
    tokenizer = directory / TOKENIZER
    return Pretrained(config, params, tokenizer if tokenizer.is_file() else None, directory)


def from_tensors(
    source: str,
    c: TransformerConfig,
    tensors: Mapping[str, np.ndarray | Stored],
    heard: Callable[[int, int], None] = ignore,
) -> Any:
    """Our parameters from arrays under their names. Args: heard: as of `load`.

    Nothing is copied before all names, types and shapes are right: what it takes is then bounded by
    the files.
    Raises: TensorError: an array is missing, holds whole numbers (of a quantised model, whose
      scales are elsewhere), has another shape than the config says, or is not of the model.
    """
    arrays = _arrays_of(source, c, tensors)
    leaves = {}
    for number, (path, place) in enumerate(families.places(c), 1):
        with np.errstate(over="ignore"):  # of float64
            array = np.asarray(arrays[path], np.float32)
        if place.third is not None:
            array = np.split(array, 3, axis=-1)[place.third]
        leaves[path] = np.ascontiguousarray(array.T if place.transposed else array)
        heard(number, len(arrays))
    return traverse_util.unflatten_dict(leaves)


def _arrays_of(
    source: str, c: TransformerConfig, tensors: Mapping[str, np.ndarray | Stored]
) -> dict[tuple[str, ...], np.ndarray | Stored]:
    """The array that each of our parameters is in. Raises: TensorError: as of `from_tensors`."""
    prefix = "" if any(name.startswith("transformer.") for name in tensors) else "transformer."
    arrays, used, shapes = {}, set(), shapes_of(c)
    for path, (name, transposed, third) in families.places(c):
        found = name if name in tensors else name.removeprefix(prefix)  # as of the first GPT-2
        if found not in tensors:
            raise TensorError.of("model", source, f"a tensor {name}, and there is none")
        array, expected = tensors[found], shapes[path]
        if not jnp.issubdtype(array.dtype, jnp.floating):
            wanted = f"floating point numbers in {name}, got {array.dtype}"
            raise TensorError.of("model", source, wanted)
        if third is not None:
            expected = (*expected[:-1], 3 * expected[-1])
        shape = array.shape[::-1] if transposed else array.shape
        _expect_shape(source, path, shape, expected)
        arrays[path] = array
        used.add(found)
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
    """Whether two arrays have the same bits; some rows at a time, as both may be large."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = np.asarray(a), np.asarray(b)
    for i in range(0, len(a), ROWS):
        ours, theirs = (x[i : i + ROWS].view(np.uint8) for x in (a, b))
        if not np.array_equal(ours, theirs):
            return False
    return True


def check_shapes(source: str, c: TransformerConfig, params: Any) -> None:
    """Raises: TensorError: an array has another shape than the config says, or is missing."""
    found: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    shapes = shapes_of(c)
    model_files.expect_none_left(source, ["/".join(path) for path in found if path not in shapes])
    for path, expected in shapes.items():
        if path not in found:
            name = "/".join(path)
            raise TensorError.of("model", source, f"a tensor for {name}, and there is none")
        _expect_shape(source, path, found[path].shape, expected)


def shapes_of(c: TransformerConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The shape of every parameter. All blocks are alike: one is traced, however many there are."""
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
) -> None:
    """Write a model in Hugging Face's format into a new directory, whole or not at all.

    Args: files: the directory of the files of the model that it was trained from, which are taken
      as they are; of config.json, only the type of the weights is new.
    Raises: ConfigError: the directory is there already, no family has the model's parts, or the
      tokenizer is none (DataError).
    """
    fields = _fields(c, files, tokenizer)
    tensors = to_tensors(c, params)
    if directory.exists():
        raise ConfigError.of("out", directory, "a directory that is not there yet")
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model_files.write_directory(temporary, tensors)
        _write(temporary / CONFIG, fields)
        copied = model_files.copy_side_files(files, temporary, but=(CONFIG,)) if files else []
        if tokenizer is not None and TOKENIZER not in copied:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        if tokenizer is not None and SETTINGS not in copied:
            _write(temporary / SETTINGS, _about(Tokenizer.load(tokenizer)))
        temporary.rename(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError.of("out", directory, f"a place to write to ({error})") from None


def _fields(c: TransformerConfig, files: Path | None, tokenizer: Path | None) -> dict[str, Any]:
    """config.json: that of the model it was trained from, or one of our own."""
    if files is not None and (files / CONFIG).is_file():
        fields = read_object(files / CONFIG, "model")
        kind = fields.get("model_type")
        if kind in families.TYPES and families.config_of(fields) == _as_described(c):
            kept = {name: value for name, value in fields.items() if name not in OF_WEIGHTS}
            return {**kept, "architectures": [families.CLASSES[kind]], "dtype": "float32"}
    fields = families.fields_of(c)
    if tokenizer is not None:
        own = Tokenizer.load(tokenizer)
        fields |= {"bos_token_id": own.begin_id, "eos_token_id": own.end_id}
    return fields


OF_WEIGHTS = ("dtype", "torch_dtype", "auto_map")
"""Fields of config.json about how the weights were stored, and about code that is not copied."""


def _as_described(c: TransformerConfig) -> TransformerConfig:
    """The config without what a run chooses, as a config.json describes it."""
    chosen: dict[str, Any] = {"dtype": None, "remat": False, "lora": None}
    return dataclasses.replace(c, max_length=c.table, num_positions=None, **chosen)


def _about(tokenizer: Tokenizer) -> dict[str, Any]:
    """What has `transformers` take tokenizer.json as it is: it would go by the kind of model."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.begin,
        "eos_token": tokenizer.end,
        "clean_up_tokenization_spaces": False,
    }


def _write(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def to_tensors(c: TransformerConfig, params: Any) -> dict[str, np.ndarray]:
    """Arrays under their names, float32; a bias that the family has and the model lacks is zero."""
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    parts: dict[str, list[np.ndarray]] = {}
    for path, (name, transposed, _) in families.places(c):  # thirds come in order
        if path in leaves:
            found = np.asarray(leaves[path], np.float32)
        else:
            found = np.zeros(leaves[*path[:-1], "kernel"].shape[1], np.float32)
        parts.setdefault(name, []).append(found.T if transposed else found)
    return {n: np.ascontiguousarray(np.concatenate(x, axis=-1)) for n, x in parts.items()}


def _download(source: str) -> Path:
    """The files of hf:NAME[@REVISION], from the cache if they are there."""
    import huggingface_hub

    name, revision = named(source)
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(WANTED)
        )
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = " ".join(str(error).split())[:200]
        wanted = f"a repository with {CONFIG} and safetensors ({reason})"
        raise ConfigError.of("model", source, wanted) from None
    return Path(found)
