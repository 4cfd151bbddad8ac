"""What runs have spent together, and whether one more fits under a limit.

Two numbers, both from the runs' losses, neither from adding up epsilons:

- `fixed` is the composition of all runs' losses. It holds if nobody chose a run's settings, or
  whether to run at all, by looking at what earlier ones had released (Zhu et al. 2022, Theorem 10).
- `adaptive` holds however runs were chosen, for a limit that was fixed before the first of them: it
  is a privacy filter. The first run counts with its loss. Every later one counts as mu-GDP but for
  a probability that is set aside for it, and mu^2 adds up (`accounting.gaussian_mu`; docs/budget.md
  has the theorem).

In both a run counts with all it planned, for it may have been stopped by looking at what it had
released. `adaptive` is what limits are held against.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget.ledger import BudgetLedger, Entry, Limit, Released
from fedsim.errors import FedsimError
from fedsim.run import directory, ledger as run_ledger

RUNNING, KILLED, GONE = "running", "killed", "gone"
"""How a run stands that has not ended."""
MOST_PATTERNS = 64
SET_ASIDE = 0.1
"""Share of delta for the tails of all runs but the first; see `set_aside`."""


@dataclasses.dataclass(frozen=True)
class Charge:
    """What a run costs each of its users."""

    entry: Entry
    released: Released
    """What it has released, as far as is known; else what it planned."""
    state: str
    """How it stands: released, stopped, running, killed, gone, ..."""

    @property
    def reserved(self) -> Released:
        """What is charged: the plan, unless the run ended before it released anything."""
        return self.entry.planned if self.released is None or self.released else []

    @property
    def nothing(self) -> str:
        """Why it promises nothing; empty where it promises something, or released nothing."""
        if self.released is None:
            return self.entry.label or "without noise"
        return self.entry.label if self.released else ""


@dataclasses.dataclass(frozen=True)
class Total:
    """Epsilons at one delta; inf where a run promises nothing."""

    fixed: float
    adaptive: float
    delta: float
    added_up: float = 0.0
    """The sum of the runs' own epsilons at this delta, which is what others would report."""

    def __or__(self, other: "Total") -> "Total":
        """The larger of each: of several people, what the one who pays most pays."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Total(*(max(pair) for pair in pairs))


def set_aside(delta: float, number: int) -> float:
    """The probability for the tail of the run with this number, from 1.

    Over all numbers these add up to at most SET_ASIDE times delta; a power of two, so that what is
    computed for one delta serves for others of its size.
    """
    share = SET_ASIDE * delta * 6 / (math.pi * number) ** 2
    return 2.0 ** math.floor(math.log2(share))


def total(charges: Iterable[Charge], delta: float, *, sums: bool = False) -> Total:
    """What someone pays who is in all of these runs.

    Args: sums: compute `added_up`, too.
    """
    ordered = sorted(charges, key=lambda charge: charge.entry.number)
    counted = [charge for charge in ordered if charge.released != []]
    if any(charge.nothing for charge in counted):
        return Total(math.inf, math.inf, delta, math.inf)
    slacks = [charge.entry.slack for charge in counted]
    reserving = [charge for charge in counted if charge.reserved]
    fixed = [phase for charge in reserving for phase in charge.reserved or []]
    adaptive = [phase for charge in reserving[:1] for phase in charge.reserved or []]
    squares = 0.0
    for charge in reserving[1:]:
        tail = set_aside(delta, charge.entry.number)
        squares += accounting.gaussian_mu(charge.reserved or [], tail) ** 2
    if 0 < squares < math.inf:
        noise = min(1 / math.sqrt(squares), accounting.MOST_NOISE)  # less noise costs more
        adaptive.append((StepEvent(noise, 1.0), 1))
    reserved = math.inf
    if not math.isinf(squares):
        # All of it, also that of runs to come: else M would depend on how many there are.
        aside = SET_ASIDE * delta if len(reserving) > 1 else 0.0
        reserved = accounting.epsilon_with(slacks, adaptive, delta, aside)
    added = 0.0
    if sums:
        added = sum(accounting.epsilon(charge.reserved or [], delta) for charge in counted)
    return Total(accounting.epsilon_with(slacks, fixed, delta), reserved, delta, added)


@dataclasses.dataclass(frozen=True)
class Books:
    """The charges on some people's texts, and what they add up to."""

    charges: list[Charge]
    """Of runs that saw any of these people, in the order in which they began."""
    patterns: list[frozenset[str]]
    """Combinations of sets of users that these people are in; see `patterns`."""
    limits: list[Limit]

    @classmethod
    def of(
        cls,
        users: np.ndarray,
        charges: Sequence[Charge],
        sets: Mapping[str, np.ndarray],
        limits: Sequence[Limit] = (),
    ) -> "Books":
        """The books of people with these fingerprints.

        Args: sets: the fingerprints of all sets of users that charges and limits name.
        """
        theirs = {name: others for name, others in sets.items() if np.isin(users, others).any()}
        kept = [charge for charge in charges if charge.entry.users in theirs]
        charged = {charge.entry.users: theirs[charge.entry.users] for charge in kept}
        bounds = [limit for limit in limits if limit.users is None or limit.users in theirs]
        return cls(kept, patterns(users, charged), bounds)

    def total(self, delta: float, *, more: Charge | None = None, sums: bool = False) -> Total:
        """What the one who pays most has paid.

        Args: more: a charge that all of them are to pay, too, instead of an earlier one of the
          same run.
        """
        result = Total(0.0, 0.0, delta)
        for pattern in self.patterns or [frozenset[str]()]:
            charges = [charge for charge in self.charges if charge.entry.users in pattern]
            if more is not None:
                charges = [c for c in charges if c.entry.run != more.entry.run] + [more]
            result |= total(charges, delta, sums=sums)
        return result

    def broken_by(self, more: Charge) -> Limit | None:
        """The first limit that one more charge breaks."""
        for limit in self.limits:
            if self.total(limit.delta, more=more).adaptive > limit.epsilon:
                return limit
        return None

    def fits(self, more: Charge) -> bool:
        """Whether one more charge keeps every limit."""
        return self.broken_by(more) is None

    def steps_that_fit(self, charge: Callable[[int], Charge], most: int) -> int:
        """The largest number of steps, up to `most`, whose charge keeps every limit."""
        if self.fits(charge(most)):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(charge(middle)) else (low, middle)
        return low


def patterns(users: np.ndarray, sets: Mapping[str, np.ndarray]) -> list[frozenset[str]]:
    """In which of the sets people of `users` are: every combination that no other one contains.

    Whoever is in more sets pays more, so that the people who pay most are among these. Where there
    are more than MOST_PATTERNS combinations, one stands for all: all sets that any of them is in.
    """
    names = sorted(sets)
    member = np.stack([np.isin(users, sets[name]) for name in names] or [np.zeros(0, bool)], 1)
    rows = np.unique(member, axis=0) if len(users) and names else np.zeros((0, len(names)), bool)
    found = [frozenset(n for n, there in zip(names, row, strict=True) if there) for row in rows]
    if len(found) > MOST_PATTERNS:
        return [frozenset().union(*found)]
    return [each for each in found if not any(each < other for other in found)]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Everybody who is in one of the sets."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))


def charge_of(entry: Entry) -> Charge:
    """What a run counts with: what it said that it released when it ended, and until then all that
    it planned. The directory of one that was killed may be a copy from before its last steps."""
    if entry.outcome:
        return Charge(entry, entry.released, entry.outcome)
    return Charge(entry, entry.planned, state_of(entry))


def state_of(entry: Entry) -> str:
    """How a run stands that has not ended."""
    run_dir = Path(entry.place)
    try:
        with directory.lock(run_dir, to_read=True):
            is_there = run_ledger.head(run_dir).get("key_seal") == entry.run
    except directory.Busy:
        return RUNNING
    except (FedsimError, OSError):
        return GONE
    return KILLED if entry.place and is_there else GONE


def books(ledger: BudgetLedger, ids: Sequence[str] | None, limit: Limit | None = None) -> Books:
    """The books of some users; of everybody where `ids` is None."""
    return books_of(ledger, None if ids is None else ledger.users(ids), limit)


def books_of(ledger: BudgetLedger, users: np.ndarray | None, limit: Limit | None = None) -> Books:
    """The books of users with these fingerprints; of everybody where there are none."""
    names = {entry.users for entry in ledger.entries.values()}
    names |= {limited.users for limited in ledger.limits if limited.users is not None}
    sets = {name: ledger.users_of(name) for name in names}
    users = union(list(sets.values())) if users is None else users
    charges = [charge_of(entry) for entry in ledger.entries.values()]
    limits = [*ledger.limits, *([limit] if limit else [])]
    return Books.of(users, charges, sets, limits)
