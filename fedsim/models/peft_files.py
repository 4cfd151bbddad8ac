"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in a directory.

Some families have several layers in one module, as GPT-2 queries, keys and values. Their adapters
are written as one of this module, whose rank is the sum of their ranks; an adapter of such a module
that PEFT trained is read as one of each layer, with copies of A. Both compute the same.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.errors import ConfigError, brief, expect
from fedsim.files import expand_home, new_directory, read_object, write_json
from fedsim.models import serving_files, weights
from fedsim.models.config_json import WIDTH, flag, number, whole
from fedsim.models.families import Place
from fedsim.models.lora import A, B, Module, in_a_block, modules_of
from fedsim.models.transformer import DENSE, Lora, TransformerConfig, unstacked
from fedsim.models.weights import ADAPTER, TensorError

TENSORS = "adapter_model.safetensors"
IGNORED = frozenset(
    "auto_mapping base_model_name_or_path exclude_modules fan_in_fan_out inference_mode "
    "lora_dropout megatron_core peft_version qalora_group_size revision runtime_config "
    "target_modules task_type".split()
)
"""Settings that change nothing of what adapters compute. The arrays tell where they are."""
PATTERNS = ("rank_pattern", "alpha_pattern")
READ = frozenset(("r", "lora_alpha", "use_rslora", *PATTERNS))
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Values that a setting may have. Other initialisations change the model beneath the adapters."""
USUAL = 8  # r and lora_alpha where a file has none
Pair = tuple[np.ndarray, np.ndarray]
"""A [inputs, rank] and B [rank, outputs] of an adapter."""


def save(
    directory: Path,
    c: TransformerConfig,
    adapters: Any,
    base: str,
    revision: str | None = None,
    files: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Write adapters into a new directory, completely or not at all.

    Args:
      base: the adapted model: a directory, or its name on the Hub.
      revision: revision of the model on the Hub.
      files: directory of its tokenizer and chat template, which are copied beside the adapters.
      more: texts of further files, by name.
    Raises:
      ConfigError: the directory exists, or cannot be made.
    """
    tensors, fields = _tensors(c, adapters), _fields(c)
    fields |= {"base_model_name_or_path": base, "revision": revision}
    with new_directory(directory) as temporary:
        weights.write(temporary / TENSORS, tensors)
        write_json(temporary / ADAPTER, fields)
        if files is not None:
            serving_files.copy_side_files(files, temporary, but=(serving_files.CONFIG,))
            serving_files.add_end_tokens(temporary)
        for name, text in (more or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")


def _fields(c: TransformerConfig) -> dict[str, Any]:
    """Settings of adapters, as PEFT reads them."""
    assert (lora := c.lora) is not None
    modules = in_a_block(c)
    ranks = {
        name: lora.rank * len(set(layers).intersection(lora.layers))
        for name, layers in modules.items()
    }
    short = {name: name.rpartition(".")[2] for name in modules}
    # Servers know modules by short names. Some are those of two modules, as c_proj in GPT-2.
    without = {short[name] for name, rank in ranks.items() if not rank}
    called = {name: name if short[name] in without else short[name] for name in modules}
    joint = {called[name]: rank for name, rank in ranks.items() if rank > lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": c.positions == "learned",
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({called[name] for name, rank in ranks.items() if rank}),
        "rank_pattern": joint,
        "alpha_pattern": {
            name: lora.alpha * (rank / lora.rank) ** (0.5 if lora.rslora else 1)  # an equal scale
            for name, rank in joint.items()
        },
    }


def _tensors(c: TransformerConfig, adapters: Any) -> dict[str, np.ndarray]:
    """Arrays by their names in the file."""
    assert c.lora is not None
    adapters, tensors = unstacked(adapters), {}
    for name, module in modules_of(c).items():
        parts: dict[Place, Pair] = {}
        for layer, place in module.layers.items():
            if layer in c.lora.layers:
                a, b = (adapters[module.block][layer + x]["kernel"] for x in (A, B))
                parts[place] = np.asarray(a, np.float32), np.asarray(b, np.float32)
        if parts:
            for tensor, array in zip(_names(name), _jointly(parts), strict=True):
                tensors[tensor] = np.ascontiguousarray(array.T)
    return tensors


def _names(module: str) -> tuple[str, str]:
    """Names of the arrays A and B of a module."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _jointly(parts: Mapping[Place, Pair]) -> Pair:
    """Join adapters of layers side by side in one module: [x A1 B1, x A2 B2, ...]."""
    a = np.concatenate([a for a, _ in parts.values()], axis=1)
    width = max(place.columns or part_b.shape[1] for place, (_, part_b) in parts.items())
    b, row = np.zeros((a.shape[1], width), np.float32), 0
    for place, (_, part_b) in parts.items():
        rank, columns = part_b.shape
        b[row : row + rank, place.first : place.first + columns] = part_b
        row += rank
    return a, b


def sha256(source: str | None) -> str | None:
    """Digest of the files of adapters; None without any. Raises: as `load`."""
    if source is None:
        return None
    digest = hashlib.sha256()
    for name in (ADAPTER, TENSORS):
        file = _directory(source) / name
        expect("adapter", source, file.is_file(), f"a directory with a {name}")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def load(source: str, c: TransformerConfig) -> tuple[TransformerConfig, Any]:
    """Load adapters of a model.

    Args:
      source: a directory, or hf:NAME[@REVISION].
      c: the model.
    Returns:
      The config with adapters, and the adapters, float32.
    Raises:
      ConfigError: there are none, they are of another model, or have a part that `Lora` lacks.
    """
    fields = read_object(_directory(source) / ADAPTER, "adapter")
    lora = _lora(source, fields)
    try:
        config, params = _read(source, lora, c)
    except TensorError as error:
        raise TensorError.of("adapter", error.value, str(error.expected)) from None
    usual, patterns = _fields(config), [fields.get(name) or {} for name in PATTERNS]
    if patterns not in ([{}, {}], [usual[name] for name in PATTERNS]):
        name = next(name for name in PATTERNS if fields.get(name))
        raise _refused(source, fields, name, "of one rank and alpha")
    return config, params


def _directory(source: str) -> Path:
    """The directory of adapters, downloaded if necessary."""
    source = expand_home("adapter", source)
    if source.startswith(weights.HUB):
        return weights.download(source, "adapter", (ADAPTER, TENSORS))
    expect("adapter", source, (Path(source) / ADAPTER).is_file(), f"a directory with a {ADAPTER}")
    return Path(source)


def _lora(source: str, fields: Mapping[str, Any]) -> Lora:
    """The settings of adapters, still without layers; ConfigError if `Lora` cannot have one."""
    for name, value in fields.items():
        allowed = ALLOWED.get(name)
        if allowed is not None and value not in allowed:
            raise _refused(source, fields, name, f"with {name}={json.dumps(allowed[0])}")
        if allowed is None and value and name not in IGNORED | READ:
            raise _refused(source, fields, name, f"without {name}")
    sizes = whole(fields, "r", WIDTH, USUAL), number(fields, "lora_alpha", 2**-20, 2**20, USUAL)
    return Lora(*sizes, (), flag(fields, "use_rslora"))


def _refused(source: str, fields: Mapping[str, Any], name: str, expected: str) -> ConfigError:
    found = f"{name}={brief(json.dumps(fields.get(name)))}"
    return ConfigError.of("adapter", source, f"an adapter {expected}, got {found}")


def _read(source: str, lora: Lora, c: TransformerConfig) -> tuple[TransformerConfig, Any]:
    """Read the arrays. Raises: TensorError: they are not those of adapters of the model."""
    tensors: dict[str, Any] = dict(weights.read(_directory(source) / TENSORS))
    params: dict[str, dict[str, Any]] = {f"block_{i}": {} for i in range(c.num_layers)}
    for name, module in modules_of(c).items():
        names = _names(name)
        found = [tensors.pop(x) for x in names if x in tensors]
        if not found:
            continue
        if len(found) == 1:
            raise TensorError.of("adapter", source, f"both of {' and '.join(names)}")
        a, b = (np.asarray(x, np.float32).T for x in found)
        for x, array in zip(names, (a, b), strict=True):
            weights.expect_finite("adapter", source, x, array)
        for layer, (part_a, part_b) in _apart(source, module, (a, b), lora.rank):
            params[module.block][layer + A] = {"kernel": np.ascontiguousarray(part_a)}
            params[module.block][layer + B] = {"kernel": np.ascontiguousarray(part_b)}
    weights.expect_none_left(source, [*tensors])
    in_blocks = {frozenset(parts) for parts in params.values()}
    same = len(in_blocks) == 1 and in_blocks != {frozenset()}
    if not same:
        raise TensorError.of("adapter", source, "adapters of the same modules in every block")
    layers = tuple(layer for layer in DENSE if layer + A in params["block_0"])
    config = replace(c, lora=replace(lora, layers=layers))
    shapes = weights.shapes_of(config)
    for block, parts in params.items():
        for name, leaf in parts.items():
            shape, path = leaf["kernel"].shape, (block, name, "kernel")
            if shape != shapes[path]:
                expected = f"{'/'.join(path)} of shape {shapes[path]} for this model, got {shape}"
                raise TensorError.of("adapter", source, expected)
    return config, params


def _apart(source: str, module: Module, pair: Pair, rank: int) -> Iterator[tuple[str, Pair]]:
    """Adapters of the layers of a module: of each, the part of B that is not zero."""
    a, b = pair
    if len(module.layers) == 1:
        yield next(iter(module.layers)), pair
        return
    places = list(module.layers.values())
    ends = [*(place.first for place in places[1:]), places[0].columns]
    for (layer, place), end in zip(module.layers.items(), ends, strict=True):
        own = b[:, place.first : end]
        blocks = [slice(i, i + rank) for i in range(0, len(own), rank) if own[i : i + rank].any()]
        if len(blocks) > 1 or b.shape != (a.shape[1], places[0].columns) or len(b) % rank:
            expected = f"{module.block}/{module.name} of rank {rank} and width {places[0].columns}"
            raise TensorError.of("adapter", source, f"{expected}, got {a.shape} and {b.shape}")
        for block in blocks:
            yield layer, (a[:, block], own[block])
