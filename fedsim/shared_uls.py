"""Algorithm 2 where texts have several owners: each text is in the group of one of them.

A user's content is in their own group, which is empty without it, and in up to max_changed groups
of others, which are other groups without it: docs/theory/owners.md has the theorem. Algorithm
1 needs no such file: its pool differs (`sampling.pool_of`), its steps do not.
"""

import dataclasses
from typing import Any

import numpy as np

from fedsim.accounting import StepEvent
from fedsim.keys import SecretKey
from fedsim.sampling import Users, groups_of
from fedsim.uls import ULS


class SharedULS(ULS):
    """ULS, its sampling units being the users whom a group of texts was given to.

    Guarantees: as ULS, by the theorem of docs/theory/owners.md, under zero-out adjacency with the
      graph of who owns what taken as public and fixed.
    """

    def __init__(self, users: Users, *, key: SecretKey, max_changed: int, **settings: Any):
        """Args: max_changed: k. settings: those of ULS."""
        self.groups = groups_of(users, max_changed, key)
        super().__init__(self.groups, key=key, **settings)

    def event(self, noise_multiplier: float) -> StepEvent:
        """One step to the accountant: one unit that is gone, k that are others."""
        event = super().event(noise_multiplier)
        return dataclasses.replace(event, max_changed=self.groups.max_changed)

    def draw(self, step: int) -> np.ndarray:
        """Who takes part in a step: rows [users, group]."""
        return self.groups.examples(super().draw(step))
