"""Whether a run fits under the limits of its users, and how many of its steps would.

An `Applicant` asks; nothing is written for it here. `admission` counts it.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fedsim import accounting
from fedsim.accounting import Event, Phases, at_least, at_most
from fedsim.budget.ledger import ELSEWHERE, BudgetLedger, Entry, Limit, Released, look, place_of
from fedsim.budget.spending import RUNNING, Books, Charge, books
from fedsim.config import PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.errors import ConfigError, expect
from fedsim.plan import AllocatedSampling, Plan
from fedsim.uls import ULS

ROOM = 1e-4
"""By how much noise is taken to be less than it is when steps are counted that fit: calibrating it
anew for so many steps comes that near."""


class People(Protocol):
    """A store of users, as far as the ledger of the data sees it."""

    def user_ids(self) -> list[str]:
        """The ids of the users whose texts a run sees."""
        ...


@dataclasses.dataclass(frozen=True)
class Applicant:
    """A run that is to be counted: whose texts it sees, and what limit it is given."""

    place: Path
    """The directory of the ledger of the data."""
    ids: Sequence[str]
    """Its users' ids."""
    kind: str
    limit: Limit | None
    run_dir: Path
    delta: float | None = None
    """At which it is planned, where --delta says so."""
    spend_rest: bool | None = None
    """Whether it was asked to train what fits; None: there is no such flag for it."""

    @classmethod
    def of(cls, run: RunConfig, users: People, delta: float | None, kind: str) -> "Applicant":
        """The run of these settings, on these users.

        Args: delta: at which it is planned, as a limit of its own is.
        """
        limit = None
        if run.limit_epsilon is not None:
            assert delta is not None, "complete() comes first"
            limit = Limit(run.limit_epsilon, delta)
        place, rest = place_of(run.budget_ledger), run.spend_rest if kind == "train" else None
        return cls(place, users.user_ids(), kind, limit, run.run_dir, delta, rest)

    def entry(self, run: str, planned: Released, slack: tuple[float, float], label: str) -> Entry:
        """It, as the ledger has it. Args: run: the key's seal; "" before there is a key."""
        place = str(self.run_dir.absolute())
        return Entry(0, run, self.kind, place, "", label, planned, slack)

    def expect_place(self) -> None:
        """Raises ConfigError: the ledger could not be written; found before anything is."""
        made = next(p for p in (self.place, *self.place.parents) if os.path.exists(p))
        writes = made.is_dir() and os.access(made, os.W_OK | os.X_OK)
        expect("budget_ledger", self.place, writes, f"a place to write to; {ELSEWHERE}")

    def expect_room(self, entry: Entry) -> None:
        """Raises ConfigError: with this run a limit would be broken."""
        if self.limit is None and not self.place.exists():
            return
        with look(self.place) as ledger:
            self.expect_room_in(ledger, entry)

    def expect_room_in(self, ledger: BudgetLedger, entry: Entry) -> None:
        """The same, of a ledger that is held already."""
        if not (self.limit or ledger.limits):
            return
        spent, more = books(ledger, self.ids, self.limit), _charge(ledger, entry)
        if (broken := spent.broken_by(more)) is not None:
            raise ConfigError.of(
                "limit_epsilon",
                f"{broken.epsilon:g}",
                f"a run that fits: {self._why_not(spent, more, broken)}",
            )

    def steps_that_fit(self, entry: Callable[[int], Entry], most: int) -> int:
        """The most steps, up to `most`, that keep every limit. Args: entry: of so many steps."""
        with look(self.place) as ledger:
            spent = books(ledger, self.ids, self.limit)
            return spent.steps_that_fit(lambda steps: _charge(ledger, entry(steps)), most)

    def _why_not(self, spent: Books, more: Charge, broken: Limit) -> str:
        """Why one more charge breaks a limit, and what to do about it."""
        if more.nothing:
            remedy = "--budget-ledger names another ledger for trials"
            if broken is self.limit:
                remedy = "--limit-epsilon is for runs that promise something"
            return f"this run promises nothing ({more.nothing}), so no limit can be kept: {remedy}"
        at, after = at_most(broken.delta, ".2e"), spent.total(broken.delta, more=more).adaptive
        would_be = f"at delta {at}, and with this one it would be {_shown(after)}"
        if first := next((charge for charge in spent.charges if charge.nothing), None):
            why = f"{first.entry.place} promises them nothing ({first.nothing})"
            return f"{why} {would_be} (see fedsim budget)"
        before = _shown(spent.total(broken.delta).adaptive)
        why = f"{len(spent.charges)} runs on these users have spent {before} {would_be}"
        rest = "; --spend-rest trains what fits" if self.spend_rest is False else ""
        why = f"{why} (see fedsim budget{rest})"
        delta = self.delta or 0.0
        if delta > broken.delta and spent.total(delta, more=more).adaptive <= broken.epsilon:
            plans = f"--delta {at_least(broken.delta, '.4g')} plans the run for it"
            why += f"; the limit is at a smaller delta than the run: {plans}"
        return why


def shortened(
    applicant: Applicant,
    run: str,
    method: ELS | ULS,
    privacy: PrivacyConfig,
    plan: Plan,
    before: Phases,
) -> PrivacyConfig:
    """The settings with as many steps as fit, under the noise of all of them, and their epsilon.

    Where users take part once in a window of steps, in whole windows.
    Args: run: see `Entry`; plan: of all steps.
    Raises: ConfigError: not even one fits, or fewer than there are bands.
    """
    if not plan.noise_multiplier:
        return privacy
    event = method.event(plan.noise_multiplier * (1 - ROOM))
    window = plan.sampling.window(plan.num_steps)

    def phases(windows: int) -> list[tuple[Event, int]]:
        return [*before, (event, windows * window)]

    def entry(windows: int) -> Entry:
        spent = accounting.epsilon(phases(windows), plan.delta)
        fewer = dataclasses.replace(plan, num_steps=windows * window, target_epsilon=spent)
        return applicant.entry(run, phases(windows), fewer.slack, "")

    windows = applicant.steps_that_fit(entry, plan.num_steps // window)
    if (most := windows * window) == plan.num_steps:
        return privacy
    if most == 0:
        applicant.expect_room(entry(1))
    bands = privacy.bands or 1
    expect("bands", bands, bands <= most, f"at most {most}, the steps that fit")
    spent = accounting.epsilon(phases(windows), plan.delta)
    part = windows if isinstance(plan.sampling, AllocatedSampling) else None
    return dataclasses.replace(privacy, num_steps=most, participations=part, epsilon=spent)


def _charge(ledger: BudgetLedger, entry: Entry) -> Charge:
    """What a run would cost, with the number that it has, or will have, in the ledger."""
    before = ledger.entries.get(entry.run)
    number = before.number if before else ledger.num_lines + 1
    return Charge(dataclasses.replace(entry, number=number), entry.planned, RUNNING)


def _shown(epsilon: float) -> str:
    return at_most(epsilon, ".4g")
