"""A run is counted before its first release, and refused where it would break a limit.

`admit` writes the run with all that it plans into the ledger of the data, under the ledger's lock:
of two runs that would fit alone, the second one is refused. When the run ends, `settle` writes what
it released. One that is killed stays as it is, and counts with its plan. How far it has come is
noted while it runs, such that an older copy of it is not accepted as its continuation.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event, Phases
from fedsim.accounting.rounding import at_least, at_most
from fedsim.budget.ledger import (
    ELSEWHERE,
    FILE,
    BudgetLedger,
    Entry,
    Limit,
    Released,
    hold,
    look,
    place_of,
)
from fedsim.budget.people import union
from fedsim.budget.spending import Books, Charge, Total
from fedsim.config import PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.errors import ConfigError, FedsimError, FileDamaged, expect
from fedsim.files import read_json, write_json
from fedsim.plan import AllocatedSampling, Plan
from fedsim.run import directory
from fedsim.run import ledger as run_ledger
from fedsim.run.directory import RECEIPT
from fedsim.run.ledger import LedgerError
from fedsim.uls import ULS

RUNNING, KILLED, GONE = "running", "killed", "gone"
RELEASED, STOPPED = "released", "stopped"
GROUP_SIZE = "group size"
"""The kind of a run that has drawn its group size privately, and is not counted otherwise yet."""
ROOM = 1e-4
"""By how much noise is taken to be less than it is when steps are counted that fit: calibrating it
anew for so many steps comes that near."""


def charge_of(entry: Entry) -> Charge:
    """What a run counts with: what it said that it released when it ended, and until then all that
    it planned. The directory of one that was killed may be a copy from before its last steps."""
    if entry.outcome:
        return Charge(entry, entry.released, entry.outcome)
    return Charge(entry, entry.planned, _state(entry))


def _state(entry: Entry) -> str:
    """How a run stands that has not ended."""
    run_dir = Path(entry.place)
    try:
        with directory.lock(run_dir, to_read=True):
            own = run_ledger.head(run_dir).get("key_seal") == entry.run
    except directory.Busy:
        return RUNNING
    except (FedsimError, OSError):
        return GONE
    return KILLED if entry.place and own else GONE


def books(ledger: BudgetLedger, ids: Sequence[str] | None, limit: Limit | None = None) -> Books:
    """The books of some users; of everybody where `ids` is None."""
    return books_of(ledger, None if ids is None else ledger.users(ids), limit)


def books_of(ledger: BudgetLedger, users: np.ndarray | None, limit: Limit | None = None) -> Books:
    """The books of users with these fingerprints; of everybody where there are none."""
    names = {each.users for each in ledger.entries.values()}
    names |= {each.users for each in ledger.limits if each.users is not None}
    sets = {name: ledger.users_of(name) for name in names}
    users = union(list(sets.values())) if users is None else users
    charges = [charge_of(entry) for entry in ledger.entries.values()]
    limits = [*ledger.limits, *([limit] if limit else [])]
    return Books.of(users, charges, sets, limits)


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
            self._expect_room(ledger, entry)

    def steps_that_fit(self, entry: Callable[[int], Entry], most: int) -> int:
        """The most steps, up to `most`, that keep every limit. Args: entry: of so many steps."""
        with look(self.place) as ledger:
            known = books(ledger, self.ids, self.limit)

            def charge(steps: int) -> Charge:
                own = _own(ledger, entry(steps))
                return Charge(own, own.planned, RUNNING)

            return known.steps_that_fit(charge, most)

    def released(self, entry: Entry) -> None:
        """Count what is released at once, when this returns.

        Raises: ConfigError: with it a limit would be broken.
        """
        with hold(self.place) as ledger:
            self._expect_room(ledger, entry)
            users = ledger.save_users(ledger.users(self.ids))
            ledger.begin(dataclasses.replace(entry, users=users))
            ledger.end(entry.run, entry.planned, RELEASED)

    @contextmanager
    def admitted(self, entry: Entry, seen: Callable[[], Released] | None = None) -> Iterator[None]:
        """Count the run, what it has come to while the block runs, and when it ends what it
        released. What has no ledger of its own releases everything when the block ends, or, after
        an exception, may be continued.

        Args: seen: says what was released, where it is not in a run's own ledger.
        Raises: ConfigError: with this run a limit would be broken. LedgerError: it is not all that
          there is of the run, whose steps would be released a second time, or the ledger has the
          run with other users or releases.
        """
        lines = run_ledger.read(self.run_dir)
        own = seen() if seen else run_ledger.phases(lines) if lines else None
        chains = _chains(lines, own)
        if (elsewhere := self._counted_elsewhere()) is not None:
            with hold(elsewhere) as ledger:
                if entry.run in ledger.entries:  # else that one was moved, and another is there
                    self._expect_newest(ledger, entry, own, chains)
        with ExitStack() as stack:
            with hold(self.place) as ledger:
                self._expect_newest(ledger, entry, own, chains)
                self._expect_same(ledger, entry)
                self._expect_room(ledger, entry)
                if promises := entry.planned is not None and not entry.label:
                    reached = stack.enter_context(ledger.marking(entry.run, self.run_dir))
                    reached(
                        len(chains) - 1, chains[-1]
                    )  # more than was noted, if a crash came between the two
                    stack.enter_context(run_ledger.witness(self.run_dir, reached))
                users = ledger.save_users(ledger.users(self.ids))
                ledger.begin(dataclasses.replace(entry, users=users, marked=promises))
                receipt = {"ledger": str(self.place), "line": ledger.num_lines}
                receipt |= {"chain": ledger.chain}
                write_json(self.run_dir / RECEIPT, receipt, mode=0o600)
            finished = False
            try:
                yield
                finished = True
            finally:
                # What has no ledger of its own, and was interrupted, may go on: it stays open.
                if finished or seen or entry.planned is None or run_ledger.read(self.run_dir):
                    self._settle(entry.run, seen)

    def _counted_elsewhere(self) -> Path | None:
        """Another ledger that has counted the run, where that can be held here."""
        receipt = _receipt(self.run_dir)
        if receipt is None or receipt["ledger"] == str(self.place):
            return None
        place = Path(receipt["ledger"])
        return place if _can_be_held(place) else None

    def _expect_newest(
        self, ledger: BudgetLedger, entry: Entry, own: Released, chains: list[str]
    ) -> None:
        """Raises LedgerError: the ledger knows of more that the run released, or of it elsewhere.

        Args: own: what it released, as far as is known here. chains: see `Mark.expect_reached`.
        """
        receipt, known = _receipt(self.run_dir), ledger.entries.get(entry.run)
        if receipt is not None and receipt["ledger"] == str(ledger.directory):
            try:
                _expect_own(ledger, receipt, self.run_dir, entry.run)
            except LedgerError as error:
                place = self.run_dir / RECEIPT
                remedy = f"put the ledger back, or remove {place} to count the run anew"
                raise LedgerError(f"{error}; {remedy}") from None
        if known is None or known.kind == GROUP_SIZE or entry.planned is None or entry.label:
            return  # it is new, or nothing is promised
        if own is not None and _number(own) == _number(entry.planned):
            return  # nothing is left to be released
        if (mark := ledger.mark(entry.run)) is not None:
            mark.expect_reached(chains, self.run_dir, ledger.directory)
        here = _number(own or [])
        if here < _number(known.released or []):
            more = f"{_number(known.released or [])} releases of it, and here are {here}"
            found = f"is an older copy of a run: {ledger.directory} has {more}"
            raise LedgerError(f"{self.run_dir}: {found}")
        place = Path(known.place)
        same = place.exists() and self.run_dir.exists() and place.samefile(self.run_dir)
        if not same and _state(known) != GONE:
            there = f"{place} has the same run: go on there, or remove it"
            raise LedgerError(f"{self.run_dir}: is a copy: {there}")

    def _expect_same(self, ledger: BudgetLedger, entry: Entry) -> None:
        """Raises LedgerError: the ledger has this run with what would now be taken off its books.

        Of the label it matters whether there is one: its words, as the slack, are the version's.
        """
        known = ledger.entries.get(entry.run)
        if known is None or known.kind == GROUP_SIZE:  # which the plan begins with
            return
        same = {
            "other planned releases": known.planned == entry.planned,
            "other users": np.array_equal(ledger.users_of(known.users), ledger.users(self.ids)),
            "another label": bool(known.label) == bool(entry.label),
        }
        for what, holds in same.items():
            if not holds:
                again = "go on as it began, or begin another one in another directory"
                raise LedgerError(
                    f"{self.run_dir}: {self.place} has the same run with {what}: {again}"
                )

    def _settle(self, run: str, seen: Callable[[], Released] | None) -> None:
        """Note what the run has released, by its own ledger.

        Raises: LedgerError: its directory was put back to what it was before; it stays open.
        """
        lines = run_ledger.read(self.run_dir)
        with hold(self.place) as ledger:
            planned = ledger.entries[run].planned
            released = run_ledger.phases(lines) if lines else planned  # pre-training has no ledger
            released = seen() if seen else released
            if (mark := ledger.mark(run)) is not None and (lines or seen):
                chains = _chains(lines, released)
                mark.expect_reached(chains, self.run_dir, ledger.directory)
            ledger.end(run, released, RELEASED if released == planned else STOPPED)

    def _expect_room(self, ledger: BudgetLedger, entry: Entry) -> None:
        if not (self.limit or ledger.limits):
            return
        known = books(ledger, self.ids, self.limit)
        own = _own(ledger, entry)
        more = Charge(own, own.planned, RUNNING)
        if known.fits(more):
            return
        broken = next(
            each
            for each in known.limits
            if known.total(each.delta, more=more).adaptive > each.epsilon
        )
        raise ConfigError.of(
            "limit_epsilon",
            f"{broken.epsilon:g}",
            f"a run that fits: {self._why_not(known, more, broken)}",
        )

    def _why_not(self, known: Books, more: Charge, broken: Limit) -> str:
        """Why one more charge breaks a limit, and what to do about it."""
        if more.nothing:
            remedy = "--budget-ledger names another ledger for trials"
            if broken is self.limit:
                remedy = "--limit-epsilon is for runs that promise something"
            return f"this run promises nothing ({more.nothing}), so no limit can be kept: {remedy}"
        at, after = at_most(broken.delta, ".2e"), known.total(broken.delta, more=more).adaptive
        would_be = f"at delta {at}, and with this one it would be {_shown(after)}"
        if first := next((each for each in known.charges if each.nothing), None):
            why = f"{first.entry.place} promises them nothing ({first.nothing})"
            return f"{why} {would_be} (see fedsim budget)"
        before = _shown(known.total(broken.delta).adaptive)
        why = f"{len(known.charges)} runs on these users have spent {before} {would_be}"
        rest = "; --spend-rest trains what fits" if self.spend_rest is False else ""
        found = f"{why} (see fedsim budget{rest})"
        own = self.delta
        if own and own > broken.delta and known.total(own, more=more).adaptive <= broken.epsilon:
            plans = f"--delta {at_least(broken.delta, '.4g')} plans the run for it"
            found += f"; the limit is at a smaller delta than the run: {plans}"
        return found


def close(run_dir: Path) -> None:
    """Note that all was released that was planned, where a crash came before that was noted.

    Raises: LedgerError, FileDamaged: the ledger was cut or changed.
    """
    receipt = _receipt(run_dir)
    if receipt is None or not _can_be_held(place := Path(receipt["ledger"])):
        return
    with hold(place) as ledger:
        ledger.expect_line(receipt["line"], receipt["chain"], str(run_dir / RECEIPT))
        run = ledger.line(receipt["line"])["run"]
        if not ledger.entries[run].outcome:
            ledger.end(run, ledger.entries[run].planned, RELEASED)


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


def _own(ledger: BudgetLedger, entry: Entry) -> Entry:
    """The entry with the number it has, or will have, in the ledger."""
    known = ledger.entries.get(entry.run)
    return dataclasses.replace(entry, number=known.number if known else ledger.num_lines + 1)


def _shown(epsilon: float) -> str:
    return at_most(epsilon, ".4g")


@dataclasses.dataclass(frozen=True)
class Together:
    """What all runs that saw a run's users have cost."""

    num_runs: int
    total: Total


def together(run_dir: Path, delta: float) -> Together | None:
    """What all runs on a run's users have cost the one who pays most; None: in no ledger here.

    Raises: LedgerError, FileDamaged: the ledger was cut or changed, or the receipt is another's.
    """
    receipt = _receipt(run_dir)
    if receipt is None or not _is_here(receipt["ledger"]):
        return None
    with hold(Path(receipt["ledger"])) as ledger:
        _expect_own(ledger, receipt, run_dir, str(run_ledger.head(run_dir).get("key_seal")))
        own = ledger.line(receipt["line"])["users"]
        known = books_of(ledger, ledger.users_of(own))
        return Together(len(known.charges), known.total(delta))


def expect_receipt(run_dir: Path, run: str, label: str) -> tuple[bool, str]:
    """(Whether the ledger of the data is here, and has this run; what is there to say of it).

    Where the ledger is, is nobody's business who reads a report.

    Args: run, label: see `Entry`.
    Raises: LedgerError, FileDamaged: the ledger was cut, has another run in its place, or a label
      where there is none, or none where there is one.
    """
    receipt = _receipt(run_dir)
    if receipt is None:
        return False, "in no ledger of the data: what other runs on them spent is not known"
    place = Path(receipt["ledger"])
    if not _is_here(place):
        return False, f"the ledger of the data, which {RECEIPT} names, is not here"
    with hold(place) as ledger:
        _expect_own(ledger, receipt, run_dir, run)
        if bool(ledger.line(receipt["line"])["label"]) != bool(label):
            said = "a guarantee" if label else "no guarantee"
            raise LedgerError(f"{run_dir}: {place} has epsilon as {said}: the plan was changed")
        return True, f"line {receipt['line']} of {ledger.num_lines} in the ledger of the data"


def _expect_own(ledger: BudgetLedger, receipt: dict[str, Any], run_dir: Path, run: str) -> None:
    """Raises LedgerError: the ledger does not have the line of a receipt, or it is another run's.

    Args: run: what the ledger knows the run by.
    """
    name = str(run_dir / RECEIPT)
    ledger.expect_line(receipt["line"], receipt["chain"], name)
    if ledger.line(receipt["line"]).get("run") != run:
        raise LedgerError(f"{name}: line {receipt['line']} of {ledger.directory} is another run's")


def _number(released: Sequence[tuple[Event, int]]) -> int:
    """How many releases these are."""
    return sum(count for _, count in released)


def _chains(lines: Sequence[dict[str, Any]], released: Released) -> list[str]:
    """The links of a run's own ledger after 0, 1, ... steps; empty ones where it has none."""
    return [line["chain"] for line in lines] or [""] * (1 + _number(released or []))


def _is_here(ledger: str | Path) -> bool:
    """Whether a ledger can be read on this machine."""
    return os.access(ledger, os.R_OK | os.X_OK)


def _can_be_held(ledger: Path) -> bool:
    """Whether there is a ledger that can be written here."""
    return (ledger / FILE).is_file() and os.access(ledger, os.W_OK)


def _receipt(run_dir: Path) -> dict[str, Any] | None:
    """Where a run is counted. Raises: FileDamaged: it does not say so."""
    path = run_dir / RECEIPT
    if not path.exists():
        return None
    receipt = read_json(path)
    if [type(receipt.get(name)) for name in ("ledger", "line", "chain")] != [str, int, str]:
        raise FileDamaged(f"{path}: expected the ledger, a line and its link")
    return receipt
