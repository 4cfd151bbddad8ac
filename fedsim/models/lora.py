"""LoRA (Hu et al. 2021): small adapters are trained, and the model beneath them does not change.

The adapters are the parameters of a run: they alone are clipped, noised and saved in checkpoints.
The frozen model is a separate argument, so that no gradient of it is ever computed.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fedsim.errors import ConfigError, expect
from fedsim.models import families, model_files
from fedsim.models.families import Place
from fedsim.models.frozen import as_float32
from fedsim.models.transformer import (
    DENSE,
    LORA_A,
    Lora,
    Transformer,
    TransformerConfig,
    unstacked,
)

A, B = "_lora_a", "_lora_b"
SCALE = 2.0
"""alpha / rank where nothing is said of alpha: it, not alpha, is how fast adapters learn."""


def adapted(c: TransformerConfig, rank: int, alpha: float, layers: str) -> TransformerConfig:
    """Add adapters to a config.

    Args:
      rank, alpha: see `Lora`.
      layers: names of layers with commas between them, or "all".
    Raises:
      ConfigError: the model has no such layer.
    """
    have = [name for name in DENSE if name != "gate" or c.mlp != "gelu"]
    chosen = have if layers == "all" else layers.split(",")
    for name in chosen:
        expect("lora_layers", layers, name in have, f"all, or some of {','.join(have)}")
    expect("lora_layers", layers, len(set(chosen)) == len(chosen), "each layer once")
    lora = Lora(rank, alpha, tuple(name for name in have if name in chosen))
    return dataclasses.replace(c, lora=lora)


def init(c: TransformerConfig, key: jax.Array) -> Any:
    """Initial adapters, float32. They do not change the logits of the model."""

    # Drawn one by one: to compile the whole model's initialisation takes longer than a first step.
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    shapes = adapters_of(jax.eval_shape(Transformer(c).init, key, tokens)["params"])
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(shapes))
    for number, (path, leaf) in enumerate(sorted(leaves.items())):
        if path[1].endswith(A):
            adapter_key = jax.random.fold_in(key, number)
            leaves[path] = LORA_A(adapter_key, leaf.shape, jnp.float32)
        else:
            leaves[path] = jnp.zeros(leaf.shape, jnp.float32)
    return traverse_util.unflatten_dict(leaves)


def adapters_of(params: Any) -> Any:
    """Select the adapters among parameters."""
    leaves = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({p: x for p, x in leaves.items() if p[1].endswith((A, B))})


def joined(frozen: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the adapted model. Args: frozen, adapters: both `stacked`, or neither."""
    return {name: {**leaf, **adapters.get(name, {})} for name, leaf in frozen.items()}


def merged(c: TransformerConfig, frozen: Any, adapters: Any) -> tuple[TransformerConfig, Any]:
    """Config and parameters of the equal model without adapters: W + (alpha / rank) A B.

    Args:
      frozen: parameters of the model, not stacked.
      adapters: stacked or not.
    """
    assert c.lora is not None
    leaves: dict[Any, Any] = dict(traverse_util.flatten_dict(as_float32(frozen)))
    for block, parts in unstacked(adapters).items():
        for layer in c.lora.layers:
            a, b = (np.asarray(parts[layer + x]["kernel"], np.float64) for x in (A, B))
            path = (block, layer, "kernel")
            added = c.lora.alpha / c.lora.rank * (a @ b)
            leaves[path] = (leaves[path] + added).astype(np.float32)
    return dataclasses.replace(c, lora=None), traverse_util.unflatten_dict(leaves)


def save(
    directory: Path,
    c: TransformerConfig,
    adapters: Any,
    base: str,
    revision: str | None = None,
    files: Path | None = None,
) -> None:
    """Write adapters in PEFT's format into a new directory.

    Some families have several layers in one, as GPT-2 queries, keys and values: their adapters
    become one, whose rank is the sum of their ranks.

    Args:
      base: the adapted model: a directory, or its name on the Hub.
      revision: revision of the model on the Hub.
      files: directory of its tokenizer and chat template, which are copied beside the adapters.
    Raises:
      ConfigError: the directory exists, or cannot be made.
    """
    assert c.lora is not None
    tensors, ranks = _tensors(c, adapters)
    targets = sorted(ranks)
    other = {name: rank for name, rank in ranks.items() if rank != c.lora.rank}
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": c.lora.rank,
        "lora_alpha": c.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": c.positions == "learned",
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": targets,
        "rank_pattern": other,
        "alpha_pattern": {n: c.lora.alpha * rank / c.lora.rank for n, rank in other.items()},
    }
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError.of("out", directory, f"a directory to make ({error})") from None
    try:
        model_files.write(directory / "adapter_model.safetensors", tensors)
        (directory / "adapter_config.json").write_text(json.dumps(fields, indent=2) + "\n")
        if files is not None:
            model_files.copy_side_files(files, directory, but=(model_files.CONFIG,))
    except (OSError, ConfigError):
        shutil.rmtree(directory)
        raise


def _tensors(c: TransformerConfig, adapters: Any) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """(arrays by their PEFT names, rank of each layer)."""
    assert c.lora is not None
    places, adapters = dict(families.places(c)), unstacked(adapters)
    tensors, ranks = {}, {}
    for i in range(c.num_layers):
        by_name: dict[str, dict[Place, Pair]] = {}
        for layer in c.lora.layers:
            a, b = (adapters[f"block_{i}"][layer + x]["kernel"] for x in (A, B))
            place = places[f"block_{i}", layer, "kernel"]
            pair = np.asarray(a, np.float32), np.asarray(b, np.float32)
            by_name.setdefault(place.name.removesuffix(".weight"), {})[place] = pair
        for name, parts in by_name.items():
            a, b = _jointly(parts)
            tensors[f"base_model.model.{name}.lora_A.weight"] = np.ascontiguousarray(a.T)
            tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(b.T)
            ranks[name.partition(f".{i}.")[2]] = a.shape[1]
    return tensors, ranks


Pair = tuple[np.ndarray, np.ndarray]


def _jointly(parts: Mapping[Place, Pair]) -> Pair:
    """Join adapters of layers that lie side by side in one: [x A1 B1, x A2 B2, ...].

    Args:
      parts: (A [inputs, rank], B [rank, width]) by the place of the layer.
    """
    a = np.concatenate([a for a, _ in parts.values()], axis=1)
    width = max(place.columns or part_b.shape[1] for place, (_, part_b) in parts.items())
    b, row = np.zeros((a.shape[1], width), np.float32), 0
    for place, (_, part_b) in parts.items():
        rank, columns = part_b.shape
        b[row : row + rank, place.first : place.first + columns] = part_b
        row += rank
    return a, b
