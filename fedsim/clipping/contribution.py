"""A unit's contribution to the sum: its clipped gradient in whole numbers, of a proven norm.

`in_passes` adds the contributions of units, a pass at a time.

The proof holds for any float32 gradient g of d coordinates, and for arithmetic that rounds each
result by a factor of at most 1 +- u, u = 2^-24, adds in any order, and may flush numbers below
2^-126 to zero.

- Squares are added along an axis of n numbers, their sums in blocks of BLOCK, the blocks' sums in
  blocks again, and so on. All terms are positive, so a sum of n numbers is right up to (1 +- u)^n
  in any order, and the whole up to (1 +- u)^m, m = n + BLOCK levels + leaves + 2. So
  |g| <= norm (1 + m u) + 2^-40; the last term is for squares that were flushed to zero.
- Coordinate i becomes z_i = round(g_i s) with s = (2^bits - sqrt(d)/2) (1 - SLACK) / max(C, |g|),
  |g| being the bound above. SLACK covers the rounding of s itself and of g_i s. Rounding to whole
  numbers moves z by at most sqrt(d)/2. Hence |z| <= s |g| + sqrt(d)/2 <= 2^bits.

The proof has three premises beside the arithmetic:

- The norm and z read the same array g in memory. A compiler may recompute s, a square or a z for
  each reader, all within the bounds above, but not g. `stored` enforces this; before a program is
  used, `engine.programs` checks that its loop is there and what hostile units contribute to
  programs like it.
- Sums are added in the order given. XLA merges sums of sums unless a barrier is between them, and
  drops barriers only after that; LLVM changes no order.
- Whole numbers are added as whole numbers.

A compiler may be told that all floats are finite, and then folds `isfinite` to true. So `is_finite`
compares the bits of a norm as whole numbers, and `whole` compares every coordinate as a whole
number: one outside +-2^bits, which no finite gradient has, is 0.

z counts units of `Clip.unit`: C 2^-bits with plain clipping, 2^-bits with normalised clipping,
whose whole numbers are the same. Sums of whole numbers are exact in any order: removing a unit
changes a sum by its z and by nothing else.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TINY = jnp.finfo(jnp.float32).tiny
MIN_BITS = 20
MODEL = "model"
"""Name scope of the model's operations in a program. The guarantee depends on the precision of all
other operations, which compute norms and sums."""
HIGHEST = jax.lax.Precision.HIGHEST
LossFn = Callable[[Any, Any], jax.Array]
"""(params, rows of a batch) -> one loss per row, float32 [rows]."""
Sums = tuple[Any, jax.Array, jax.Array, jax.Array]
"""(Sum; norms, losses and dropped of the units, [units] each.)"""


@dataclasses.dataclass(frozen=True)
class Clip:
    """clip(g, C), plain: g min(1, C/|g|), or normalised: g min(1/C, 1/|g|) (De et al. 2022).

    Guarantees: a unit changes the clipped sum by at most `sensitivity` in L2 norm, whatever its
      gradient; one with a non-finite norm contributes exactly zero.
    """

    norm: float
    """C, the clip norm. > 0."""
    normalised: bool = False
    """True: gradients are also divided by C, which decouples the learning rate from C."""
    in_float32: bool = False
    """True: sums are float32 instead of whole numbers, without a proof; for training without
    noise."""

    @property
    def sensitivity(self) -> float:
        """Bound on a contribution's L2 norm: C with plain clipping, 1 with normalised clipping."""
        return 1.0 if self.normalised else self.norm

    def unit(self, dimensions: int) -> float:
        """Value of the whole number 1 in a sum: sensitivity 2^-bits, for d = `dimensions`."""
        return self.sensitivity * 2.0 ** -lattice_bits(dimensions)

    def scale(self, norms: jax.Array) -> jax.Array:
        """Return the factor for gradients of these norms, float32; 0 where a norm is not finite."""
        factor = jnp.minimum(jnp.float32(1), jnp.float32(self.norm) / jnp.maximum(norms, TINY))
        if self.normalised:
            factor = factor / jnp.float32(self.norm)
        return jnp.where(is_finite(norms), factor, jnp.float32(0))


def is_finite(x: jax.Array) -> jax.Array:
    """True where a float32 number is neither nan nor infinite, decided on its bits."""
    without_sign = jax.lax.bitcast_convert_type(x, jnp.uint32) << 1
    return without_sign < jnp.uint32(0xFF000000)  # all bits of the exponent


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply matrices in full float32 precision, for norms and sums.

    By default accelerators first round float32 factors to 11 bits (TF32) or 8 bits (bfloat16).
    """
    return jnp.matmul(a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def num_coordinates(tree: Any) -> int:
    """Count the numbers in all leaves: d."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def lattice_bits(dimensions: int) -> int:
    """Bits of the lattice of contributions: the sensitivity is 2^bits units. Public.

    Rounding costs at most sqrt(dimensions) / 2 units of the clip norm: 0.2 %.
    """
    return max(MIN_BITS, math.ceil(math.log2(max(dimensions, 1)) / 2) + 8)


def lattice_capacity(dimensions: int) -> int:
    """Number of contributions that an int32 sum holds without overflow, whatever they are."""
    return 2 ** (31 - lattice_bits(dimensions)) - 1


BLOCK = 256
LONG = 4096
ROUNDING = 2.0**-24  # u of float32
SLACK = 2.0**-20  # 16 u: a root, a quotient and four products
UNDERFLOW = 2.0**-40  # above sqrt(d) 2^-63


def contribution(grad: Any, real: jax.Array, clip: Clip) -> tuple[Any, jax.Array, jax.Array]:
    """Clip a unit's gradient and round it to whole numbers.

    Guarantees: sum(z^2) <= 4^bits, in exact arithmetic; z is 0 where the norm is not finite.
    Args:
      grad: tree of float32 arrays.
      real: bool, false if the unit has no rows; then z and the norm are 0.
      clip: the clip norm C.
    Returns: (z, int32 tree like grad; the norm of grad before clipping, float32; true if that norm
      was not finite, bool).
    """
    norm, bound = norm_and_bound(grad)
    dimensions = num_coordinates(grad)
    scale, dropped = factor(bound, real, clip, dimensions)
    z = jax.tree.map(lambda leaf: whole(leaf, scale, dimensions), grad)
    return z, jnp.where(real, norm, 0), dropped


def factor(
    bound: jax.Array, real: jax.Array, clip: Clip, dimensions: int
) -> tuple[jax.Array, jax.Array]:
    """Return s for a gradient of norm at most `bound`, and true if the unit is dropped."""
    longest = 2.0 ** lattice_bits(dimensions) - math.sqrt(dimensions) / 2
    finite = is_finite(bound) | ~real
    # The division comes last: XLA would recompute a `where` for every coordinate.
    most = jnp.where(finite, jnp.maximum(jnp.float32(clip.norm), bound), 1)
    return jnp.where(finite & real, jnp.float32(longest * (1 - SLACK)), 0) / most, ~finite


def whole(leaf: jax.Array, scale: jax.Array, dimensions: int) -> jax.Array:
    """Multiply coordinates by s and round: int32, at most 2^bits whatever the coordinate is."""
    # Selects zeros, because 0 * nan is nan.
    z = jnp.round(jnp.where(scale > 0, leaf * scale, 0)).astype(jnp.int32)
    # One comparison for both signs, of whole numbers: nan may be any of them after the conversion.
    most = 2 ** lattice_bits(dimensions)
    return jnp.where((z + most).astype(jnp.uint32) <= jnp.uint32(2 * most), z, 0)


def norm_and_bound(tree: Any) -> tuple[jax.Array, jax.Array]:
    """Return the computed L2 norm over all leaves and an upper bound of the true norm, float32.

    Both are not finite if a coordinate is not.
    """
    leaves = jax.tree.leaves(tree)
    return root_and_bound(sum_of_squares(tree), additions(tree) + len(leaves))


def root_and_bound(squares: jax.Array, additions: int) -> tuple[jax.Array, jax.Array]:
    """Return the root of a computed sum of squares and an upper bound of the true norm.

    Args:
      squares: the computed sum, float32.
      additions: the most additions that a square went through.
    """
    norm, error = jnp.sqrt(squares), (additions + 2) * ROUNDING
    return norm, norm * jnp.float32(1 + error) + jnp.float32(UNDERFLOW)


def sum_of_squares(tree: Any) -> jax.Array:
    """Add the squares of all leaves, one leaf after another; float32."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return sum(map(_sum_of_squares, leaves), start=jnp.float32(0))


def additions(tree: Any) -> int:
    """The most additions that a square goes through in the sum over its leaf."""
    return max(map(_additions, jax.tree.leaves(tree)), default=0)


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    values = jnp.square(leaf)
    # Along an axis of the unreshaped leaf: XLA on CPUs takes three times as long after a reshape.
    # Without barriers it may merge two short sums into a long one.
    if (axis := _axis(leaf)) is not None:
        values = jax.lax.optimization_barrier(values.sum(axis=axis))
    values = values.reshape(-1)
    for _ in range(_levels(len(values)) - 1):
        whole = len(values) // BLOCK * BLOCK
        blocks = values[:whole].reshape(-1, BLOCK).sum(axis=1)
        values = jax.lax.optimization_barrier(jnp.append(blocks, values[whole:].sum()))
    return values.sum()


def _axis(leaf: jax.Array) -> int | None:
    """Axis along which squares are added first: the last of at most LONG numbers; None: none."""
    return next((i for i in reversed(range(leaf.ndim)) if 1 < leaf.shape[i] <= LONG), None)


def _additions(leaf: jax.Array) -> int:
    """The most additions that a square goes through in `_sum_of_squares`, on one device or more:
    the number of terms is the same, and none is added twice."""
    along = 1 if (axis := _axis(leaf)) is None else leaf.shape[axis]
    return along + BLOCK * (_levels(leaf.size // along) - 1) + min(BLOCK, leaf.size // along)


def _levels(count: int) -> int:
    """Levels of blocked addition from `count` numbers to one."""
    levels = 1
    while count > BLOCK:
        count, levels = count // BLOCK + 1, levels + 1
    return levels


def scaled(grad: Any, real: jax.Array, clip: Clip) -> tuple[Any, jax.Array, jax.Array]:
    """Like `contribution`, but in float32, with a norm of C up to rounding and without a proof."""
    norm, _ = norm_and_bound(grad)
    norm = jnp.where(real, norm, 0)
    scale, finite = clip.scale(norm), is_finite(norm)
    added = jax.tree.map(lambda leaf: jnp.where(finite & real, leaf * scale, 0), grad)
    return added, norm, ~finite


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
        lambda leaf: to_multiple(jnp.asarray(leaf), side_by_side), (batch, mask)
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
    number = -(-reach(mask.any(axis=1)) // side_by_side)
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


def reach(real: jax.Array) -> jax.Array:
    """Number of entries up to the last true one, int32."""
    return jnp.max(jnp.where(real, jnp.arange(1, len(real) + 1), 0), initial=0)


def to_multiple(leaf: jax.Array, size: int) -> jax.Array:
    """Pad [n, ...] with zeros to a multiple of `size`."""
    return jnp.pad(leaf, [(0, -len(leaf) % size)] + [(0, 0)] * (leaf.ndim - 1))


def zeros_like(params: Any, dtype: Any = jnp.float32) -> Any:
    """Return a tree of zeros with the shapes of `params`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), params)
