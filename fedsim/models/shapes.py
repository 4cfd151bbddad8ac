"""Shapes of a transformer's parameters, without the parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping.layered import BLOCKS
from fedsim.models import lora
from fedsim.models.transformer import Transformer, TransformerConfig

SMOLLM2_1_7B = {"num_heads": 32, "mlp_width": 8192, "rope_base": 130_000.0}
LLAMA_3_8B = {"num_heads": 32, "num_kv_heads": 8, "mlp_width": 14_336, "rope_base": 5e5}
LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rope", "mlp_bias": False}
WELL_KNOWN = {
    "350M": {"vocab_size": 30_522, "width": 1024, "num_layers": 24, "num_heads": 16},
    "1.7B": {"vocab_size": 49_152, "width": 2048, "num_layers": 24, **LLAMA, **SMOLLM2_1_7B},
    "8B": {"vocab_size": 128_256, "width": 4096, "num_layers": 32, "tied": False}
    | {**LLAMA, **LLAMA_3_8B},
}
"""By name: the paper's model, SmolLM2-1.7B and Llama 3.1 8B."""


def shapes_of(config: TransformerConfig) -> tuple[Any, Any]:
    """(parameters that are trained, frozen ones) as `ShapeDtypeStruct`s, blocks' in one tree.

    With `config.lora` adapters are trained, else everything is, and nothing is frozen.
    """
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    one = Transformer(dataclasses.replace(config, num_layers=1))  # all blocks are alike
    whole: Any = jax.eval_shape(one.init, jax.random.key(0), tokens)["params"]
    if config.lora is None:
        return _stacked(whole, config.num_layers), {}
    adapters = lora.adapters_of(whole)
    rest = _without(whole, adapters)
    return _stacked(adapters, config.num_layers), _stacked(rest, config.num_layers)


def _stacked(params: Any, num_layers: int) -> dict[str, Any]:
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("block_")}
    blocks = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype), params["block_0"]
    )
    return {**rest, BLOCKS: blocks}


def _without(tree: Any, other: Any) -> Any:
    """A tree of dicts less the leaves of another one."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: _without(leaf, other.get(name, {})) for name, leaf in tree.items()}
    return {n: leaf for n, leaf in kept.items() if isinstance(tree[n], dict) or n not in other}
