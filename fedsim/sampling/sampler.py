"""Draws of a step's units: Poisson sampling, and the shuffling that it is compared with."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from typing import ClassVar

import numpy as np

from fedsim.accounting import StepEvent, allocated_event, cyclic_event
from fedsim.errors import expect
from fedsim.keys import SecretKey

MOST_INVERTED = 29  # expected successes of a part, beyond which tables would grow long
FLOAT_BITS, MORE_BYTES = 53, 32
UNIFORM = 2 ** (FLOAT_BITS + 8 * MORE_BYTES)
"""The number of values of a uniform number, by which a size is drawn."""
DIGITS = 120  # in which probabilities are computed; UNIFORM has 94


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
        """p or q: the share of all units that is expected in a step."""
        return self.expected_count / self.num_units

    @property
    def accounted_prob(self) -> float:
        """p or q as it is accounted."""
        return self.sampling_prob * self.assumed_share

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """Arrays that are drawn once for several steps of `num_steps`: other ones in later steps
        than in earlier ones would break the guarantee."""
        return iter(())

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Units of `step`, int64 [drawn], ascending."""
        return poisson_subset(self.num_units, self.sampling_prob, key, step)

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """What one step is to the accountant."""
        return StepEvent(noise_multiplier, self.accounted_prob, max_contributions)


@dataclasses.dataclass(frozen=True)
class Shuffle(Poisson):
    """Fixed-size draws in shuffled order, a new order every epoch: the paper's comparison mode.

    No guarantee: `event` accounts as if Poisson sampled, which shuffling does not give (Chua et al.
    2024). The units left over at the end of an epoch sit it out.
    """

    bands: int = 1
    """As if cyclic sampling had so many groups."""
    name: ClassVar[str] = "shuffle"

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Units of `step`, int64 [expected_count], ascending."""
        epoch, batch = divmod(step, self.num_units // self.expected_count)
        order = key.generator("shuffle", epoch).permutation(self.num_units)
        return np.sort(order[batch * self.expected_count :][: self.expected_count])

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """What one step would be to the accountant, were units Poisson sampled."""
        return cyclic_event(noise_multiplier, self.accounted_prob, max_contributions, self.bands)


def poisson_subset(num_units: int, prob: float, key: SecretKey, step: int) -> np.ndarray:
    """Each of the numbers below `num_units` with probability `prob`, int64 [drawn], ascending."""
    # k ~ Binomial(n, p), then a uniform k-subset: the same law as n independent coins.
    rng = key.generator("units", step)
    count = binomial(num_units, prob, rng, key.generator("sizes of draws", step))
    return np.sort(rng.choice(num_units, count, replace=False, shuffle=False))


def binomial(
    num_units: int, prob: float, rng: np.random.Generator, more: np.random.Generator
) -> int:
    """A number of successes in `num_units` coins, as the sum of those of consecutive parts.

    Guarantees: no probability is off by more than 2^-300 for each part. (NumPy's inversion, whose
      results these are but for one in 10^13, is off by up to 4e-13, which e^epsilon multiplies.)
    Args: rng: of the leading bits; more: of the others.
    """
    prob = math.floor(prob * 2.0**FLOAT_BITS) / 2.0**FLOAT_BITS  # so that 1 - prob is exact
    rare = min(prob, 1 - prob)
    num_parts = int(num_units * rare / MOST_INVERTED) + 1
    leading, rest = rng.random(num_parts), more.bytes(MORE_BYTES * num_parts)
    found = 0
    for part in range(num_parts):
        size = num_units // num_parts + (part < num_units % num_parts)
        low = int.from_bytes(rest[MORE_BYTES * part : MORE_BYTES * (part + 1)])
        uniform = (int(leading[part] * 2.0**FLOAT_BITS) << 8 * MORE_BYTES) | low
        found += bisect.bisect_right(_cumulative(size, rare), uniform)
    return found if rare == prob else num_units - found


@functools.lru_cache(maxsize=64)
def _cumulative(size: int, prob: float) -> list[int]:
    """UNIFORM times the probability of at most k successes in `size` coins, for k = 0, 1, ...; the
    last is UNIFORM, what is left out beyond it less than two."""
    found: list[int] = []
    with localcontext(prec=DIGITS):
        total, fails = Decimal(0), 1 - Decimal(prob)
        mass = fails**size * UNIFORM
        for k in range(size + 1):
            total += mass
            found.append(int(total))
            mass *= Decimal(prob) / fails * (size - k) / (k + 1)
            if k > 2 * size * prob and mass < 1:  # each further one is less than half of the last
                break
    return [*found[:-1], UNIFORM]


@dataclasses.dataclass(frozen=True)
class Cyclic(Poisson):
    """Users are put into `bands` groups once; step t draws from group t mod bands, each unit with
    probability bands * sampling_prob.

    Guarantees: all units of a user are in one group, so that two steps in which a user takes part
      are a multiple of `bands` apart; the groups depend on the key alone, and nobody's on whether
      another user is there (`balanced`: on how many there are, which zero-out takes as public).
      One band is Poisson sampling, bit by bit.
    Raises: ConfigError: there are not as many groups with enough units in them.
    Source: Choquette-Choo et al. 2023, Algorithm 2 (arXiv 2306.08153).
    """

    bands: int = 1
    """b: the number of groups."""
    balanced: bool = True
    """Whether groups are of equal size; else everyone's is drawn by itself."""
    owners: Callable[[], np.ndarray] | None = None
    """Whose each unit is, int64 [units]; None: each is a user."""
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        most = self.num_units // self.expected_count
        holds = self.bands * self.expected_count <= self.num_units
        expect("bands", self.bands, holds, f"<= {most}: a step draws from one of so many groups")

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """The groups."""
        yield from _groups(self, key)

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Units of `step`, int64 [drawn], ascending."""
        order, starts = _groups(self, key)
        group = step % self.bands
        members = order[starts[group] : starts[group + 1]]
        prob = min(1.0, self.sampling_prob * self.bands)
        return members[poisson_subset(len(members), prob, key, step)]

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """What one step is to the accountant."""
        return cyclic_event(noise_multiplier, self.accounted_prob, max_contributions, self.bands)


@functools.lru_cache(maxsize=2)
def _groups(sampler: Cyclic, key: SecretKey) -> tuple[np.ndarray, np.ndarray]:
    """All units, group by group and ascending in each, and where each group begins."""
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
    """In every `window` successive steps each user takes part in exactly one, uniformly chosen.

    Guarantees: everyone's step depends on the key alone, and is independent of all others' and of
      that in other windows; nobody is left out, and the size of a draw varies.
    Source: Chua et al. 2024 (balls and bins).
    """

    window: int = 1
    """W = T / K, for K participations in T steps."""
    name: ClassVar[str] = "allocation"

    @property
    def sampling_prob(self) -> float:
        """The share of all users that is expected in a step."""
        return 1 / self.window

    def drawn_once(self, key: SecretKey, num_steps: int) -> Iterator[np.ndarray]:
        """Everyone's step, window by window."""
        for number in range(-(-num_steps // self.window)):
            yield _places(self, key, number)

    def draw(self, key: SecretKey, step: int) -> np.ndarray:
        """Users of `step`, int64 [drawn], ascending."""
        number, place = divmod(step, self.window)
        return np.flatnonzero(_places(self, key, number) == place)

    def event(self, noise_multiplier: float, *, max_contributions: int = 1) -> StepEvent:
        """What one step is to the accountant."""
        assert max_contributions == 1, "of users, who are one unit each"
        return allocated_event(noise_multiplier, self.window)


@functools.lru_cache(maxsize=2)
def _places(sampler: Allocation, key: SecretKey, number: int) -> np.ndarray:
    """Which step of a window each user takes part in, [users]."""
    return key.generator("allocation", number).integers(0, sampler.window, sampler.num_units)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to draw units, before it is known from which."""

    name: str = "poisson"
    """poisson, cyclic, allocation or shuffle."""
    bands: int = 1
    """b of cyclic sampling."""
    balanced: bool = True
    """Whether the groups of cyclic sampling are of equal size; see `Cyclic`."""

    window: int = 1
    """W of random allocation."""
    assumed_share: float = 1.0
    """See `Poisson`."""

    def over(
        self,
        num_units: int,
        expected_count: int,
        owners: Callable[[], np.ndarray] | None = None,
    ) -> Poisson:
        """The sampler of these units. Args: owners: see `Cyclic`."""
        drawn = (num_units, expected_count, self.assumed_share)
        if self.name == Cyclic.name:
            return Cyclic(*drawn, self.bands, self.balanced, owners)
        if self.name == Allocation.name:
            return Allocation(*drawn, self.window)
        if self.name == Shuffle.name:
            return Shuffle(*drawn, self.bands)
        return Poisson(*drawn)
