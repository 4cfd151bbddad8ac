"""A unit's contribution to the sum: its clipped gradient in whole numbers, of a proven norm.

What follows holds for any float32 gradient g of d coordinates, and for arithmetic that rounds each
result by a factor of at most 1 +- u, u = 2^-24, adds in any order, and may take what is below
2^-126 for zero.

- Squares are added along an axis of n numbers, the sums in blocks of BLOCK, the blocks' sums in
  blocks again, and so on. All terms are positive, so a sum of n numbers is right up to (1 +- u)^n
  in any order, and the whole up to (1 +- u)^m, m = n + BLOCK levels + leaves + 2. So
  |g| <= norm (1 + m u) + 2^-40; the last term is for squares that were taken for zero.
- Coordinate i becomes z_i = round(g_i s) with s = (2^bits - sqrt(d)/2) (1 - SLACK) / max(C, |g|),
  |g| being the bound above. SLACK covers the rounding of s itself and of g_i s. Rounding to whole
  numbers moves z by at most sqrt(d)/2. Hence |z| <= s |g| + sqrt(d)/2 <= 2^bits.

It rests on three things beside the arithmetic. That g is one array in memory for both: a compiler
may compute s, a square or a z anew for each reader, all within the bounds above, but not g itself.
`scan.stored` sees to that, and before a program is used
`engine.programs` looks for its loop, and at what hostile units contribute to programs like it.
That sums are added up in the order given: XLA merges sums of sums unless a barrier is between
them, and it drops barriers only after that; LLVM changes no order. And that whole numbers are added
as such.

Devices that have a gradient between them each add squares of their part, and then these sums: n
numbers that are cut in k equal parts go through n / k + k - 1 <= n additions, wherever XLA puts the
second kind, and padding is zeros, which round nothing. Each device rounds its part by an s that is
taken from a bound of the whole |g|. It rests on devices that have the same where they should.

z stands for z times `Clip.unit`: C 2^-bits with plain clipping, 2^-bits with normalised, whose
whole numbers are the same. Sums of whole numbers are exact in any order: a unit that is missing
changes a sum by its z and by nothing else.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

TINY = jnp.finfo(jnp.float32).tiny
LEAST_BITS = 20
MODEL = "model"
"""Scope of the model's operations in a program. All others make norms and sums, on which the
guarantee rests."""
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Clip:
    """clip(g, C), plain: g min(1, C/|g|), or normalised: g min(1/C, 1/|g|) (De et al. 2022).

    Guarantees: a unit changes the clipped sum by at most `sensitivity` in L2 norm, whatever its
      gradient; one with a non-finite norm contributes exactly zero.
    """

    norm: float  # C
    normalised: bool = False
    in_float32: bool = False
    """Sums are floating-point numbers, finer than whole ones and without a proof: for training
    without noise."""

    @property
    def sensitivity(self) -> float:
        """C when plain; 1 when normalised, so that learning rate and C decouple."""
        return 1.0 if self.normalised else self.norm

    def unit(self, dimensions: int) -> float:
        """What the number 1 stands for in a sum of gradients of so many coordinates: a
        contribution's L2 norm is at most 2^bits units, which is the sensitivity."""
        return self.sensitivity * 2.0 ** -lattice_bits(dimensions)

    def scale(self, norms: jax.Array) -> jax.Array:
        """The factor for gradients of these norms, float32, zero where a norm is not finite."""
        factor = jnp.minimum(jnp.float32(1), jnp.float32(self.norm) / jnp.maximum(norms, TINY))
        if self.normalised:
            factor = factor / jnp.float32(self.norm)
        return jnp.where(jnp.isfinite(norms), factor, jnp.float32(0))


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of matrices of which a norm or a sum is made, float32. By default accelerators
    round float32 factors to 11 bits (TF32) or 8 (bfloat16) first."""
    return jnp.matmul(a, b, precision=HIGHEST, preferred_element_type=jnp.float32)


def num_coordinates(tree: Any) -> int:
    """Numbers in all leaves, d."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def lattice_bits(dimensions: int) -> int:
    """How fine contributions are rounded: the sensitivity is 2^bits units. Public; what rounding
    takes from C, sqrt(dimensions) / 2 units, is at most 0.2 % of it."""
    return max(LEAST_BITS, math.ceil(math.log2(max(dimensions, 1)) / 2) + 8)


def lattice_capacity(dimensions: int) -> int:
    """How many contributions an int32 sum can hold, whatever they are."""
    return 2 ** (31 - lattice_bits(dimensions)) - 1


BLOCK = 256
LONG = 4096
ROUNDING = 2.0**-24  # u, of float32
SLACK = 2.0**-20  # 16 u, for a root, a quotient and four products
UNDERFLOW = 2.0**-40  # more than sqrt(d) 2^-63


def contribution(grad: Any, real: jax.Array, clip: Clip) -> tuple[Any, jax.Array, jax.Array]:
    """What a unit adds to the sum.

    Guarantees: sum(z^2) <= 4^bits, in exact arithmetic; z is 0 where the norm is not finite.
    Args:
      grad: float32 tree.
      real: bool, whether the unit has rows; without, z and norm are 0.
    Returns: (z, int32 tree like grad; the norm of grad before clipping, float32; whether that was
      not finite, bool).
    """
    norm, bound = norm_and_bound(grad)
    scale, dropped = factor(bound, real, clip, num_coordinates(grad))
    z = jax.tree.map(lambda leaf: whole(leaf, scale), grad)
    return z, jnp.where(real, norm, 0), dropped


def factor(
    bound: jax.Array, real: jax.Array, clip: Clip, dimensions: int
) -> tuple[jax.Array, jax.Array]:
    """(s, whether the unit is dropped) of gradients whose norm is at most `bound`."""
    longest = 2.0 ** lattice_bits(dimensions) - math.sqrt(dimensions) / 2
    finite = jnp.isfinite(bound) | ~real
    # The division comes last: XLA does not do it again for every coordinate, as it would a choice.
    most = jnp.where(finite, jnp.maximum(jnp.float32(clip.norm), bound), 1)
    return jnp.where(finite & real, jnp.float32(longest * (1 - SLACK)), 0) / most, ~finite


def whole(leaf: jax.Array, scale: jax.Array) -> jax.Array:
    """Coordinates times s, rounded; int32. Selected, not multiplied by zero: 0 * nan is nan."""
    return jnp.round(jnp.where(scale > 0, leaf * scale, 0)).astype(jnp.int32)


def norm_and_bound(tree: Any) -> tuple[jax.Array, jax.Array]:
    """The L2 norm over all leaves as computed, and what it is at most; float32. Not finite where a
    coordinate is not."""
    leaves = jax.tree.leaves(tree)
    return root_and_bound(sum_of_squares(tree), additions(tree) + len(leaves))


def root_and_bound(squares: jax.Array, additions: int) -> tuple[jax.Array, jax.Array]:
    """The root of a sum of squares, and what the norm is at most.

    Args: additions: how many, at most, a square went through.
    """
    norm, error = jnp.sqrt(squares), (additions + 2) * ROUNDING
    return norm, norm * jnp.float32(1 + error) + jnp.float32(UNDERFLOW)


def sum_of_squares(tree: Any) -> jax.Array:
    """The sum over all leaves, one after another."""
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return sum(map(_sum_of_squares, leaves), start=jnp.float32(0))


def additions(tree: Any) -> int:
    """How many additions, at most, a square goes through until its leaf's are added up."""
    return max(map(_additions, jax.tree.leaves(tree)), default=0)


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    values = jnp.square(leaf)
    # Along an axis of the leaf as it is: of reshaped numbers XLA for processors takes thrice as
    # long. Without barriers it might make one long sum of two short ones.
    if (axis := _axis(leaf)) is not None:
        values = jax.lax.optimization_barrier(values.sum(axis=axis))
    values = values.reshape(-1)
    for _ in range(_levels(len(values)) - 1):
        whole = len(values) // BLOCK * BLOCK
        blocks = values[:whole].reshape(-1, BLOCK).sum(axis=1)
        values = jax.lax.optimization_barrier(jnp.append(blocks, values[whole:].sum()))
    return values.sum()


def _axis(leaf: jax.Array) -> int | None:
    """The axis along which squares are added first: the last that is not long, or none."""
    return next((i for i in reversed(range(leaf.ndim)) if 1 < leaf.shape[i] <= LONG), None)


def _additions(leaf: jax.Array) -> int:
    """How many additions, at most, a square goes through in `_sum_of_squares`, on one device or on
    several: there are as many numbers, and none is added twice."""
    along = 1 if (axis := _axis(leaf)) is None else leaf.shape[axis]
    return along + BLOCK * (_levels(leaf.size // along) - 1) + min(BLOCK, leaf.size // along)


def _levels(count: int) -> int:
    """How often so many numbers are added up in blocks until one is left."""
    levels = 1
    while count > BLOCK:
        count, levels = count // BLOCK + 1, levels + 1
    return levels


def scaled(grad: Any, real: jax.Array, clip: Clip) -> tuple[Any, jax.Array, jax.Array]:
    """Like `contribution`, but float32, of a norm that is C up to rounding: no proof."""
    norm, _ = norm_and_bound(grad)
    norm = jnp.where(real, norm, 0)
    scale, finite = clip.scale(norm), jnp.isfinite(norm)
    added = jax.tree.map(lambda leaf: jnp.where(finite & real, leaf * scale, 0), grad)
    return added, norm, ~finite
