"""Cost in epsilon and delta of noise that is not ideal; docs/theory/noise.md has the theorem.

The probability of every value of a noisy number is that of ideal noise up to a factor of
e^(+-eta), and eta is known. `slack` adds that up over all numbers that a mechanism draws;
`together` over mechanisms, each with its own slack.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SHARE = 1e-6
"""Fraction of delta for the unlikely sums of errors."""
BEYOND = 1e-70
"""Bound on the probability that one of 10^18 numbers lies so far out that no eta holds."""
Errors = Sequence[tuple[float, float]]
"""(probability that a number lies there, eta there): several entries where eta is larger far
out."""


class Slack(NamedTuple):
    """(epsilon, delta) to be added for noise that is not ideal."""

    epsilon: float
    delta: float


def slack(count: float, epsilon: float, delta: float, cell_errors: Errors) -> Slack:
    """Slack of a mechanism that draws `count` numbers, against one with ideal noise.

    If that is (epsilon, delta)-DP, the mechanism is (epsilon + slack.epsilon, delta +
    slack.delta)-DP. Proof: let L be the log of the ratio of the probabilities of a number as it is
    drawn and of the ideal one, given the numbers before. |L| is at most b, the largest eta; L^2 has
    a mean of at most v, the mean of eta^2. E[e^-L] = 1, so that 0 <= E[L] <= v e^b / 2. By
    Freedman's inequality the sum of all n is at most

        e = n v e^b / 2 + b l / 3 + sqrt((b l / 3)^2 + 2 n v l),   l = ln(1/d),

    but for a probability of d. So P(real) <= e^e P(ideal) + d and the other way round, for whatever
    is computed from the numbers. `_both_ways` follows.
    """
    if not math.isfinite(epsilon):
        return Slack(0.0, 0.0)
    share = max(delta * SHARE * math.exp(-epsilon), 1e-300)
    largest = max(eta for _, eta in cell_errors)
    variance = count * sum(probability * eta**2 for probability, eta in cell_errors)
    logarithm = -math.log(share)
    linear = largest * logarithm / 3
    error = variance * math.exp(largest) / 2 + linear
    error += math.sqrt(linear**2 + 2 * variance * logarithm)
    return Slack(*map(float, _both_ways(error, share + BEYOND, epsilon, delta)))


def together(parts: Sequence[tuple[float, float]], epsilon: Any, delta: Any) -> tuple[Any, Any]:
    """The slack of mechanisms that together would be (epsilon, delta)-DP with ideal noise.

    Adding up the deltas of their own slacks would not do: each has the factor of its own epsilon.
    Proof: of a part with the slack (2 e, D), d is at most D. The e of `slack` grows no faster than
    ln(1/d), so that with D e^-epsilon in the place of d it is at most e (1 + epsilon / ln(1/D)).
    The sum of all errors exceeds the sum of these e with at most the sum of these probabilities.

    Args:
      parts: slacks, whatever epsilon and delta each of them is for.
      epsilon, delta: numbers, or arrays of one shape; so is what is returned.
    """
    error = missed = 0.0 * epsilon
    if any(part >= 1 for _, part in parts):
        return error + math.inf, missed + 1.0
    for twice, part in parts:
        if part > 0:
            error = error + twice / 2 * (1 + epsilon / -math.log(part))
            missed = missed + part * np.exp(-epsilon) + BEYOND
    return _both_ways(error, missed, epsilon, delta)


def _both_ways(error: Any, missed: Any, epsilon: Any, delta: Any) -> tuple[Any, Any]:
    """(epsilon, delta) to be added, where probabilities with real and ideal noise differ by a
    factor of e^error at most, but for `missed`.

    P(real, D) <= e^e P(ideal, D) + d <= e^e (e^epsilon P(ideal, D') + delta) + d, and P(ideal, D')
    <= e^e P(real, D') + d.
    """
    apart = np.exp(np.minimum(700.0, epsilon + error)) * missed
    return 2 * error, np.minimum(1.0, missed + np.expm1(error) * delta + apart)
