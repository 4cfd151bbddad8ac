"""Lower bounds on epsilon from guesses about canaries in a single run; pure statistics.

Each of many canaries was included or left out by the toss of a coin. More correct guesses of the
coins than (epsilon, delta)-DP allows refute it. There are three bounds, each with more assumptions
than the one before:

1. `audit`: of one pair (epsilon, delta), whatever the mechanism (Steinke, Nasr and Jagielski 2023).
2. `audit_curve`: of a trade-off curve (Mahloujifar, Melis and Chaudhuri 2024). Guessing 76 % of the
   coins is far from refuting epsilon = 8 of randomised response, and refutes that of the Gaussian
   mechanism, so it takes far fewer canaries.
3. `audit_independent`: of a curve, where each canary's score depends on its own coin alone. The
   first two hold even if the scores depend on each other in the worst way, which a claim about one
   user does not rule out. Gradient canaries are independent by construction: their directions have
   no coordinate in common, whether one is drawn is independent of the others, and so is the noise
   on its coordinates. What is assumed is that other users' gradients, at parameters that canaries
   have moved, do not pass on their coins.

Theorem (of 3). Let the coins be tossed independently with probability 1/2, and the scores be
independent of each other, each depending on its own coin alone, by a mechanism for which the claim
holds. Then however the guesses are made from all scores, the number of correct ones among m is, in
distribution, at most that of heads among m tosses of a coin with probability (1 + a)/2, where a is
the largest y - claim(y), the total variation distance that the claim allows.
Proof. Given all scores, the coins are independent, and the distribution of coin i depends on score
i alone; a guess of it is correct with at most the larger of its two probabilities. These are
independent of each other, with means of at most (1 + a)/2 each.

Agrawal et al. (2026, arXiv 2606.12733) approximate sums of canaries' signals by Gaussians, by a
limit theorem; this needs neither that nor the scores' sizes.
"""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
from scipy import optimize, special, stats

from fedsim.accounting import gaussian_epsilon

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Fractions of canaries to guess, most confident first; the rest are abstentions."""
LARGEST = 100.0
MOST_CANARIES = 2**20


@dataclasses.dataclass(frozen=True)
class Bound:
    """With this confidence, the run was (epsilon, delta)-DP for no smaller epsilon."""

    epsilon: float
    confidence: float
    canaries: int
    included: int
    guesses: int
    """Number of guesses of the best bound."""
    correct: int
    largest_possible: float
    """The bound if every guess were right: no larger claim can be refuted."""


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Largest probability of so many correct guesses under (epsilon, delta)-DP.

    Exact for delta = 0, where randomised response attains it. With delta it is the bound of the
    theorem, which no attack may attain. Compared with exact linear programming it was too small in
    238 of 3,779 cases, in all of which it is 0.71 or more: far above any significance that is used,
    so that no bound on epsilon follows from them.

    Args:
      canaries: m; each was included with probability 1/2, independently.
      guesses: r, decided before the run.
      correct: v, how many of them were right.

    Source: Steinke et al. 2023, Theorem 5.2 (the guarantee is add-or-remove).
    """
    right = 1 / (1 + math.exp(-epsilon))  # randomised response
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    below = np.arange(1, correct + 1)
    excess = stats.binom.sf(correct - below - 1, guesses, right) - beta
    alpha = float(np.max(excess / below, initial=0.0))
    return min(1.0, beta + 2 * canaries * delta * alpha)


def lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, significance: float
) -> float:
    """Largest epsilon that so many correct guesses refute; 0 if none. Args: see `p_value`."""

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, correct, epsilon, delta) - significance

    if excess(0.0) >= 0:
        return 0.0
    if excess(LARGEST) < 0:
        return LARGEST
    return float(optimize.brentq(excess, 0.0, LARGEST, xtol=1e-6))  # pyright: ignore


def audit(scores: np.ndarray, included: np.ndarray, delta: float, confidence: float) -> Bound:
    """The best bound over several numbers of guesses, which share the significance (Bonferroni).

    Args:
      scores: [canaries], larger if a canary seems included. Ties are broken by position.
      included: bool [canaries].
      delta: of the claim.
      confidence: of the bound.
    """
    count, tried = len(scores), guessed(scores, included)
    significance = (1 - confidence) / len(tried)
    # The more guesses, the better if all are right: the last option has all.
    largest = lower_bound(count, count, count, delta, significance)
    bounds = [(lower_bound(count, r, v, delta, significance), r, v) for r, v in tried]
    epsilon, guesses, correct = max(bounds, key=lambda bound: bound[0])
    return Bound(epsilon, confidence, count, int(included.sum()), guesses, correct, largest)


def canaries_needed(epsilon: float, delta: float, confidence: float) -> int | None:
    """Number of canaries that refute `epsilon` if every guess is right.

    Returns:
      None if it is more than MOST_CANARIES, or if delta is too large for any number.

    Guarantees: `largest_possible` of an audit with so many exceeds epsilon, and with one fewer not.
    """
    significance = (1 - confidence) / len(options_of(1))

    def enough(count: int) -> bool:
        return p_value(count, count, count, epsilon, delta) < significance

    high = 1
    while not enough(high):
        high *= 2
        if high > MOST_CANARIES:
            return None
    low = high // 2 + 1  # one fewer is too few
    return low + bisect_left(range(low, high), True, key=enough)


def options_of(count: int) -> list[tuple[int, int]]:
    """Options decided before the run: (guesses of "included", guesses of "left out")."""
    options = []
    for share in SHARES:
        guesses = max(1, round(share * count))
        above = -(-guesses // 2)
        options.append((above, guesses - above))
        if share <= 1 / 2:
            options.append((guesses, 0))  # guess "included" alone
    return options


def guessed(scores: np.ndarray, included: np.ndarray) -> list[tuple[int, int]]:
    """(guesses, correct ones) of each of the options. Args: as of `audit`."""
    count, order = len(scores), np.argsort(-scores, kind="stable")
    took_part = included[order]
    return [
        (above + below, int(took_part[:above].sum() + (~took_part[count - below :]).sum()))
        for above, below in options_of(count)
    ]


def area(inside: np.ndarray, outside: np.ndarray) -> float:
    """Area under the ROC curve: probability that a score of `inside` exceeds one of `outside`."""
    return float(
        stats.mannwhitneyu(inside, outside).statistic / (len(inside) * len(outside))  # pyright: ignore
    )


def roc(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(false, true) positive rates over all thresholds, from (0, 0) to (1, 1)."""
    scores = np.concatenate([inside, outside])
    order = np.argsort(-scores, kind="stable")
    member = np.concatenate([np.ones(len(inside)), np.zeros(len(outside))])[order]
    ends = np.append(
        np.flatnonzero(np.diff(scores[order])), len(scores) - 1
    )  # ties change together
    true, false = np.cumsum(member)[ends], np.cumsum(1 - member)[ends]
    return (
        np.concatenate([[0.0], false / len(outside)]),
        np.concatenate([[0.0], true / len(inside)]),
    )


Claim = Callable[[float], float]
"""y -> the least probability, on one of two neighbouring data sets, of an event that has
probability y on the other."""

LARGEST_MU = 50.0


@dataclasses.dataclass(frozen=True)
class CurveBound:
    """Result of testing a claimed trade-off curve by guesses."""

    refuted: bool
    could_refute: bool
    """True if it would be refuted with every guess right."""
    guesses: int
    correct: int
    mu: float
    """Largest mu whose Gaussian curve is also refuted; 0 if none."""
    epsilon: float
    """Epsilon of the Gaussian mechanism with that mu, at the claim's delta."""


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
    """True if so many correct guesses have less than this probability if the claim holds.

    Args:
      canaries: m; each was included with probability 1/2, independently.
      guesses: r, decided before the run.
      correct: v, how many of them were right.
      significance: the probability.

    Source: Mahloujifar et al. 2024, Algorithm 3, for coins of two sides.
    """
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        grown = max(wrong, claim(right))
        if grown == wrong:
            break  # and so in all later steps
        right += i / (guesses - i) * (grown - wrong)
        wrong = grown
        if right + wrong > guesses / canaries:
            return True  # neither decreases
    return right + wrong > guesses / canaries


def audit_curve(
    scores: np.ndarray, included: np.ndarray, claim: Claim, delta: float, confidence: float
) -> CurveBound:
    """Test a claimed curve with several numbers of guesses, which share the significance.

    Args:
      scores, included: as for `audit`.
      claim: the curve.
      delta: of the claim, for `CurveBound.epsilon`.
      confidence: of a refutation.
    """
    count, tried = len(scores), guessed(scores, included)
    significance = (1 - confidence) / len(tried)
    largest = [(_largest_mu(count, r, v, significance), r, v) for r, v in tried]
    mu, guesses, correct = max(largest)
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


@dataclasses.dataclass(frozen=True)
class IndependentBound:
    """Result of testing a claimed curve by guesses, if canaries are independent."""

    refuted: bool
    could_refute: bool
    """True if it would be refuted with every guess right."""
    correct: int
    """Number of correct guesses; every coin is guessed."""
    most_expected: float
    """Largest expected number of correct guesses under the claim."""
    epsilon: float
    """Lower bound at the claim's delta, by the curve of the Gaussian mechanism."""


def advantage(claim: Claim) -> float:
    """Largest y - claim(y): the total variation distance that the claim allows."""
    minimum = optimize.minimize_scalar(
        lambda y: claim(y) - y, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10}
    )
    return min(1.0, 1e-9 - float(minimum.fun))  # pyright: ignore


def audit_independent(
    scores: np.ndarray, included: np.ndarray, claim: Claim, delta: float, significance: float
) -> IndependentBound:
    """Test a claimed curve by guessing that the canaries with the larger half of scores took part.

    Guarantees: if canaries are independent (see above), a claim that holds is refuted with at most
      this probability.

    Args:
      scores, included: as for `audit`.
      claim: the curve.
      delta: of the claim, for `IndependentBound.epsilon`.
      significance: the probability.
    """
    count, (_, correct) = len(scores), guessed(scores, included)[-1]  # the option with all
    right = (1 + advantage(claim)) / 2

    def refutes(number: int) -> bool:
        return bool(stats.binom.sf(number - 1, count, right) < significance)

    share = float(stats.beta.ppf(significance, correct, count - correct + 1)) if correct else 0.0
    mu = max(0.0, 2 * float(special.ndtri(share)))
    epsilon = gaussian_epsilon(mu, delta) if mu else 0.0
    return IndependentBound(refutes(correct), refutes(count), correct, count * right, epsilon)
