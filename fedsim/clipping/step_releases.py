"""What a step may release beside its gradient, from the same draw: a clip norm that moves, a loss.

Each release and the gradient together are one Gaussian mechanism, so the accountant sees the step
that it would see without, and the gradient gets a little more noise in exchange. A sampling unit
moves (clipped sum, count or sum of losses), each divided by the noise on it, by at most 1/z in
norm, z being the noise multiplier of the step. A user with k examples in a step of ELS moves it by
at most k/z, which is what Theorem 1 accounts.

`AdaptiveClip` follows a quantile of the gradient norms (Andrew et al. 2021): how many units have a
norm within C is released, and C <- C exp(-rate (share within C - quantile)). The quantile is of
users in ULS and of examples in ELS.
"""

import dataclasses
import math
from typing import Protocol

import numpy as np

from fedsim.noise import noisy_mean_loss, noisy_number

RATE = 0.2
"""How far C moves, on a logarithmic scale; the value of Andrew et al. 2021."""

PER_HALF = 2**20  # parts that half a unit, the sensitivity of the count, is made of
SMALLEST, LARGEST = 1e-6, 1e6  # norms outside over- or underflow float32


class StepStats(Protocol):
    """What a release beside a gradient is computed from: see `engine.Stats`."""

    @property
    def counted_norms(self) -> np.ndarray: ...

    @property
    def counted_losses(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class AdaptiveClip:
    """What a step releases to move the clip norm; all public."""

    quantile: float
    """gamma: share of units whose norm is to be within C. In (0, 1)."""
    count: float
    """B or M."""
    noise_multiplier: float
    """z, of the whole step: what is accounted. 0: no noise anywhere."""

    @property
    def count_stddev(self) -> float:
        """sigma_b, of the noise on the count of units within C.

        count / 20 as in Andrew et al., or as much as leaves the gradient's multiplier within 1 % of
        z, which is more where few units take part.
        """
        return max(self.count / 20, 3.6 * self.noise_multiplier) if self.noise_multiplier else 0.0

    @property
    def gradient_noise_multiplier(self) -> float:
        """z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2): what the gradient gets. In the count, a unit is
        1/2 or -1/2. Source: Andrew et al. 2021, Theorem 1."""
        z = self.noise_multiplier
        return (z**-2 - (2 * self.count_stddev) ** -2) ** -0.5 if z else 0.0

    purpose = "clip quantile"
    """Of the randomness: `SecretKey.generator(purpose, step)`."""

    def release(
        self, clip_norm: float, stats: StepStats, rng: np.random.Generator
    ) -> dict[str, float]:
        """What a step releases beside its gradient: the next step's clip norm."""
        return {"clip_norm": self.next(clip_norm, stats.counted_norms, rng)}

    def next(self, clip_norm: float, norms: np.ndarray, rng: np.random.Generator) -> float:
        """The next step's C, from the norms [units] of this one's draw before clipping.

        Guarantees: one unit changes the released count by at most 1/2, whatever its norm; nan is
        not within C.
        """
        # In whole numbers, as the sum of gradients is; see noise/independent.py.
        within = int(np.sum(np.where(norms <= clip_norm, 1, -1))) * PER_HALF
        stddev = 2 * self.count_stddev * PER_HALF
        released = noisy_number(within, stddev, rng) / (2 * PER_HALF)
        share = released / self.count + 0.5
        farthest = math.log(LARGEST / SMALLEST)
        change = min(max(-RATE * (share - self.quantile), -farthest), farthest)
        return min(max(clip_norm * math.exp(change), SMALLEST), LARGEST)


SHARE = 7.2
"""The noise on the loss, in units of z: so much leaves the gradient's multiplier within 1 % of z,
as that on the count of `AdaptiveClip` does."""


@dataclasses.dataclass(frozen=True)
class NoisyLoss:
    """What a step releases of its loss; all public."""

    bound: float
    """L: a unit's mean loss above counts as L. Nats per token."""
    count: float
    """B or M."""
    noise_multiplier: float
    """z, of the whole step: what is accounted. 0: no noise anywhere."""

    @property
    def stddev(self) -> float:
        """The standard deviation of the noise on the sum of losses, in units of L / 2."""
        return SHARE * self.noise_multiplier

    purpose = "loss"
    """Of the randomness: `SecretKey.generator(purpose, step)`."""

    def release(
        self, clip_norm: float, stats: StepStats, rng: np.random.Generator
    ) -> dict[str, float]:
        """What a step releases beside its gradient: its loss."""
        return {"loss": self.mean(stats.counted_losses, rng)}

    def mean(self, losses: np.ndarray, rng: np.random.Generator) -> float:
        """The mean loss of the units [units] of a draw that have rows, with noise.

        Guarantees: one unit changes the sum by at most L / 2, around which its loss counts,
          whatever it is; what is not finite counts as L, and a unit without rows adds nothing.
        """
        own = {"bound": self.bound, "count": self.count, "stddev": self.stddev}
        return noisy_mean_loss(losses, **own, rng=rng)
