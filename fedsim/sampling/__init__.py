"""Who takes part: the draw of a step's units, contribution bounding, a user's group of examples.

    poisson         Poisson sampling, and the shuffling that it is compared with
    allocation      every user equally often, at random steps
    cyclic          Poisson sampling from one of several groups of users, in turn
    contributions   the pool of ELS, a user's examples in a step of ULS
    shared          both where examples have several owners

All are pure functions of (key, purpose, step, user); see `keys`. What is accounted comes from the
object that drew the units, so the run and its accounting cannot disagree. Does not read any text.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from fedsim.sampling.allocation import Allocation
from fedsim.sampling.contributions import (
    PADDING,
    Users,
    draw_groups,
    examples_per_user,
    graph_of,
    groups_of,
    limit_contributions,
    owners_of,
    places,
    pool_of,
    without_padding,
)
from fedsim.sampling.cyclic import Cyclic
from fedsim.sampling.poisson import Poisson, Shuffle

__all__ = [
    "PADDING",
    "Allocation",
    "Cyclic",
    "Poisson",
    "Sampling",
    "Shuffle",
    "Users",
    "draw_groups",
    "examples_per_user",
    "graph_of",
    "groups_of",
    "limit_contributions",
    "owners_of",
    "places",
    "pool_of",
    "without_padding",
]


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

    def over(
        self,
        num_units: int,
        expected_count: int,
        owners: Callable[[], np.ndarray] | None = None,
    ) -> Poisson:
        """The sampler of these units. Args: owners: see `Cyclic`."""
        if self.name == Cyclic.name:
            groups = (self.bands, self.balanced, owners)
            return Cyclic(num_units, expected_count, 1.0, *groups)
        if self.name == Allocation.name:
            return Allocation(num_units, expected_count, 1.0, self.window)
        if self.name == Shuffle.name:
            return Shuffle(num_units, expected_count, 1.0, self.bands)
        return Poisson(num_units, expected_count)
