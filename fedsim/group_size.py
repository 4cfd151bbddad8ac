"""The group size of ELS: the median user's number of examples, as it is or privately.

The private one is the exponential mechanism (McSherry and Talwar 2007) on a public grid.
`accounting.PureEvent` says what it costs together with training.
"""

import math

import numpy as np

GRID = np.unique(np.round(2 ** (np.arange(81) / 4)).astype(np.int64))
"""What the answer may be, whatever the data: four values per octave from 1 to 2^20."""

FAILURE = 0.01
"""Probability with which `rank_error` may be exceeded."""


def median_group_size(sizes: np.ndarray) -> int:
    """The median heuristic for G_ELS: the median user's number of examples, at least 1 (Section 6).

    Looks at the data without protection; `private_median` is the version with protection.
    """
    return max(1, int(np.median(sizes)))


def private_median(sizes: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """A value of GRID that about half the users' sizes are below, drawn with exp(epsilon utility).

    Guarantees: epsilon-DP under adding or removing one user, and under leaving a user without
      texts, for such users count for nothing. With probability 1 - FAILURE at most
      `rank_error(epsilon)` users more than for the best value of GRID have to be passed to reach
      the median. What float64 rounds is not accounted: 2^-50 (epsilon N + 4) of epsilon for N
      users, and 1e-14 (1 + e^epsilon) of delta (docs/noise.md).
    Args: sizes: examples of each user, int [users].
    """
    scores = epsilon * utility(sizes[sizes > 0])  # sensitivity 1/2, so exp(epsilon u / (2 * 1/2))
    weights = np.exp(scores - scores.max())
    return int(rng.choice(GRID, p=weights / weights.sum()))


def utility(sizes: np.ndarray) -> np.ndarray:
    """Minus how many users lie between each value of GRID and the median, [grid].

    Adding or removing a user changes it by at most 1/2: a count of users on one side by 0 or 1, and
    half of all users by 1/2.
    """
    ordered, half = np.sort(sizes), len(sizes) / 2
    below = np.searchsorted(ordered, GRID, "left")
    above = len(sizes) - np.searchsorted(ordered, GRID, "right")
    return -np.maximum(0.0, np.maximum(below, above) - half)


def rank_error(epsilon: float) -> float:
    """Users by which the answer may miss what GRID offers, but for FAILURE: ln(|GRID| / FAILURE) /
    epsilon."""
    return math.log(len(GRID) / FAILURE) / epsilon
