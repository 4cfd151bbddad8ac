"""The families of models that differ from Llama in details, as a table: `FAMILIES`.

`families` reads and writes by it. A detail is an option of `TransformerConfig` that all models of
the family have, a field of config.json and its default, or the names and layout of arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedsim.models.config_json import LAYERS, ROPE_TYPES, Fields, layer_flags, number, whole

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


LOCAL_BASE, ROPE_INTERVAL = "rope_local_base_freq", "no_rope_layer_interval"


def nowhere(f: Fields, layers: int) -> list[bool]:
    return [False] * layers


def _after_first_layers(f: Fields, layers: int) -> list[bool]:
    first = number(f, "max_window_layers", 0, LAYERS)
    return [i >= first for i in range(layers)]


def _by_pattern(f: Fields, layers: int) -> list[bool]:
    period = whole(f, "sliding_window_pattern", LAYERS)
    return [(i + 1) % period != 0 for i in range(layers)]


def rope_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Layers of SmolLM3 with rotary positions."""
    interval = whole(f, ROPE_INTERVAL, LAYERS)
    given = layer_flags(f, "no_rope_layers", layers, 1, 0)
    return given or tuple((i + 1) % interval != 0 for i in range(layers))


class Family(NamedTuple):
    """How a family of models differs from Llama."""

    parts: Mapping[str, Any] = {}
    """Fields of TransformerConfig that all its models have."""
    defaults: Mapping[str, Any] = {}
    """Values of fields that config.json lacks."""
    biases: tuple[str, ...] = ()
    """Flags of config.json, of BIASES."""
    numbers: Mapping[str, tuple[str, bool]] = {}
    """Field of TransformerConfig: (field of config.json, True if it may be null)."""
    allowed: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
    """Field of config.json: the values that it may have; the first is the default."""
    windows: Callable[[Fields, int], list[bool]] = nowhere
    """(config.json, number of layers) -> layers with a window, where it has no `layer_types`."""
    window_flag: str | None = None
    """A flag of config.json without which there are no windows."""
    norms: Mapping[str, str] = NORMS
    """Our norm: its name in a block."""
    scaled: bool = False
    """True: embeddings are multiplied by sqrt(width), scores by query_pre_attn_scalar^-1/2 (where
    that is a field), and norms have their scale minus one in files: the habits of Gemma."""
    fused: bool = False
    """True: queries, keys and values are one array, and so are gate and up."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    """Scalings of rotary positions that it may have."""


SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
BIASES = {"attention_bias": ("query_bias", "out_bias"), "mlp_bias": ("mlp_bias",)}
GELU = ("gelu_pytorch_tanh", "gelu_new")
CAPS = {
    "attention_cap": ("attn_logit_softcapping", True),
    "logit_cap": ("final_logit_softcapping", True),
}
CAUSAL = {"use_bidirectional_attention": (False, None)}
NO_TYPES = {"layer_types": (None,)}
LLAMA = Family(biases=("attention_bias", "mlp_bias"))
QWEN2 = Family(
    parts={"query_bias": True},
    defaults={"max_window_layers": 28, "sliding_window": 4096},
    windows=_after_first_layers,
    window_flag="use_sliding_window",
)
MISTRAL = Family(
    defaults={"sliding_window": 4096},
    allowed=SILU | NO_TYPES,
    windows=lambda f, layers: [True] * layers,
)
GEMMA = Family(
    parts={"mlp": "geglu"},
    defaults={"head_dim": 256, "tie_word_embeddings": True},
    biases=("attention_bias",),
    allowed={"hidden_act": (*GELU, "gelu", None), "hidden_activation": (*GELU, None)} | CAUSAL,
    scaled=True,
)
GEMMA2 = GEMMA._replace(
    parts={"mlp": "geglu", "norms": "both"},
    defaults={
        **GEMMA.defaults,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    numbers=CAPS,
    allowed={"hidden_activation": (*GELU, None)} | CAUSAL,
    windows=lambda f, layers: [i % 2 == 0 for i in range(layers)],
    norms=GEMMA_NORMS | POST_NORMS,
)
MULTIPLIERS = {
    "embedding_multiplier": ("embedding_multiplier", False),
    "residual_multiplier": ("residual_multiplier", False),
    "attention_scale": ("attention_multiplier", False),
    "logit_divisor": ("logits_scaling", False),
}
FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN2._replace(
        parts={"query_key_norm": True},
        defaults={**QWEN2.defaults, "head_dim": 128},
        allowed=SILU | {"attention_bias": (False, None)},
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2._replace(
        parts={**GEMMA2.parts, "query_key_norm": True},
        defaults={
            **GEMMA2.defaults,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            LOCAL_BASE: 10_000.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        numbers={"logit_cap": CAPS["logit_cap"]},
        allowed={**GEMMA2.allowed, "attn_logit_softcapping": (None,)},
        windows=_by_pattern,
    ),
    "vaultgemma": GEMMA2._replace(parts=GEMMA.parts, norms=GEMMA_NORMS),
    "phi3": Family(
        defaults={"rms_norm_eps": 1e-5},
        allowed=SILU | NO_TYPES,
        windows=lambda f, layers: [True] * layers,
        fused=True,
        rope_types=("default",),
    ),
    "smollm3": Family(
        defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            ROPE_INTERVAL: 4,
        },
        biases=("attention_bias", "mlp_bias"),
        allowed=SILU | {"use_sliding_window": (False, None)},
    ),
    "olmo2": Family(
        parts={"norms": "after", "query_key_norm": True, "joint_query_key_norm": True},
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias",),
        norms=POST_NORMS,
    ),
    "granite": Family(
        biases=("attention_bias", "mlp_bias"),
        numbers=MULTIPLIERS,
        defaults={theirs: 1.0 for theirs, _ in MULTIPLIERS.values()},
    ),
    "ministral": MISTRAL._replace(allowed=SILU),
}
