"""Private selection: a random number of trials, of which only the best one is released.

Each trial takes one of the candidates at random and runs it anew. The number of trials K is drawn
from a truncated negative binomial distribution, whatever the data are, and stays secret. Selecting
by the trials' outcomes then costs little more than one trial, however many there are.

Source: Papernot and Steinke 2022, who bound Renyi divergences. Here the whole curve is bounded:

    delta_A(epsilon) <= E[K] delta_Q(epsilon - (1 + shape) c),   c = log of the largest of
    (gamma + (1 - gamma) s') / (gamma + (1 - gamma) s)   over s in [0, 1], s' <= e^x s + delta_Q(x)

Proof: let s be the probability that a trial beats an outcome y, and s' the same on the neighbouring
data. A releases y with density q(y) f'(1 - s), f being the generating function of K, so that f'(1 -
s) is proportional to (gamma + (1 - gamma) s)^-(1 + shape): on the neighbouring data it is smaller
by a factor of e^((1 + shape) c) at most. And f' <= E[K]. This resembles what Koskela, Redberg and
Wang 2024 have for other distributions.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import optimize

from fedsim.accounting import composition
from fedsim.accounting.composition import together
from fedsim.errors import expect

FLOOR = 1e-15  # smaller deltas are not resolved
POINTS = 4001  # of the curve at which c is looked for
LARGEST_LOSS = 600.0  # what is beyond counts as infinite, so that e^loss is a number
GAMMAS = math.exp(-700), math.exp(-1e-12)
"""Range of the search for gamma; values beyond are numerically 0 or 1."""
ONE = 1 + 1e-9  # a smaller mean stands for K = 1


@dataclasses.dataclass(frozen=True)
class SelectionEvent:
    """The best of K trials, each of a candidate drawn at random.

    Raises: ConfigError: mean < 1, shape <= -1 or too close to it for this mean, or there is no
      candidate.
    """

    candidates: tuple[tuple[Any, ...], ...]
    """Releases of one trial of each candidate: phases, as for the accountant."""
    mean: float
    """E[K], the expected number of trials. >= 1."""
    shape: float = 0.0
    """eta of the distribution of K: 1 is geometric, 0 logarithmic. The smaller, the heavier its
    tail, the more often K is 1, and the lower the cost. > -1."""
    slack: tuple[float, float] = (0.0, 0.0)
    """(epsilon, delta) of a trial, for noise that is not ideal."""

    def __post_init__(self) -> None:
        expect("candidates", self.candidates, len(self.candidates) > 0, "one at least")
        expect("mean", self.mean, 1 <= self.mean < math.inf, ">= 1")
        expect("shape", self.shape, -1 < self.shape < math.inf, "> -1")
        most, least = (mean_of(gamma, self.shape) for gamma in GAMMAS)
        bounded = self.mean < ONE or least < self.mean < most
        expect("shape", self.shape, bounded, f"one with which the mean can be {self.mean:g}")

    @property
    def gamma(self) -> float:
        """The other parameter of K's distribution, which follows from the mean. 1: K is 1."""
        if self.mean < ONE:
            return 1.0

        def excess(log_gamma: float) -> float:
            return math.log(mean_of(math.exp(log_gamma), self.shape) / self.mean)

        root = optimize.brentq(excess, *map(math.log, GAMMAS), xtol=1e-12)
        return math.exp(float(root))  # pyright: ignore


def mean_of(gamma: float, shape: float) -> float:
    """E[K]. Source: Papernot and Steinke 2022, Definition 1."""
    log = -math.log(gamma)
    if shape == 0:
        return math.expm1(log) / log
    return shape * math.expm1(log) / -math.expm1(-shape * log)


def draw_trials(event: SelectionEvent, rng: np.random.Generator) -> int:
    """Draw K, which is secret, by inversion; each probability follows from the one before.

    Raises: ConfigError: the shape is not 0, as of all selections that are begun.
    """
    expect("shape", event.shape, event.shape == 0, "0")
    left, gamma = rng.random(), event.gamma
    if gamma == 1:
        return 1
    count, log = 1, math.log1p(-gamma) - math.log(-math.log(gamma))
    while left > (probability := math.exp(log)) and (count < event.mean or probability > 1e-18):
        left -= probability
        log += math.log1p(-gamma) + math.log(count / (count + 1))
        count += 1
    return count


def selection_deltas(
    event: SelectionEvent, trials: Sequence[PrivacyLossDistribution], epsilons: np.ndarray
) -> np.ndarray:
    """delta of the selection at each epsilon, from above.

    Args:
      trials: privacy loss of one trial of each candidate.
      epsilons: in ascending order.
    """
    gamma, last = event.gamma, max(map(_last, trials))
    points = np.linspace(0.0, last, POINTS)
    trial_deltas = _trial(event, trials, points)
    with np.errstate(divide="ignore"):
        small = 1 / (gamma + (1 - gamma) * (1 - trial_deltas) * np.exp(-points))
    shift = (1 + event.shape) * math.log(
        np.maximum(1 + (1 - gamma) * trial_deltas / gamma, small).min()
    )
    below = epsilons - shift
    deltas = event.mean * _trial(event, trials, np.maximum(below, 0.0))
    deltas = np.where(below < 0, 1.0, np.minimum(deltas, 1.0))
    return np.minimum.accumulate(deltas)  # the slack of a trial grows with epsilon, delta does not


def selection_pmf(
    event: SelectionEvent, trials: Sequence[PrivacyLossDistribution], discretization: float
) -> DensePLDPmf:
    """The discretised loss of the selection, an upper bound, the same in both directions.

    delta is convex in e^epsilon, so the largest convex curve below the bound is a bound, too.
    Raises: GridTooLargeError: the grid would be longer than MAX_GRID_POINTS.
    """
    last = math.ceil(loss_range(event, trials) / 2 / discretization)
    composition.check_size(2 * last + 1, discretization)
    epsilons = np.arange(last + 1) * discretization
    deltas = selection_deltas(event, trials, epsilons)
    # H_{e^-x}(P||Q) = 1 - e^-x (1 - H_{e^x}(Q||P))
    negative = 1 - np.exp(-epsilons[:0:-1]) * (1 - deltas[:0:-1])
    places = np.exp(np.concatenate([-epsilons[:0:-1], epsilons]))
    curve = _convex(np.concatenate([[0.0], places]), np.concatenate([[1.0], negative, deltas]))
    slopes = np.append(np.diff(curve) / np.diff(np.concatenate([[0.0], places])), 0.0)
    mass = np.maximum(np.diff(slopes), 0.0) * places  # p = e^l q, and q is how the slope grows
    return DensePLDPmf(discretization, -last, mass, float(max(curve[-1], FLOOR)), True)


def loss_range(event: SelectionEvent, trials: Sequence[PrivacyLossDistribution]) -> float:
    """Width of the range of losses that contains the whole curve, but for FLOOR and what is beyond
    LARGEST_LOSS."""
    last = (max(map(_last, trials)) + event.slack[0]) * (2 + event.shape)
    return 2 * min(last, LARGEST_LOSS)


def _trial(
    event: SelectionEvent, trials: Sequence[PrivacyLossDistribution], epsilons: np.ndarray
) -> np.ndarray:
    """delta of one trial: the mean over candidates, which are drawn independently of the data."""
    more, missed = together([event.slack], epsilons, 0.0)
    at = np.maximum(epsilons - more, 0.0)
    of_candidates = [
        np.maximum(*(composition.deltas_at(pmf, at) for pmf in composition.directions(trial)))
        for trial in trials
    ]
    deltas = np.mean(of_candidates, axis=0) * np.exp(more / 2) + missed
    return np.where(epsilons < more, 1.0, np.minimum(deltas, 1.0))


def _last(trial: PrivacyLossDistribution) -> float:
    """The largest finite loss with probability FLOOR at least, in either direction."""
    pmfs = composition.directions(trial)
    most = max(composition.pmf_epsilon_at(pmf, max(FLOOR, 2 * pmf._infinity_mass)) for pmf in pmfs)
    return min(most, LARGEST_LOSS)


def _convex(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest convex function below the points, at each x (ascending): their lower hull."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[b]) < (y[i] - y[b]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return np.interp(x, x[kept], y[kept])
