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
