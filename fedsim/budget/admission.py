"""A run is counted before its first release, and what it released when it ends.

`admitted` writes the run with all that it plans into the ledger of the data, under the ledger's
lock: of two runs that would fit alone, the second one is refused. One that is killed stays as it
is, and counts with its plan. How far it has come is noted while it runs, such that an older copy of
it is not accepted as its continuation.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event, Phases, at_least, at_most
from fedsim.budget.ledger import (
    ELSEWHERE,
    BudgetLedger,
    Entry,
    Limit,
    Released,
    hold,
    look,
    place_of,
)
from fedsim.budget.receipt import Receipt
from fedsim.budget.spending import GONE, RUNNING, Books, Charge, books, state_of
from fedsim.config import PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.errors import ConfigError, expect
from fedsim.plan import AllocatedSampling, Plan
from fedsim.run import RECEIPT, LedgerError, ledger as run_ledger
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


RELEASED, STOPPED = "released", "stopped"
GROUP_SIZE = "group size"
"""The kind of a run that has drawn its group size privately, and is not counted otherwise yet."""

Seen = Callable[[], Released]
"""Says what was released, where that is not in a run's own ledger."""


class Progress(NamedTuple):
    """How far a run has come, by what is in its directory."""

    released: Released
    """None: without noise, or not noted there; see `is_noted`."""
    chains: list[str]
    """Of its own ledger after 0, 1, ... steps; empty ones where it has none."""
    is_noted: bool

    @classmethod
    def of(cls, run_dir: Path, seen: Seen | None) -> "Progress":
        """Raises: LedgerError: its ledger was changed."""
        lines = run_ledger.read(run_dir)
        released = seen() if seen else run_ledger.phases(lines) if lines else None
        chains = [line["chain"] for line in lines] or [""] * (1 + _count(released or []))
        return cls(released, chains, bool(lines or seen))


def count_at_once(applicant: Applicant, entry: Entry) -> None:
    """Count what is released directly after this returns.

    Raises: ConfigError: with it a limit would be broken.
    """
    with hold(applicant.place) as ledger:
        applicant.expect_room_in(ledger, entry)
        users = ledger.save_users(ledger.users(applicant.ids))
        ledger.begin(dataclasses.replace(entry, users=users))
        ledger.end(entry.run, entry.planned, RELEASED)


@contextmanager
def admitted(applicant: Applicant, entry: Entry, seen: Seen | None = None) -> Iterator[None]:
    """Count the run, what it has come to while the block runs, and when it ends what it
    released. What has no ledger of its own releases everything when the block ends, or, after
    an exception, may be continued.

    Raises: ConfigError: with this run a limit would be broken. LedgerError: it is not all that
      there is of the run, whose steps would be released a second time, or the ledger has the
      run with other users or releases.
    """
    progress = Progress.of(applicant.run_dir, seen)
    _expect_newest_elsewhere(applicant, entry, progress)
    with ExitStack() as stack:
        with hold(applicant.place) as ledger:
            _expect_newest(applicant, ledger, entry, progress)
            _expect_same(applicant, ledger, entry)
            applicant.expect_room_in(ledger, entry)
            if promises := entry.planned is not None and not entry.label:
                reached = stack.enter_context(ledger.marking(entry.run, applicant.run_dir))
                # More than was noted, if a crash came between a step and its mark.
                reached(len(progress.chains) - 1, progress.chains[-1])
                stack.enter_context(run_ledger.witness(applicant.run_dir, reached))
            users = ledger.save_users(ledger.users(applicant.ids))
            ledger.begin(dataclasses.replace(entry, users=users, marked=promises))
            line, chain = ledger.num_lines, ledger.chain
            Receipt(applicant.run_dir, str(applicant.place), line, chain).write()
        finished = False
        try:
            yield
            finished = True
        finally:
            # What has no ledger of its own, and was interrupted, may go on: it stays open.
            progress = Progress.of(applicant.run_dir, seen)
            if finished or entry.planned is None or progress.is_noted:
                _settle(applicant, entry.run, progress)


def close(run_dir: Path) -> None:
    """Note that all was released that was planned, where a crash came before that was noted.

    Raises: LedgerError, FileDamaged: the ledger was cut or changed.
    """
    receipt = Receipt.of(run_dir)
    if receipt is None or not receipt.can_be_held():
        return
    with hold(Path(receipt.ledger)) as ledger:
        run = receipt.line_in(ledger)["run"]
        if not ledger.entries[run].outcome:
            ledger.end(run, ledger.entries[run].planned, RELEASED)


def _settle(applicant: Applicant, run: str, progress: Progress) -> None:
    """Note what the run has released, by its directory; all, where that does not say.

    Raises: LedgerError: its directory was put back to what it was before; it stays open.
    """
    with hold(applicant.place) as ledger:
        planned = ledger.entries[run].planned
        released = progress.released if progress.is_noted else planned
        if progress.is_noted and (mark := ledger.mark(run)) is not None:
            mark.expect_reached(progress.chains, applicant.run_dir, ledger.directory)
        ledger.end(run, released, RELEASED if released == planned else STOPPED)


def _expect_newest_elsewhere(applicant: Applicant, entry: Entry, progress: Progress) -> None:
    """`_expect_newest`, by another ledger that has counted the run, where that can be held here."""
    receipt = Receipt.of(applicant.run_dir)
    if receipt is None or receipt.ledger == str(applicant.place) or not receipt.can_be_held():
        return
    with hold(Path(receipt.ledger)) as ledger:
        if entry.run in ledger.entries:  # else that one was moved, and another is there
            _expect_newest(applicant, ledger, entry, progress)


def _expect_newest(
    applicant: Applicant, ledger: BudgetLedger, entry: Entry, progress: Progress
) -> None:
    """Raises LedgerError: the ledger knows of more that the run released, or of it elsewhere."""
    run_dir, before = applicant.run_dir, ledger.entries.get(entry.run)
    receipt = Receipt.of(run_dir)
    if receipt is not None and receipt.ledger == str(ledger.directory):
        try:
            receipt.line_in(ledger, entry.run)
        except LedgerError as error:
            remedy = f"put the ledger back, or remove {run_dir / RECEIPT} to count the run anew"
            raise LedgerError(f"{error}; {remedy}") from None
    if before is None or before.kind == GROUP_SIZE or entry.planned is None or entry.label:
        return  # it is new, or nothing is promised
    count, released = _count(progress.released or []), _count(before.released or [])
    if progress.released is not None and count == _count(entry.planned):
        return  # nothing is left to be released
    if (mark := ledger.mark(entry.run)) is not None:
        mark.expect_reached(progress.chains, run_dir, ledger.directory)
    if count < released:
        more = f"{ledger.directory} has {released} releases of it, and here are {count}"
        raise LedgerError(f"{run_dir}: is an older copy of a run: {more}")
    place = Path(before.place)
    same = place.exists() and run_dir.exists() and place.samefile(run_dir)
    if not same and state_of(before) != GONE:
        there = f"{place} has the same run: go on there, or remove it"
        raise LedgerError(f"{run_dir}: is a copy: {there}")


def _expect_same(applicant: Applicant, ledger: BudgetLedger, entry: Entry) -> None:
    """Raises LedgerError: the ledger has this run with what would now be taken off its books.

    Of the label it matters whether there is one: its words, as the slack, are the version's.
    """
    before = ledger.entries.get(entry.run)
    if before is None or before.kind == GROUP_SIZE:  # which the plan begins with
        return
    users = ledger.users_of(before.users)
    same = {
        "other planned releases": before.planned == entry.planned,
        "other users": np.array_equal(users, ledger.users(applicant.ids)),
        "another label": bool(before.label) == bool(entry.label),
    }
    for what, holds in same.items():
        if not holds:
            again = "go on as it began, or begin another one in another directory"
            raise LedgerError(
                f"{applicant.run_dir}: {applicant.place} has the same run with {what}: {again}"
            )


def _count(released: Sequence[tuple[Event, int]]) -> int:
    """How many releases these are."""
    return sum(count for _, count in released)
