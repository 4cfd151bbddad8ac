"""The noise of a step, as Gaussian numbers on a lattice.

independent    of every step for itself, and how far it is from the ideal
correlated     each step takes back part of the noise of the steps before
toeplitz       how much of it, and what that does to sums of steps
bands          of how many steps
"""

from typing import Protocol

import numpy as np

from fedsim.keys import SecretKey
from fedsim.noise.correlated import Correlated
from fedsim.noise.independent import (
    CELL_ERRORS,
    add_gaussian,
    gaussian,
    in_blocks,
    noisy_mean_loss,
    noisy_number,
    release_shift,
    slack,
)

__all__ = [
    "CELL_ERRORS",
    "AddNoise",
    "Correlated",
    "add_gaussian",
    "gaussian",
    "in_blocks",
    "noisy_mean_loss",
    "noisy_number",
    "release_shift",
    "slack",
]


class AddNoise(Protocol):
    """A kind of noise; `add_gaussian` is the independent one."""

    def __call__(
        self, sums: list[np.ndarray], *, stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """The sums of a step with its noise, rounded; see `add_gaussian`."""
        ...
