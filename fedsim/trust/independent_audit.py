"""Does one run refute a whole curve, if each canary tells of its own coin alone?

The bounds of `lower_bound` and `curve_audit` hold even if what is released of all canaries hangs
together in the worst way, which a claim about one user does not rule out. Where it does not hang
together, every canary is an audit of its own, and 1,000 of them say far more. Gradient canaries are
made so: their ways have no coordinate in common, whether one of them is drawn says nothing of the
others, and so does the noise on its coordinates. What is left to take for granted is that other
users' gradients, at parameters that canaries have moved, do not pass on their coins.

Theorem. Let the coins be tossed independently with probability 1/2, and the scores be independent
of each other, each following from its own coin by a mechanism for which the claim holds. Then
however the guesses are made of all scores, the number of right ones among m is at most, in
distribution, that of heads among m tosses of a coin with probability (1 + a)/2, a being the largest
y - claim(y), the total variation distance that the claim allows.
Proof. Given all scores, coins are independent, and that of canary i has a distribution that follows
from score i alone; a guess of it is right with at most the larger of its two probabilities. These
are independent of each other, with means of at most (1 + a)/2 each.

Agrawal et al. (2026, arXiv 2606.12733) take sums of canaries' signals as Gaussians, by a limit
theorem; this needs neither that nor the scores' sizes.
"""

import dataclasses

import numpy as np
from scipy import optimize, special, stats

from fedsim.accounting import gaussian_epsilon
from fedsim.trust.curve_audit import Claim


@dataclasses.dataclass(frozen=True)
class IndependentBound:
    """What the guesses say of a claimed curve if canaries are independent."""

    refuted: bool
    could_refute: bool
    """Whether it would be refuted with every guess right."""
    correct: int
    """Of all coins, every one of which is guessed."""
    most_expected: float
    """How many the claim allows, in the mean."""
    epsilon: float
    """At the claim's delta, with this confidence: as the Gaussian mechanism has it."""


def advantage(claim: Claim) -> float:
    """The largest y - claim(y): by how much probabilities can differ where the claim holds."""
    found = optimize.minimize_scalar(
        lambda y: claim(y) - y, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-10}
    )
    return min(1.0, 1e-9 - float(found.fun))  # pyright: ignore


def audit_independent(
    scores: np.ndarray, included: np.ndarray, claim: Claim, delta: float, significance: float
) -> IndependentBound:
    """The verdict of guessing that the larger half of the scores took part.

    Guarantees: under the premise of this module a claim that holds is refuted with at most this
      probability.
    Args: scores, included: as for `lower_bound.audit`; delta: of the claim.
    """
    count, order = len(scores), np.argsort(-scores, kind="stable")
    half = count - count // 2
    correct = int(included[order[:half]].sum() + (~included[order[half:]]).sum())
    right = (1 + advantage(claim)) / 2

    def refutes(number: int) -> bool:
        return bool(stats.binom.sf(number - 1, count, right) < significance)

    share = float(stats.beta.ppf(significance, correct, count - correct + 1)) if correct else 0.0
    mu = max(0.0, 2 * float(special.ndtri(share)))
    epsilon = gaussian_epsilon(mu, delta) if mu else 0.0
    return IndependentBound(refutes(correct), refutes(count), correct, count * right, epsilon)
