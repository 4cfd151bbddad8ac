"""What is drawn once, before the first step: the pool of ELS, and the group size.

The pool bounds the contributions of a user (Algorithm 1). The group size of ELS is the median
user's number of examples (Section 6), from the data as they are or by the exponential mechanism on
a public grid; `accounting.PureEvent` composes that mechanism with training.
"""

import math
from typing import Protocol

import numpy as np

from fedsim.config import ZERO_OUT
from fedsim.data import Owners
from fedsim.keys import SecretKey
from fedsim.sampling.sampler import PADDING
from fedsim.sampling.shared import Groups, bounded_pool, owners_groups

POOL = "contributions"
"""Purpose of the streams that draw the pool of ELS, once for all of training."""

GRID = np.unique(np.round(2 ** (np.arange(81) / 4)).astype(np.int64))
"""Possible results of `private_median`, whatever the data: four values per octave, 1 to 2^20."""

FAILURE = 0.01
"""Probability with which `private_median` may miss by more than `rank_error`."""


class Users(Protocol):
    """The assignment of examples to users: all that sampling and accounting read of the data."""

    @property
    def num_users(self) -> int:
        """The number of users, N."""
        ...

    @property
    def num_examples(self) -> int:
        """The number of examples of all users together."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """int64 [num_users + 1]: user u owns the examples offsets[u]:offsets[u + 1]. For examples
        with several owners, the same of owner sets instead of users; see `graph_of`."""
        ...


def limit_contributions(offsets: np.ndarray, group_size: int, key: SecretKey) -> np.ndarray:
    """D_sub: at most `group_size` examples of each user, drawn once for all of training.

    Guarantees: a user's examples in the pool depend on (key, user) alone, so they are the same in
      every step and after every resume; no example appears twice.
    Args:
      offsets: int64 [num_users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
      group_size: G_ELS.
      key: secret key of the run.
    Returns: example indices, int64 [pool], ascending.
    Source: Charles et al. 2024, Algorithm 1, lines 1-4.
    """
    keep, streams = np.ones(offsets[-1], bool), key.streams(POOL)
    for user in np.flatnonzero(np.diff(offsets) > group_size):
        start, end = offsets[user], offsets[user + 1]
        keep[start:end] = False
        rng = streams.at(int(user))
        keep[start + rng.choice(end - start, group_size, replace=False, shuffle=False)] = True
    return np.flatnonzero(keep)


def pool_of(users: Users, group_size: int, key: SecretKey, adjacency: str) -> np.ndarray:
    """Return D_sub, the pool of ELS: example indices, int64 [pool], PADDING where a place is empty.

    `limit_contributions` draws it; under zero-out adjacency, `places` then gives every user the
    same number of places. For examples with several owners, `bounded_pool` draws it.
    """
    offsets = users.offsets
    if (owners := graph_of(users)) is not None:
        return bounded_pool(offsets, owners, group_size, key)
    pool = limit_contributions(offsets, group_size, key)
    return places(offsets, pool, group_size) if adjacency == ZERO_OUT else pool


def groups_of(users: Users, max_changed: int, key: SecretKey) -> Groups:
    """Return D_u of each user for examples with several owners; see `owners_groups`."""
    owners = graph_of(users)
    assert owners is not None, "with one owner per example, a user's group is what the user owns"
    return owners_groups(users.offsets, owners, max_changed, key)


def graph_of(users: Users) -> Owners | None:
    """Return the ownership graph of owner sets and users; None if every example has one owner."""
    return getattr(users, "owners", None)


def examples_per_user(users: Users) -> np.ndarray:
    """Count the examples that each user owns, alone or with others: int64 [num_users]."""
    owners, counts = graph_of(users), np.diff(users.offsets)
    return counts if owners is None else owners.count(counts)


def places(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """Return D_sub with `group_size` places for every user, PADDING where a place is empty.

    Guarantees: a user's places depend on that user's part of `pool` alone.
    Args:
      offsets: int64 [num_users + 1], as in `Users`.
      pool: the result of `limit_contributions`.
      group_size: G_ELS.
    Returns: int64 [num_users * group_size].
    """
    counts = np.minimum(np.diff(offsets), group_size)
    found = np.full(len(counts) * group_size, PADDING, np.int64)
    within = np.arange(len(pool)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[np.repeat(np.arange(len(counts)) * group_size, counts) + within] = pool
    return found


def owners_of(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """Return the user of each place of a pool that `pool_of` returned, int64 [pool]."""
    if len(pool) == (len(offsets) - 1) * group_size:
        return np.arange(len(pool)) // group_size
    return np.searchsorted(offsets, pool, side="right") - 1


def median_group_size(sizes: np.ndarray) -> int:
    """The median heuristic for G_ELS: the median user's number of examples, at least 1.

    The result is not private; `private_median` is.
    Args:
      sizes: examples of each user, int [users].
    Source: Charles et al. 2024, Section 6.
    """
    return max(1, int(np.median(sizes)))


def private_median(sizes: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Draw a value of GRID near the median of the users' sizes, with weight exp(epsilon utility).

    Guarantees: epsilon-DP under adding or removing one user, and under removing all texts of a
      user, because users without texts are not counted. With probability 1 - FAILURE, the number of
      users between the result and the median exceeds that of the best value of GRID by at most
      `rank_error(epsilon)`. The accountant leaves out the rounding of float64: 2^-50 (epsilon N +
      4) in epsilon for N users, and 1e-14 (1 + e^epsilon) in delta (docs/theory/noise.md).
    Args:
      sizes: examples of each user, int [users].
      epsilon: of this release, > 0.
      rng: generator of this release alone.
    Source: McSherry and Talwar 2007 (the exponential mechanism).
    """
    values, probs = law_of_median(sizes, epsilon)
    return int(rng.choice(values, p=probs))


def law_of_median(sizes: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """(values, their probabilities) of `private_median`; both are shaped [grid]."""
    scores = epsilon * utility(sizes[sizes > 0])  # sensitivity 1/2, so exp(epsilon u / (2 * 1/2))
    weights = np.exp(scores - scores.max())
    return GRID, weights / weights.sum()


def utility(sizes: np.ndarray) -> np.ndarray:
    """Minus the number of users between each value of GRID and the median, float64 [grid].

    Adding or removing a user changes an entry by at most 1/2: the count on one side changes by 0 or
    1, and half of the number of users by 1/2.
    """
    ordered, half = np.sort(sizes), len(sizes) / 2
    below = np.searchsorted(ordered, GRID, "left")
    above = len(sizes) - np.searchsorted(ordered, GRID, "right")
    return -np.maximum(0.0, np.maximum(below, above) - half)


def rank_error(epsilon: float) -> float:
    """ln(|GRID| / FAILURE) / epsilon: the error of `private_median` in users, up to FAILURE."""
    return math.log(len(GRID) / FAILURE) / epsilon
