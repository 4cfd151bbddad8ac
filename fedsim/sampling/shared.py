"""Contribution bounding for texts with several owners: the pool of ELS and the groups of ULS.

Both are functions of the key and of the ownership graph, never of a text's content. Which of one
user's texts are kept depends on all users, so the graph is taken as public and fixed, and the
guarantee protects the content of a user's texts (docs/theory/owners.md). Both are computed once,
before the first step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, sparse

from fedsim.data import Owners
from fedsim.keys import SecretKey

EXACT_SETS = 1000  # owner sets up to which integer programming searches for the largest pool
EXACT_NODES = 1000  # of the search tree: a time limit would make the pool depend on the machine


def bounded_pool(
    offsets: np.ndarray, owners: Owners, group_size: int, key: SecretKey
) -> np.ndarray:
    """D_sub: texts of which no user owns more than `group_size`.

    Guarantees: a function of the graph and the key. It is the largest such pool if there are at
      most EXACT_SETS owner sets and the search succeeds; otherwise the greedy one, of texts in an
      order drawn from the key.
    Args:
      offsets: int64 [sets + 1]; set s has the texts offsets[s]:offsets[s + 1].
      owners: the ownership graph of sets and users.
      group_size: G_ELS.
      key: secret key of the run.
    Returns: numbers of texts, int64 [pool], ascending.
    """
    order = key.generator("contributions").permutation(int(offsets[-1]))
    if owners.num_sets <= EXACT_SETS:
        most = largest_pool(np.diff(offsets), owners, group_size)
        if most is not None:
            return _first_of_each(order, offsets, most)
    return greedy_pool(order, offsets, owners, group_size)


def greedy_pool(
    order: np.ndarray, offsets: np.ndarray, owners: Owners, group_size: int
) -> np.ndarray:
    """Keep each text, in this order, unless one of its owners already has `group_size` texts.

    Vectorised in rounds. A text is kept once it is among the first undecided texts of each of its
    owners, as many as still fit, because then it fits whatever is decided about the texts before
    it. It is left out once an owner has no room. Every round decides at least the first text; a
    random order needs few rounds.
    Returns: numbers of texts, int64 [pool], ascending.
    """
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    text, user = _memberships(offsets, owners)
    sorting = np.lexsort((place[text], user))
    text, user = text[sorting], user[sorting]
    room = np.full(owners.num_users, group_size, np.int64)
    kept, full, fits = (np.zeros(len(order), bool) for _ in range(3))
    while len(text):
        first = np.flatnonzero(np.diff(user, prepend=-1))
        rank = np.arange(len(user)) - np.repeat(first, np.diff(first, append=len(user)))
        fits[text] = True
        fits[text[rank >= room[user]]] = False
        chosen = fits[text]
        kept[text[chosen]] = True
        room -= np.bincount(user[chosen], minlength=len(room))
        full[text[room[user] == 0]] = True
        undecided = ~(kept[text] | full[text])
        text, user = text[undecided], user[undecided]
    return np.flatnonzero(kept)


def largest_pool(num_texts: np.ndarray, owners: Owners, group_size: int) -> np.ndarray | None:
    """Count the texts of each owner set in a largest pool, by integer programming.

    Texts with the same owners are interchangeable, so the counts determine the pool's size.
    Args:
      num_texts: texts of each owner set, int [sets].
      owners: the ownership graph of sets and users.
      group_size: G_ELS.
    Returns: int64 [sets], or None if the search reached EXACT_NODES.
    """
    shape = (owners.num_users, owners.num_sets)
    ones, most = np.ones(len(owners.users)), np.full(owners.num_users, group_size)
    owned = sparse.csr_array((ones, (owners.users, owners.sets)), shape=shape)
    solution: Any = optimize.milp(
        -np.ones(owners.num_sets),
        integrality=np.ones(owners.num_sets),
        bounds=optimize.Bounds(0, num_texts.astype(np.float64)),  # pyright: ignore
        constraints=optimize.LinearConstraint(owned, -np.inf, most),  # pyright: ignore
        options={"mip_rel_gap": 0.0, "node_limit": EXACT_NODES},
    )
    return np.round(solution.x).astype(np.int64) if solution.success else None


@dataclass(frozen=True)
class Groups:
    """The groups of ULS for texts with several owners. As `Users`, it has the users with a group.

    Attributes:
      offsets: int64 [groups + 1]; group g has the places offsets[g]:offsets[g + 1].
      rows: int64 [places], the example at each place.
      users: int64 [groups], the user of each group.
      max_changed: k, the most groups of other users that hold texts of any one user.
    """

    offsets: np.ndarray
    rows: np.ndarray
    users: np.ndarray
    max_changed: int

    @property
    def num_users(self) -> int:
        """Number of users with a group."""
        return len(self.users)

    @property
    def num_examples(self) -> int:
        """Number of examples of all groups."""
        return len(self.rows)

    def examples(self, places: np.ndarray) -> np.ndarray:
        """Return the examples at some places, in the same shape; -1, padding, stays."""
        return np.where(places >= 0, self.rows[places], places)


def owners_groups(offsets: np.ndarray, owners: Owners, max_changed: int, key: SecretKey) -> Groups:
    """Assign each text to the group of one of its owners.

    Each owner set, in an order drawn from the key, is assigned whole to one of its owners: the one
    for whom the fewest other owners enter a group in which they have no text yet; the key breaks
    ties. A set is left out if some owner would then be in more than `max_changed` groups of others.
    Users without a group are not sampling units.

    Guarantees: a function of the graph and the key. All texts in a group have its user among their
      owners. Texts of one user are in at most max_changed groups of other users.
    Args:
      offsets: int64 [sets + 1]; set s has the texts offsets[s]:offsets[s + 1].
      owners: the ownership graph of sets and users.
      max_changed: k.
      key: secret key of the run.
    """
    rng = key.generator("contributions")
    order, chances = rng.permutation(owners.num_sets), rng.random(len(owners.users))
    home = np.where(owners.sizes == 1, owners.users[owners.starts[:-1]], -1)
    entered: dict[int, set[int]] = {}
    for number in order[owners.sizes[order] > 1].tolist():
        here = slice(owners.starts[number], owners.starts[number + 1])
        members = owners.users[here].tolist()
        chosen, fewest = -1, len(members)
        for place in np.argsort(chances[here]).tolist():
            new = _entering(members, members[place], entered, max_changed)
            if new is not None and new < fewest:
                chosen, fewest = members[place], new
        if chosen >= 0:
            home[number] = chosen
            for user in members:
                if user != chosen:
                    entered.setdefault(user, set()).add(chosen)
    per_set = np.diff(offsets)
    sets = np.flatnonzero((home >= 0) & (per_set > 0))
    sets = sets[np.argsort(home[sets], kind="stable")]
    users, first = np.unique(home[sets], return_index=True)
    starts = np.concatenate([[0], np.cumsum(per_set[sets])])
    rows = np.arange(starts[-1]) + np.repeat(offsets[sets] - starts[:-1], per_set[sets])
    return Groups(np.append(starts[first], starts[-1]), rows, users.astype(np.int64), max_changed)


def _entering(members: list[int], home: int, entered: dict[int, set[int]], most: int) -> int | None:
    """Count the members who would newly enter the group of `home`; None if a member may not."""
    new = 0
    for user in members:
        into = entered.get(user, ())
        if user != home and home not in into:
            if len(into) >= most:
                return None
            new += 1
    return new


def _memberships(offsets: np.ndarray, owners: Owners) -> tuple[np.ndarray, np.ndarray]:
    """Return (texts, owners): one entry for each text and each of its owners."""
    per_set = np.diff(offsets)
    counts = per_set[owners.sets]  # texts of each membership's set
    ends = np.cumsum(counts)
    text = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return text + np.repeat(offsets[owners.sets], counts), np.repeat(owners.users, counts)


def _first_of_each(order: np.ndarray, offsets: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return the first `most` [sets] texts of each owner set in an order: int64, ascending."""
    sets = np.repeat(np.arange(len(most)), np.diff(offsets))
    of_order = order[np.argsort(sets[order], kind="stable")]  # by set, then in the given order
    rank = np.arange(len(order)) - offsets[sets]
    return np.sort(of_order[rank < most[sets]])
