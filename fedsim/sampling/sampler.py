"""What is drawn in a step: the units that take part, and in ULS each user's group of examples.

A sampler draws the units, and has the accountant's event of that draw. `Poisson` is the default.
`Cyclic` and `Allocation` restrict in which steps a user can take part. `Sampling` holds the
settings of a sampler before the number of units is known.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, localcontext
from typing import ClassVar

import numpy as np

from fedsim.accounting import StepEvent, allocated_event, cyclic_event
from fedsim.errors import expect
from fedsim.keys import SecretKey

PADDING = -1
MAX_INVERTED = 29  # expected successes of a part, beyond which tables would grow long
FLOAT_BITS, MORE_BYTES = 53, 32
UNIFORM = 2 ** (FLOAT_BITS + 8 * MORE_BYTES)
"""The number of values of the uniform number that determines the size of a draw."""
DIGITS = 120  # of decimal precision for probabilities; UNIFORM has 94


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each unit takes part in a step independently, with probability `sampling_prob`.

    Guarantees: draws are independent over units and steps; nothing is dropped or topped up; the
      size of a draw varies and may be 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """

    num_units: int
    expected_count: int
    name: ClassVar[str] = "poisson"

    @property
    def sampling_prob(self) -> float:
        """p or q: the expected share of all units in a step."""
        return self.expected_count / self.num_units

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """Yield the arrays that one draw fixes for several of `num_steps` steps.

        A resumed run must draw equal arrays, or the guarantee does not hold; runs keep their seal.
        """
        return iter(())

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Draw the units of a step.

        Args:
          key: secret key of the run in its segment; with `step` it determines the draw.
          step: t, from 0.
        Returns: numbers of units below num_units, int64 [drawn], ascending.
        """
        return poisson_subset(self.num_units, self.sampling_prob, key, step)

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """Return the accountant's event of one step.

        Args:
          noise_multiplier: sigma.
          max_contributions: the most units of one user: G_ELS in ELS, 1 in ULS.
        """
        return StepEvent(noise_multiplier, self.sampling_prob, max_contributions)


def poisson_subset(num_units: int, prob: float, key: SecretKey, step: int) -> np.ndarray:
    """Draw each number below `num_units` with probability `prob`: int64 [drawn], ascending."""
    # k ~ Binomial(n, p), then a uniform k-subset: the same law as n independent coins.
    rng = key.fresh.generator("units", step)
    count = binomial(num_units, prob, rng, key.fresh.generator("sizes of draws", step))
    return np.sort(rng.choice(num_units, count, replace=False, shuffle=False))


def binomial(
    num_units: int, prob: float, rng: np.random.Generator, low_rng: np.random.Generator
) -> int:
    """Draw from Binomial(num_units, prob), as a sum over consecutive parts of the units.

    Guarantees: no probability is off by more than 2^-300 for each part. NumPy's inversion gives the
      same results except for one in 10^13, but its probabilities are off by up to 4e-13, an error
      that e^epsilon multiplies.
    Args:
      rng: generator of the leading 53 bits of each uniform number.
      low_rng: generator of the bits below.
    """
    prob = math.floor(prob * 2.0**FLOAT_BITS) / 2.0**FLOAT_BITS  # so that 1 - prob is exact
    rare = min(prob, 1 - prob)
    num_parts = int(num_units * rare / MAX_INVERTED) + 1
    leading, rest = rng.random(num_parts), low_rng.bytes(MORE_BYTES * num_parts)
    count = 0
    for part in range(num_parts):
        size = num_units // num_parts + (part < num_units % num_parts)
        low = int.from_bytes(rest[MORE_BYTES * part : MORE_BYTES * (part + 1)])
        uniform = (int(leading[part] * 2.0**FLOAT_BITS) << 8 * MORE_BYTES) | low
        count += bisect.bisect_right(_cumulative(size, rare), uniform)
    return count if rare == prob else num_units - count


@functools.lru_cache(maxsize=64)
def _cumulative(size: int, prob: float) -> list[int]:
    """Return UNIFORM times the probability of at most k successes of Binomial(size, prob), for
    k = 0, 1, ...; the last entry is UNIFORM, and the values beyond it are worth less than 2."""
    table: list[int] = []
    with localcontext(prec=DIGITS):
        total, fails = Decimal(0), 1 - Decimal(prob)
        mass = fails**size * UNIFORM
        for k in range(size + 1):
            total += mass
            table.append(int(total))
            mass *= Decimal(prob) / fails * (size - k) / (k + 1)
            if k > 2 * size * prob and mass < 1:  # from here on each mass is below half the last
                break
    return [*table[:-1], UNIFORM]


@dataclasses.dataclass(frozen=True)
class Cyclic(Poisson):
    """Cyclic Poisson sampling: step t draws from group t mod bands of the users, which are divided
    into groups once, each unit with probability bands * sampling_prob.

    Guarantees: all units of a user are in one group, so two steps in which a user takes part are a
      multiple of `bands` apart, also in different segments. A user's group depends on the key
      alone, not on whether another user is present; with `balanced` it depends on the number of
      users, which zero-out adjacency takes as public. One band is Poisson sampling, bit by bit.
    Raises: ConfigError: `bands` groups of `expected_count` units do not exist.
    Source: Choquette-Choo et al. 2023, Algorithm 2 (arXiv 2306.08153).
    """

    bands: int = 1
    """b: the number of groups."""
    balanced: bool = True
    """True: groups of equal size. False: each user's group is drawn independently."""
    owners: Callable[[], np.ndarray] | None = None
    """Returns the user of each unit, int64 [units]. None: each unit is a user."""
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        most = self.num_units // self.expected_count
        holds = self.bands * self.expected_count <= self.num_units
        expect("bands", self.bands, holds, f"<= {most}: a step draws from one of so many groups")

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """Yield the groups: the units in the order of groups, and where each group begins."""
        yield from _groups(self, key)

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Draw the units of a step: int64 [drawn], ascending."""
        order, starts = _groups(self, key)
        group = step % self.bands
        members = order[starts[group] : starts[group + 1]]
        prob = min(1.0, self.sampling_prob * self.bands)
        return members[poisson_subset(len(members), prob, key, step)]

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """Return the accountant's event of one step; see `Poisson.event`."""
        return cyclic_event(noise_multiplier, self.sampling_prob, max_contributions, self.bands)


@functools.lru_cache(maxsize=2)
def _groups(sampler: Cyclic, key: SecretKey) -> tuple[np.ndarray, np.ndarray]:
    """Return (units group by group, ascending in each; where each group begins)."""
    owners = np.arange(sampler.num_units) if sampler.owners is None else sampler.owners()
    users, rng = int(owners.max()) + 1, key.generator("groups")
    if sampler.balanced:
        group_of_user = rng.permutation(users) % sampler.bands
    else:
        group_of_user = rng.integers(0, sampler.bands, users)
    groups = group_of_user[owners]
    sizes = np.bincount(groups, minlength=sampler.bands)
    return np.argsort(groups, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])


@dataclasses.dataclass(frozen=True)
class Allocation(Poisson):
    """Random allocation: each user takes part in exactly one of every `window` successive steps,
    chosen uniformly.

    Guarantees: a user's step depends on the key alone, not on segments, and is independent of other
      users' steps and of other windows. No user is left out, and the size of a draw varies.
    Source: Chua et al. 2024 (balls and bins).
    """

    window: int = 1
    """W = T / K, for K participations in T steps."""
    name: ClassVar[str] = "allocation"

    @property
    def sampling_prob(self) -> float:
        """Expected share of all users in a step."""
        return 1 / self.window

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """Yield the step of each user, window by window; see `Poisson.drawn_once`."""
        for number in range(-(-num_steps // self.window)):
            yield _places(self, key, number)

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Draw the users of a step: int64 [drawn], ascending."""
        number, place = divmod(step, self.window)
        return np.flatnonzero(_places(self, key, number) == place)

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """Return the accountant's event of one step. Each user is one unit."""
        assert max_contributions == 1, "a user is one unit"
        return allocated_event(noise_multiplier, self.window)


@functools.lru_cache(maxsize=2)
def _places(sampler: Allocation, key: SecretKey, number: int) -> np.ndarray:
    """Draw the step of a window in which each user takes part, int64 [users]."""
    return key.generator("allocation", number).integers(0, sampler.window, sampler.num_units)


def draw_groups(
    offsets: np.ndarray, cohort: Iterable[int], group_size: int, key: SecretKey, step: int
) -> np.ndarray:
    """D_u^t: for each user of the cohort a fresh uniform subset of at most `group_size` examples.

    Guarantees: no example appears twice in a group; a user's group depends on (key, segment, step,
      user) alone.
    Args:
      offsets: int64 [num_users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
      cohort: U^t, numbers of users.
      group_size: G_ULS.
      key: secret key of the run.
      step: t, from 0.
    Returns: example indices, int64 [cohort, group_size]; PADDING fills the groups of users with
      fewer examples.
    Source: Charles et al. 2024, Algorithm 2.
    """
    users = [int(user) for user in cohort]
    rows = np.full((len(users), group_size), PADDING, np.int64)
    streams = key.fresh.streams("group", step)
    for group, user in zip(rows, users, strict=True):
        start, size = int(offsets[user]), int(offsets[user + 1] - offsets[user])
        if size <= group_size:
            group[:size] = np.arange(start, start + size)
        else:
            rng = streams.at(user)
            group[:] = start + np.sort(rng.choice(size, group_size, replace=False, shuffle=False))
    return rows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of a sampler, before the number of units is known."""

    name: str = "poisson"
    """poisson, cyclic or allocation."""
    bands: int = 1
    """b, the number of groups of cyclic sampling."""
    balanced: bool = True
    """True if the groups of cyclic sampling are of equal size; see `Cyclic`."""

    window: int = 1
    """W, the number of steps of a window of random allocation."""

    def over(
        self,
        num_units: int,
        expected_count: int,
        owners: Callable[[], np.ndarray] | None = None,
    ) -> Poisson:
        """Return the sampler of these settings over some units.

        Args:
          num_units: number of units to draw from.
          expected_count: B or M, the expected number of units of a step.
          owners: returns the user of each unit; see `Cyclic`.
        """
        drawn = (num_units, expected_count)
        if self.name == Cyclic.name:
            return Cyclic(*drawn, self.bands, self.balanced, owners)
        if self.name == Allocation.name:
            return Allocation(*drawn, self.window)
        return Poisson(*drawn)
