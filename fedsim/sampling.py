"""Who takes part: contribution bounding, the draw of a step's units, a user's group of examples.

All are pure functions of (key, purpose, step, user); see `keys`. What is accounted comes from the
object that drew the units, so the run and its accounting cannot disagree. Does not read any text.
"""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Protocol

import numpy as np

from fedsim.accounting import StepEvent
from fedsim.config import ZERO_OUT
from fedsim.keys import SecretKey

PADDING = -1


class Users(Protocol):
    """Whose examples are which: what sampling and accounting know of the data."""

    @property
    def num_users(self) -> int:
        """N."""
        ...

    @property
    def num_examples(self) -> int:
        """Examples of all users."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """int64 [num_users + 1]: user u owns the examples offsets[u]:offsets[u + 1]."""
        ...


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each unit takes part in a step independently, with probability `sampling_prob`.

    Guarantees: draws are independent over units and steps; nothing is dropped or topped up; the
      size of a draw varies and may be 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """

    num_units: int
    expected_count: int
    assumed_share: float = 1.0
    """The share of an assumed population's units that is there. Below 1 what is accounted is an
    assumption, not a guarantee."""
    name: ClassVar[str] = "poisson"

    @property
    def sampling_prob(self) -> float:
        """p or q: the probability with which a unit takes part in a step."""
        return self.expected_count / self.num_units

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Units of `step`, int64 [drawn], ascending."""
        # k ~ Binomial(n, p), then a uniform k-subset: the same law as n independent coins.
        rng = key.generator("units", step)
        count = rng.binomial(self.num_units, self.sampling_prob)
        return np.sort(rng.choice(self.num_units, count, replace=False, shuffle=False))

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """What one step is to the accountant."""
        prob = self.sampling_prob * self.assumed_share
        return StepEvent(noise_multiplier, prob, max_contributions)


@dataclasses.dataclass(frozen=True)
class Shuffle(Poisson):
    """Fixed-size draws in shuffled order, a new order every epoch: the paper's comparison mode.

    No guarantee: `event` accounts as if Poisson sampled, which shuffling does not give (Chua et al.
    2024). The units left over at the end of an epoch sit it out.
    """

    name: ClassVar[str] = "shuffle"

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Units of `step`, int64 [expected_count], ascending."""
        epoch, batch = divmod(step, self.num_units // self.expected_count)
        order = key.generator("shuffle", epoch).permutation(self.num_units)
        return np.sort(order[batch * self.expected_count :][: self.expected_count])


SAMPLERS = {sampler.name: sampler for sampler in (Poisson, Shuffle)}


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


def pool_of(offsets: np.ndarray, group_size: int, key: SecretKey, adjacency: str) -> np.ndarray:
    """D_sub: of `limit_contributions`, or with zero-out of `places`, as many for every user."""
    pool = limit_contributions(offsets, group_size, key)
    return places(offsets, pool, group_size) if adjacency == ZERO_OUT else pool


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
