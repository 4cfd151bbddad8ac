"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors in a directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.errors import expect
from fedsim.files import new_directory, write_json
from fedsim.models import weights
from fedsim.models.lora import A, B, in_a_block, modules_of
from fedsim.models.transformer import TransformerConfig, unstacked
from fedsim.models.weights import ADAPTER

TENSORS = "adapter_model.safetensors"


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
      ConfigError: the directory exists or cannot be made, or a module of the model's family has
        several layers, as those of GPT-2 and Phi-3.
    """
    fields, tensors = _fields(c), _tensors(c, adapters)
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
    """Settings of adapters, as PEFT reads them. Raises: ConfigError: layers share a module."""
    assert (lora := c.lora) is not None
    modules, own = in_a_block(c), []
    for name, layers in modules.items():
        alone = "a model with one layer in each module; the export of the whole model merges them"
        expect("adapter", f"True, with {name}", len(layers) == 1, alone)
        if layers[0] in lora.layers:
            own.append(name.rpartition(".")[2])  # servers know modules by short names
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted(own),
    }


def _tensors(c: TransformerConfig, adapters: Any) -> dict[str, np.ndarray]:
    """Arrays by their names in the file."""
    assert c.lora is not None
    adapters, tensors = unstacked(adapters), {}
    for name, module in modules_of(c).items():
        for layer in {*module.layers}.intersection(c.lora.layers):
            for ours, theirs in ((A, "lora_A"), (B, "lora_B")):
                array = np.asarray(adapters[module.block][layer + ours]["kernel"], np.float32)
                tensors[f"base_model.model.{name}.{theirs}.weight"] = np.ascontiguousarray(array.T)
    return tensors
