"""The strategy `bookkeeping`: one forward and one backward pass for many units (Bu et al. 2022).

The backward pass stops at the outputs of the layers that have weights. Their inputs X and output
cotangents G give every unit's gradient norm, layer by layer, and then the clipped sum X^T (w G), w
being the units' scales: no unit's gradient is ever formed whole. Here units are users with several
rows as well as examples.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fedsim.clipping import scan
from fedsim.clipping.clip import Clip, matmul
from fedsim.clipping.observed import Observed, Path, expect_shape

# A unit's squared norm must be so many times its rounding: then the norm is right to 0.1 %.
TRUSTED = 500.0


def clipped_sum(
    loss_fn: scan.LossFn, params: Any, batch: Any, mask: jax.Array, clip: Clip
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """The sum of `scan.clipped_sum`, of all units at once. It takes the memory of all rows'
    activations.

    A unit that is not finite, or whose gradient's parts cancel so far that rounding could hide its
    norm, is left to `scan`: the guarantee is the same, and the other units' sum is, too.
    Raises: UnsupportedModel: a parameter is not in a layer of `LAYERS`.
    """
    model = Observed(loss_fn, params)
    inputs, cotangents, losses = model.run(batch, mask)
    vectors, squared, rounding = _norms(model, inputs, cotangents)
    seen = inputs, cotangents, vectors
    trusted = jnp.isfinite(squared) & (squared >= TRUSTED * rounding)

    def trusted_only(leaf):
        # Selected, not multiplied by zero: 0 * nan is nan.
        return jnp.where(trusted.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)

    # Loops that are never entered, where all are trusted: a branch would copy what it is given.
    seen = jax.lax.fori_loop(
        0, 1 - trusted.all(), lambda _, seen: jax.tree.map(trusted_only, seen), seen
    )
    scale = trusted_only(clip.scale(jnp.sqrt(squared + rounding)))  # of the largest it may be
    total = _weighted_sum(model, seen, scale)
    own = mask & ~trusted[:, None]
    total, *apart = scan.clipped_sum(
        loss_fn, params, batch, own, dataclasses.replace(clip, in_float32=True), total=total
    )
    ours = trusted_only(jnp.sqrt(squared)), losses, jnp.zeros_like(trusted)
    norms, losses, dropped = (
        jnp.where(trusted, mine, theirs) for mine, theirs in zip(ours, apart, strict=True)
    )
    return total, norms, losses, dropped


def _norms(model: Observed, inputs: Any, cotangents: Any) -> tuple[Any, jax.Array, jax.Array]:
    """Gradients of vectors by path, squared norms [units], rounding [units]."""
    vectors: dict[Path, dict[str, jax.Array]] = {}
    squared = rounding = jnp.zeros(())
    for path, layer, own in model.layers(inputs, cotangents):
        vectors[path] = layer.vectors(own)
        of_matrix, its_rounding = layer.squared_norms(own)
        squared, rounding = squared + of_matrix, rounding + its_rounding
        squared += sum(jnp.sum(jnp.square(leaf), axis=1) for leaf in vectors[path].values())
    return vectors, squared, rounding


def _weighted_sum(model: Observed, seen: Any, weights: jax.Array) -> Any:
    """sum over units of weight times gradient, a tree like the parameters."""
    leaves, (*calls, vectors) = {}, seen
    for path, layer, own in model.layers(*calls):
        small = {name: matmul(weights, leaf) for name, leaf in vectors[path].items()}
        for name, leaf in (layer.weighted_sum(own, weights) | small).items():
            expect_shape((*path, name), own[name], leaf)
            leaves[*path, name] = leaf
    return traverse_util.unflatten_dict(leaves)
