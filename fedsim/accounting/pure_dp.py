"""Privacy loss of a mechanism with pure epsilon-DP, whatever it is: randomised response's.

Randomised response dominates every mechanism with the same epsilon (Kairouz et al. 2015), so its
loss, +epsilon with probability e^epsilon / (1 + e^epsilon) and else -epsilon, is an upper bound
under any composition, and the same in both directions of adjacency.
"""

import dataclasses
import math

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special

from fedsim.accounting.composition import check_size
from fedsim.errors import expect


@dataclasses.dataclass(frozen=True)
class PureEvent:
    """A release with (epsilon, 0)-DP, such as the exponential mechanism's.

    Raises: ConfigError: epsilon is not positive and finite.
    """

    epsilon: float

    def __post_init__(self) -> None:
        expect("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "> 0 and finite")


def pure_pmf(event: PureEvent, discretization: float) -> DensePLDPmf:
    """The discretised loss, an upper bound: connect the dots, as for `mixture`.

    Each atom is split between the grid points next to it so that the masses under both
    distributions stay what they are.
    Raises: GridTooLargeError: the grid would be longer than MAX_GRID_POINTS.
    """
    last = math.ceil(event.epsilon / discretization)
    check_size(2 * last + 1, discretization)
    probs = np.zeros(2 * last + 1)
    for loss in (-event.epsilon, event.epsilon):
        mass = float(special.expit(loss))
        low = math.floor(loss / discretization)
        above = max(0.0, loss - low * discretization)
        raised = mass * math.expm1(-above) / math.expm1(-discretization)
        probs[low + last] += mass - raised
        if raised:
            probs[low + 1 + last] += raised
    return DensePLDPmf(discretization, -last, probs, 0.0, True)


def pure_pld(event: PureEvent, discretization: float) -> PrivacyLossDistribution:
    """The loss in both directions of adjacency, which are alike."""
    return PrivacyLossDistribution(*[pure_pmf(event, discretization)] * 2)
