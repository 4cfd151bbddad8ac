"""The clip function and the sensitivity that goes with it: one record, so they cannot disagree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

TINY = jnp.finfo(jnp.float32).tiny


@dataclasses.dataclass(frozen=True)
class Clip:
    """clip(g, C), plain: g min(1, C/|g|), or normalised: g min(1/C, 1/|g|) (De et al. 2022).

    Guarantees: a unit changes the clipped sum by at most `sensitivity` in L2 norm, whatever its
      gradient; one with a non-finite norm contributes exactly zero.
    """

    norm: float  # C
    normalised: bool = False

    @property
    def sensitivity(self) -> float:
        """C when plain; 1 when normalised, so that learning rate and C decouple."""
        return 1.0 if self.normalised else self.norm

    def scale(self, norms: jax.Array) -> jax.Array:
        """The factor for gradients of these norms, float32, zero where a norm is not finite."""
        factor = jnp.minimum(jnp.float32(1), jnp.float32(self.norm) / jnp.maximum(norms, TINY))
        if self.normalised:
            factor = factor / jnp.float32(self.norm)
        return jnp.where(jnp.isfinite(norms), factor, jnp.float32(0))


def global_norm(tree: Any) -> jax.Array:
    """L2 norm over all leaves, float32 whatever their type: half precision would underflow to 0
    and let a gradient pass unclipped."""
    leaves = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(leaves, start=jnp.float32(0)))
