"""Random allocation: every user takes part equally often, at random steps."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from fedsim.accounting import StepEvent, allocated_event
from fedsim.keys import SecretKey
from fedsim.sampling.poisson import Poisson


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
