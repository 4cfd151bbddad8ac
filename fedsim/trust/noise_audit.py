"""Test of whether a training's releases have as much noise as claimed.

Unlike an attacker, the audit records the sums before noise, and subtracts them from the releases.
The rest is noise, whose squared length is chi-squared. If it were noise plus anything independent
of it, it would be longer: adding something to Gaussian noise that it does not depend on makes a
square at least as large, in distribution (Anderson 1955). So a rest that is shorter than the
claimed noise has less noise, whatever the sums are. Correlated noise is first combined to the fresh
noise of each step. Sampling and clipping, on which the claim also depends, are not tested.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from scipy import stats

from fedsim import accounting
from fedsim.accounting import Events, StepEvent
from fedsim.clipping import lattice_bits
from fedsim.keys import SecretKey
from fedsim.noise import CELLS_BITS, AddNoise

LEAST = 1 / 4
"""Smallest share of the claimed noise for which epsilon is computed."""


@dataclasses.dataclass(frozen=True)
class NoiseBound:
    """Result of testing the noise in the released numbers."""

    refuted: bool
    claimed: float
    """The claimed noise multiplier."""
    noise_multiplier: float
    """Upper bound on the noise multiplier that was used; below `claimed` if refuted."""
    numbers: int
    """Number of coordinates of all steps."""
    epsilon: float
    """Smallest epsilon of a training with so little noise, if the rest is as claimed."""


class ReleasedNoise:
    """Adds up squares of the releases minus the recorded sums, step by step."""

    def __init__(self) -> None:
        self.squares = 0.0
        """Sum of squares, in clip norms: about sigma^2 for each number, for noise alone."""
        self.numbers = 0
        self.rounded = 0.0
        """Bound on how much rounding to the public lattice shortens a release, for each number, in
        standard deviations of the noise."""
        self._heard: list[np.ndarray] | None = None
        self._rows: list[list[np.ndarray]] = []
        """Rests of the last steps, the newest first, in clip norms."""

    def record_noise(self, add_noise: AddNoise) -> AddNoise:
        """Wrap `add_noise` so that the sums before noise are recorded."""

        def heard(
            sums: list[np.ndarray], *, stddev: float, key: SecretKey, step: int
        ) -> list[np.ndarray]:
            self._heard = sums
            return add_noise(sums, stddev=stddev, key=key, step=step)

        return heard

    def on_release(
        self, gradient: Any, unit: float, coefficients: np.ndarray | None = None
    ) -> None:
        """Record a step's privatised gradient.

        Args:
          unit: size in it of a contribution of one clip norm.
          coefficients: 1, c_1, ... of correlated noise; None for independent noise.
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
    seen: ReleasedNoise, phases: Events, delta: float, significance: float
) -> NoiseBound:
    """Test whether the releases can have the claimed noise.

    Guarantees: a training with the claimed noise is refuted with at most this probability, whatever
      its sums are, however they depend on earlier releases, and whether or not they were recorded.

    Args:
      seen: the recorded releases.
      phases: the claimed events; all steps have one noise multiplier.
      delta: of the claim, for `NoiseBound.epsilon`.
      significance: the probability.
    """
    claimed = max(e.noise_multiplier for e, _ in phases if isinstance(e, StepEvent))
    least = float(stats.chi2.ppf(significance, seen.numbers))
    longest = math.sqrt(seen.squares) + math.sqrt(seen.numbers) * seen.rounded * claimed
    bound = longest / math.sqrt(least) if least > 0 else math.inf
    scale = max(LEAST, bound / claimed)
    less = [
        (dataclasses.replace(e, noise_multiplier=scale * e.noise_multiplier), count)
        if isinstance(e, StepEvent)
        else (e, count)
        for e, count in phases
    ]
    epsilon = accounting.epsilon(less, delta) if math.isfinite(scale) else 0.0
    return NoiseBound(bound < claimed, claimed, bound, seen.numbers, epsilon)
