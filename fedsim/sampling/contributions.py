"""What is drawn once, before the first step: the pool of ELS, and the group size.

The pool bounds the contributions of a user (Algorithm 1). The group size of ELS is the median
user's number of examples (Section 6), from the data as they are or by the exponential mechanism on
a public grid; `accounting.PureEvent` composes that mechanism with training.

For texts with several owners, the pool of ELS and the groups of ULS are functions of the key and of
the ownership graph, never of a text's content. Which of one user's texts are kept depends on all
users, so the graph is taken as public and fixed, and the guarantee protects the content of a user's
texts (docs/theory/owners.md).
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy import optimize, sparse

from fedsim.config import ZERO_OUT
from fedsim.data import Owners
from fedsim.keys import SecretKey
from fedsim.sampling.sampler import PADDING

POOL = "contributions"
"""Purpose of the streams that draw the pool of ELS, once for all of training."""

GRID = np.unique(np.round(2 ** (np.arange(81) / 4)).astype(np.int64))
"""Possible results of `private_median`, whatever the data: four values per octave, 1 to 2^20."""

EXACT_SETS = 1000  # owner sets up to which integer programming searches for the largest pool
EXACT_NODES = 1000  # of the search tree: a time limit would make the pool depend on the machine

FEW_USERS = 100  # fewer get the blame for a batch that is too large for them

FAILURE = 0.01
"""Probability with which `private_median` may miss by more than `rank_error`."""


class Users(Protocol):
    """The assignment of examples to users: all that sampling and accounting read of the data."""

    @property
    def num_users(self) -> int:
        """The number of users, N."""
        ...

    @property
    def num_examples(self) -> int:
        """The number of examples of all users together."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """int64 [num_users + 1]: user u owns the examples offsets[u]:offsets[u + 1]. For examples
        with several owners, the same of owner sets instead of users; see `graph_of`."""
        ...


def too_few(users: Users) -> str:
    """End of the error line about a batch that is too large for some users; "" if they are many."""
    few = users.num_users < FEW_USERS
    return f": hundreds of users are needed, got {users.num_users}" if few else ""


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


def limit_contributions(offsets: np.ndarray, group_size: int, key: SecretKey) -> np.ndarray:
    """D_sub: at most `group_size` examples of each user, drawn once for all of training.

    Guarantees: a user's examples in the pool depend on (key, user) alone, so they are the same in
      every step and after every resume; no example appears twice.
    Args:
      offsets: int64 [num_users + 1]; user u owns the examples offsets[u]:offsets[u + 1].
      group_size: G_ELS.
      key: secret key of the run.
    Returns: example indices, int64 [pool], ascending.
    Source: Charles et al. 2024, Algorithm 1, lines 1-4.
    """
    keep, streams = np.ones(offsets[-1], bool), key.streams(POOL)
    for user in np.flatnonzero(np.diff(offsets) > group_size):
        start, end = offsets[user], offsets[user + 1]
        keep[start:end] = False
        rng = streams.at(int(user))
        keep[start + rng.choice(end - start, group_size, replace=False, shuffle=False)] = True
    return np.flatnonzero(keep)


def pool_of(users: Users, group_size: int, key: SecretKey, adjacency: str) -> np.ndarray:
    """Return D_sub, the pool of ELS: example indices, int64 [pool], PADDING where a place is empty.

    `limit_contributions` draws it; under zero-out adjacency, `places` then gives every user the
    same number of places. For examples with several owners, `bounded_pool` draws it.
    """
    offsets = users.offsets
    if (owners := graph_of(users)) is not None:
        return bounded_pool(offsets, owners, group_size, key)
    pool = limit_contributions(offsets, group_size, key)
    return places(offsets, pool, group_size) if adjacency == ZERO_OUT else pool


def graph_of(users: Users) -> Owners | None:
    """Return the ownership graph of owner sets and users; None if every example has one owner."""
    return getattr(users, "owners", None)


def examples_per_user(users: Users) -> np.ndarray:
    """Count the examples that each user owns, alone or with others: int64 [num_users]."""
    owners, counts = graph_of(users), np.diff(users.offsets)
    return counts if owners is None else owners.count(counts)


def places(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """Return D_sub with `group_size` places for every user, PADDING where a place is empty.

    Guarantees: a user's places depend on that user's part of `pool` alone.
    Args:
      offsets: int64 [num_users + 1], as in `Users`.
      pool: the result of `limit_contributions`.
      group_size: G_ELS.
    Returns: int64 [num_users * group_size].
    """
    counts = np.minimum(np.diff(offsets), group_size)
    found = np.full(len(counts) * group_size, PADDING, np.int64)
    within = np.arange(len(pool)) - np.repeat(np.cumsum(counts) - counts, counts)
    found[np.repeat(np.arange(len(counts)) * group_size, counts) + within] = pool
    return found


def owners_of(offsets: np.ndarray, pool: np.ndarray, group_size: int) -> np.ndarray:
    """Return the user of each place of a pool that `pool_of` returned, int64 [pool]."""
    if len(pool) == (len(offsets) - 1) * group_size:
        return np.arange(len(pool)) // group_size
    return np.searchsorted(offsets, pool, side="right") - 1


def median_group_size(sizes: np.ndarray) -> int:
    """The median heuristic for G_ELS: the median user's number of examples, at least 1.

    The result is not private; `private_median` is.
    Args:
      sizes: examples of each user, int [users].
    Source: Charles et al. 2024, Section 6.
    """
    return max(1, int(np.median(sizes)))


def private_median(sizes: np.ndarray, epsilon: float, rng: np.random.Generator) -> int:
    """Draw a value of GRID near the median of the users' sizes, with weight exp(epsilon utility).

    Guarantees: epsilon-DP under adding or removing one user, and under removing all texts of a
      user, because users without texts are not counted. With probability 1 - FAILURE, the number of
      users between the result and the median exceeds that of the best value of GRID by at most
      `rank_error(epsilon)`. The accountant leaves out the rounding of float64: 2^-50 (epsilon N +
      4) in epsilon for N users, and 1e-14 (1 + e^epsilon) in delta (docs/theory/noise.md).
    Args:
      sizes: examples of each user, int [users].
      epsilon: of this release, > 0.
      rng: generator of this release alone.
    Source: McSherry and Talwar 2007 (the exponential mechanism).
    """
    values, probs = law_of_median(sizes, epsilon)
    return int(rng.choice(values, p=probs))


def law_of_median(sizes: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """(values, their probabilities) of `private_median`; both are shaped [grid]."""
    scores = epsilon * utility(sizes[sizes > 0])  # sensitivity 1/2, so exp(epsilon u / (2 * 1/2))
    weights = np.exp(scores - scores.max())
    return GRID, weights / weights.sum()


def utility(sizes: np.ndarray) -> np.ndarray:
    """Minus the number of users between each value of GRID and the median, float64 [grid].

    Adding or removing a user changes an entry by at most 1/2: the count on one side changes by 0 or
    1, and half of the number of users by 1/2.
    """
    ordered, half = np.sort(sizes), len(sizes) / 2
    below = np.searchsorted(ordered, GRID, "left")
    above = len(sizes) - np.searchsorted(ordered, GRID, "right")
    return -np.maximum(0.0, np.maximum(below, above) - half)


def rank_error(epsilon: float) -> float:
    """ln(|GRID| / FAILURE) / epsilon: the error of `private_median` in users, up to FAILURE."""
    return math.log(len(GRID) / FAILURE) / epsilon


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
