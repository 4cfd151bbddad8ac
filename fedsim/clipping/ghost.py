"""The strategy `ghost`: norms without forming gradients, then gradients a tile at a time.

`direct` writes every unit's gradient and reads it twice, for its norm and for the sum, which
dominates the time of a large model. Here one forward and one backward pass stop at the layers.
Inputs and cotangents give a proven bound on each unit's norm, see factors.py (ghost norms:
Goodfellow 2015; Li et al. 2022). Then each unit's gradient is formed, scaled, rounded and added
tile by tile, in the CPU's cache. So the whole numbers of a unit do not depend on other units, as in
`scan`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from fedsim.clipping import scan
from fedsim.clipping.contribution import Clip, factor, norm_and_bound, num_coordinates, whole
from fedsim.clipping.factors import Factors
from fedsim.clipping.layers import Observed, expect_shape


def clip_chunk(
    loss_fn: scan.LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    *,
    side_by_side: int,
    total: Any = None,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Compute the sum of `scan.clip_chunk`; arguments and results are the same.

    Memory: the activations of all rows of a pass, small layers' gradients, and one tile.
    Guarantees: those of `scan.clip_chunk`. The upper bound on norms is a little less tight: a
      clipped unit may be shorter than C by a few thousandths.
    Args:
      side_by_side: units of one pass.
    Raises: UnsupportedModel: a parameter is not in a layer of `LAYERS`.
    """
    model, units = Observed(loss_fn, params), len(mask)
    chunks = jax.tree.map(lambda leaf: scan.in_parts(leaf, side_by_side), (batch, mask))

    def at(i):
        return jax.tree.map(lambda leaf: leaf[i], chunks)

    def seen(i):
        inputs, cotangents, losses = model.run(*at(i))
        return inputs, cotangents, losses, _formed(model, inputs, cotangents)[0]

    def add(i, carry):
        total, found, *values = carry
        mask = at(i)[1]
        found = scan.stored(seen, i, mask.any(), found)
        total, *new = _added(model, params, found, mask, clip, total)
        return total, found, *(old.at[i].set(one) for old, one in zip(values, new, strict=True))

    nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(seen, jnp.int32(0))
    )
    values = (jnp.stack([value] * len(chunks[1])) for value in scan.no_values(len(chunks[1][0])))
    dtype = jnp.float32 if clip.in_float32 else jnp.int32
    start = (scan.zeros_like(params, dtype) if total is None else total, nothing, *values)
    number = scan.reach(chunks[1].any(axis=(1, 2)))
    total, _, *values = jax.lax.fori_loop(0, number, add, start)
    return total, *(value.reshape(-1)[:units] for value in values)


def _added(model: Observed, params: Any, found: Any, mask: jax.Array, clip: Clip, total: Any):
    """Add the units of a pass to total; return (total, norms, losses, dropped)."""
    inputs, cotangents, losses, formed = found
    _, factors = _formed(model, inputs, cotangents)
    squares = bound_squares = jnp.zeros(len(mask))
    if formed:
        squares, bound_squares = map(jnp.square, jax.vmap(norm_and_bound)(formed))
    for product in factors.values():
        squared, bound = product.squared_and_bound()
        squares, bound_squares = squares + squared, bound_squares + jnp.square(bound)
    # Three roundings of each parameter's part.
    bounds = jnp.sqrt(bound_squares) * jnp.float32(1 + (len(factors) + 6) * 2.0**-23)
    real, norms = mask.any(axis=1), jnp.sqrt(squares)
    dimensions = num_coordinates(params)
    scales, dropped = factor(bounds, real, clip, dimensions)
    if clip.in_float32:
        scales = jnp.where(real, clip.scale(norms), 0)

    def added(grad, unit):
        if clip.in_float32:
            return jnp.where(scales[unit] > 0, grad * scales[unit], 0)
        return whole(grad, scales[unit], dimensions)

    leaves: dict[Any, Any] = {}
    before: dict[Any, Any] = traverse_util.flatten_dict(total)
    parameters: dict[Any, Any] = traverse_util.flatten_dict(params)
    for name, sums in before.items():
        if name in factors:
            leaves[name] = factors[name].add_to(sums, added)
            continue
        expect_shape(name, parameters[name], formed[name][0])
        leaves[name] = sum((added(grad, u) for u, grad in enumerate(formed[name])), start=sums)
    return (
        traverse_util.unflatten_dict(leaves),
        jnp.where(real, norms, 0),
        jnp.where(real, losses, 0),
        dropped,
    )


def _formed(model: Observed, inputs: Any, cotangents: Any) -> tuple[dict, dict[Any, Factors]]:
    """Return (formed gradients [units, ...], gradients as products), by the parameter's path.

    Gradients of vectors are formed, and those of matrices whose norm is cheaper to compute formed.
    """
    formed: dict[tuple[str, ...], jax.Array] = {}
    factors: dict[tuple[str, ...], Factors] = {}
    for path, layer, own in model.layers(inputs, cotangents):
        formed |= {(*path, name): leaf for name, leaf in layer.vectors(own).items()}
        for name, product in layer.factors().items():
            shape: Any = own[name].shape
            if product.is_cheaper(shape):
                factors[*path, name] = product
            else:
                formed[*path, name] = product.formed(shape)
    return formed, factors
