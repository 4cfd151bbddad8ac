"""Cyclic Poisson sampling: every user has steps in which alone they can take part."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np

from fedsim.accounting import StepEvent, cyclic_event
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.sampling.poisson import Poisson, poisson_subset


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
