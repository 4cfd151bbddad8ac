"""The strategies of a clipped sum: their names, the rule that takes one, and the call of it.

A strategy changes the time and memory of a clipped sum, not its guarantee. With `scan` and `direct`
memory does not grow with the number of units or of a unit's rows: parameters, one sum, the
gradients of the units that are computed side by side, and the activations of the rows of a pass.
`scan` takes one unit at a time, has gradients as JAX derives them, and is the oracle of the other
strategies. `direct` takes the faster products below, and several small units side by side, so that
parameters and sum are read once for all of them. `ghost` forms no gradient of a large matrix.

The products of `direct` (`in_one_product`): JAX derives the gradient of y = x W as (g^T x)^T, g
being the cotangent of y. XLA on CPUs then transposes g for a product that is slower for it: up to a
fifth of a step. Here the gradient is x^T g, the same sums of the same numbers. And norm layers get
one axis of positions instead of rows and positions: XLA adds over two axes, one of them of length
one, ten times as slowly.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedsim.clipping import ghost
from fedsim.clipping.contribution import (
    MODEL,
    Clip,
    LossFn,
    Sums,
    alone,
    contribution,
    in_passes,
    reach,
    scaled,
    to_multiple,
    zeros_like,
)
from fedsim.clipping.packing import Buckets, Chunk
from fedsim.errors import expect

NAMES = ("scan", "direct", "ghost")  # the simpler ones first
AUTO = "auto"
MANY_PARAMETERS = 10_000_000  # a gradient of this size is far larger than a CPU's cache
ROWS_ON_CPU = 4
TOKENS_OF_PASS = 8192  # on accelerators; 350 M parameters need 18 GiB for 64 rows of 128 tokens
GRADIENTS_OF_PASS = 2**32  # numbers, on accelerators: `direct` holds two gradients of each unit
LENGTH = 128  # of rows of unknown length
MANY_ROWS = 16  # rows of a pass from which on `_over_one` is faster
INPUTS, OUTPUTS = 0, 1  # contracted axis of a weight: Dense has its inputs first, an embedding last


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to compute clipped sums. Bits of a result depend on it."""

    name: str = "scan"
    """scan, direct or ghost."""
    rows: int = 8
    """Rows of one forward and backward pass. `scan` takes one unit at a time, `direct` several
    whole units if they fit, `ghost` whole units; fewer where `Buckets.side_by_side` says so."""

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Parse NAME:ROWS, as `str` writes it.

        Raises: ConfigError: it names no strategy.
        """
        name, _, rows = text.partition(":")
        expected = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, then :ROWS (>= 1)"
        valid = name in NAMES and rows.isdecimal() and int(rows) > 0
        expect("strategy", text, valid, expected)
        return cls(name, int(rows))

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"

    def units_at_once(self, group: int) -> int:
        """Units of one forward and backward pass, for groups of `group` rows."""
        return 1 if self.name == "scan" else max(1, self.rows // group)

    def of(self, chunk: Chunk) -> "Strategy":
        """Return the strategy with the rows of a pass that a chunk is made for."""
        return dataclasses.replace(self, rows=chunk.rows) if chunk.rows else self


def clip_chunk(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    *,
    buckets: Buckets | None = None,
    total: Any = None,
) -> Sums:
    """sum over units of clip(mean over the unit's rows of grad loss, C), in whole numbers.

    Guarantees: a unit's contribution depends on (params, its rows, C) alone and has an L2 norm of
      at most `clip.sensitivity`, and the sum is exact; see contribution.py. A unit's gradient is
      complete before it is clipped; a unit without rows, or with a non-finite gradient, contributes
      exactly zero. With `clip.in_float32` only the last sentence holds.
    Args:
      loss_fn: (params, rows of a batch) -> one loss per row, float32 [rows]; rows are independent.
      params: tree of float32 arrays.
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      clip: the clip norm C.
      strategy: how the sum is computed.
      buckets: lengths to which the rows of a pass may be trimmed: the least that holds all of them.
      total: a sum to add to; one holds at most `lattice_capacity` units. None: zeros.
    Returns: (sum, int32 tree like params, in units of `clip.unit`, or float32; norms [units];
      losses [units]; dropped bool [units]).
    Raises: UnsupportedModel: the strategy does not support the model.
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """
    loss_fn = jax.named_scope(MODEL)(loss_fn)
    if total is None:
        total = zeros_like(params, jnp.float32 if clip.in_float32 else jnp.int32)
    units, group = mask.shape
    at_once = min(units, strategy.units_at_once(group))
    if strategy.name == "ghost":
        return ghost.clip_chunk(
            loss_fn, params, batch, mask, clip, total=total, side_by_side=at_once
        )
    gradient = functools.partial(
        _unit_gradient, loss_fn, strategy.rows, strategy.name == "direct", buckets, params
    )
    return _add_formed(gradient, params, batch, mask, clip, total=total, side_by_side=at_once)


def _add_formed(
    gradient: Callable[..., Any],
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    *,
    total: Any,
    side_by_side: int,
) -> Sums:
    """Form each unit's gradient, clip it and add it; several side by side if each fits whole."""
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
    return jax.lax.fori_loop(0, reach(parts[1].any(axis=1)), add_part, start)


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
    return to_multiple(leaf, size).reshape(-1, size, *leaf.shape[1:])


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


def by_rule(
    name: str,
    rows: int | None,
    *,
    group: int,
    num_parameters: int,
    adapters: bool,
    on_cpu: bool,
    length: int | None,
    public_places: bool = False,
) -> Strategy:
    """Return the strategy of the settings, a function of public constants alone.

    Bits of a result depend on the strategy, so neither a timer nor a cache may choose it. From
    MANY_PARAMETERS on, a gradient does not fit into a CPU's cache, and `ghost`, which forms it a
    tile at a time, takes less time and memory than `direct` for units of one row.
    Args:
      name: of the strategy, or AUTO.
      rows: rows of a pass; None: by the rule.
      group: rows of a unit.
      num_parameters: number of trained parameters.
      adapters: they are adapters on a model that is not trained.
      on_cpu: workers compute on CPUs.
      length: tokens of the longest row; None: unknown.
      public_places: no text decides which units are drawn, nor their order.
    """
    if name == AUTO:
        large = on_cpu and group == 1 and not adapters and num_parameters >= MANY_PARAMETERS
        name = "ghost" if large else "direct"
    if rows is None:
        # A CPU's cache holds the activations of few rows. An accelerator needs many; they are of
        # one unit where places are not public: see `Engine.keeps_places`.
        fit = max(1, TOKENS_OF_PASS // (length or LENGTH))
        if name == "direct":
            fit = min(fit, group * max(1, GRADIENTS_OF_PASS // num_parameters))
        rows = ROWS_ON_CPU if on_cpu else fit if public_places else min(group, fit)
    return Strategy(name, rows)
