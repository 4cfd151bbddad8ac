"""The clip function and the sensitivity that goes with it: one record, so they cannot disagree."""

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
