"""Algorithm 2 for texts with several owners: each text is in the group of one of its owners.

Without one user's content, that user's group is empty and up to max_changed groups of other users
change; docs/theory/owners.md has the theorem. Algorithm 1 needs no such file, because only its pool
differs (`sampling.pool_of`), not its steps.
"""

import dataclasses
from typing import Any

import numpy as np

from fedsim.accounting import StepEvent
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.sampling import Users, graph_of, owners_groups
from fedsim.uls import ULS


class SharedULS(ULS):
    """ULS whose sampling units are the users to whom a group of texts was assigned.

    Guarantees: as ULS, by the theorem of docs/theory/owners.md, under zero-out adjacency, with the
      ownership graph taken as public and fixed.
    """

    def __init__(self, users: Users, *, key: SecretKey, max_changed: int, **settings: Any):
        """Assign each text to one of its owners.

        Args:
          users: the users and their ownership graph.
          key: secret key of the run; the assignment depends on it.
          max_changed: k, the most groups of other users that hold texts of any one user.
          settings: the other settings of `ULS`.
        """
        owners = graph_of(users)
        assert owners is not None, "with one owner of each text, a group is what a user owns"
        self.groups = owners_groups(users.offsets, owners, max_changed, key)
        size, most = settings["batch_size"], self.groups.num_users * settings["group_size"]
        few = f"only {self.groups.num_users:,} of {users.num_users:,} users have a text within the "
        why = f"{few}bound on the texts of an owner; does one, such as a bot, have nearly all?"
        expect("batch_size", size, size <= most, f"<= {most}: {why}")
        super().__init__(self.groups, key=key, **settings)

    def event(self, noise_multiplier: float) -> StepEvent:
        """Return the accountant's event of one step: one unit is removed and k units change."""
        event = super().event(noise_multiplier)
        return dataclasses.replace(event, max_changed=self.groups.max_changed)

    def draw(self, step: int) -> np.ndarray:
        """Draw the sampling units of a step: example indices, int64 [users, group_size]."""
        return self.groups.examples(super().draw(step))
