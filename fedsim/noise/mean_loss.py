"""A mean of losses with Gaussian noise: of the units of a step, or of held-out users."""

import numpy as np

from fedsim.noise.independent import noisy_number

PER_UNIT = 2**20  # parts that L / 2, the sensitivity of the sum, is made of


def noisy_mean_loss(
    losses: np.ndarray, *, bound: float, count: float, stddev: float, rng: np.random.Generator
) -> float:
    """The mean of losses, each cut to [0, L], with noise on their sum.

    Guarantees: the Gaussian mechanism, on a lattice: a loss counts as its distance from L / 2, so
      that one more or less moves the sum by L / 2 at most, whatever it is. What is not finite
      counts as L.
    Args:
      losses: [those who have texts], nats. Whoever has none adds nothing: they count as L / 2.
      bound: L > 0, public.
      count: what the sum is divided by, public, with those who have no texts.
      stddev: of the noise on the sum, in units of L / 2.
      rng: of this release alone.
    """
    losses = np.nan_to_num(losses.astype(np.float64), nan=bound, posinf=bound, neginf=0.0)
    cut = 2 * np.clip(losses, 0.0, bound) / bound - 1
    total = int(np.rint(cut * PER_UNIT).astype(np.int64).sum())
    released = noisy_number(total, stddev * PER_UNIT, rng) / PER_UNIT
    return bound / 2 * (1 + released / count)
