"""Which of a user's examples take part: contribution bounding, and the group of a step.

All are pure functions of (key, purpose, step, user); see `keys`.
"""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from fedsim.config import ZERO_OUT
from fedsim.data import Owners
from fedsim.keys import SecretKey
from fedsim.sampling.shared import Groups, bounded_pool, owners_groups

PADDING = -1


class Users(Protocol):
    """Whose examples are which: what sampling and accounting know of the data."""

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
        """int64 [num_users + 1]: user u owns the examples offsets[u]:offsets[u + 1]. Where examples
        have several owners: those of each owner set; see `graph_of`."""
        ...


def limit_contributions(offsets: np.ndarray, group_size: int, key: SecretKey) -> np.ndarray:
    """D_sub: at most `group_size` examples of each user, drawn once for all of training.

    Guarantees: a user's share depends on (key, user) alone, so it is the same in every step and
      after every resume; no example appears twice.
    Args:
      offsets: int64 [num_users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
    Returns: example indices, int64 [pool], ascending.
    Source: Charles et al. 2024, Algorithm 1, lines 1-4.
    """
    keep, streams = np.ones(offsets[-1], bool), key.streams("contributions")
    for user in np.flatnonzero(np.diff(offsets) > group_size):
        start, end = offsets[user], offsets[user + 1]
        keep[start:end] = False
        rng = streams.at(int(user))
        keep[start + rng.choice(end - start, group_size, replace=False, shuffle=False)] = True
    return np.flatnonzero(keep)


def pool_of(users: Users, group_size: int, key: SecretKey, adjacency: str) -> np.ndarray:
    """D_sub: of `limit_contributions`, or with zero-out of `places`, as many for every user. Where
    examples have several owners: of `bounded_pool`."""
    offsets = users.offsets
    if (owners := graph_of(users)) is not None:
        return bounded_pool(offsets, owners, group_size, key)
    pool = limit_contributions(offsets, group_size, key)
    return places(offsets, pool, group_size) if adjacency == ZERO_OUT else pool


def groups_of(users: Users, max_changed: int, key: SecretKey) -> Groups:
    """D_u where examples have several owners: of `owners_groups`."""
    owners = graph_of(users)
    assert owners is not None, "else a user's group is all that they own"
    return owners_groups(users.offsets, owners, max_changed, key)


def graph_of(users: Users) -> Owners | None:
    """Who owns the examples of each owner set; None where every example has one owner."""
    return getattr(users, "owners", None)


def examples_per_user(users: Users) -> np.ndarray:
    """int64 [num_users]: examples that each user owns, alone or with others."""
    owners, counts = graph_of(users), np.diff(users.offsets)
    return counts if owners is None else owners.count(counts)


def without_padding(rows: np.ndarray) -> np.ndarray:
    """Rows [n] without empty places, which would add zero to the sum."""
    return rows[rows != PADDING]


def places(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """D_sub with `group_size` places for every user: what a user lacks is PADDING.

    Guarantees: a user's places depend on their own part of `pool` alone.
    Args: pool: of `limit_contributions`.
    Returns: int64 [num_users * group_size].
    """
    counts = np.minimum(np.diff(offsets), group_size)
    found = np.full(len(counts) * group_size, PADDING, np.int64)
    within = np.arange(len(pool)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[np.repeat(np.arange(len(counts)) * group_size, counts) + within] = pool
    return found


def owners_of(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """Whose each place of the pool of ELS is, int64 [pool]. Args: pool: of `pool_of`."""
    if len(pool) == (len(offsets) - 1) * group_size:
        return np.arange(len(pool)) // group_size
    return np.searchsorted(offsets, pool, side="right") - 1


def draw_groups(
    offsets: np.ndarray, cohort: Iterable[int], group_size: int, key: SecretKey, step: int
) -> np.ndarray:
    """D_u^t: for each user of the cohort a fresh uniform subset of at most `group_size` examples.

    Guarantees: no example appears twice in a group; a user's group depends on (key, step, user)
      alone.
    Returns: example indices, int64 [cohort, group_size]; PADDING fills the groups of short users.
    Source: Charles et al. 2024, Algorithm 2.
    """
    users = [int(user) for user in cohort]
    rows, streams = np.full((len(users), group_size), PADDING, np.int64), key.streams("group", step)
    for group, user in zip(rows, users, strict=True):
        start, size = int(offsets[user]), int(offsets[user + 1] - offsets[user])
        if size <= group_size:
            group[:size] = np.arange(start, start + size)
        else:
            rng = streams.at(user)
            group[:] = start + np.sort(rng.choice(size, group_size, replace=False, shuffle=False))
    return rows


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
