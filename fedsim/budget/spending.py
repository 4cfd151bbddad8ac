"""The composed privacy cost of runs, and a filter that decides if another run fits a limit.

There are two numbers, both composed from the privacy losses of runs instead of adding epsilons:

- `fixed` composes the losses of all runs. It holds if no run, nor its settings, was chosen by
  looking at what earlier runs had released (Zhu et al. 2022, Theorem 10).
- `adaptive` holds however runs were chosen, for a limit that was fixed before the first one: it is
  a privacy filter. The first run counts with its loss. Each later run counts as mu-GDP except for a
  probability that is set aside for it, and the mu^2 add up (`accounting.gaussian_mu`;
  docs/theory/budget.md has the theorem).

In both numbers a run counts with all that it planned, because what it had released may be why it
was stopped. Limits are compared with `adaptive`.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget.ledger import BudgetLedger, Entry, Limit, Released

MAX_PATTERNS = 64
SET_ASIDE = 0.1
"""Share of delta for the tails of all runs after the first; see `set_aside`."""


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of a run for each of its users."""

    entry: Entry
    released: Released
    """Releases of the run, if they are known; else all that it planned."""

    @property
    def reserved(self) -> Released:
        """Releases that are charged: all that was planned, or none if the run released nothing."""
        return self.entry.planned if self.released is None or self.released else []

    @property
    def nothing(self) -> str:
        """Reason why the run has no guarantee; empty if it has one or released nothing."""
        if self.released is None:
            return self.entry.label or "without noise"
        return self.entry.label if self.released else ""


@dataclasses.dataclass(frozen=True)
class Total:
    """Epsilons at one delta; inf if a run has no guarantee."""

    fixed: float
    adaptive: float


def set_aside(delta: float, number: int) -> float:
    """Probability that is set aside for the tail of the run with this number, from 1.

    Over all numbers these add up to at most SET_ASIDE times delta. It is a power of two, so that
    cached results for one delta also serve for similar ones.
    """
    share = SET_ASIDE * delta * 6 / (math.pi * number) ** 2
    return 2.0 ** math.floor(math.log2(share))


def total(charges: Iterable[RunCost], delta: float) -> Total:
    """The cost for a user who is in all of these runs."""
    ordered = sorted(charges, key=lambda charge: charge.entry.number)
    counted = [charge for charge in ordered if charge.released != []]
    if any(charge.nothing for charge in counted):
        return Total(math.inf, math.inf)
    slacks = [charge.entry.slack for charge in counted]
    reserving = [charge for charge in counted if charge.reserved]
    fixed = [phase for charge in reserving for phase in charge.reserved or []]
    adaptive = [phase for charge in reserving[:1] for phase in charge.reserved or []]
    squares = 0.0
    for charge in reserving[1:]:
        tail = set_aside(delta, charge.entry.number)
        squares += accounting.gaussian_mu(charge.reserved or [], tail) ** 2
    if 0 < squares < math.inf:
        noise = min(1 / math.sqrt(squares), accounting.MAX_NOISE)  # less noise costs more
        adaptive.append((StepEvent(noise, 1.0), 1))
    reserved = math.inf
    if not math.isinf(squares):
        # Set aside for all runs, also later ones: else it would depend on their number.
        aside = SET_ASIDE * delta if len(reserving) > 1 else 0.0
        reserved = accounting.epsilon_with(slacks, adaptive, delta, aside)
    return Total(accounting.epsilon_with(slacks, fixed, delta), reserved)


@dataclasses.dataclass(frozen=True)
class Account:
    """The charges on the texts of some users, and their total."""

    charges: list[RunCost]
    """Charges of all runs on any of these users' texts, in the order of their starts."""
    patterns: list[frozenset[str]]
    """Combinations of sets, of charges and limits, that these users are in; see `patterns`."""
    limits: list[Limit]

    @classmethod
    def of(
        cls,
        users: np.ndarray,
        charges: Sequence[RunCost],
        sets: Mapping[str, np.ndarray],
        limits: Sequence[Limit] = (),
    ) -> "Account":
        """The account of users with these fingerprints, uint64 [users].

        Args:
          charges, limits: of all users.
          sets: fingerprints of all sets of users that charges and limits name, by name.
        """
        theirs = {name: others for name, others in sets.items() if np.isin(users, others).any()}
        kept = [charge for charge in charges if charge.entry.users in theirs]
        bounds = [limit for limit in limits if limit.users is None or limit.users in theirs]
        named = {charge.entry.users for charge in kept} | {limit.users for limit in bounds}
        sets = {name: theirs[name] for name in named if name is not None}
        return cls(kept, patterns(users, sets), bounds)

    def under(self, limit: Limit) -> "Account":
        """The account of those of the users whom a limit is for."""
        if limit.users is None:
            return self
        theirs = [pattern for pattern in self.patterns if limit.users in pattern]
        read = frozenset[str]().union(*theirs)
        charges = [charge for charge in self.charges if charge.entry.users in read]
        return dataclasses.replace(self, charges=charges, patterns=theirs)

    def total(self, delta: float, *, more: RunCost | None = None) -> Total:
        """The cost for the user who pays most.

        Args: more: another charge for all users, which replaces an earlier one of the same run.
        """
        totals = []
        for pattern in self.patterns or [frozenset[str]()]:
            charges = [charge for charge in self.charges if charge.entry.users in pattern]
            if more is not None:
                charges = [c for c in charges if c.entry.run != more.entry.run] + [more]
            totals.append(total(charges, delta))
        return Total(max(each.fixed for each in totals), max(each.adaptive for each in totals))

    def broken_by(self, more: RunCost) -> Limit | None:
        """The first limit that another charge exceeds; None if it exceeds none."""
        for limit in self.limits:
            if self.under(limit).total(limit.delta, more=more).adaptive > limit.epsilon:
                return limit
        return None


def patterns(users: np.ndarray, sets: Mapping[str, np.ndarray]) -> list[frozenset[str]]:
    """Combinations of sets that users are in, without those contained in another combination.

    A user in more sets pays more, so these include the user who pays most. More than MAX_PATTERNS
    combinations are replaced by one: all sets that any user is in, which is no cheaper.

    Args:
      users: fingerprints, uint64 [users].
      sets: fingerprints by the name of a set.
    """
    names = sorted(sets)
    member = np.stack([np.isin(users, sets[name]) for name in names] or [np.zeros(0, bool)], 1)
    rows = np.unique(member, axis=0) if len(users) and names else np.zeros((0, len(names)), bool)
    combinations = [
        frozenset(n for n, is_in in zip(names, row, strict=True) if is_in) for row in rows
    ]
    if len(combinations) > MAX_PATTERNS:
        return [frozenset().union(*combinations)]
    return [one for one in combinations if not any(one < other for other in combinations)]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The users in any of the sets, uint64 [users]."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))


def charge_of(entry: Entry) -> RunCost:
    """The charge of a run: what it released when it ended; until then all that it planned.

    The directory of a killed run cannot tell more, as it may be a copy from before its last steps.
    """
    return RunCost(entry, entry.released if entry.outcome else entry.planned)


def books(ledger: BudgetLedger, ids: Sequence[str] | None, limit: Limit | None = None) -> Account:
    """The account of users with these ids, or of all users in the ledger.

    Args: limit: another limit for them, beside those in the ledger.
    """
    names = {entry.users for entry in ledger.entries.values()}
    names |= {limited.users for limited in ledger.limits if limited.users is not None}
    sets = {name: ledger.users_of(name) for name in names}
    users = union(list(sets.values())) if ids is None else ledger.users(ids)
    charges = [charge_of(entry) for entry in ledger.entries.values()]
    limits = [*ledger.limits, *([limit] if limit else [])]
    return Account.of(users, charges, sets, limits)
