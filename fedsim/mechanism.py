"""The Gaussian mechanism on a clipped sum: the only place where noise is added to gradients.

`noise` draws the noise. `noisy_mean` only scales it to the sensitivity and divides by the public
count.

A step can release more from the same draw: an adaptive clip norm, a noisy loss. Each release and
the gradient together are one Gaussian mechanism. The accountant's event of the step stays the same,
and the gradient gets a little more noise in exchange. A sampling unit moves (clipped sum, count or
sum of losses), each divided by the standard deviation of its noise, by at most 1/z in norm, z being
the noise multiplier of the step. A user with k examples in a step of ELS moves it by at most k/z,
as Theorem 1 accounts.

`AdaptiveClip` follows a quantile of the gradient norms (Andrew et al. 2021): it releases the noisy
number of units with a norm within C, and C <- C exp(-rate (share within C - quantile)). The
quantile is over users in ULS and over examples in ELS.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from fedsim.clipping import Clip, lattice_bits
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.noise import (
    AddNoise,
    add_gaussian,
    in_blocks,
    noisy_mean_loss,
    noisy_number,
    release_shift,
)

RATE = 0.2
"""Learning rate of log C; the value of Andrew et al. 2021."""

SHARE = 7.2
"""Noise on the loss in units of z: it leaves the gradient's multiplier within 1 % of z, as the
noise on the count of `AdaptiveClip` does."""

PER_HALF = 2**20  # parts of 1/2, the sensitivity of the count
SMALLEST, LARGEST = 1e-6, 1e6  # norms outside overflow or underflow float32


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
    expect("count", count, 0 < count < np.inf, "> 0")
    expect("noise_multiplier", noise_multiplier, 0 <= noise_multiplier < np.inf, ">= 0")
    if clip.in_float32:
        expect("noise_multiplier", noise_multiplier, noise_multiplier == 0, "0 for float32 sums")
        return NoisyMean(grad_sum, 1 / count)
    leaves, treedef = jax.tree.flatten(grad_sum)
    dimensions = sum(np.size(leaf) for leaf in leaves)
    stddev = noise_multiplier * 2.0 ** lattice_bits(dimensions)  # in units of clip.unit
    flat = [np.ravel(leaf) for leaf in leaves]
    noisy = add_noise(flat, stddev=stddev, key=key, step=step)
    shaped = [leaf.reshape(np.shape(like)) for leaf, like in zip(noisy, leaves, strict=True)]
    unit = clip.unit(dimensions) * 2.0 ** release_shift(stddev) / count
    return NoisyMean(jax.tree.unflatten(treedef, shaped), unit)


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """The release that adapts the clip norm. Its fields are public."""

    quantile: float
    """gamma: target share of units with a norm within C. In (0, 1)."""
    count: float
    """B or M."""
    noise_multiplier: float
    """z, of the whole step: what is accounted. 0: no noise anywhere."""

    @property
    def count_stddev(self) -> float:
        """sigma_b: standard deviation of the noise on the number of units within C.

        It is count / 20, as in Andrew et al., or 3.6 z if that is more: then the gradient's
        multiplier stays within 1 % of z when few units take part.
        """
        return max(self.count / 20, 3.6 * self.noise_multiplier) if self.noise_multiplier else 0.0

    @property
    def gradient_noise_multiplier(self) -> float:
        """z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2): noise multiplier of the gradient.

        In the count, a unit is 1/2 or -1/2. Source: Andrew et al. 2021, Theorem 1.
        """
        z = self.noise_multiplier
        return (z**-2 - (2 * self.count_stddev) ** -2) ** -0.5 if z else 0.0

    purpose = "clip quantile"
    """Purpose of its randomness: `SecretKey.generator(purpose, step)`."""

    def release(self, clip_norm: float, stats: Any, rng: np.random.Generator) -> dict[str, float]:
        """Release the next step's clip norm.

        Guarantees: one unit changes the count by at most 1/2, whatever its norm; nan is not within
          C.
        Args:
          clip_norm: C of this step.
          stats: per-unit statistics of this step, `engine.Stats`.
          rng: generator of (`purpose`, step) alone.
        """
        # In whole numbers, like the sum of gradients; see noise/independent.py.
        within = int(np.sum(np.where(stats.counted_norms <= clip_norm, 1, -1))) * PER_HALF
        stddev = 2 * self.count_stddev * PER_HALF
        released = noisy_number(within, stddev, rng) / (2 * PER_HALF)
        share = released / self.count + 0.5
        farthest = math.log(LARGEST / SMALLEST)
        change = min(max(-RATE * (share - self.quantile), -farthest), farthest)
        return {"clip_norm": min(max(clip_norm * math.exp(change), SMALLEST), LARGEST)}


@dataclasses.dataclass(frozen=True)
class NoisyLoss:
    """The release of a step's mean loss. Its fields are public."""

    bound: float
    """L: a larger mean loss of a unit counts as L. Nats per token."""
    count: float
    """B or M."""
    noise_multiplier: float
    """z, of the whole step: what is accounted. 0: no noise anywhere."""

    @property
    def stddev(self) -> float:
        """Standard deviation of the noise on the sum of losses, in units of L / 2."""
        return SHARE * self.noise_multiplier

    purpose = "loss"
    """Purpose of its randomness: `SecretKey.generator(purpose, step)`."""

    def release(self, clip_norm: float, stats: Any, rng: np.random.Generator) -> dict[str, float]:
        """Release the step's mean loss; arguments as of `AdaptiveClip.release`.

        Guarantees: one unit changes the sum by at most L / 2, whatever its loss; see
          `noise.noisy_mean_loss`.
        """
        mean = noisy_mean_loss(
            stats.counted_losses, bound=self.bound, count=self.count, stddev=self.stddev, rng=rng
        )
        return {"loss": mean}
