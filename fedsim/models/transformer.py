"""A decoder-only transformer; its loss is in language_model.py.

One plain `flax.linen` model in the shapes of the paper's 350 M parameters (pre-norm blocks, learned
positions, GELU, tied embedding) and of the widespread open families: RMS norm, rotary positions,
grouped-query attention, SwiGLU, biases or none, an untied head. Rows are independent: no dropout,
no batch statistics, nothing that would couple users inside the loss.

Shape suffixes: B rows, L positions, D width, H heads, K head width, S keys, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedsim.clipping import remat_function, remat_module
from fedsim.errors import expect
from fedsim.placement import BLOCKS


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary positions in Llama 3.1 and later: divides low frequencies by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021): y = x W + (alpha / rank) x A B."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Names of DENSE: layers that have adapters, in every block."""


DENSE = ("query", "key", "value", "out", "gate", "up", "down")
LORA_A = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Initial A of an adapter, as in the reference implementation: uniform in +-1/sqrt(inputs)."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and parts of a model. The defaults are those of the paper's models."""

    vocab_size: int
    max_length: int
    width: int
    num_layers: int
    num_heads: int
    dtype: str | None = None
    """Type of the computation; None: the parameters' own, which is float32."""
    num_kv_heads: int | None = None
    """Heads of keys and values, shared by groups of queries' heads. None: num_heads."""
    head_width: int | None = None
    """None: width / num_heads."""
    mlp_width: int | None = None
    """None: four times the width."""
    num_positions: int | None = None
    """Length of the longest sequence of the model: rows of the table of learned positions. None:
    max_length."""
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: float = 1e-6
    query_key_norm: bool = False
    """An RMS norm of every head's query and key."""
    positions: Literal["learned", "rope"] = "learned"
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """Number of positions that a position attends to, itself included. None: all before it."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    query_bias: bool = False
    """True if queries, keys and values have biases."""
    out_bias: bool = False
    mlp_bias: bool = True
    tied: bool = True
    """True if the embedding is also the output layer."""
    remat: bool = False
    """Compute each block again in the backward pass: less memory, more time, equal values."""
    lora: Lora | None = None

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // self.num_heads

    @property
    def hidden(self) -> int:
        """Width inside the MLP."""
        return self.mlp_width or 4 * self.width

    @property
    def table(self) -> int:
        """The longest sequence the model is made for."""
        return self.num_positions or self.max_length

    def as_dict(self) -> dict[str, Any]:
        """The config as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "TransformerConfig":
        """Make a config from the result of `as_dict`."""
        scaling, lora = fields["rope_scaling"], fields["lora"]
        parts = {
            "rope_scaling": scaling and RopeScaling(**scaling),
            "lora": lora and Lora(**{**lora, "layers": tuple(lora["layers"])}),
        }
        return cls(**{**fields, **parts})


# width, layers, heads. `paper` has the paper's 350 M parameters with a 30,522-piece WordPiece
# vocabulary: 24 blocks of 12 * 1024^2 weights and a tied embedding. `large` has a billion.
PRESETS = {
    "micro": (16, 1, 2),
    "tiny": (64, 2, 4),
    "small": (128, 4, 4),
    "medium": (256, 6, 8),
    "paper": (1024, 24, 16),
    "large": (2048, 20, 16),
}


def check_preset(name: str) -> None:
    """Check the name of a preset. Raises: ConfigError: there is none of that name."""
    expect("model", name, name in PRESETS, "one of " + ", ".join(PRESETS))


def preset(
    name: str, vocab_size: int, max_length: int, dtype: str = "float32"
) -> TransformerConfig:
    """Config of the preset `name`. Raises: ConfigError: there is none of that name."""
    check_preset(name)
    compute_dtype = None if dtype == "float32" else dtype
    return TransformerConfig(vocab_size, max_length, *PRESETS[name], compute_dtype)


def _norm(c: TransformerConfig, name: str) -> nn.Module:
    kind = nn.LayerNorm if c.norm == "layer" else nn.RMSNorm
    return kind(epsilon=c.norm_epsilon, dtype=c.dtype, name=name)


def _dense(c: TransformerConfig, name: str, x_BLD: jax.Array, width: int, bias: bool) -> jax.Array:
    """x W (+ b), and the adapter's x A B where the layer has one."""
    y = nn.Dense(width, use_bias=bias, dtype=c.dtype, name=name)(x_BLD)
    if c.lora is None or name not in c.lora.layers:
        return y
    own = {"use_bias": False, "dtype": c.dtype}
    # B starts at zero.
    x_BLR = nn.Dense(c.lora.rank, kernel_init=LORA_A, name=f"{name}_lora_a", **own)(x_BLD)
    added = nn.Dense(width, kernel_init=nn.initializers.zeros, name=f"{name}_lora_b", **own)(x_BLR)
    return y + c.lora.alpha / c.lora.rank * added


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        x_BLD: jax.Array,
        start: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
    ) -> jax.Array:
        c = self.config
        y_BLD = _norm(c, "attention_norm")(x_BLD)
        q_BLHK, k_BLHK, v_BLHK = (
            _dense(c, name, y_BLD, heads * c.head, c.query_bias).reshape(
                *x_BLD.shape[:2], heads, c.head
            )
            for name, heads in (("query", c.num_heads), ("key", c.kv_heads), ("value", c.kv_heads))
        )
        if c.query_key_norm:
            own = {"epsilon": c.norm_epsilon, "dtype": c.dtype}
            q_BLHK = nn.RMSNorm(name="query_norm", **own)(q_BLHK)
            k_BLHK = nn.RMSNorm(name="key_norm", **own)(k_BLHK)
        if c.positions == "rope":
            at = _positions(x_BLD.shape[1], start) if positions_BL is None else positions_BL
            q_BLHK, k_BLHK = rotate(c, q_BLHK, at), rotate(c, k_BLHK, at)
        if positions_BL is not None:
            own = _own_text(c, positions_BL)
            y_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BLHK, v_BLHK, mask=own)
        elif start is None:
            y_BLHK = _attention(c)(q_BLHK, k_BLHK, v_BLHK)
        else:
            k_BSHK = self._remember("key_cache", k_BLHK, start)
            v_BSHK = self._remember("value_cache", v_BLHK, start)
            seen = _seen(c, start + jnp.arange(x_BLD.shape[1]))
            y_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BSHK, v_BSHK, mask=seen)
        y_BLD = y_BLHK.reshape(*x_BLD.shape[:2], c.num_heads * c.head)
        x_BLD += _dense(c, "out", y_BLD, c.width, c.out_bias)
        y_BLD = _norm(c, "mlp_norm")(x_BLD)
        if c.mlp == "gelu":
            y_BLD = nn.gelu(_dense(c, "up", y_BLD, c.hidden, c.mlp_bias))
        else:
            gate_BLD = nn.silu(_dense(c, "gate", y_BLD, c.hidden, c.mlp_bias))
            y_BLD = gate_BLD * _dense(c, "up", y_BLD, c.hidden, c.mlp_bias)
        return x_BLD + _dense(c, "down", y_BLD, c.width, c.mlp_bias)

    @nn.nowrap
    def _remember(self, name: str, new_BLHK: jax.Array, start: jax.Array) -> jax.Array:
        """Add keys or values from position `start` on to the cache.

        Returns:
          All keys or values, [B, max_length, H, K].
        """
        rows, _, *heads = new_BLHK.shape
        shape = (rows, self.config.max_length, *heads)
        cache = self.variable("cache", name, jnp.zeros, shape, new_BLHK.dtype)
        cache.value = jax.lax.dynamic_update_slice(cache.value, new_BLHK, (0, start, 0, 0))
        return cache.value


def _attention(c: TransformerConfig):
    """Causal attention as a function of queries, keys and values."""
    local = {} if c.window is None else {"local_window_size": (c.window - 1, 0)}
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, **local)
    return remat_function(attention) if c.remat else attention


def _seen(c: TransformerConfig, positions_L: jax.Array) -> jax.Array:
    """Mask of the keys, of max_length, that each position attends to, bool [1, 1, L, S]."""
    back_LS = positions_L[:, None] - jnp.arange(c.max_length)[None, :]
    seen_LS = back_LS >= 0
    if c.window is not None:
        seen_LS &= back_LS < c.window
    return seen_LS[None, None]


def _own_text(c: TransformerConfig, positions_BL: jax.Array) -> jax.Array:
    """Mask of the positions of a row that each position attends to, bool [B, 1, L, S].

    Those are the positions of its own text, up to itself.
    """
    here_L = jnp.arange(positions_BL.shape[1])
    back_LS = here_L[:, None] - here_L[None, :]
    farthest_BL = positions_BL
    if c.window is not None:
        farthest_BL = jnp.minimum(positions_BL, c.window - 1)
    seen_BLS = (back_LS >= 0)[None] & (back_LS[None] <= farthest_BL[:, :, None])
    return seen_BLS[:, None]


def _positions(length: int, start: jax.Array | None) -> jax.Array:
    """Positions start ... start + length - 1, int [1, L]. `start` defaults to 0."""
    return (jnp.arange(length) + (0 if start is None else start))[None]


def rope_frequencies(c: TransformerConfig) -> np.ndarray:
    """Radians per position of each pair of features of a head, float32 [K / 2]."""
    frequencies = c.rope_base ** (-np.arange(0, c.head, 2) / c.head)
    if (s := c.rope_scaling) is not None:
        turns = s.original_length * frequencies / (2 * math.pi)  # within the original length
        kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / s.factor)
    return frequencies.astype(np.float32)


def rotate(c: TransformerConfig, x_BLHK: jax.Array, positions_BL: jax.Array) -> jax.Array:
    """Apply rotary positions (Su et al. 2021). Pairs feature i with i + K/2, as Hugging Face does.

    Args:
      x_BLHK: queries or keys.
      positions_BL: int [B, L] or [1, L].
    """
    angles_BLK = positions_BL[:, :, None].astype(jnp.float32) * rope_frequencies(c)[None, None]
    cos, sin = jnp.cos(angles_BLK)[:, :, None], jnp.sin(angles_BLK)[:, :, None]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHK.dtype)


def stacked(params: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Parameters with the trees of all blocks as one tree of NumPy arrays [layers, ...].

    A transformer with such parameters compiles a block once, and loops over the layers.
    """
    names = [f"block_{i}" for i in range(num_layers)]
    rest = {name: leaf for name, leaf in params.items() if name not in names}
    blocks = (params[name] for name in names)
    return {**rest, BLOCKS: jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


def unstacked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters with a tree for each block. Args: params: `stacked` or not."""
    rest = {name: leaf for name, leaf in params.items() if name != BLOCKS}
    blocks = params.get(BLOCKS, {})
    count = len(jax.tree.leaves(blocks)[0]) if blocks else 0
    numbered = ((i, jax.tree.map(lambda leaf: leaf[i], blocks)) for i in range(count))  # noqa: B023
    return {**rest, **{f"block_{i}": block for i, block in numbered}}


def _in_turn(block: nn.Module, x_BLD: jax.Array, stacked: Any, *positions: Any) -> jax.Array:
    def through(x_BLD, params) -> tuple[Any, None]:
        return block.apply({"params": params}, x_BLD, *positions), None

    return jax.lax.scan(through, x_BLD, stacked)[0]


class Transformer(nn.Module):
    """Tokens int [B, L] to logits [B, L, V]. Parameters may be `stacked`.

    With `start`, the tokens begin at that position. The keys and values of all tokens before are
    in the collection `cache`, to which those of these tokens are added. With `positions_BL`, a row
    has several texts: the position of each token in its text, which alone it attends to.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        start: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
    ) -> jax.Array:
        c = self.config
        embed = _embed(c)
        at = _positions(tokens_BL.shape[1], start) if positions_BL is None else positions_BL
        x_BLD = _embedded(c, embed, tokens_BL, at)
        block = remat_module(Block) if c.remat and start is None else Block
        if (stacked := self.get_variable("params", BLOCKS)) is not None:
            x_BLD = _in_turn(block(c, parent=None), x_BLD, stacked, start, positions_BL)
        else:
            for i in range(c.num_layers):
                x_BLD = block(c, name=f"block_{i}")(x_BLD, start, positions_BL)
        return _logits(c, embed, x_BLD)


def _embed(c: TransformerConfig, name: str = "embed", rows: int | None = None) -> nn.Embed:
    init = nn.initializers.normal(0.02)
    return nn.Embed(rows or c.vocab_size, c.width, embedding_init=init, dtype=c.dtype, name=name)


def _embedded(
    c: TransformerConfig, embed: nn.Embed, tokens_BL: jax.Array, positions_BL: jax.Array
) -> jax.Array:
    if c.positions != "learned":
        return embed(tokens_BL)
    positions_BL = jnp.broadcast_to(positions_BL, tokens_BL.shape)
    return embed(tokens_BL) + _embed(c, "positions", c.table)(positions_BL)


def _logits(c: TransformerConfig, embed: nn.Embed, x_BLD: jax.Array) -> jax.Array:
    x_BLD = _norm(c, "final_norm")(x_BLD)
    if c.tied:
        return embed.attend(x_BLD)
    init = nn.initializers.normal(0.02)
    head = nn.Dense(c.vocab_size, use_bias=False, kernel_init=init, dtype=c.dtype, name="head")
    return head(x_BLD)
