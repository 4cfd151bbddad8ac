"""Hugging Face names for the parts of `Transformer`: settings and arrays of each model family.

A family converts the fields of a config.json to a TransformerConfig and back, and gives the place
of each parameter in a file: the name of its array, whether it is transposed (torch keeps [out,
in]), and the third of the array (GPT-2 keeps queries, keys and values in one).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedsim.errors import ConfigError, brief
from fedsim.models.transformer import RopeScaling, TransformerConfig

Path = tuple[str, ...]


class UnsupportedArchitecture(ConfigError):
    """A model that `Transformer` cannot represent. The message names the reason."""


class Place(NamedTuple):
    """Place of a parameter in a file."""

    name: str
    transposed: bool = False
    third: int | None = None


GPT2, LLAMA = "gpt2", ("llama", "mistral", "qwen2", "qwen3")
TYPES = (*LLAMA, GPT2)
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


NEEDED: Any = object()
HEAD_COUNT = "num_attention_heads"
TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 2**24, 2**24, 2**20, 2**10, 2**12
"""Bounds of sizes, above those of all models in use. A larger model would be traced for hours
before an array is found to be missing."""


def whole(f: Mapping[str, Any], name: str, most: int, default: Any = NEEDED) -> Any:
    """A whole number in [1, most] of a config.json; `default` if it is absent or null.

    Raises:
      KeyError: the field is absent, and there is no default.
      UnsupportedArchitecture: the field has another value.
    """
    if (value := f.get(name)) is None:
        return _default(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise _odd(name, value, f"a whole number in [1, {most}]")
    return value


def number(
    f: Mapping[str, Any], name: str, least: float, most: float, default: Any = NEEDED
) -> float:
    """A number in [least, most] of a config.json; `default` if it is absent or null.

    Raises: as `whole`.
    """
    if (value := f.get(name)) is None:
        return _default(name, default)
    if type(value) not in (int, float) or not least <= value <= most:
        raise _odd(name, value, f"a number in [{least:g}, {most:g}]")
    return float(value)


def _flag(f: Mapping[str, Any], name: str, default: bool) -> bool:
    if (value := f.get(name)) is None:
        return default
    if type(value) is not bool:
        raise _odd(name, value, "true or false")
    return value


def _default(name: str, default: Any) -> Any:
    if default is NEEDED:
        raise KeyError(name)
    return default


def _odd(name: str, value: Any, expected: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture.of(name, brief(value), expected)


def config_of(fields: Mapping[str, Any]) -> TransformerConfig:
    """Convert a config.json. The max_length of the result is the longest sequence of the model.

    Raises:
      UnsupportedArchitecture: no Transformer is like that, or a field is missing or invalid.
    """
    kind = fields.get("model_type")
    if kind not in TYPES:
        raise _odd("model_type", kind, f"one of {', '.join(TYPES)}")
    if (quantised := fields.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        expected = "none: a model that is not quantised, or a GGUF file"
        raise _odd("quantization_config", method, expected)
    try:
        config = _gpt2_config(fields) if kind == GPT2 else _llama_config(kind, fields)
    except KeyError as error:
        raise UnsupportedArchitecture.of("model_type", kind, f"{error} in config.json") from None
    check_heads(config)
    return config


def check_heads(c: TransformerConfig) -> None:
    """Check that heads, their groups and their widths fit together.

    Raises:
      UnsupportedArchitecture: they do not.
    """
    if c.head_width is None and c.width % c.num_heads:
        names = ("n_head", "n_embd") if c.positions == "learned" else (HEAD_COUNT, "hidden_size")
        raise _odd(names[0], c.num_heads, f"a divisor of {names[1]}={c.width}")
    if c.num_heads % c.kv_heads:
        expected = f"a divisor of {HEAD_COUNT}={c.num_heads}"
        raise _odd("num_key_value_heads", c.kv_heads, expected)
    if c.positions == "rope" and c.head % 2:
        raise _odd("head_dim", c.head, "an even number, for rotary positions")


def _need(field: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise _odd(field, value, " or ".join(map(str, allowed)))


def _gpt2_config(f: Mapping[str, Any]) -> TransformerConfig:
    _need("activation_function", f.get("activation_function", "gelu_new"), *GELU)
    _need("scale_attn_weights", f.get("scale_attn_weights", True), True)
    _need("scale_attn_by_inverse_layer_idx", f.get("scale_attn_by_inverse_layer_idx", False), False)
    _need("add_cross_attention", f.get("add_cross_attention", False), False)
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
        tied=_flag(f, "tie_word_embeddings", True),
    )


GELU = ("gelu_new", "gelu_pytorch_tanh")


def _llama_config(kind: str, f: Mapping[str, Any]) -> TransformerConfig:
    _need("hidden_act", f.get("hidden_act", "silu"), "silu")
    bias = _flag(f, "attention_bias", False)
    if kind == "qwen3":
        _need("attention_bias", bias, False)
    base, scaling = _rope(f)
    heads = whole(f, HEAD_COUNT, HEADS)
    return TransformerConfig(
        vocab_size=whole(f, "vocab_size", TOKENS),
        max_length=whole(f, "max_position_embeddings", LENGTH),
        width=whole(f, "hidden_size", WIDTH),
        num_layers=whole(f, "num_hidden_layers", LAYERS),
        num_heads=heads,
        num_kv_heads=whole(f, "num_key_value_heads", HEADS, heads),
        head_width=whole(f, "head_dim", HEADS, 128 if kind == "qwen3" else None),
        mlp_width=whole(f, "intermediate_size", WIDTH),
        norm="rms",
        norm_epsilon=number(f, "rms_norm_eps", 0, 1, 1e-6),
        query_key_norm=kind == "qwen3",
        positions="rope",
        rope_base=base,
        rope_scaling=scaling,
        window=_window(kind, f),
        mlp="swiglu",
        query_bias=kind == "qwen2" or bias,
        out_bias=kind == "llama" and bias,
        mlp_bias=kind == "llama" and _flag(f, "mlp_bias", False),
        tied=_flag(f, "tie_word_embeddings", False),
    )


def _rope(f: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of rotary positions, as old and new versions of `transformers` write them."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if (value := f.get(name)) is not None:
            if not isinstance(value, dict):
                raise _odd(name, value, "an object, or null")
            rope |= value
    base = number(rope, "rope_theta", *BASES, number(f, "rope_theta", *BASES, 10_000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _need("rope_type", kind, "default", "llama3")
    _need("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    if kind == "default":
        return base, None
    factors = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (number(rope, name, 1 / 1024, 2**20) for name in factors)
    if low >= high:
        raise _odd("low_freq_factor", low, f"less than high_freq_factor={high}")
    length = whole(rope, "original_max_position_embeddings", LENGTH)
    return base, RopeScaling(factor, low, high, length)


BASES = (1.0, 1e15)
LAYER_TYPES = ("full_attention", "sliding_attention")


def _window(kind: str, f: Mapping[str, Any]) -> int | None:
    """Number of positions that a position attends to; None without a limit.

    Raises:
      UnsupportedArchitecture: some layers have a limit and others none, as Qwen allows.
    """
    layers = f.get("layer_types") or []
    if not isinstance(layers, list) or not all(layer in LAYER_TYPES for layer in layers):
        raise _odd("layer_types", layers, f"a list of {' and '.join(LAYER_TYPES)}")
    layers = set(layers)
    if kind == "llama" or f.get("sliding_window") is None or layers == {"full_attention"}:
        return None
    if kind.startswith("qwen"):
        if not _flag(f, "use_sliding_window", False):
            return None
        if not layers:  # from max_window_layers on
            layers = {"sliding_attention"} if f.get("max_window_layers") == 0 else {"mixed"}
    window = whole(f, "sliding_window", LENGTH)
    if len(layers) > 1 or layers == {"mixed"}:
        raise UnsupportedArchitecture.of(
            "sliding_window", f"{window} in some layers", "it in all or in none"
        )
    return window


def fields_of(c: TransformerConfig) -> dict[str, Any]:
    """Fields of a config.json for a config, in the first family that has its parts.

    Raises:
      UnsupportedArchitecture: no family has them.
    """
    kind = family_of(c)
    shared = {"model_type": kind, "architectures": [CLASSES[kind]], "dtype": "float32"}
    shared |= {"vocab_size": c.vocab_size, "tie_word_embeddings": c.tied}
    if kind == GPT2:
        return shared | {
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
    rope: dict[str, Any] = {"rope_type": "default"}
    if (s := c.rope_scaling) is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(s)}
        rope["original_max_position_embeddings"] = rope.pop("original_length")
    fields = shared | {
        "hidden_size": c.width,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head,
        "hidden_act": "silu",
        "max_position_embeddings": c.table,
        "rms_norm_eps": c.norm_epsilon,
        "rope_theta": c.rope_base,
        "rope_scaling": rope if c.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_base},
        "attention_bias": kind == "llama" and c.out_bias,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    }
    if kind == "llama":
        fields["mlp_bias"] = c.mlp_bias
    elif kind == "mistral" or c.window is not None:
        fields["sliding_window"] = c.window
    if kind.startswith("qwen") and c.window is not None:
        layers = ["sliding_attention"] * c.num_layers
        fields |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": layers}
    return fields


def family_of(c: TransformerConfig) -> str:
    """Name of the first family that has the parts of a config.

    Raises:
      UnsupportedArchitecture: no family has them.
    """
    if (c.norm, c.positions, c.mlp) == ("layer", "learned", "gelu"):
        # Biases that a model lacks are zeros there.
        if c.mlp_bias and c.kv_heads == c.num_heads and c.head * c.num_heads == c.width:
            return GPT2
    if (c.norm, c.positions, c.mlp) == ("rms", "rope", "swiglu"):
        biases = (c.query_bias, c.out_bias, c.mlp_bias)
        if c.query_key_norm:
            if biases == (False, False, False):
                return "qwen3"
        elif biases == (True, False, False):
            return "qwen2"
        elif c.window is not None:
            if biases == (False, False, False):
                return "mistral"
        elif c.query_bias == c.out_bias:
            return "llama"
    raise UnsupportedArchitecture("model: expected parts that go together in a known family")


BUFFERS = re.compile(r"(^|\.)(h\.\d+\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")
"""Constants beside parameters, which older versions of `transformers` wrote."""
HEAD = "lm_head.weight"


def is_buffer(name: str) -> bool:
    """True for an array that is no parameter. `transformers` ignores it, too."""
    return BUFFERS.search(name) is not None


def places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    """Yield (path of a parameter, its place in a file) of all parameters of the family."""
    yield from _gpt2_places(c) if c.positions == "learned" else _llama_places(c)


def _llama_places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    yield ("embed", "embedding"), Place("model.embed_tokens.weight")
    yield ("final_norm", "scale"), Place("model.norm.weight")
    if not c.tied:
        yield ("head", "kernel"), Place(HEAD, transposed=True)
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if c.query_key_norm:
        norms |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
    for i in range(c.num_layers):
        block, there = f"block_{i}", f"model.layers.{i}"
        for ours, theirs in norms.items():
            yield (block, ours, "scale"), Place(f"{there}.{theirs}.weight")
        for ours, (theirs, bias) in _llama_dense(c).items():
            yield (block, ours, "kernel"), Place(f"{there}.{theirs}.weight", transposed=True)
            if bias:
                yield (block, ours, "bias"), Place(f"{there}.{theirs}.bias")


def _llama_dense(c: TransformerConfig) -> dict[str, tuple[str, bool]]:
    """(Hugging Face name, True if it has a bias) of each layer."""
    attention = {"query": "q", "key": "k", "value": "v"}
    layers = {ours: (f"self_attn.{x}_proj", c.query_bias) for ours, x in attention.items()}
    layers["out"] = ("self_attn.o_proj", c.out_bias)
    return layers | {name: (f"mlp.{name}_proj", c.mlp_bias) for name in ("gate", "up", "down")}


GPT2_DENSE = {"out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2_THIRDS = {"query": 0, "key": 1, "value": 2}
GPT2_JOINT = "attn.c_attn"


def _gpt2_places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    yield ("embed", "embedding"), Place("transformer.wte.weight")
    yield ("positions", "embedding"), Place("transformer.wpe.weight")
    if not c.tied:
        yield ("head", "kernel"), Place(HEAD, transposed=True)
    norms = {("final_norm",): "transformer.ln_f"}
    for i in range(c.num_layers):
        block, there = f"block_{i}", f"transformer.h.{i}"
        norms |= {(block, "attention_norm"): f"{there}.ln_1", (block, "mlp_norm"): f"{there}.ln_2"}
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            for ours, third in GPT2_THIRDS.items():
                yield (block, ours, kind), Place(f"{there}.{GPT2_JOINT}.{name}", third=third)
            for ours, theirs in GPT2_DENSE.items():
                yield (block, ours, kind), Place(f"{there}.{theirs}.{name}")
    for ours, theirs in norms.items():
        yield (*ours, "scale"), Place(f"{theirs}.weight")
        yield (*ours, "bias"), Place(f"{theirs}.bias")


def peft_name(c: TransformerConfig, layer: str) -> str:
    """Name of the Hugging Face module, inside its block, that holds a layer."""
    if c.positions == "learned":
        return GPT2_DENSE.get(layer, GPT2_JOINT)
    return _llama_dense(c)[layer][0]
