"""Is there as much noise in what a training released as it claims?

An audit, unlike an attacker, hears the sums that noise is added to, and takes them off what was
released. What is left is noise, whose squared length is chi-squared. Were it something else, it
would be longer: with Gaussian noise, whatever is added to it that it does not depend on, a square
is at least as large, in distribution (Anderson 1955). So what is left and is shorter than noise
would be has less noise than is claimed, whatever the sums are. With correlated noise the rows are
first put back together, which leaves the fresh noise of each step. Nothing is said of what else the
claim rests on: who took part, and clipping.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from scipy import stats

from fedsim import accounting
from fedsim.accounting import Phases, StepEvent
from fedsim.clipping import lattice_bits
from fedsim.keys import SecretKey
from fedsim.noise import CELLS_BITS, AddNoise

LEAST = 1 / 4
"""Of the noise that is claimed: epsilon is not computed for less."""


@dataclasses.dataclass(frozen=True)
class NoiseBound:
    """What the released numbers say of the noise in them, with some confidence."""

    refuted: bool
    claimed: float
    """The noise multiplier that is claimed."""
    noise_multiplier: float
    """No larger one was used: an upper bound. Above the claim where it is not refuted."""
    numbers: int
    """Coordinates of all steps."""
    epsilon: float
    """What such a training costs at least, if users are drawn and gradients clipped as claimed."""


class ReleasedNoise:
    """Adds up the squares of what is released less what was heard, step by step."""

    def __init__(self) -> None:
        self.squares = 0.0
        """In clip norms; those of noise alone add up to sigma^2 for each number."""
        self.numbers = 0
        self.rounded = 0.0
        """The most by which rounding to the public lattice shortens a release, for each number:
        in standard deviations of the noise."""
        self._heard: list[np.ndarray] | None = None
        self._rows: list[list[np.ndarray]] = []
        """What was left of the last steps, the newest first, in clip norms."""

    def hearing(self, add_noise: AddNoise) -> AddNoise:
        """The same, with the sums heard that it adds noise to."""

        def heard(
            sums: list[np.ndarray], *, stddev: float, key: SecretKey, step: int
        ) -> list[np.ndarray]:
            self._heard = sums
            return add_noise(sums, stddev=stddev, key=key, step=step)

        return heard

    def watch(self, gradient: Any, unit: float, coefficients: np.ndarray | None = None) -> None:
        """Look at a step's privatised gradient.

        Args:
          unit: what a contribution of one clip norm is in it.
          coefficients: 1, c_1, ... of correlated noise; None: it is independent.
        """
        c = np.ones(1) if coefficients is None else coefficients
        length = float(np.linalg.norm(c))
        row = [np.asarray(leaf, np.float64).ravel() / unit for leaf in jax.tree.leaves(gradient)]
        if self._heard is not None:
            of_sum = 2.0 ** -lattice_bits(sum(leaf.size for leaf in row))
            row = [a - of_sum * b for a, b in zip(row, self._heard, strict=True)]
        self._heard = None
        self._rows = [row, *self._rows][: len(c)]
        for leaves in zip(*self._rows, strict=True):
            fresh = sum(each * leaf for each, leaf in zip(c, leaves, strict=False))
            self.squares += float(np.square(fresh).sum()) / length**2
            self.numbers += leaves[0].size
        # Half a cell of the lattice for each row; twice that covers float32 and whole numbers.
        self.rounded = 2.0**-CELLS_BITS * float(np.abs(c).sum()) / length


def audit_noise(
    seen: ReleasedNoise, phases: Phases, delta: float, significance: float
) -> NoiseBound:
    """Whether what was released can have the noise that is claimed.

    Guarantees: a training with that noise is refuted with at most this probability, whatever its
      sums are, however they follow from earlier releases, and whether or not they were heard.
    Args: phases: what is claimed; all steps have one noise multiplier.
    """
    claimed = max(e.noise_multiplier for e, _ in phases if isinstance(e, StepEvent))
    least = float(stats.chi2.ppf(significance, seen.numbers))
    longest = math.sqrt(seen.squares) + math.sqrt(seen.numbers) * seen.rounded * claimed
    found = longest / math.sqrt(least) if least > 0 else math.inf
    scale = max(LEAST, found / claimed)
    less = [
        (dataclasses.replace(e, noise_multiplier=scale * e.noise_multiplier), count)
        if isinstance(e, StepEvent)
        else (e, count)
        for e, count in phases
    ]
    epsilon = accounting.epsilon(less, delta) if math.isfinite(scale) else 0.0
    return NoiseBound(found < claimed, claimed, found, seen.numbers, epsilon)
