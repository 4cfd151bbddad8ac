"""Discrete Laplace noise for counts, drawn exactly: with integers alone, nothing is rounded.

P(X = x) is proportional to exp(-|x| / scale) for whole numbers x. Added to counts that one user
changes by at most the sensitivity, in all counts together, it gives pure differential privacy.
Source: Canonne, Kamath and Steinke 2020, Algorithms 1 and 2.
"""

import numpy as np

from fedsim.errors import expect

PARTS = 2**20
"""Epsilon is rounded down to a multiple of 1 / PARTS, so that the noise follows from integers."""
LARGEST = 2.0**20  # epsilon: more would be noise in name only, and leave the range of integers


def discrete_laplace(
    count: int, sensitivity: int, epsilon: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw noise of scale sensitivity / epsilon, int64 [count].

    Guarantees: whole numbers that one user changes by at most `sensitivity` in L1 norm are
      epsilon-DP with this noise added, without any slack. Every call needs a fresh generator.
    Args:
      sensitivity: >= 1 and below 2^31.
      epsilon: at least 1 / PARTS.
    Raises: ConfigError: epsilon is too small or too large.
    """
    expect(
        "epsilon", epsilon, 1 / PARTS <= epsilon <= LARGEST, f"from {1 / PARTS:g} to {LARGEST:g}"
    )
    over, under = sensitivity * PARTS, int(epsilon * PARTS)
    return np.array([_number(over, under, rng) for _ in range(count)], np.int64)


def _number(over: int, under: int, rng: np.random.Generator) -> int:
    """Draw one number of scale over / under."""
    while True:
        part = int(rng.integers(over))
        if not _survives(part, over, rng):
            continue
        whole = 0
        while _survives(1, 1, rng):
            whole += 1
        size, negative = (part + over * whole) // under, bool(rng.integers(2))
        if size or not negative:  # else 0 would be drawn twice as often
            return -size if negative else size


def _survives(over: int, under: int, rng: np.random.Generator) -> bool:
    """True with probability exp(-over / under), for over / under in [0, 1]."""
    tries = 1
    while int(rng.integers(under * tries)) < over:
        tries += 1
    return tries % 2 == 1
