"""Models that others made, and models for others: Hugging Face directories, without torch.

A directory has config.json, model.safetensors (or several, and their index) and tokenizer.json,
beside which tokenizer_config.json has `transformers` take it as it is. What is loaded is float32
whatever it was; what is saved is read by `transformers`.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fedsim.data.text import Tokenizer
from fedsim.errors import ConfigError
from fedsim.files import expand_home
from fedsim.models import families, gguf_files, tensor_files
from fedsim.models.tensor_files import TensorError
from fedsim.models.transformer import Transformer, TransformerConfig

CONFIG, TOKENIZER, TOKENS = "config.json", "tokenizer.json", "tokenizer_config.json"
HUB = "hf:"
WANTED = (CONFIG, TOKENIZER, tensor_files.INDEX, "model*.safetensors")


class Pretrained(NamedTuple):
    """A model with its parameters."""

    config: TransformerConfig
    """Its max_length is the longest the model was made for."""
    params: Any
    """Nested dicts of float32 NumPy arrays."""
    tokenizer: Path | None
    """Its tokenizer.json."""


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
        config, params, tokenizer = gguf_files.load(Path(source), heard)
        check_shapes(source, config, params)
        return Pretrained(config, params, tokenizer)
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
    return (path / CONFIG).is_file() and "model_type" in _fields(path)


def load_directory(directory: Path, heard: Callable[[int, int], None] = ignore) -> Pretrained:
    """A model in Hugging Face's format. Args: heard: as of `load`."""
    config = families.config_of(_fields(directory))
    tensors = tensor_files.read_directory(directory)
    params = from_tensors(str(directory), config, tensors, heard)
    tokenizer = directory / TOKENIZER
    return Pretrained(config, params, tokenizer if tokenizer.is_file() else None)


def from_tensors(
    source: str,
    c: TransformerConfig,
    tensors: Mapping[str, np.ndarray],
    heard: Callable[[int, int], None] = ignore,
) -> Any:
    """Our parameters from arrays under their names. Args: heard: as of `load`.

    Raises: TensorError: one is missing, holds whole numbers (of a quantised model, whose scales
      are elsewhere), or has another shape than the config says.
    """
    prefix = "" if any(name.startswith("transformer.") for name in tensors) else "transformer."
    leaves, places = {}, list(families.places(c))
    for number, (path, (name, transposed, third)) in enumerate(places, 1):
        found = tensors.get(name)
        if found is None:  # the first GPT-2 has no prefix
            found = tensors.get(name.removeprefix(prefix))
        if found is None:
            raise TensorError(f"model={source}: expected a tensor {name}, and there is none")
        if not jnp.issubdtype(found.dtype, jnp.floating):
            expected = f"expected floating point numbers in {name}, got {found.dtype}"
            raise TensorError(f"model={source}: {expected}")
        if third is not None:
            found = np.split(found, 3, axis=-1)[third]
        found = np.asarray(found, np.float32)
        leaves[path] = np.ascontiguousarray(found.T) if transposed else found
        heard(number, len(places))
    params = traverse_util.unflatten_dict(leaves)
    check_shapes(source, c, params)
    return params


def check_shapes(source: str, c: TransformerConfig, params: Any) -> None:
    """Raises: TensorError: an array has another shape than the config says, or is missing."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes: dict[Any, Any] = jax.eval_shape(Transformer(c).init, jax.random.key(0), tokens)[
        "params"
    ]
    found: dict[Any, Any] = dict(traverse_util.flatten_dict(params))
    expected: dict[Any, Any] = dict(traverse_util.flatten_dict(shapes))
    for path, leaf in expected.items():
        name = "/".join(path)
        if path not in found:
            raise TensorError(f"model={source}: expected a tensor for {name}, and there is none")
        if found[path].shape != leaf.shape:
            shape = found[path].shape
            raise TensorError(f"model={source}: {name} has shape {shape}: expected {leaf.shape}")


def save(directory: Path, c: TransformerConfig, params: Any, tokenizer: Path | None = None) -> None:
    """Write a model in Hugging Face's format into a new directory, whole or not at all.

    Raises: ConfigError: the directory is there already, no family has the model's parts, or the
      tokenizer is none (DataError).
    """
    fields = families.fields_of(c)
    tensors = to_tensors(c, params)
    own = None if tokenizer is None else Tokenizer.load(tokenizer)
    if own is not None:
        fields |= {"bos_token_id": own.begin_id, "eos_token_id": own.end_id}
    if directory.exists():
        raise ConfigError(f"out={directory}: expected a directory that is not there yet")
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        tensor_files.write_directory(temporary, tensors)
        _write(temporary / CONFIG, fields)
        if own is not None and tokenizer is not None:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
            _write(temporary / TOKENS, _about(own))
        temporary.rename(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(f"out={directory}: expected a place to write to ({error})") from None


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
    return {name: np.concatenate(found, axis=-1) for name, found in parts.items()}


def _fields(directory: Path) -> dict[str, Any]:
    try:
        fields = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except OSError:
        expected = f"a directory with a {CONFIG}"
        raise ConfigError(f"model={directory}: expected {expected}") from None
    except ValueError as error:
        raise ConfigError(f"model={directory / CONFIG}: expected JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"model={directory / CONFIG}: expected a JSON object")
    return fields


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
        message = f"expected a repository with {CONFIG} and safetensors ({reason})"
        raise ConfigError(f"model={source}: {message}") from None
    return Path(found)
