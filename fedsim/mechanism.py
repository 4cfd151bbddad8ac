"""The Gaussian mechanism on a clipped sum: the only place where noise is added to gradients.

`noise` draws the noise. This module only scales it to the sensitivity and divides by the public
count.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from fedsim.clipping import Clip, lattice_bits
from fedsim.errors import ConfigError
from fedsim.keys import SecretKey
from fedsim.noise import AddNoise, add_gaussian, in_blocks, release_shift


@dataclasses.dataclass(frozen=True)
class NoisyMean:
    """A released gradient: whole numbers and the unit that they count."""

    numbers: Any
    """Tree of NumPy int32 or int64, in the shapes of the parameters; float32 without noise."""
    unit: float
    """Value of the number 1, in units of the gradient. Public."""

    def values(self) -> Any:
        """Return the privatised gradient, numbers * unit, as a tree of NumPy float32 arrays."""
        leaves, treedef = jax.tree.flatten(self.numbers)
        flat, unit = [np.ravel(leaf) for leaf in leaves], np.float32(self.unit)
        scaled = [np.empty(leaf.shape, np.float32) for leaf in flat]

        def fill(leaf: int, _: int, part: slice) -> None:
            np.multiply(flat[leaf][part], unit, out=scaled[leaf][part], dtype=np.float32)

        in_blocks(fill, flat)
        shaped = [leaf.reshape(np.shape(like)) for leaf, like in zip(scaled, leaves, strict=True)]
        return jax.tree.unflatten(treedef, shaped)


def noisy_mean(
    grad_sum: Any,
    *,
    clip: Clip,
    noise_multiplier: float,
    count: float,
    key: SecretKey,
    step: int,
    add_noise: AddNoise = add_gaussian,
) -> NoisyMean:
    """(grad_sum + N(0, (C sigma)^2 I)) / count: the last line of a step of Algorithms 1 and 2.

    Guarantees: if one unit changes grad_sum by at most `clip.sensitivity` in L2 norm, as in a
      clipped sum of `clip`, the result is the Gaussian mechanism with noise multiplier sigma,
      rounded to a public lattice, up to `accounting.slack`. Noise is independent across coordinates
      and, with `add_gaussian`, across steps and segments.
    Args:
      grad_sum: tree of whole numbers in units of `clip.unit`; float32 with `clip.in_float32`.
      clip: the clipping that grad_sum was computed with.
      noise_multiplier: sigma; must be 0 with `clip.in_float32`.
      count: B or M, the *expected* number of units; must not depend on the draw.
      key: secret key of the run in its segment; with `step` it determines the noise.
      step: t, from 0.
      add_noise: kind of noise; `noise.Correlated` documents its own guarantee over all steps.
    Returns: the released gradient.
    Raises: ConfigError: count <= 0 or noise_multiplier < 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """
    if not 0 < count < np.inf:
        raise ConfigError.of("count", count, "> 0")
    if not 0 <= noise_multiplier < np.inf:
        raise ConfigError.of("noise_multiplier", noise_multiplier, ">= 0")
    if clip.in_float32:
        if noise_multiplier:
            raise ConfigError.of("noise_multiplier", noise_multiplier, "0 for float32 sums")
        return NoisyMean(grad_sum, 1 / count)
    leaves, treedef = jax.tree.flatten(grad_sum)
    dimensions = sum(np.size(leaf) for leaf in leaves)
    stddev = noise_multiplier * 2.0 ** lattice_bits(dimensions)  # in units of clip.unit
    flat = [np.ravel(leaf) for leaf in leaves]
    noisy = add_noise(flat, stddev=stddev, key=key, step=step)
    shaped = [leaf.reshape(np.shape(like)) for leaf, like in zip(noisy, leaves, strict=True)]
    unit = clip.unit(dimensions) * 2.0 ** release_shift(stddev) / count
    return NoisyMean(jax.tree.unflatten(treedef, shaped), unit)
