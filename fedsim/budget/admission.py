"""Admission of a run: it must fit the limits, and is counted before its first release.

`BudgetRequest` checks the limits and writes nothing. `admitted` writes the run, with all that it
plans, into the ledger of the data under the ledger's lock: of two runs of which only one fits, the
second is refused. When the run ends, what it released is noted; a killed run keeps counting with
its plan. While it runs, marks note how far it has come, so that it is resumed only from there.

The receipt in a run's directory names the line of the ledger of the data that counts the run, so
that a ledger that was replaced or cut shows.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.accounting import at_most
from fedsim.budget.ledger import (
    ELSEWHERE,
    OPENED,
    BudgetLedger,
    Entry,
    Head,
    Limit,
    Released,
    is_in,
    num_releases,
    open_locked,
    open_read_only,
    place_of,
)
from fedsim.budget.spending import Account, RunCost, books
from fedsim.config import RunConfig
from fedsim.errors import ConfigError, FileDamaged, expect
from fedsim.files import read_json, write_json
from fedsim.plan import in_words
from fedsim.run import RECEIPT, LedgerError, Reached, ledger as run_ledger


class Receipt(NamedTuple):
    """The content of budget.json in a run's directory."""

    run_dir: Path
    ledger: str
    """Directory of the ledger."""
    line: int
    """Number of the line, from 1."""
    chain: str
    """Chain of the ledger after that line."""

    @classmethod
    def of(cls, run_dir: Path) -> "Receipt | None":
        """The receipt of a run; None if it is not counted. Raises FileDamaged: it is malformed."""
        path = run_dir / RECEIPT
        if not path.exists():
            return None
        record = read_json(path)
        if [type(record.get(name)) for name in ("ledger", "line", "chain")] != [str, int, str]:
            raise FileDamaged(f"{path}: expected the ledger, a line and its link")
        return cls(run_dir, record["ledger"], record["line"], record["chain"])

    @property
    def is_here(self) -> bool:
        """True if the ledger, or what is left of it, can be locked on this machine."""
        return is_in(place := Path(self.ledger)) and os.access(place, os.R_OK | os.W_OK | os.X_OK)

    def line_in(self, ledger: BudgetLedger, run: str | None = None) -> dict[str, Any]:
        """The line that counts the run, or any run without `run`. Raises LedgerError: it is
        missing, or of another run."""
        name = str(self.run_dir / RECEIPT)
        line = ledger.expect_line(self.line, self.chain, name)
        if line["what"] != OPENED or run not in (None, line["run"]):
            raise LedgerError(f"{name}: line {self.line} of {ledger.directory} is another run's")
        return line


def expect_receipt(run_dir: Path, run: str, label: str, planned: Released) -> tuple[bool, str]:
    """Check that the ledger of the data counts a run with all that it planned.

    Returns:
      Whether the ledger is on this machine and counts the run, and a message; it does not say where
      the ledger is, because readers of a report need not know.

    Raises:
      LedgerError, FileDamaged: the ledger was changed, or disagrees on the run, its plan or its
        guarantee.
    """
    receipt = Receipt.of(run_dir)
    if receipt is None:
        return False, "in no ledger of the data: what other runs on them spent is not known"
    if not receipt.is_here:
        return False, f"the ledger of the data, which {RECEIPT} names, is not here"
    with open_locked(Path(receipt.ledger)) as ledger:
        receipt.line_in(ledger, run)
        if other := _difference(ledger.entries[run], planned, label):
            raise LedgerError(f"{run_dir}: {receipt.ledger} has {other}: the plan was changed")
        return True, "counted in the ledger of the data"


def _difference(counted: Entry, planned: Released, label: str) -> str:
    """How an entry differs from a run; empty if it does not. Labels are compared as present or
    absent, because their words depend on the version."""
    if counted.planned != planned:
        return "other planned releases"
    return "" if bool(counted.label) == bool(label) else "another label"


@dataclasses.dataclass(frozen=True)
class BudgetRequest:
    """A run that is to be counted: its users and its limit."""

    place: Path
    """Directory of the ledger of the data."""
    ids: Sequence[str]
    """Ids of its users."""
    kind: str
    """See `Entry`."""
    limit: Limit | None
    run_dir: Path

    @classmethod
    def of(
        cls, run: RunConfig, ids: Sequence[str], delta: float | None, kind: str
    ) -> "BudgetRequest":
        """The request of a run with these settings. Args: delta: of its own limit."""
        limit = None
        if run.limit_epsilon is not None:
            assert delta is not None, "fill_defaults() comes first"
            limit = Limit(run.limit_epsilon, delta)
        return cls(place_of(run.budget_ledger), ids, kind, limit, run.run_dir)

    def entry(self, run: str, planned: Released, slack: tuple[float, float], label: str) -> Entry:
        """This run as an entry of the ledger. Args: see `Entry`."""
        place = str(self.run_dir.absolute())
        return Entry(0, run, self.kind, place, "", label, planned, slack)

    def expect_place(self) -> None:
        """Raise ConfigError if the ledger cannot be written, before anything else is written."""
        made = next(p for p in (self.place, *self.place.parents) if os.path.exists(p))
        writes = made.is_dir() and os.access(made, os.W_OK | os.X_OK)
        expect("budget_ledger", self.place, writes, f"a place to write to; {ELSEWHERE}")

    def lookalike_warning(self) -> str:
        """A warning if its users look like users of counted runs under other ids; else empty."""
        with open_read_only(self.place) as ledger:
            return ledger.lookalike_warning(self.ids)

    def expect_room(self, entry: Entry) -> None:
        """Raise ConfigError if this run would exceed a limit."""
        with open_read_only(self.place) as ledger:
            self.expect_room_in(ledger, entry)

    def expect_room_in(self, ledger: BudgetLedger, entry: Entry) -> None:
        """Raise ConfigError if this run would exceed a limit, given the locked ledger."""
        if not (self.limit or ledger.limits):
            return
        spent, more = books(ledger, self.ids, self.limit), _charge(ledger, entry)
        if (broken := spent.broken_by(more)) is not None:
            expected = f"a run that fits: {_why_not(spent, more, broken)}"
            raise ConfigError.of("limit_epsilon", f"{broken.epsilon:g}", expected)


def _why_not(spent: Account, more: RunCost, broken: Limit) -> str:
    """Explain why another charge exceeds a limit."""
    if more.nothing:
        return f"this run has no guarantee ({in_words(more.nothing)}), so no limit can be kept"
    spent = spent.under(broken)
    before, after = (spent.total(broken.delta, more=m).adaptive for m in (None, more))
    why = f"runs on these users so far ({len(spent.charges)}) spent {at_most(before, '.4g')}"
    if first := next((charge for charge in spent.charges if charge.nothing), None):
        why = f"{first.entry.place} has no guarantee for them ({in_words(first.nothing)})"
    at = f"at delta {at_most(broken.delta, '.2e')}, the limit's"
    return f"{why} {at}, and with this one it would be {at_most(after, '.4g')}"


def _charge(ledger: BudgetLedger, entry: Entry) -> RunCost:
    """The charge of a run, with the number that it has, or would get, in the ledger."""
    before, number = ledger.entries.get(entry.run), ledger.num_lines + 1
    number = before.number_again(number) if before else number
    return RunCost(dataclasses.replace(entry, number=number), entry.planned)


RELEASED, STOPPED = "released", "stopped"
GROUP_SIZE = "group size"
"""Kind of a run that has only drawn its group size privately so far."""


class Progress(NamedTuple):
    """The progress of a run, by the files in its directory."""

    released: Released
    """Releases so far; None without noise, or if `is_noted` is false."""
    chains: list[str]
    """Chain after each line of its own ledger; without one, an empty string for each release."""
    is_noted: bool
    """True if the directory notes its releases."""

    @property
    def head(self) -> Head:
        """How far the run has come."""
        return Head(len(self.chains), self.chains[-1] if self.chains else "")

    @classmethod
    def of(cls, run_dir: Path, seen: Callable[[], Released] | None) -> "Progress":
        """Read the progress of a run. Raises LedgerError: its ledger was changed."""
        lines = run_ledger.read(run_dir)
        released = seen() if seen else run_ledger.phases(lines) if lines else None
        chains = [line["chain"] for line in lines] or [""] * num_releases(released)
        return cls(released, chains, bool(lines or seen))


def count_at_once(applicant: BudgetRequest, entry: Entry) -> None:
    """Count a release that follows directly after this returns. Raises ConfigError: it would exceed
    a limit."""
    with open_locked(applicant.place) as ledger:
        applicant.expect_room_in(ledger, entry)
        ledger.begin(dataclasses.replace(entry, **ledger.save_people(applicant.ids)))
        ledger.end(entry.run, entry.planned, RELEASED)


@contextmanager
def admitted(
    applicant: BudgetRequest, entry: Entry, seen: Callable[[], Released] | None = None
) -> Iterator[Reached]:
    """Count a run with its plan, its progress while the block runs, and at the end its releases.

    A release without a ledger of its own happens when the block ends; after an exception it may be
    resumed, and counts with its plan.

    Args:
      entry: the run with all that it plans.
      seen: says what was released, for a release without a ledger of its own.

    Yields:
      A function that notes how far the run has come, durably; to be called before a release.

    Raises:
      ConfigError: the run would exceed a limit.
      LedgerError: the directory does not begin with what the ledger knows of the run, as an older
        copy; or the ledger has the run with other users or releases.
    """
    progress = Progress.of(applicant.run_dir, seen)
    _expect_here(applicant, entry, progress)
    with ExitStack() as stack:
        with open_locked(applicant.place) as ledger:
            _expect_goes_on(applicant, ledger, entry, progress)
            applicant.expect_room_in(ledger, entry)
            reached = run_ledger.unnoted
            if entry.marked:
                reached = stack.enter_context(ledger.marking(entry.run, applicant.run_dir))
                # A crash may have come between a line of the run's ledger and its mark.
                reached(*progress.head)
            people = ledger.save_people(applicant.ids)
            ledger.begin(dataclasses.replace(entry, **people, head=progress.head))
            counted = {"line": ledger.num_lines, "chain": ledger.chain}
            record = {"ledger": str(applicant.place), **counted}
            write_json(applicant.run_dir / RECEIPT, record, mode=0o600)
        finished = False
        try:
            yield reached
            finished = True
        finally:
            # An interrupted release without a ledger of its own may be resumed: it stays open.
            progress = Progress.of(applicant.run_dir, seen)
            if finished or entry.planned is None or progress.is_noted:
                _settle(applicant, entry.run, progress)


def close(run_dir: Path) -> None:
    """Note that a run released all that it planned, if a crash came before that was noted."""
    receipt = Receipt.of(run_dir)
    if receipt is None or not receipt.is_here:
        return
    with open_locked(Path(receipt.ledger)) as ledger:
        run = receipt.line_in(ledger)["run"]
        if not ledger.entries[run].outcome:
            _end_as_planned(ledger, run)


def _end_as_planned(ledger: BudgetLedger, run: str) -> None:
    planned = ledger.entries[run].planned
    ledger.end(run, planned, RELEASED, Head(num_releases(planned), ""))


def _settle(applicant: BudgetRequest, run: str, progress: Progress) -> None:
    """Note what the run has released, by its directory, or all its plan if that notes nothing."""
    with open_locked(applicant.place) as ledger:
        planned = ledger.entries[run].planned
        if not progress.is_noted:
            _end_as_planned(ledger, run)
            return
        ledger.head(run).expect_begins(progress.chains, applicant.run_dir, ledger.directory)
        outcome = RELEASED if progress.released == planned else STOPPED
        ledger.end(run, progress.released, outcome, progress.head)


def _expect_here(applicant: BudgetRequest, entry: Entry, progress: Progress) -> None:
    """Raise LedgerError if another ledger counts the run, as its receipt says, and knows more of
    it; or knows a place where it still is."""
    receipt = Receipt.of(applicant.run_dir)
    if receipt is None or receipt.ledger == str(applicant.place) or not receipt.is_here:
        return
    with open_locked(Path(receipt.ledger)) as ledger:
        if entry.run not in ledger.entries:  # it was moved, and another one took its place
            return
        _expect_goes_on(applicant, ledger, entry, progress)
        place = Path(ledger.entries[entry.run].place)
        same = not place.exists() or place.samefile(applicant.run_dir)
        is_there = run_ledger.head(place).get("key_seal", entry.run) == entry.run
        if not same and is_there and (place / RECEIPT).exists():
            there = f"{place} has the same run, which {receipt.ledger} counts: go on there"
            raise LedgerError(f"{applicant.run_dir}: is a copy: {there}, or remove it")


def _expect_goes_on(
    applicant: BudgetRequest, ledger: BudgetLedger, entry: Entry, progress: Progress
) -> None:
    """Raise LedgerError if a ledger has a run otherwise than its directory: without the line of its
    receipt; further; or with other releases, users or guarantee."""
    receipt, before = Receipt.of(applicant.run_dir), ledger.entries.get(entry.run)
    if receipt is not None and receipt.ledger == str(ledger.directory):
        receipt.line_in(ledger, entry.run)
    if before is None or before.kind == GROUP_SIZE:  # a new run, whose plan includes the draw
        return
    if entry.marked:
        ledger.head(entry.run).expect_begins(progress.chains, applicant.run_dir, ledger.directory)
    other = _difference(before, entry.planned, entry.label)
    if not np.array_equal(ledger.users_of(before.users), ledger.users(applicant.ids)):
        other = "other users"
    if other:
        again = "go on as it began, or begin another one in another directory"
        known = f"{ledger.directory} has the same run with {other}: {again}"
        raise LedgerError(f"{applicant.run_dir}: {known}")
