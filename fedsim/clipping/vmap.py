"""The strategy `vmap`: the gradients of several units side by side, for few parameters.

Memory: units times parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping import scan
from fedsim.clipping.clip import HIGHEST, Clip, global_norm


def clipped_sum(
    loss_fn: scan.LossFn, params: Any, batch: Any, mask: jax.Array, clip: Clip
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The sum of `scan.clipped_sum`, whole units at a time."""

    def unit_loss(params, rows, real):
        count = jnp.maximum(real.sum(), 1).astype(jnp.float32)
        return jnp.sum(jnp.where(real, loss_fn(params, rows), 0)) / count

    per_unit = jax.vmap(jax.value_and_grad(unit_loss), in_axes=(None, 0, 0))
    losses, grads = per_unit(params, batch, mask)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    norms = jax.vmap(global_norm)(grads)
    real = mask.any(axis=1)
    norms, losses = jnp.where(real, norms, 0), jnp.where(real, losses, 0)
    finite = jnp.isfinite(norms)
    weights, used = clip.scale(norms), finite & real

    def weigh(g):
        # Selected, not multiplied by zero: 0 * nan is nan.
        g = jnp.where(used.reshape(-1, *[1] * (g.ndim - 1)), g, 0)
        return jnp.tensordot(weights, g, axes=1, precision=HIGHEST)

    return jax.tree.map(weigh, grads), norms, losses, ~finite
