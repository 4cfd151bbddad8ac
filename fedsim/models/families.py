"""Hugging Face names for the parts of `Transformer`: settings and arrays of each model family.

A family converts the fields of a config.json to a TransformerConfig, and gives the place of each
parameter in a file: the name of its array, whether it is transposed (torch keeps [out, in]), the
columns of it (some families keep queries, keys and values in one), and a constant between the two.
`family_table` describes the families that differ from Llama in details; GPT-2 is another kind.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from fedsim.models.config_json import (
    BASES,
    FACTORS,
    FULL,
    HEADS,
    LAYER_TYPES,
    LAYERS,
    LENGTH,
    SLIDING,
    TOKENS,
    WIDTH,
    Fields,
    as_object,
    flag,
    layer_flags,
    need,
    number,
    odd,
    scaling_of,
    whole,
)
from fedsim.models.family_table import (
    BIASES,
    FAMILIES,
    GELU,
    LOCAL_BASE,
    ROPE_INTERVAL,
    Family,
    nowhere,
    rope_layers,
)
from fedsim.models.transformer import TransformerConfig

Path = tuple[str, ...]


class Place(NamedTuple):
    """Place of a parameter in a file."""

    name: str
    transposed: bool = False
    first: int = 0
    """The column of the array, as it is here, with which the parameter begins."""
    columns: int | None = None
    """Number of columns of the array; None: those of the parameter."""
    minus: float = 0.0
    """Subtracted from the parameter where it is written."""


GPT2 = "gpt2"
TYPES = (*FAMILIES, GPT2)
HEAD_COUNT = "num_attention_heads"
PARTIAL = "partial_rotary_factor"


def config_of(fields: Fields) -> TransformerConfig:
    """Convert a config.json. The max_length of the result is the longest sequence of the model.

    Raises: UnsupportedArchitecture: no Transformer is like that, or a field is missing or invalid.
    """
    need("model_type", kind := fields.get("model_type"), *TYPES)
    need("quantization_config", fields.get("quantization_config"), None)
    if kind == "mistral" and fields.get("layer_types"):  # as `transformers` takes it
        kind = "ministral"
    c = _gpt2_config(fields) if kind == GPT2 else _llama_config(str(kind), fields)
    if c.head_width is None and c.width % c.num_heads:
        name = "n_head" if kind == GPT2 else HEAD_COUNT
        raise odd(name, c.num_heads, f"a divisor of the width {c.width}")
    if c.num_heads % c.kv_heads:
        expected = f"a divisor of {HEAD_COUNT}={c.num_heads}"
        raise odd("num_key_value_heads", c.kv_heads, expected)
    if c.positions == "rope" and c.head % 2:
        raise odd("head_dim", c.head, "an even number, for rotary positions")
    return c


def described(c: TransformerConfig) -> TransformerConfig:
    """The config as a config.json describes it: with all sizes, without the settings of a run."""
    sizes = {"head_width": c.head, "mlp_width": c.hidden, "num_kv_heads": c.kv_heads}
    chosen: dict[str, Any] = {"dtype": None, "remat": False, "lora": None}
    return dataclasses.replace(c, max_length=c.table, num_positions=None, **sizes, **chosen)


def fields_of(c: TransformerConfig) -> dict[str, Any]:
    """Fields of a new config.json for a fresh model, as one of GPT-2.

    Raises: UnsupportedArchitecture: GPT-2 lacks a part of it.
    """
    c = dataclasses.replace(c, query_bias=True, out_bias=True)  # what it lacks are zeros there
    fields = {
        "model_type": GPT2,
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied,
        "n_positions": c.table,
        "n_embd": c.width,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_epsilon,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), None),
    }
    if described(config_of(fields)) != described(c):
        raise odd("family", c.family, "a model with a config.json of its own")
    return fields


def _llama_config(kind: str, f: Fields) -> TransformerConfig:
    family = FAMILIES[kind]
    f = {**family.defaults, **f}
    for name, values in family.allowed.items():
        need(name, f.get(name, values[0]), *values)
    heads, width = whole(f, HEAD_COUNT, HEADS), whole(f, "hidden_size", WIDTH)
    head_width = whole(f, "head_dim", HEADS, None)
    head = head_width or width // heads
    sizes: dict[str, Any] = {
        "vocab_size": whole(f, "vocab_size", TOKENS),
        "width": width,
        "num_layers": whole(f, "num_hidden_layers", LAYERS),
        "num_heads": heads,
        "num_kv_heads": whole(f, "num_key_value_heads", HEADS, heads),
        "head_width": head_width,
        "mlp_width": whole(f, "intermediate_size", WIDTH),
        "norm_epsilon": number(f, "rms_norm_eps", 0, 1, 1e-6),
        "tied": flag(f, "tie_word_embeddings"),
    }
    parts: dict[str, Any] = {"norm": "rms", "positions": "rope", "mlp": "swiglu", "mlp_bias": False}
    parts |= {ours: flag(f, name) for name in family.biases for ours in BIASES[name]}
    for ours, (theirs, may_be_null) in family.numbers.items():
        parts[ours] = number(f, theirs, *FACTORS, *((None,) if may_be_null else ()))
    if family.scaled:
        parts["embedding_multiplier"] = width**0.5
    if "query_pre_attn_scalar" in family.defaults:
        scalar = number(f, "query_pre_attn_scalar", *FACTORS)
        parts["attention_scale"] = None if scalar == head else scalar**-0.5
    parts |= _rotary(family, f) | _windows(family, f)
    return TransformerConfig(**{**sizes, **parts, **family.parts}, family=kind)


def _rotary(family: Family, f: Fields) -> dict[str, Any]:
    """Fields of TransformerConfig about rotary positions and the longest sequence."""
    scaling, rope = as_object(f, "rope_scaling"), as_object(f, "rope_parameters")
    by_layer, parts = LOCAL_BASE in family.defaults, {}
    if rope and by_layer != any(kind in rope for kind in LAYER_TYPES):
        expected = f"those of {FULL} and of {SLIDING}" if by_layer else "the same in all layers"
        raise odd("rope_parameters", [*rope], expected)
    if by_layer:
        local = {"rope_theta": f[LOCAL_BASE], **as_object(rope, SLIDING)}
        need(f"rope_type of {SLIDING}", local.get("rope_type", "default"), "default")
        parts["window_rope_base"] = number(local, "rope_theta", *BASES)
        rope = as_object(rope, FULL)
    if rope and any(rope.get(name) != value for name, value in scaling.items()):
        raise odd("rope_scaling", scaling, "the same as in rope_parameters: remove one of the two")
    rope = rope or scaling
    kind = rope.get("rope_type") or rope.get("type") or "default"
    need("rope_type", kind, *family.rope_types)
    for holder in (f, rope):
        need(PARTIAL, holder.get(PARTIAL), None, 1)
    base = number(rope, "rope_theta", *BASES, number(f, "rope_theta", *BASES, 10_000.0))
    parts |= {"rope_base": base, "rope_scaling": scaling_of(f, str(kind), rope)}
    if ROPE_INTERVAL in family.defaults:
        blocks = rope_layers(f, whole(f, "num_hidden_layers", LAYERS))
        parts["rope_blocks"] = None if all(blocks) else blocks
    return parts | {"max_length": whole(f, "max_position_embeddings", LENGTH)}


def _windows(family: Family, f: Fields) -> dict[str, Any]:
    """Fields of TransformerConfig about windows of attention."""
    layers = whole(f, "num_hidden_layers", LAYERS)
    given = layer_flags(f, "layer_types", layers, SLIDING, FULL)
    if family.windows is nowhere:
        need("layer_types", SLIDING if given and any(given) else FULL, FULL)
        return {}
    if family.window_flag and not flag(f, family.window_flag):
        return {}
    blocks = given or tuple(family.windows(f, layers))
    window = whole(f, "sliding_window", LENGTH, None)
    if window is None or not any(blocks):
        return {}
    return {"window": window, "window_blocks": None if all(blocks) else blocks}


def _gpt2_config(f: Fields) -> TransformerConfig:
    need("activation_function", f.get("activation_function", "gelu_new"), *GELU)
    need("scale_attn_weights", f.get("scale_attn_weights", True), True)
    need("scale_attn_by_inverse_layer_idx", f.get("scale_attn_by_inverse_layer_idx", False), False)
    need("add_cross_attention", f.get("add_cross_attention", False), False)
    return TransformerConfig(
        vocab_size=whole(f, "vocab_size", TOKENS),
        max_length=whole(f, "n_positions", LENGTH),
        width=whole(f, "n_embd", WIDTH),
        num_layers=whole(f, "n_layer", LAYERS),
        num_heads=whole(f, "n_head", HEADS),
        mlp_width=whole(f, "n_inner", WIDTH, None),
        norm_epsilon=number(f, "layer_norm_epsilon", 0, 1, 1e-5),
        query_bias=True,
        out_bias=True,
        tied=flag(f, "tie_word_embeddings", True),
        family=GPT2,
    )


BUFFERS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
"""Constants beside parameters, which older versions of `transformers` wrote, and now ignores."""
HEAD = "lm_head.weight"


def places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    """Yield (path of a parameter, its place in a file) of all parameters of the family. Parts of
    one array come in the order of its columns."""
    yield from _gpt2_places(c) if c.family == GPT2 else _llama_places(FAMILIES[c.family], c)


def _llama_places(family: Family, c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    norm = Place("", minus=1.0 if family.scaled else 0.0)
    yield ("embed", "embedding"), Place("model.embed_tokens.weight")
    yield ("final_norm", "scale"), norm._replace(name="model.norm.weight")
    if not c.tied:
        yield ("head", "kernel"), Place(HEAD, transposed=True)
    norms = dict(family.norms)
    if c.query_key_norm:
        norms |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    for i in range(c.num_layers):
        block, there = f"block_{i}", f"model.layers.{i}"
        for ours, theirs in norms.items():
            yield (block, ours, "scale"), norm._replace(name=f"{there}.{theirs}.weight")
        for ours, place in _llama_dense(family, c).items():
            name = f"{there}.{place.name}"
            yield (block, ours, "kernel"), place._replace(name=f"{name}.weight")
            if getattr(c, HAS_BIAS[ours]):
                yield (block, ours, "bias"), Place(f"{name}.bias")


HAS_BIAS = {
    **dict.fromkeys(("query", "key", "value"), "query_bias"),
    "out": "out_bias",
    **dict.fromkeys(("gate", "up", "down"), "mlp_bias"),
}


def _llama_dense(family: Family, c: TransformerConfig) -> dict[str, Place]:
    """Place of the kernel of each layer of a block; the name is that of the layer."""
    heads = {"query": c.num_heads, "key": c.kv_heads, "value": c.kv_heads}
    widths = {name: number * c.head for name, number in heads.items()}
    if family.fused:
        attention = _columns("self_attn.qkv_proj", widths)
        mlp = _columns("mlp.gate_up_proj", {"gate": c.hidden, "up": c.hidden})
    else:
        attention = {name: Place(f"self_attn.{name[0]}_proj", True) for name in heads}
        mlp = {name: Place(f"mlp.{name}_proj", True) for name in ("gate", "up")}
    attention["out"], mlp["down"] = Place("self_attn.o_proj", True), Place("mlp.down_proj", True)
    return attention | mlp


def _columns(name: str, widths: Mapping[str, int], *, transposed: bool = True) -> dict[str, Place]:
    """Places of layers that lie side by side in one array."""
    columns, firsts = sum(widths.values()), accumulate(widths.values(), initial=0)
    return {
        ours: Place(name, transposed, first, columns)
        for ours, first in zip(widths, firsts, strict=False)
    }


GPT2_DENSE = {"out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}


def _gpt2_places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    yield ("embed", "embedding"), Place("transformer.wte.weight")
    yield ("positions", "embedding"), Place("transformer.wpe.weight")
    if not c.tied:
        yield ("head", "kernel"), Place(HEAD, transposed=True)
    joint = _columns(
        "attn.c_attn", dict.fromkeys(("query", "key", "value"), c.width), transposed=False
    )
    dense = joint | {ours: Place(theirs) for ours, theirs in GPT2_DENSE.items()}
    norms = {("final_norm",): "transformer.ln_f"}
    for i in range(c.num_layers):
        block, there = f"block_{i}", f"transformer.h.{i}"
        norms |= {(block, "attention_norm"): f"{there}.ln_1", (block, "mlp_norm"): f"{there}.ln_2"}
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            for ours, place in dense.items():
                yield (block, ours, kind), place._replace(name=f"{there}.{place.name}.{name}")
    for ours, theirs in norms.items():
        yield (*ours, "scale"), Place(f"{theirs}.weight")
        yield (*ours, "bias"), Place(f"{theirs}.bias")
