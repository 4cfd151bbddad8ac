"""The loss of causal language models: cross entropy of the next token, in nats.

Shape suffixes: B rows, L positions, V vocabulary; 1 is an axis of length one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


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
    return nats_of(logits_BLV, tokens_BL, sizes_B)


def packed_nats(
    model: nn.Module, params: Any, batch: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The same of rows that have several texts, as `shared_rows.packed` makes them."""
    tokens_BL, targets_BL = batch["tokens"], batch["targets"]
    logits_BLV: Any = model.apply({"params": params}, tokens_BL, None, batch["positions"])
    return _summed(logits_BLV, jnp.maximum(targets_BL, 0), targets_BL >= 0)


def nats_of(
    logits_BLV: jax.Array, tokens_BL: jax.Array, sizes_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cross entropy of `next_token_nats`, from the logits of all tokens but the last."""
    real_BL = jnp.arange(1, tokens_BL.shape[1])[None] < sizes_B[:, None]
    return _summed(logits_BLV, tokens_BL[:, 1:], real_BL)


def _summed(logits_BLV, targets_BL, real_BL) -> tuple[jax.Array, jax.Array]:
    at_least_float32 = jnp.promote_types(logits_BLV.dtype, jnp.float32)
    nats_BL = cross_entropy(logits_BLV.astype(at_least_float32), targets_BL)
    return jnp.sum(jnp.where(real_BL, nats_BL, 0), axis=1), real_BL.sum(axis=1)


@jax.custom_vjp
def cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """-log_softmax(logits)[targets], float32 [B, L], for targets in [0, V). In reverse mode only.

    The gradient is what JAX derives, in float32 bit for bit, in a form that XLA does not compute
    twice: a twelfth of a small model's step.
    """
    # Not _cross_entropy_forward's value: alone, XLA rounds that otherwise in the last bit.
    log_probs_BLV = jax.nn.log_softmax(logits_BLV)
    return -jnp.take_along_axis(log_probs_BLV, targets_BL[..., None], axis=-1)[..., 0]


def _cross_entropy_forward(logits_BLV, targets_BL):
    max_BL1 = logits_BLV.max(axis=-1, keepdims=True)
    sum_BL1 = jnp.exp(logits_BLV - max_BL1).sum(axis=-1, keepdims=True)
    target_BL1 = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
    nats_BL = -(target_BL1 - max_BL1 - jnp.log(sum_BL1))[..., 0]
    return nats_BL, (logits_BLV, max_BL1, sum_BL1, targets_BL)


def _cross_entropy_backward(residuals, cotangent_BL):
    logits_BLV, max_BL1, sum_BL1, targets_BL = residuals
    cotangent_BL1 = cotangent_BL[..., None]
    ids_BLV = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    is_target_BLV = ids_BLV == targets_BL[..., None]
    probs_BLV = jnp.exp(logits_BLV - max_BL1) * (cotangent_BL1 / sum_BL1)
    return jnp.where(is_target_BLV, -cotangent_BL1, 0) + probs_BLV, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
