"""The strategies `scan` and `direct`: each unit's gradient is formed, clipped and added.

Memory does not grow with the number of units or of a unit's rows: parameters, one sum, the
gradients of the units that are computed side by side, and the activations of `rows_per_pass` rows.
`scan` takes one unit at a time, has gradients as JAX derives them, and is the oracle of the other
strategies. `direct` takes the faster products below, and several small units side by side, so that
parameters and sum are read once for all of them.

The products of `direct` (`in_one_product`): JAX derives the gradient of y = x W as (g^T x)^T, g
being the cotangent of y. XLA on CPUs then transposes g for a product that is slower for it: up to a
fifth of a step. Here the gradient is x^T g, the same sums of the same numbers. And norm layers get
one axis of positions instead of rows and positions: XLA adds over two axes, one of them of length
one, ten times as slowly.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedsim.clipping.contribution import Clip, contribution, scaled
from fedsim.clipping.packing import Buckets

LossFn = Callable[[Any, Any], jax.Array]
"""(params, rows of a batch) -> one loss per row, float32 [rows]."""
Sums = tuple[Any, jax.Array, jax.Array, jax.Array]
"""(Sum; norms, losses and dropped of the units, [units] each.)"""
MANY_ROWS = 16  # rows of a pass from which on `_over_one` is faster
INPUTS, OUTPUTS = 0, 1  # contracted axis of a weight: Dense has its inputs first, an embedding last


def clip_chunk(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    *,
    total: Any,
    side_by_side: int,
    rows_per_pass: int,
    direct: bool,
    buckets: Buckets | None,
) -> Sums:
    """`strategy.clip_chunk` by these strategies, with all arguments.

    Args:
      rows_per_pass: rows of one forward and backward pass.
      direct: take the gradient of each layer's weights in one product.
      side_by_side: units of one pass; more than 1 only if all rows of each fit into the pass.
    """
    how = loss_fn, rows_per_pass, direct, buckets
    gradient = functools.partial(_unit_gradient, *how, params)
    clipped = functools.partial(scaled if clip.in_float32 else contribution, clip=clip)
    each = jax.vmap if side_by_side > 1 else alone

    def add(found, mask, total):
        real = mask.any(axis=1)
        # Each unit's whole numbers are a function of its own rows. Added in one expression, because
        # an addition reads and writes the whole sum.
        added, norms, dropped = each(clipped)(found[0], real)
        total = jax.tree.map(lambda t, z: functools.reduce(jnp.add, list(z), t), total, added)
        return total, norms, jnp.where(real, found[1], 0), dropped

    of_units = jax.tree.map(lambda leaf: jnp.zeros((side_by_side, *leaf.shape)), params)
    nothing = of_units, jnp.zeros(side_by_side)
    return in_passes(each(gradient), add, nothing, batch, mask, side_by_side, total)


def in_passes(
    compute: Callable[..., Any],
    add: Callable[..., Sums],
    nothing: Any,
    batch: Any,
    mask: jax.Array,
    side_by_side: int,
    total: Any,
) -> Sums:
    """Compute units a pass at a time, and add what is in memory then to a sum.

    Args:
      compute: (rows [side_by_side, group, ...], mask) -> gradients, or numbers that they are made
        of; `stored`.
      add: (these numbers, mask, total) -> (total, norms, losses, dropped), [side_by_side] each.
      nothing: zeros in the shapes of these numbers.
    """
    units = len(mask)
    batch, mask = jax.tree.map(
        lambda leaf: _to_multiple(jnp.asarray(leaf), side_by_side), (batch, mask)
    )

    def at(i):
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=side_by_side)
        return jax.tree.map(lambda leaf: cut(leaf, i * side_by_side), (batch, mask))

    def add_pass(i, carry):
        total, found, *values = carry
        mask = at(i)[1]
        found = stored(lambda j: compute(*at(j)), i, mask.any(), found)
        total, *new = add(found, mask, total)
        first, update = (i * side_by_side,), jax.lax.dynamic_update_slice
        values = (update(old, some, first) for old, some in zip(values, new, strict=True))
        return total, found, *values

    # A loop of dynamic length costs less than a loop with a branch: a branch copies its operands.
    number = -(-_reach(mask.any(axis=1)) // side_by_side)
    values = (jnp.zeros(len(mask), dtype) for dtype in (jnp.float32, jnp.float32, bool))
    total, _, *values = jax.lax.fori_loop(0, number, add_pass, (total, nothing, *values))
    return total, *(value[:units] for value in values)


def stored(compute: Callable[[jax.Array], Any], i: jax.Array, some: jax.Array, before: Any) -> Any:
    """Compute compute(i) and write it to memory once, before anything reads it.

    XLA recomputes each number of an elementwise gradient for every reader, and LLVM may fuse a
    product and a sum into one rounding for one of the readers: then the norm would not be that of
    the added gradient. On CPUs `optimization_barrier` does not prevent this. The result of a loop
    whose length is unknown at compile time must be in memory when the loop ends.
    Args:
      compute: the computation, a function of the loop's index.
      i: the index; the body must depend on it, or XLA moves it out of the loop.
      some: bool, false if there is nothing to compute; then the result is `before`.
      before: arrays in the shapes of the result, which overwrites them.
    """
    return jax.lax.fori_loop(i, i + some.astype(i.dtype), lambda j, _: compute(j), before)


def alone(function):
    """Like vmap over an axis of length one, without the axis, which makes XLA on CPUs slower."""

    def run(*arguments):
        result = function(*jax.tree.map(lambda leaf: leaf[0], arguments))
        return jax.tree.map(lambda leaf: leaf[None], result)

    return run


def _reach(real: jax.Array) -> jax.Array:
    """Number of entries up to the last true one, int32."""
    return jnp.max(jnp.where(real, jnp.arange(1, len(real) + 1), 0), initial=0)


def zeros_like(params: Any, dtype: Any = jnp.float32) -> Any:
    """Return a tree of zeros with the shapes of `params`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), params)


def _unit_gradient(loss_fn, rows_per_pass, direct, buckets, params, rows, real):
    """Gradient and value of sum(mask * loss) / max(1, sum(mask)) of one unit."""
    count = jnp.maximum(real.sum(), 1).astype(jnp.float32)
    loss_fn = in_one_product(loss_fn) if direct else loss_fn

    def part_loss(params, part):
        rows, real = part
        return jnp.sum(jnp.where(real, loss_fn(params, rows), 0)) / count

    def gradient(part):
        derived = jax.value_and_grad(part_loss)
        if len(part[1]) >= MANY_ROWS and not direct:
            derived = _over_one(derived)
        loss, grad = derived(params, part)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grad), loss

    parts = jax.tree.map(lambda leaf: in_parts(leaf, rows_per_pass), (rows, real))
    if len(parts[1]) == 1:  # always in ELS: no loop, no second copy of the gradient
        return gradient(jax.tree.map(lambda leaf: leaf[0], parts))

    def cut_to(length):
        return lambda part: gradient((buckets.trim(part[0], length), part[1]))

    def add_part(i, carry):
        part = rows, real = jax.tree.map(lambda leaf: leaf[i], parts)
        if buckets is None or len(buckets.lengths) == 1:
            return jax.tree.map(jnp.add, carry, gradient(part))
        longest = jnp.max(jnp.where(real, buckets.sizes(rows), 0))
        number = jnp.searchsorted(jnp.array(buckets.lengths), longest)
        ways = [cut_to(length) for length in buckets.lengths]
        return jax.tree.map(jnp.add, carry, jax.lax.switch(number, ways, part))

    start = (zeros_like(params), jnp.float32(0))
    return jax.lax.fori_loop(0, _reach(parts[1].any(axis=1)), add_part, start)


def _over_one(function):
    """Map function(params, part) over an axis of length one: XLA on CPUs then picks a faster matrix
    product for the weights' gradients (a tenth of all time; jaxlib 0.10)."""

    def run(params, part):
        parts = jax.tree.map(lambda leaf: leaf[None], part)
        return jax.tree.map(lambda leaf: leaf[0], jax.vmap(function, (None, 0))(params, parts))

    return run


def in_parts(leaf: jax.Array, size: int) -> jax.Array:
    """Reshape [n, ...] to [parts, min(size, n), ...], padded with zeros (false in a mask)."""
    size = min(size, len(leaf))
    return _to_multiple(leaf, size).reshape(-1, size, *leaf.shape[1:])


def _to_multiple(leaf: jax.Array, size: int) -> jax.Array:
    """Pad [n, ...] with zeros to a multiple of `size`."""
    return jnp.pad(leaf, [(0, -len(leaf) % size)] + [(0, 0)] * (leaf.ndim - 1))


def in_one_product(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, whose layers compute their weights' gradients in one product.

    It changes `nn.Dense` and `nn.Embed.attend`, unless they were given another product, and norms
    over the last axis, unless the function has other interceptors. In reverse mode only. A model
    that maps over its rows (`vmap`) gets slower: there it forms every row's gradient.
    """

    @functools.wraps(loss_fn)
    def run(*args: Any) -> Any:
        with nn.intercept_methods(_intercept):
            return loss_fn(*args)

    return run


def _intercept(next_fun, args, kwargs, context):
    module, method = context.module, context.method_name
    ordinary = next_fun is context.orig_method and len(args) == 1 and not kwargs
    if ordinary and type(module) is nn.Dense and method == "__call__":
        if (module.precision, module.dot_general, module.dot_general_cls) == (None, None, None):
            return _dense(module, *args)
    if ordinary and type(module) is nn.Embed and method == "attend":
        x, _ = module.promote_dtype(*args, module.embedding, dtype=module.dtype)
        return product(x, module.embedding, OUTPUTS)
    if ordinary and type(module) in (nn.LayerNorm, nn.RMSNorm):
        if (module.reduction_axes, module.feature_axes, module.axis_name) == (-1, -1, None):
            return next_fun(args[0].reshape(-1, args[0].shape[-1])).reshape(args[0].shape)
    return next_fun(*args, **kwargs)


def _dense(module, x):
    """Compute `nn.Dense` with `product`."""
    shape, dtype = (x.shape[-1], module.features), module.param_dtype
    kernel, bias = module.param("kernel", module.kernel_init, shape, dtype), None
    if module.use_bias:
        bias = module.param("bias", module.bias_init, shape[1:], dtype)
    x, _, bias = module.promote_dtype(x, kernel, bias, dtype=module.dtype)
    y: Any = product(x, kernel, INPUTS)
    return y if bias is None else y + jnp.expand_dims(bias, range(y.ndim - 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, weight: jax.Array, axis: int) -> jax.Array:
    """Contract the last axis of x with `axis` of weight: [..., I], [I, O] or [O, I] -> [..., O].

    The result has the type of x. Terms are added in float32, also if x is bfloat16, and so are
    those of the weight's gradient.
    """
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return _dot(x, weight.astype(x.dtype), dimensions).astype(x.dtype)


def _dot(a, b, dimensions) -> Any:
    at_least_float32 = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=at_least_float32)


def _forward(x, weight, axis):
    return product(x, weight, axis), (x, weight)


def _backward(axis, residuals, g):
    x, weight = residuals
    flat_x, flat_g = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (x, g))
    pair = (flat_x, flat_g) if axis == INPUTS else (flat_g, flat_x)
    over_rows = (((0,), (0,)), ((), ()))
    of_weight = _dot(*pair, over_rows)
    of_x: Any = product(g, weight, 1 - axis)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


product.defvjp(_forward, _backward)
