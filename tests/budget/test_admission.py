"""A run is counted before it releases anything, and refused at the limit."""

import dataclasses
import json
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from refused import refuses

from fedsim.accounting import StepEvent, epsilon, event_fields
from fedsim.budget import admission
from fedsim.budget.admission import BudgetRequest, expect_receipt
from fedsim.budget.ledger import FILE, Limit, open_locked
from fedsim.budget.spending import books, charge_of
from fedsim.errors import ConfigError, FileDamaged
from fedsim.keys import SecretKey
from fedsim.run import directory
from fedsim.run.directory import RECEIPT
from fedsim.run.formats import Segment
from fedsim.run.ledger import Ledger, LedgerError

STEP, STEPS, DELTA = StepEvent(2.0, 0.1), 20, 1e-6
PEOPLE = [f"user {i}" for i in range(5)]
PLANNED = [(STEP, STEPS)]
ONE = epsilon(PLANNED, DELTA)


@contextmanager
def admitted(applicant, entry, seen=None, *, killed=False):
    """The run, counted; of one that is killed nothing is written when it ends."""
    with pytest.MonkeyPatch.context() as patch:
        if killed:
            patch.setattr(admission, "_settle", lambda *_: None)
        with admission.admitted(applicant, entry, seen) as reached:
            yield reached


def begun(run_dir, key, reached=lambda *_: None):
    """The ledger of a run, in a new segment."""
    book = Ledger(run_dir, head_of(key))
    book.reached = reached
    book.begin(Segment(secrets.token_hex(16), book.num_steps, book.num_steps))
    return book


def head_of(key):
    return {"plan": {}, "adjacency": "", "key_seal": key.seal("ledger")}


def run(place, run_dir, *, limit=None, steps=STEPS, killed=False, kind="train", label="", at=None):
    """A run that releases so many of its steps, and ends or is killed.

    Args: at: called after each step that is released, with how many there are, and first with 0.
    """
    again = run_dir.exists()
    run_dir.mkdir(exist_ok=True)
    key = SecretKey.load(run_dir) if again else SecretKey.create()
    key.save(run_dir)
    limits = None if limit is None else Limit(limit, DELTA)
    applicant = BudgetRequest(place, PEOPLE, kind, limits, run_dir)
    entry = applicant.entry(key.seal("ledger"), PLANNED, (0.0, 0.0), label)
    with directory.lock(run_dir), admitted(applicant, entry, killed=killed) as reached:
        book = begun(run_dir, key, reached)
        for step in range(book.num_steps, steps):
            if at is not None:
                at(step)
            book.record(step, event=event_fields(STEP))
        if at is not None:
            at(steps)
        book.close()


def copied(run_dir, step):
    """Keep a copy of a run as it is after a step."""
    shutil.copytree(run_dir, run_dir.with_name(f"copy-{step}"))


def put_back(run_dir, step):
    """Put the copy of that step in the place of the run."""
    shutil.rmtree(run_dir)
    shutil.copytree(run_dir.with_name(f"copy-{step}"), run_dir)


def charges(place):
    with open_locked(place) as ledger:
        return [charge_of(entry) for entry in ledger.entries.values()]


def receipt(run_dir, label="", planned=PLANNED):
    return expect_receipt(run_dir, SecretKey.load(run_dir).seal("ledger"), label, planned)


def states(place):
    return [(each.entry.outcome, each.released) for each in charges(place)]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "ledger"


def test_a_run_is_counted_when_it_ends_as_when_it_is_stopped(place, tmp_path):
    run(place, tmp_path / "a")
    run(place, tmp_path / "b", steps=7)
    run(place, tmp_path / "c", steps=0, kind="audit")
    assert states(place) == [("released", PLANNED), ("stopped", [(STEP, 7)]), ("stopped", [])]
    shutil.rmtree(tmp_path / "a")  # what was released stays released
    assert states(place)[0] == ("released", PLANNED)


@pytest.mark.privacy
def test_a_killed_run_counts_whole_whatever_its_directory_shows(place, tmp_path):
    """It may be a copy from before the first step, put back."""
    run(place, tmp_path / "a", steps=7, killed=True, at=lambda step: copied(tmp_path / "a", step))
    for step in range(7):
        put_back(tmp_path / "a", step)
        assert states(place) == [("", PLANNED)]
        with refuses("limit_epsilon", says="so far (1)"):
            run(place, tmp_path / "b", limit=1.05 * ONE)
        shutil.rmtree(tmp_path / "b")
    (tmp_path / "a" / directory.CONFIG).write_text("{}")
    (tmp_path / "a" / "ledger.jsonl").unlink()
    assert states(place) == [("", PLANNED)]


@pytest.mark.privacy
@pytest.mark.parametrize("ended", [0, 2])
def test_an_older_copy_of_a_killed_run_is_refused(place, tmp_path, ended):
    """Its next step could be another gradient under the noise of the one that was released. Every
    step of the copy and of the kill, after the run began and after it ended once before."""
    if ended:
        run(place, tmp_path / "a", steps=ended)
    run(place, tmp_path / "a", steps=5, killed=True, at=lambda step: copied(tmp_path / "a", step))
    for step in range(ended, 5):
        put_back(tmp_path / "a", step)
        with pytest.raises(LedgerError, match="a: is an older copy of a run"):
            run(place, tmp_path / "a", steps=8)
    elsewhere = begun(tmp_path / "a", SecretKey.load(tmp_path / "a"))
    for step in range(4, 8):
        elsewhere.record(step, event=event_fields(STEP))
    elsewhere.close()
    with pytest.raises(LedgerError, match="a: is a copy that went another way"):
        run(place, tmp_path / "a")
    put_back(tmp_path / "a", 5)
    run(place, tmp_path / "a", steps=6, killed=True)
    put_back(tmp_path / "a", 5)
    with pytest.raises(LedgerError, match="a: is an older copy of a run"):
        run(place, tmp_path / "a")


@pytest.mark.privacy
def test_of_two_copies_that_do_not_see_each_other_one_goes_on(place, tmp_path):
    """On two hosts with one ledger."""

    def other_host(step):
        if step == 2:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            (tmp_path / "a").rename(tmp_path / "hidden")
            with pytest.raises(LedgerError, match="b: is a copy: another process works on"):
                run(place, tmp_path / "b")
            (tmp_path / "hidden").rename(tmp_path / "a")

    run(place, tmp_path / "a", at=other_host)
    assert states(place) == [("released", PLANNED)]


@pytest.mark.privacy
def test_a_mark_that_was_changed_or_is_gone_is_refused_and_one_that_was_cut_off_is_not(
    place, tmp_path
):
    run(place, tmp_path / "a", steps=3, killed=True)
    (path,) = (place / "steps").iterdir()
    whole = path.read_text()
    path.write_text(whole + "9 ")
    run(place, tmp_path / "a", steps=3, killed=True)
    run(place, tmp_path / "before the first mark", steps=0, killed=True)
    (other,) = {*(place / "steps").iterdir()} - {path}
    other.write_text("")
    run(place, tmp_path / "before the first mark", steps=0, killed=True)
    for changed in (whole.replace("\n5 ", "\n1 "), whole + "nothing\n"):
        path.write_text(changed)
        with pytest.raises(FileDamaged, match=f"{path.name}: expected how far a run has come"):
            run(place, tmp_path / "a")
    path.unlink()
    with pytest.raises(FileDamaged, match=f"{path.name}: expected how far .*a has come"):
        run(place, tmp_path / "a")


@pytest.mark.privacy
def test_another_ledger_does_not_let_a_copy_go_on(place, tmp_path):
    other = tmp_path / "other"
    run(place, tmp_path / "a", steps=5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run(place, tmp_path / "a", steps=8)
    with pytest.raises(LedgerError, match="b: is an older copy of a run: .* 11 .* here are 7"):
        run(other, tmp_path / "b", steps=8)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    with pytest.raises(LedgerError, match="c: is a copy: .*a has the same run"):
        run(other, tmp_path / "c")
    run(other, tmp_path / "a")  # itself it may
    assert states(other) == [("released", PLANNED)]


@pytest.mark.privacy
def test_a_run_does_not_go_on_by_a_receipt_of_another_ledger(place, tmp_path):
    """Whoever lost the ledger would have all that was spent be forgotten."""
    for name in "ab":
        run(place, tmp_path / name, steps=5, killed=True)
    shutil.rmtree(place)
    with pytest.raises(LedgerError, match="b/budget.json is line 2 of it"):
        run(place, tmp_path / "b")


@pytest.mark.privacy
@pytest.mark.parametrize(
    "ids, planned, label, what",
    [
        (PEOPLE, [(StepEvent(20.0, 0.1), STEPS)], "", "other planned releases"),
        (PEOPLE, [(STEP, STEPS - 1)], "", "other planned releases"),
        (PEOPLE, None, "", "other planned releases"),
        (["someone else"], PLANNED, "", "other users"),
        (PEOPLE, PLANNED, "no guarantee", "another label"),
    ],
)
def test_a_run_that_is_known_is_not_counted_as_something_else(
    place, tmp_path, ids, planned, label, what
):
    """What it released would be gone from the books, or be somebody else's."""
    (tmp_path / "run").mkdir()
    began = BudgetRequest(place, PEOPLE, "selection", None, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), admitted(began, of_selection(began)):
        raise KeyboardInterrupt
    before = (place / FILE).read_bytes()
    again = BudgetRequest(place, ids, "selection", None, tmp_path / "run")
    with pytest.raises(LedgerError, match=f"run: .*ledger has the same run with {what}"):
        with admitted(again, again.entry("key", planned, (0.0, 0.0), label)):
            pass
    assert (place / FILE).read_bytes() == before
    with admitted(began, began.entry("key", PLANNED, (0.1, 1e-9), "")):  # of another version
        pass


def of_selection(applicant):
    """The entry of what has no ledger of its own."""
    return applicant.entry("key", PLANNED, (0.0, 0.0), "")


@pytest.mark.privacy
@pytest.mark.parametrize("where", ["run", "copy"])
def test_what_has_no_ledger_of_its_own_is_released_once(where, place, tmp_path):
    """An older copy of a private selection, say, comes to another model under the same entry."""
    (tmp_path / "run").mkdir()
    began = BudgetRequest(place, PEOPLE, "selection", None, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), admitted(began, of_selection(began)):
        raise KeyboardInterrupt  # nothing is released yet, and it may go on
    assert states(place) == [("", PLANNED)]  # until then it counts with its plan
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with admitted(began, of_selection(began)):
        pass
    assert states(place) == [("released", PLANNED)]
    again = BudgetRequest(place, PEOPLE, "selection", None, tmp_path / where)
    with pytest.raises(LedgerError, match=f"{where}: is an older copy .* {STEPS} lines"):
        with admitted(again, of_selection(again)):
            pass
    assert states(place) == [("released", PLANNED)]


@pytest.mark.privacy
def test_a_run_that_would_break_the_limit_is_refused_and_leaves_no_trace(place, tmp_path):
    run(place, tmp_path / "a", limit=1.2 * ONE)
    before = (place / FILE).read_bytes()
    with refuses("limit_epsilon", says="so far (1)"):
        run(place, tmp_path / "b", limit=1.2 * ONE)
    assert (place / FILE).read_bytes() == before
    assert not (tmp_path / "b" / RECEIPT).exists()
    run(place, tmp_path / "c", limit=3 * ONE)


@pytest.mark.privacy
def test_the_owners_limit_binds_every_run_on_these_users(place, tmp_path):
    with open_locked(place) as ledger:
        users = ledger.save_users(ledger.users(PEOPLE[:1]))
        ledger.limit(Limit(1.1 * ONE, DELTA, users))
    run(place, tmp_path / "a")
    with refuses("limit_epsilon"):
        run(place, tmp_path / "b")
    with refuses("limit_epsilon"):
        run(place, tmp_path / "c", limit=9 * ONE)  # a higher one of its own does not help
    with open_locked(place) as ledger:
        others = dataclasses.replace(books(ledger, ["nobody"]), charges=[])
        assert others.limits == []


@pytest.mark.privacy
def test_after_a_run_that_promises_nothing_no_limit_can_be_kept(place, tmp_path):
    run(place, tmp_path / "a", label="of a seed that others may know or guess")
    with refuses("limit_epsilon", says="a has no guarantee for them (of a seed"):
        run(place, tmp_path / "b", limit=1e3)


@pytest.mark.privacy
def test_an_older_copy_of_the_ledger_is_refused(place, tmp_path):
    run(place, tmp_path / "a")
    shutil.copytree(place, tmp_path / "copy")
    run(place, tmp_path / "b")
    assert receipt(tmp_path / "b")[1] == "counted in the ledger of the data"
    shutil.rmtree(place)
    shutil.move(tmp_path / "copy", place)
    assert receipt(tmp_path / "a")[1] == "counted in the ledger of the data"
    with pytest.raises(LedgerError, match="b/budget.json is line 3 of it"):
        receipt(tmp_path / "b")
    shutil.rmtree(place)
    here, found = receipt(tmp_path / "b")
    assert not here and found.endswith("is not here")
    (tmp_path / "b" / RECEIPT).unlink()
    here, found = receipt(tmp_path / "b")
    assert not here and found.startswith("in no ledger")


@pytest.mark.privacy
def test_a_plan_that_costs_less_than_what_was_counted_shows(place, tmp_path):
    """Whoever rewrites all files of a run's directory cannot rewrite the ledger of the data."""
    run(place, tmp_path / "a")
    for planned in ([(StepEvent(20.0, 0.1), STEPS)], [(STEP, STEPS - 1)], None):
        with pytest.raises(LedgerError, match="has other planned releases: the plan was changed"):
            receipt(tmp_path / "a", planned=planned)


@pytest.mark.privacy
def test_the_receipt_of_another_run_is_none(place, tmp_path):
    for name in "ab":
        run(place, tmp_path / name)
    assert receipt(tmp_path / "b")[0]
    with pytest.raises(LedgerError, match="has another label: the plan was changed"):
        with open_locked(place) as ledger:
            ledger.begin(dataclasses.replace(next(iter(ledger.entries.values())), label="seeded"))
            last = {"ledger": str(place), "line": ledger.num_lines, "chain": ledger.chain}
        (tmp_path / "a" / RECEIPT).write_text(json.dumps(last))
        receipt(tmp_path / "a")
    shutil.copy(tmp_path / "a" / RECEIPT, tmp_path / "b" / RECEIPT)
    with pytest.raises(LedgerError, match="line 5 of .*ledger is another run's"):
        receipt(tmp_path / "b")


@pytest.mark.privacy
def test_of_two_at_once_that_fit_alone_one_is_refused(place, tmp_path):
    def attempt(name):
        try:
            run(place, tmp_path / name, limit=1.2 * ONE)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(attempt, "ab"))
    assert sum(text is not None and "expected a run that fits" in text for text in said) == 1
    assert states(place) == [("released", PLANNED)]


@pytest.mark.privacy
def test_a_run_that_had_released_nothing_goes_on_as_a_later_one(place, tmp_path):
    """The filter's first run is fixed beforehand: it is not the one that was left out so far."""
    run(place, tmp_path / "a", steps=0)
    run(place, tmp_path / "b", steps=3)
    run(place, tmp_path / "c", steps=3, killed=True)
    with open_locked(place) as ledger:
        numbers = {Path(each.place).name: each.number for each in ledger.entries.values()}
    for name in "abc":
        run(place, tmp_path / name)
    with open_locked(place) as ledger:
        again = {Path(each.place).name: each.number for each in ledger.entries.values()}
    assert again["b"] == numbers["b"] < again["c"] == numbers["c"] < again["a"]
