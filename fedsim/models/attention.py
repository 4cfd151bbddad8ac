"""Attention over the positions that a position may see.

Shape suffixes: B rows, L positions, H heads (of keys and values), G heads of queries that share
them, K head width, S keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def attend(
    q_BLHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask: jax.Array | None = None,
    *,
    window: int | None,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Attention, causal unless a mask is given; where `is_fused`, by cuDNN.

    Args:
      mask: positions that are seen, bool [B or 1, 1, L, S]; takes the place of `window`.
      window: number of positions that a position attends to, itself included; None: all before it.
      scale: factor of the products of queries and keys; None: 1 / sqrt(K).
      cap: their soft cap; None: none.
    """
    if cap is not None:
        length = q_BLHK.shape[1]
        mask = seen(jnp.arange(length)[None], length, window) if mask is None else mask
        return _capped_attention(q_BLHK, k_BSHK, v_BSHK, mask, scale, cap)
    if mask is not None:
        return jax.nn.dot_product_attention(q_BLHK, k_BSHK, v_BSHK, mask=mask, scale=scale)
    fused = is_fused(*q_BLHK.shape[1:], k_BSHK.shape[2], str(q_BLHK.dtype), window)
    return _causal((q_BLHK, k_BSHK, v_BSHK), window, scale, fused)


def _causal(qkv: Any, window: int | None, scale: float | None, fused: bool) -> jax.Array:
    length = qkv[0].shape[1]
    how: dict[str, Any] = {"is_causal": True, "local_window_size": window and (window - 1, 0)}
    if not fused:
        return jax.nn.dot_product_attention(*qkv, scale=scale, **how)
    # cuDNN takes an even number of positions. The others do not see one more at the end.
    qkv = [jnp.pad(x, ((0, 0), (0, length % 2), (0, 0), (0, 0))) for x in qkv]
    how["implementation"] = "cudnn"
    return jax.nn.dot_product_attention(*qkv, scale=scale, **how)[:, :length]


@functools.cache
def is_fused(L: int, H: int, K: int, kv_heads: int, dtype: str, window: int | None) -> bool:
    """True if cuDNN computes causal attention here, without a matrix of scores.

    JAX, XLA and cuDNN know what they take: they are asked to compile its gradient, with kernels
    that repeat their bits. Args: H: heads of queries; window: as of `attend`.
    """
    if jax.default_backend() != "gpu":
        return False
    qkv = [jax.ShapeDtypeStruct((1, L, heads, K), dtype) for heads in (H, kv_heads, kv_heads)]
    gradient = jax.jit(jax.grad(lambda qkv: _causal(qkv, window, None, fused=True).sum()))
    try:
        lowered = gradient.trace(qkv).lower(lowering_platforms=("cuda",))
        lowered.compile({"xla_gpu_deterministic_ops": True})  # as `engine.programs` compiles
    except Exception:  # noqa: BLE001 (each of the three has exceptions of its own)
        return False
    return True


def soft_cap(cap: float | None, x: jax.Array) -> jax.Array:
    """cap tanh(x / cap); x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _capped_attention(q_BLHK, k_BSHK, v_BSHK, mask, scale: float | None, cap: float) -> jax.Array:
    """`jax.nn.dot_product_attention` with a soft cap, which that function lacks."""
    q_BLHGK = q_BLHK.reshape(*q_BLHK.shape[:2], k_BSHK.shape[2], -1, q_BLHK.shape[3])
    scores_BHGLS = jnp.einsum(
        "BLHGK,BSHK->BHGLS", q_BLHGK, k_BSHK, preferred_element_type=jnp.float32
    )
    scores_BHGLS = soft_cap(cap, scores_BHGLS * (scale or q_BLHK.shape[3] ** -0.5))
    weights_BHGLS = jax.nn.softmax(jnp.where(mask[:, :, None], scores_BHGLS, -jnp.inf))
    y_BLHGK = jnp.einsum("BHGLS,BSHK->BLHGK", weights_BHGLS.astype(v_BSHK.dtype), v_BSHK)
    return y_BLHGK.reshape(q_BLHK.shape)


def attend_cached(
    q_BLHK: jax.Array,
    k_BHSK: jax.Array,
    v_BHSK: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None,
    cap: float | None,
) -> jax.Array:
    """Attention with a mask, over keys and values whose heads come before their positions.

    Processors take a third of the time of `jax.nn.dot_product_attention` for one query of a text:
    the products have one matrix of queries for each head of keys. Args: as of `attend`.
    """
    B, L, K = (q_BLHK.shape[axis] for axis in (0, 1, 3))
    H = k_BHSK.shape[1]
    q_BHGLK = q_BLHK.reshape(B, L, H, -1, K).transpose(0, 2, 3, 1, 4)
    how: dict[str, Any] = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("BHQK,BHSK->BHQS", q_BHGLK.reshape(B, H, -1, K), k_BHSK, **how)
    scores = soft_cap(cap, scores * (scale or K**-0.5))
    scores_BHGLS = scores.reshape(*q_BHGLK.shape[:4], -1)
    weights_BHGLS = jax.nn.softmax(jnp.where(mask[:, :, None], scores_BHGLS, -jnp.inf))
    weights = weights_BHGLS.astype(v_BHSK.dtype).reshape(scores.shape)
    y_BHGLK = jnp.einsum("BHQS,BHSK->BHQK", weights, v_BHSK).reshape(q_BHGLK.shape)
    return y_BHGLK.transpose(0, 3, 1, 2, 4).reshape(q_BLHK.shape)


def seen(positions_BL: jax.Array, keys: int, window: int | None) -> jax.Array:
    """Mask of the first `keys` positions that each position attends to, bool [B, 1, L, S]."""
    back_BLS = positions_BL[:, :, None] - jnp.arange(keys)[None, None]
    seen_BLS = back_BLS >= 0
    if window is not None:
        seen_BLS &= back_BLS < window
    return seen_BLS[:, None]


def own_text(positions_BL: jax.Array, window: int | None) -> jax.Array:
    """Mask of the positions of a row that each position attends to, bool [B, 1, L, S].

    Those are the positions of its own text, up to itself.
    """
    here_L = jnp.arange(positions_BL.shape[1])
    back_LS = here_L[:, None] - here_L[None, :]
    own_BLS = back_LS[None] <= positions_BL[:, :, None]
    return seen(here_L[None], len(here_L), window) & own_BLS[:, None]
