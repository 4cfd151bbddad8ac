"""A decoder-only transformer and its causal language-modelling loss.

Plain `flax.linen`: pre-norm blocks, learned positions, GELU, tied embedding. Rows are independent:
no dropout, no batch statistics, nothing that would couple users inside the loss.

Shape suffixes: B rows, L positions, D width, H heads, K head width, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedsim.config import expect


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a model."""

    vocab_size: int
    max_length: int
    width: int
    num_layers: int
    num_heads: int
    dtype: str | None = None
    """Type of the computation; None: the parameters' own, which is float32."""


# width, layers, heads. `paper` has the paper's 350 M parameters with a 30,522-piece WordPiece
# vocabulary: 24 blocks of 12 * 1024^2 weights and a tied embedding.
PRESETS = {
    "tiny": (64, 2, 4),
    "small": (128, 4, 4),
    "medium": (256, 6, 8),
    "paper": (1024, 24, 16),
}


def check_preset(name: str) -> None:
    """Raises ConfigError unless there is a model of that name."""
    expect("model", name, name in PRESETS, "one of " + ", ".join(PRESETS))


def preset(
    name: str, vocab_size: int, max_length: int, dtype: str = "float32"
) -> TransformerConfig:
    """The sizes that `name` stands for."""
    check_preset(name)
    own = None if dtype == "float32" else dtype
    return TransformerConfig(vocab_size, max_length, *PRESETS[name], own)


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and a residual around it."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        width, heads = self.config.width, self.config.num_heads
        dtype = self.config.dtype
        split = (*x_BLD.shape[:2], heads, width // heads)
        y_BLD = nn.LayerNorm(dtype=dtype, name="attention_norm")(x_BLD)
        q_BLHK, k_BLHK, v_BLHK = (
            nn.Dense(width, use_bias=False, dtype=dtype, name=name)(y_BLD).reshape(split)
            for name in ("query", "key", "value")
        )
        y_BLHK = jax.nn.dot_product_attention(q_BLHK, k_BLHK, v_BLHK, is_causal=True)
        y_BLD = y_BLHK.reshape(x_BLD.shape)
        x_BLD += nn.Dense(width, use_bias=False, dtype=dtype, name="out")(y_BLD)
        y_BLD = nn.LayerNorm(dtype=dtype, name="mlp_norm")(x_BLD)
        y_BLD = nn.gelu(nn.Dense(4 * width, dtype=dtype, name="up")(y_BLD))
        return x_BLD + nn.Dense(width, dtype=dtype, name="down")(y_BLD)


class Transformer(nn.Module):
    """Tokens to logits."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        c = self.config
        options = {"embedding_init": nn.initializers.normal(0.02), "dtype": c.dtype}
        embed = nn.Embed(c.vocab_size, c.width, **options, name="embed")
        positions = nn.Embed(c.max_length, c.width, **options, name="positions")
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        x_BLD = embed(tokens_BL) + positions(positions_BL)
        for i in range(c.num_layers):
            x_BLD = Block(c, name=f"block_{i}")(x_BLD)
        x_BLD = nn.LayerNorm(dtype=c.dtype, name="final_norm")(x_BLD)
        return embed.attend(x_BLD)


def next_token_nats(
    model: nn.Module, params: Any, tokens_BL: jax.Array, sizes_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy of predicting tokens[i + 1] from tokens[: i + 1].

    Args:
      tokens_BL: ids, starting with the beginning-of-text token.
      sizes_B: real tokens of each row; the rest is padding and predicts nothing.
    Returns: (nats, predictions): float32 [B] sums over a row's sizes - 1 predictions, and how many.
    """
    logits_BLV: Any = model.apply({"params": params}, tokens_BL[:, :-1])
    at_least_float32 = jnp.promote_types(logits_BLV.dtype, jnp.float32)
    log_probs_BLV = jax.nn.log_softmax(logits_BLV.astype(at_least_float32))
    targets_BL = tokens_BL[:, 1:]
    nats_BL = -jnp.take_along_axis(log_probs_BLV, targets_BL[..., None], axis=-1)[..., 0]
    real_BL = jnp.arange(1, tokens_BL.shape[1])[None] < sizes_B[:, None]
    return jnp.sum(jnp.where(real_BL, nats_BL, 0), axis=1), real_BL.sum(axis=1)
