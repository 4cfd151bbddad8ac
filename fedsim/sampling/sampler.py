"""A way to draw units, by its settings."""

import dataclasses
from collections.abc import Callable

import numpy as np

from fedsim.sampling.allocation import Allocation
from fedsim.sampling.cyclic import Cyclic
from fedsim.sampling.poisson import Poisson, Shuffle


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
