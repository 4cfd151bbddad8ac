"""Is there as much noise in what a training released as it claims?

Whatever a step's sum is, the squared length of that sum with Gaussian noise is at least as large,
in distribution, as that of the noise alone (Anderson 1955), which is chi-squared. So a release that
is shorter than noise would be by itself has less noise than is claimed, and nobody has to know the
sum. With correlated noise the rows are first put back together, which leaves the fresh noise of
each step. Nothing is said of what else the claim rests on: who took part, and clipping.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from scipy import stats

from fedsim import accounting
from fedsim.accounting import Phases, StepEvent
from fedsim.noise.independent import CELLS_BITS

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
    """Adds up the squares of what is released, step by step."""

    def __init__(self) -> None:
        self.squares = 0.0
        """In clip norms; those of noise alone add up to sigma^2 for each number."""
        self.numbers = 0
        self.rounded = 0.0
        """The most by which rounding to the public lattice shortens a release, for each number:
        in standard deviations of the noise."""
        self._rows: list[tuple[float, list[Any]]] = []
        """Units and gradients of the last steps, the newest first."""

    def watch(self, gradient: Any, unit: float, coefficients: np.ndarray | None = None) -> None:
        """Look at a step's privatised gradient.

        Args:
          unit: what a contribution of one clip norm is in it.
          coefficients: 1, c_1, ... of correlated noise; None: it is independent.
        """
        c = np.ones(1) if coefficients is None else coefficients
        length = float(np.linalg.norm(c))
        leaves = jax.tree.leaves(gradient)
        self._rows = [(unit, leaves), *self._rows][: len(c)]
        for number, leaf in enumerate(leaves):
            fresh = np.zeros(np.shape(leaf))
            for each, (unit_then, then) in zip(c, self._rows, strict=False):
                fresh += float(each) / unit_then * np.asarray(then[number], np.float64)
            self.squares += float(np.square(fresh).sum()) / length**2
            self.numbers += fresh.size
        # Half a cell of the lattice for each row; twice that covers float32 and whole numbers.
        self.rounded = 2.0**-CELLS_BITS * float(np.abs(c).sum()) / length


def audit_noise(
    seen: ReleasedNoise, phases: Phases, delta: float, significance: float
) -> NoiseBound:
    """Whether what was released can have the noise that is claimed.

    Guarantees: a training with that noise is refuted with at most this probability, whatever its
      sums are and however they follow from earlier releases.
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
