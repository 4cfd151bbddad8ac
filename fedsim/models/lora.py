"""LoRA (Hu et al. 2021): small adapters are trained, and the model beneath them does not change.

The adapters are the parameters of a run: they alone are clipped, noised and saved in checkpoints.
The frozen model is a separate argument, so that no gradient of it is ever computed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from fedsim.config import ALL_LINEAR
from fedsim.errors import expect
from fedsim.models import families
from fedsim.models.families import Place
from fedsim.models.frozen import as_float32
from fedsim.models.transformer import DENSE, LORA_A, Lora, TransformerConfig, unstacked
from fedsim.models.weights import shapes_of

A, B = "_lora_a", "_lora_b"
SCALE, RSLORA_ALPHA = 2.0, 8.0
"""Where nothing is said of alpha: alpha / rank, which is how fast adapters learn; and alpha with
rslora, which gives this scale at rank 16."""


def adapted(
    c: TransformerConfig,
    rank: int,
    alpha: float | None,
    modules: str = ALL_LINEAR,
    rslora: bool = False,
) -> TransformerConfig:
    """Add adapters to a config.

    Args:
      rank, alpha, rslora: see `Lora`; alpha None: by default.
      modules: all-linear, or names with commas between them: those of PEFT, such as q_proj or
        self_attn.q_proj, or of DENSE.
    Raises: ConfigError: the model has no such module.
    """
    have = tuple(name for name in DENSE if name != "gate" or c.mlp != "gelu")
    chosen = have if modules == ALL_LINEAR else _layers_of(c, modules, have)
    layers = tuple(name for name in have if name in chosen)
    if alpha is None:
        alpha = RSLORA_ALPHA if rslora else SCALE * rank
    lora = Lora(rank, alpha, layers, rslora)
    return dataclasses.replace(c, lora=lora)


def _layers_of(c: TransformerConfig, modules: str, have: tuple[str, ...]) -> list[str]:
    """The layers in modules of these names. Raises: ConfigError: there are no such modules."""
    inside, chosen = in_a_block(c), []
    for name in modules.split(","):
        layers = [name] if name in have else []
        # PEFT takes q_proj for self_attn.q_proj, too.
        named = (own for module, own in inside.items() if f".{module}".endswith(f".{name}"))
        layers += [layer for own in named for layer in own]
        known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in inside))
        expect("lora_modules", modules, layers != [], f"{ALL_LINEAR}, or some of {known}")
        chosen += layers
    expect("lora_modules", modules, len(set(chosen)) == len(chosen), "each module once")
    return chosen


class Module(NamedTuple):
    """A linear module of a model as PEFT sees it, with one layer or several side by side."""

    block: str
    """Such as block_0."""
    name: str
    """Its name in the block, such as self_attn.q_proj."""
    layers: dict[str, Place]
    """Names of DENSE, in the order of their columns."""


def modules_of(c: TransformerConfig) -> dict[str, Module]:
    """All linear modules in blocks by their whole names."""
    modules: dict[str, Module] = {}
    for path, place in families.places(c):
        if path[0].startswith("block_") and path[1] in DENSE and path[2] == "kernel":
            name = place.name.removesuffix(".weight")
            inner = name.partition(f".{path[0].removeprefix('block_')}.")[2]
            modules.setdefault(name, Module(path[0], inner, {})).layers[path[1]] = place
    return modules


def in_a_block(c: TransformerConfig) -> dict[str, list[str]]:
    """The layers in each module of a block, by its name there."""
    one = modules_of(dataclasses.replace(c, num_layers=1))
    return {module.name: list(module.layers) for module in one.values()}


def init(c: TransformerConfig, key: jax.Array) -> Any:
    """Initial adapters, float32. They do not change the logits of the model."""

    # Drawn one by one: to compile the whole model's initialisation takes longer than a first step.
    shapes = {path: shape for path, shape in shapes_of(c).items() if path[1].endswith((A, B))}
    leaves: dict[Any, Any] = {}
    for number, (path, shape) in enumerate(sorted(shapes.items())):
        if path[1].endswith(A):
            leaves[path] = LORA_A(jax.random.fold_in(key, number), shape, jnp.float32)
        else:
            leaves[path] = jnp.asarray(np.zeros(shape, np.float32))
    return traverse_util.unflatten_dict(leaves)


def joined(frozen: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the adapted model. Args: frozen, adapters: both `stacked`, or neither."""
    return {name: {**leaf, **adapters.get(name, {})} for name, leaf in frozen.items()}


def merged(c: TransformerConfig, frozen: Any, adapters: Any) -> tuple[TransformerConfig, Any]:
    """Config and parameters of the equal model without adapters: W + scale A B.

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
            added = c.lora.scale * (a @ b)
            leaves[path] = (leaves[path] + added).astype(np.float32)
    return dataclasses.replace(c, lora=None), traverse_util.unflatten_dict(leaves)
