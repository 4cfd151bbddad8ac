"""Counts, for `verify`, of how often one user occurs in the pool and in other users' groups.

Counts every owner of every text, unlike `sampling.shared`, which drew the pool and the groups.
"""

import numpy as np

from fedsim.data.owners import Owners
from fedsim.sampling.shared import Groups
from fedsim.trust.evidence import demand


def most_owned(rows: np.ndarray, offsets: np.ndarray, owners: Owners) -> int:
    """Largest number of texts among `rows` that one user owns.

    Raises Violated: a text occurs twice.
    """
    demand(len(np.unique(rows)) == len(rows), "a text is in the pool twice")
    sets = np.searchsorted(offsets, rows, side="right") - 1
    return int(owners.count(np.bincount(sets, minlength=owners.num_sets)).max())


def most_entered(groups: Groups, offsets: np.ndarray, owners: Owners) -> int:
    """Largest number of other users' groups that contain texts of one user.

    Raises Violated: a text is in two groups, a user has two groups, or a group has a text that its
      user does not own.
    """
    demand(len(np.unique(groups.rows)) == len(groups.rows), "a text is in two groups")
    demand(len(np.unique(groups.users)) == groups.num_users, "a user has two groups")
    group = np.repeat(np.arange(groups.num_users), np.diff(groups.offsets))
    sets = np.searchsorted(offsets, groups.rows, side="right") - 1
    group, sets = np.divmod(np.unique(group * owners.num_sets + sets), owners.num_sets)
    counts = owners.sizes[sets]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    user = owners.users[np.repeat(owners.starts[sets], counts) + within]
    group = np.repeat(group, counts)
    own = user == groups.users[group]
    demand(int(own.sum()) == len(sets), "a group has a text that its user does not own")
    pairs = np.unique(user[~own].astype(np.int64) * groups.num_users + group[~own])
    entered = np.bincount(pairs // groups.num_users, minlength=1)
    return int(entered.max())
