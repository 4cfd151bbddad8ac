"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in a directory.

Some families have several layers in one module, as GPT-2 queries, keys and values. Their adapters
are written as one of this module, whose rank is the sum of their ranks, which computes the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.files import new_directory, write_json
from fedsim.models import weights
from fedsim.models.families import Place
from fedsim.models.lora import A, B, in_a_block, modules_of
from fedsim.models.transformer import TransformerConfig, unstacked
from fedsim.models.weights import ADAPTER

TENSORS = "adapter_model.safetensors"
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
    Raises: ConfigError: the directory exists, or cannot be made.
    """
    tensors, fields = _tensors(c, adapters), _fields(c)
    fields |= {"base_model_name_or_path": base, "revision": revision}
    with new_directory(directory) as temporary:
        weights.write(temporary / TENSORS, tensors)
        write_json(temporary / ADAPTER, fields)
        if files is not None:
            weights.copy_side_files(files, temporary, but=(weights.CONFIG,))
            weights.add_end_tokens(temporary)
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
            for x, array in zip("AB", _jointly(parts), strict=True):
                tensor = f"base_model.model.{name}.lora_{x}.weight"
                tensors[tensor] = np.ascontiguousarray(array.T)
    return tensors


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
