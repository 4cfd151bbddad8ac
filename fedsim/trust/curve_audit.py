"""Does one run refute a whole trade-off curve? (Mahloujifar, Melis and Chaudhuri 2024)

A claim is not one pair of epsilon and delta but a curve of them. An attack that guesses 76 % of the
coins right is far from refuting epsilon = 8 as randomised response has it, and refutes it as the
Gaussian mechanism has it. So it takes far fewer canaries. Pure statistics: knows nothing of runs.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from fedsim.accounting import gaussian_epsilon
from fedsim.trust.lower_bound import options_of

Claim = Callable[[float], float]
"""y -> the least probability, on one of two neighbouring data sets, of an event that has
probability y on the other."""

LARGEST_MU = 50.0


@dataclasses.dataclass(frozen=True)
class CurveBound:
    """What the guesses say of a claimed curve, with some confidence."""

    refuted: bool
    could_refute: bool
    """Whether it would be refuted with every guess right."""
    guesses: int
    correct: int
    mu: float
    """The largest mu whose Gaussian curve is refuted, too; 0: none."""
    epsilon: float
    """Of that mu, at the claim's delta: as the Gaussian mechanism has it."""


def curve_claim(epsilons: np.ndarray, deltas: np.ndarray) -> Claim:
    """The claim that a mechanism is (epsilon, delta)-DP for each of the pairs, [pairs] each."""
    grown = np.exp(epsilons)

    def least(y: float) -> float:
        below = np.max((y - deltas) / grown, initial=0.0)
        above = np.max(1 - deltas - grown * (1 - y), initial=0.0)
        return float(max(below, above))

    return least


def gaussian_claim(mu: float) -> Claim:
    """The claim that a mechanism is mu-GDP."""

    def least(y: float) -> float:
        return float(special.ndtr(special.ndtri(min(max(y, 0.0), 1.0)) - mu))

    return least


def refutes(canaries: int, guesses: int, correct: int, claim: Claim, significance: float) -> bool:
    """Whether a mechanism for which the claim holds makes so many correct guesses with less than
    this probability.

    Args:
      canaries: m; each was included with probability 1/2, independently.
      guesses: r, decided on before the run; correct: v of them were right.
    Source: Mahloujifar et al. 2024, Algorithm 3, for coins of two sides.
    """
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        grown = max(wrong, claim(right))
        if grown == wrong:
            break  # and so in every step that is left
        right += i / (guesses - i) * (grown - wrong)
        wrong = grown
        if right + wrong > guesses / canaries:
            return True  # both only grow
    return right + wrong > guesses / canaries


def audit_curve(
    scores: np.ndarray, included: np.ndarray, claim: Claim, delta: float, confidence: float
) -> CurveBound:
    """The verdict over a few numbers of guesses, which share the significance (Bonferroni).

    Args: scores, included: as for `lower_bound.audit`; delta: of the claim.
    """
    count, order = len(scores), np.argsort(-scores, kind="stable")
    options = options_of(count)
    significance = (1 - confidence) / len(options)

    def correct_of(above: int, below: int) -> int:
        return int(included[order[:above]].sum() + (~included[order[count - below :]]).sum())

    tried = [(a + b, correct_of(a, b)) for a, b in options]
    found = [(_largest_mu(count, r, v, significance), r, v) for r, v in tried]
    mu, guesses, correct = max(found)
    refuting = [(r, v) for r, v in tried if refutes(count, r, v, claim, significance)]
    if refuting:
        guesses, correct = refuting[0]
    could = any(refutes(count, r, r, claim, significance) for r, _ in tried)
    epsilon = gaussian_epsilon(mu, delta)
    return CurveBound(bool(refuting), could, guesses, correct, mu, epsilon)


def _largest_mu(canaries: int, guesses: int, correct: int, significance: float) -> float:
    def excess(mu: float) -> float:
        return (
            1.0 if refutes(canaries, guesses, correct, gaussian_claim(mu), significance) else -1.0
        )

    if excess(0.0) < 0:
        return 0.0
    if excess(LARGEST_MU) > 0:
        return LARGEST_MU
    return float(optimize.bisect(excess, 0.0, LARGEST_MU, xtol=1e-4)) - 1e-4  # pyright: ignore
