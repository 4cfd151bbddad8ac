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

import numpy as np

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget import people
from fedsim.budget.ledger import Entry, Limit, Released

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
    counted = [each for each in ordered if each.released != []]
    if any(each.nothing for each in counted):
        return Total(math.inf, math.inf, delta, math.inf)
    slacks = [each.entry.slack for each in counted]
    reserving = [each for each in counted if each.reserved]
    fixed = [phase for each in reserving for phase in each.reserved or []]
    adaptive = [phase for each in reserving[:1] for phase in each.reserved or []]
    squares = 0.0
    for each in reserving[1:]:
        tail = set_aside(delta, each.entry.number)
        squares += accounting.gaussian_mu(each.reserved or [], tail) ** 2
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
        added = sum(accounting.epsilon(each.reserved or [], delta) for each in counted)
    return Total(accounting.epsilon_with(slacks, fixed, delta), reserved, delta, added)


@dataclasses.dataclass(frozen=True)
class Books:
    """The charges on some people's texts, and what they add up to."""

    charges: list[Charge]
    """Of runs that saw any of these people, in the order in which they began."""
    patterns: list[frozenset[str]]
    """Combinations of sets of users that these people are in; see `people.patterns`."""
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
        there = {name: own for name, own in sets.items() if np.isin(users, own).any()}
        kept = [each for each in charges if each.entry.users in there]
        own = {each.entry.users: there[each.entry.users] for each in kept}
        bounds = [each for each in limits if each.users is None or each.users in there]
        return cls(kept, people.patterns(users, own), bounds)

    def total(self, delta: float, *, more: Charge | None = None, sums: bool = False) -> Total:
        """What the one who pays most has paid.

        Args: more: a charge that all of them are to pay, too, instead of an earlier one of the
          same run.
        """
        result = Total(0.0, 0.0, delta)
        for pattern in self.patterns or [frozenset[str]()]:
            own = [each for each in self.charges if each.entry.users in pattern]
            if more is not None:
                own = [each for each in own if each.entry.run != more.entry.run] + [more]
            result |= total(own, delta, sums=sums)
        return result

    def fits(self, more: Charge) -> bool:
        """Whether one more charge keeps every limit."""
        return all(
            self.total(each.delta, more=more).adaptive <= each.epsilon for each in self.limits
        )

    def steps_that_fit(self, charge: Callable[[int], Charge], most: int) -> int:
        """The largest number of steps, up to `most`, whose charge keeps every limit."""
        if self.fits(charge(most)):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(charge(middle)) else (low, middle)
        return low
