"""Hugging Face's names for what `Transformer` is made of: settings and arrays of each family.

A family turns the fields of a config.json into a TransformerConfig and back, and says for each of
our parameters which array it is there: its name, whether it is transposed (torch keeps [out, in]),
and which third of it (GPT-2 keeps queries, keys and values in one).
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedsim.errors import ConfigError
from fedsim.models.transformer import RopeScaling, TransformerConfig

Path = tuple[str, ...]


class UnsupportedArchitecture(ConfigError):
    """A model that `Transformer` cannot be; the message says what about it."""


class Place(NamedTuple):
    """Where a parameter is in a file."""

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


def config_of(fields: Mapping[str, Any]) -> TransformerConfig:
    """What a config.json describes. max_length is the longest sequence the model was made for.

    Raises: UnsupportedArchitecture: no Transformer is like that, or a field is missing.
    """
    kind = fields.get("model_type")
    if kind not in TYPES:
        raise UnsupportedArchitecture(f"model_type={kind}: expected one of {', '.join(TYPES)}")
    if (quantised := fields.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        expected = "none: a model that is not quantised, or a GGUF file"
        raise UnsupportedArchitecture(f"quantization_config={method}: expected {expected}")
    try:
        return _gpt2_config(fields) if kind == GPT2 else _llama_config(str(kind), fields)
    except KeyError as error:
        message = f"model_type={kind}: expected {error} in config.json"
        raise UnsupportedArchitecture(message) from None


def _need(field: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise UnsupportedArchitecture(f"{field}={value}: expected {' or '.join(map(str, allowed))}")


def _gpt2_config(f: Mapping[str, Any]) -> TransformerConfig:
    _need("activation_function", f.get("activation_function", "gelu_new"), *GELU)
    _need("scale_attn_weights", f.get("scale_attn_weights", True), True)
    _need("scale_attn_by_inverse_layer_idx", f.get("scale_attn_by_inverse_layer_idx", False), False)
    _need("add_cross_attention", f.get("add_cross_attention", False), False)
    return TransformerConfig(
        vocab_size=f["vocab_size"],
        max_length=f["n_positions"],
        width=f["n_embd"],
        num_layers=f["n_layer"],
        num_heads=f["n_head"],
        mlp_width=f.get("n_inner"),
        norm_epsilon=f.get("layer_norm_epsilon", 1e-5),
        query_bias=True,
        out_bias=True,
        tied=f.get("tie_word_embeddings", True),
    )


GELU = ("gelu_new", "gelu_pytorch_tanh")


def _llama_config(kind: str, f: Mapping[str, Any]) -> TransformerConfig:
    _need("hidden_act", f.get("hidden_act", "silu"), "silu")
    bias = bool(f.get("attention_bias", False))
    if kind == "qwen3":
        _need("attention_bias", bias, False)
    base, scaling = _rope(f)
    heads = f["num_attention_heads"]
    return TransformerConfig(
        vocab_size=f["vocab_size"],
        max_length=f["max_position_embeddings"],
        width=f["hidden_size"],
        num_layers=f["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=f.get("num_key_value_heads") or heads,
        head_width=f.get("head_dim") or (128 if kind == "qwen3" else None),
        mlp_width=f["intermediate_size"],
        norm="rms",
        norm_epsilon=f.get("rms_norm_eps", 1e-6),
        query_key_norm=kind == "qwen3",
        positions="rope",
        rope_base=base,
        rope_scaling=scaling,
        window=_window(kind, f),
        mlp="swiglu",
        query_bias=kind == "qwen2" or bias,
        out_bias=kind == "llama" and bias,
        mlp_bias=kind == "llama" and bool(f.get("mlp_bias", False)),
        tied=bool(f.get("tie_word_embeddings", False)),
    )


def _rope(f: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, where old and new versions of `transformers` write them."""
    rope = {**(f.get("rope_scaling") or {}), **(f.get("rope_parameters") or {})}
    base = float(rope.get("rope_theta") or f.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _need("rope_type", kind, "default", "llama3")
    _need("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0)
    if kind == "default":
        return base, None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return base, RopeScaling(*(rope[name] for name in names))


def _window(kind: str, f: Mapping[str, Any]) -> int | None:
    """Positions that a position sees. Of Qwen, some layers may have one and others none."""
    layers = set(f.get("layer_types") or ())
    window = f.get("sliding_window")
    if kind == "llama" or window is None or layers == {"full_attention"}:
        return None
    if kind.startswith("qwen"):
        if not f.get("use_sliding_window", False):
            return None
        if not layers:  # from max_window_layers on
            layers = {"sliding_attention"} if f.get("max_window_layers") == 0 else {"mixed"}
    if len(layers) > 1 or layers == {"mixed"}:
        raise UnsupportedArchitecture(
            f"sliding_window={window} in some layers: expected it in all or in none"
        )
    return window


def fields_of(c: TransformerConfig) -> dict[str, Any]:
    """config.json of a model like that, in the first family that has its parts.

    Raises: UnsupportedArchitecture: none has.
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
    found = shared | {
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
        found["mlp_bias"] = c.mlp_bias
    elif kind == "mistral" or c.window is not None:
        found["sliding_window"] = c.window
    if kind.startswith("qwen") and c.window is not None:
        layers = ["sliding_attention"] * c.num_layers
        found |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": layers}
    return found


def family_of(c: TransformerConfig) -> str:
    """Raises: UnsupportedArchitecture: no family has all of the model's parts."""
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


def places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    """(parameter of ours, where it is in a file) of every parameter that the family has."""
    yield from _gpt2_places(c) if c.positions == "learned" else _llama_places(c)


def _llama_places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    yield ("embed", "embedding"), Place("model.embed_tokens.weight")
    yield ("final_norm", "scale"), Place("model.norm.weight")
    if not c.tied:
        yield ("head", "kernel"), Place("lm_head.weight", transposed=True)
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
    """The Hugging Face name of each of our layers, and whether it has a bias."""
    attention = {"query": "q", "key": "k", "value": "v"}
    found = {ours: (f"self_attn.{x}_proj", c.query_bias) for ours, x in attention.items()}
    found["out"] = ("self_attn.o_proj", c.out_bias)
    return found | {name: (f"mlp.{name}_proj", c.mlp_bias) for name in ("gate", "up", "down")}


GPT2_DENSE = {"out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
GPT2_THIRDS = {"query": 0, "key": 1, "value": 2}
GPT2_JOINT = "attn.c_attn"


def _gpt2_places(c: TransformerConfig) -> Iterator[tuple[Path, Place]]:
    yield ("embed", "embedding"), Place("transformer.wte.weight")
    yield ("positions", "embedding"), Place("transformer.wpe.weight")
    if not c.tied:
        yield ("head", "kernel"), Place("lm_head.weight", transposed=True)
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
    """What the Hugging Face module is called, inside of its block, that holds a layer."""
    if c.positions == "learned":
        return GPT2_DENSE.get(layer, GPT2_JOINT)
    return _llama_dense(c)[layer][0]
