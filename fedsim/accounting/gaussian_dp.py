"""Gaussian differential privacy: the cost of steps as one number, mu, that simply adds up.

A mechanism is mu-GDP if telling two neighbours apart is no easier than telling N(0, 1) from
N(mu, 1). Costs add up as mu^2, even where each mechanism is chosen after seeing the releases of
those before: that makes mu the currency of a privacy filter (docs/theory/budget.md has the
theorem).

Steps with sampling are not exactly Gaussian in their farthest tails. So a small probability is set
aside: with it a mechanism may give everything away, and otherwise it is mu-GDP.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy import optimize, special

from fedsim.accounting import composition
from fedsim.accounting.accountant import composed_loss
from fedsim.accounting.events import Event, Events, PureEvent
from fedsim.errors import expect

POINTS = 20_000  # of the curve that is compared
LARGEST_EPSILON = 500.0
LARGEST_MU = 1e3


def gaussian_mu(events: Events, set_aside: float) -> float:
    """The smallest mu such that the events together are mu-GDP but for a probability.

    Guarantees: with d = set_aside, for every epsilon, in both directions, the delta of the steps is
      at most (1 - d) delta_mu(epsilon) + d. So they are a post-processing of this: with probability
      d give everything away, else release N(0, 1) or N(mu, 1). Pure releases, which the steps may
      depend on, are Gaussian mechanisms of their own: their mu^2 are added.
    Returns: inf where no mu up to 1,000 is enough.
    Source: Dong et al. 2022, Corollary 2.13; Blackwell's theorem.
    """
    expect("set_aside", set_aside, 0 < set_aside < 1, "in (0, 1)")
    squares, steps = 0.0, []
    for event, count in events:
        if count and isinstance(event, PureEvent):
            # The corner of randomised response's trade-off lies on that of this mu.
            squares += count * (2 * special.ndtri(special.expit(-event.epsilon))) ** 2
        elif count:
            steps.append((event, count))
    if steps:
        squares += _gaussian_mu(tuple(steps), set_aside) ** 2
    return math.sqrt(squares)


def gaussian_delta(epsilon: float | np.ndarray, mu: float) -> np.ndarray:
    """delta of mu-GDP at each epsilon. Source: Dong et al. 2022, Corollary 2.13."""
    epsilon = np.asarray(epsilon, np.float64)
    below = np.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
    return special.ndtr(-epsilon / mu + mu / 2) - below


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon for which mu-GDP is (epsilon, delta)-DP."""
    if mu == 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = mu * (mu / 2 - special.ndtri(delta)) + 1.0

    def excess(epsilon: float) -> float:
        return float(gaussian_delta(epsilon, mu)) - delta

    return _root(excess, 0.0, high) if math.isfinite(mu) else math.inf


@functools.lru_cache(maxsize=1024)  # never on disk: claims and limits rest on it
def _gaussian_mu(events: tuple[tuple[Event, int], ...], set_aside: float) -> float:
    loss = composed_loss(events, set_aside)
    return max(_mu_of(pmf, set_aside) for pmf in composition.directions(loss))


def _mu_of(pmf: DensePLDPmf, set_aside: float) -> float:
    """The smallest mu in one direction of adjacency."""
    last = composition.pmf_epsilon_at(pmf, set_aside)
    if last > LARGEST_EPSILON:
        return math.inf
    epsilons = np.linspace(0.0, last, POINTS + 1)
    # Between two points delta falls: the left one's bounds it, and so does the right one's mu.
    above, right = composition.deltas_at(pmf, epsilons)[:-1] - set_aside, epsilons[1:]

    def excess(mu: float) -> float:
        return float(np.max(above - (1 - set_aside) * gaussian_delta(right, mu)))

    low = 1e-9
    if excess(low) <= 0:
        return low
    if excess(LARGEST_MU) > 0:
        return math.inf
    return _root(excess, low, LARGEST_MU) * (1 + 1e-8) + 1e-11


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(optimize.brentq(function, low, high, xtol=1e-12, rtol=1e-9))  # pyright: ignore
