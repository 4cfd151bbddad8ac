"""The training loss of a step with noise, released beside its gradient and from the same draw.

As with the clip norm that moves (adaptive.py), both releases together are one Gaussian mechanism,
so the accountant sees the step that it would see without, and the gradient gets a little more
noise in exchange. A sampling unit moves the pair (clipped sum, sum of losses), each divided by the
noise on it, by at most 1/z in norm, z being the noise multiplier of the step; a user with k
examples in a step of ELS by at most k/z.
"""

import dataclasses

import numpy as np

from fedsim.clipping.adaptive import StepStats
from fedsim.noise import noisy_mean_loss

SHARE = 7.2
"""The noise on the loss, in units of z: so much leaves the gradient's multiplier within 1 % of z,
as that on the count of adaptive.py does."""


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
