"""The strategy `scan`: units one by one, a unit's rows a few at a time.

Memory is flat in the number of units and in the rows of a unit: parameters, one sum, one unit's
gradient, and the activations of `rows_per_pass` rows. It is the oracle of the other strategies.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping.clip import Clip, global_norm

LossFn = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The lengths that rows may be cut to, so that short ones cost little."""

    lengths: tuple[int, ...]
    """Ascending; every row fits into the last one."""
    sizes: Callable[[Any], Any]
    """(rows of a batch) -> the length that each row needs, int [rows]."""
    trim: Callable[[Any, int], Any]
    """(batch, length) -> the batch with rows cut to `length`; loses nothing where it suffices."""

    def up_to(self, length: int) -> "Buckets":
        """Without the longer ones."""
        return dataclasses.replace(self, lengths=tuple(n for n in self.lengths if n <= length))


def clipped_sum(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    *,
    rows_per_pass: int = 8,
    buckets: Buckets | None = None,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """sum over units of clip(mean over the unit's rows of grad loss, C).

    Guarantees: adding or removing one unit changes the sum by at most `clip.sensitivity`. A unit's
      gradient is complete before it is clipped; a unit without rows, or with a non-finite gradient,
      contributes exactly zero.
    Args:
      loss_fn: (params, rows of a batch) -> one loss per row, float32 [rows]; rows are independent.
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      rows_per_pass: rows of one forward and backward pass.
      buckets: lengths that the rows of a pass may be cut to: the least that holds all of them.
    Returns: (sum, float32 tree like params; norms [units]; losses [units]; dropped bool [units]).
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """

    def add_unit(total, unit):
        rows, real = unit
        grad, loss = jax.lax.cond(
            real.any(),
            lambda: _unit_gradient(loss_fn, params, rows, real, rows_per_pass, buckets),
            lambda: (zeros_like(params), jnp.float32(0)),
        )
        norm = global_norm(grad)
        scale, finite = clip.scale(norm), jnp.isfinite(norm)
        # Selected, not multiplied by zero: 0 * nan is nan.
        total = jax.tree.map(lambda t, g: t + jnp.where(finite, g * scale, 0), total, grad)
        return total, (norm, loss, ~finite)

    total, (norms, losses, dropped) = jax.lax.scan(add_unit, zeros_like(params), (batch, mask))
    return total, norms, losses, dropped


def zeros_like(params: Any) -> Any:
    """A float32 tree of zeros with the shapes of `params`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def _unit_gradient(loss_fn, params, rows, real, rows_per_pass, buckets):
    """Gradient and value of sum(mask * loss) / max(1, sum(mask)) of one unit."""
    count = jnp.maximum(real.sum(), 1).astype(jnp.float32)

    def part_loss(params, part):
        rows, real = part
        return jnp.sum(jnp.where(real, loss_fn(params, rows), 0)) / count

    def add_part(carry, part):
        loss, grad = jax.value_and_grad(part_loss)(params, part)
        grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
        return jax.tree.map(jnp.add, carry, (grad, loss))

    def add_at(length):
        return lambda carry, part: add_part(carry, (buckets.trim(part[0], length), part[1]))

    parts = jax.tree.map(lambda leaf: _in_parts(leaf, rows_per_pass), (rows, real))
    start = (zeros_like(params), jnp.float32(0))
    if len(parts[1]) == 1:  # one pass, as always in ELS: no loop, no second copy of the gradient
        return add_part(start, jax.tree.map(lambda leaf: leaf[0], parts))

    ways = [add_at(length) for length in buckets.lengths] if buckets else [add_part]

    def add_one(carry, part):
        rows, real = part
        way = jnp.int32(0)
        if buckets:
            longest = jnp.max(jnp.where(real, buckets.sizes(rows), 0))
            way = jnp.searchsorted(jnp.array(buckets.lengths), longest).astype(jnp.int32)
        skip = [lambda carry, _: carry]
        return jax.lax.switch(jnp.where(real.any(), way + 1, 0), skip + ways, carry, part), None

    return jax.lax.scan(add_one, start, parts)[0]


def _in_parts(leaf: jax.Array, size: int) -> jax.Array:
    """[group, ...] -> [parts, min(size, group), ...], padded with zeros (false in a mask)."""
    group = leaf.shape[0]
    size = min(size, group)
    padding = [(0, -group % size)] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, padding).reshape(-1, size, *leaf.shape[1:])
