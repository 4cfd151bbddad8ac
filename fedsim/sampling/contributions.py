"""Which of a user's examples take part: contribution bounding, and the group of a step.

All are pure functions of (key, purpose, step, user); see `keys`.
"""

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
