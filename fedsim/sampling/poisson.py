"""Draws of a step's units: Poisson sampling, and the shuffling that it is compared with."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import ClassVar

import numpy as np

from fedsim.accounting import StepEvent, cyclic_event
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
