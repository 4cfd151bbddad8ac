"""Whose budget is spent where data are built again, and what several people pay over all runs."""

import json
import math
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refuses
from test_verify import command, write_texts

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, allocated_event, cyclic_event
from fedsim.budget import BudgetRequest, Entry, Limit, RunCost, open_locked
from fedsim.cli.main import main
from fedsim.data import Dataset, build
from fedsim.run import ledger as run_ledger
from fedsim.trust import budget
from fedsim.trust.budget import why_by_group

pytestmark = pytest.mark.privacy
DELTA = 1e-6
OF_OLD, OF_NEW = [(StepEvent(1.0, 0.05), 30)], [(StepEvent(3.0, 0.1), 20)]
BOTH = accounting.epsilon([*OF_OLD, *OF_NEW], DELTA)
OLD_ALONE, NEW_ALONE = (accounting.epsilon(run, DELTA) for run in (OF_OLD, OF_NEW))


def built(path, users):
    """Data with three texts of each user."""
    rows = [(f"user {user}", f"text {i} {path.name}") for user in users for i in range(3)]
    columns = dict(zip(("user_id", "text"), zip(*rows, strict=True), strict=True))
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))
    return build(path.with_suffix(".parquet"), path, num_workers=1, eval_users=0)


def counted(ledger, number, data, planned, place="", label=""):
    """A run on data, counted, which released all that it planned."""
    users = ledger.save_users(ledger.users(data.train.user_ids()))
    ledger.begin(Entry(0, f"run {number}", "train", place, users, label, planned, (0.0, 0.0)))
    ledger.end(f"run {number}", planned, "released")


@pytest.fixture
def place(tmp_path):
    """A ledger with a run on old data, and one on data built again with five more users."""
    old = built(tmp_path / "old", range(20))
    new = built(tmp_path / "new", range(25))
    with open_locked(tmp_path / "ledger") as ledger:
        counted(ledger, 1, old, OF_OLD)
        counted(ledger, 2, new, OF_NEW)
    return tmp_path / "ledger"


def of(place, ids):
    return budget(place, ids, delta=DELTA)


def test_old_people_pay_for_both_runs_and_new_ones_for_theirs(tmp_path, place):
    old, new = (Dataset.open(tmp_path / name) for name in ("old", "new"))
    came = sorted(set(new.people()) - set(old.people()))
    assert len(came) == 5
    for ids, expected, sizes in (
        (new.people(), BOTH, [20, 25]),
        (old.people(), BOTH, [20, 20]),
        (came, NEW_ALONE, [5]),
    ):
        found = of(place, ids)
        assert found["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert [run["users"] for run in found["runs"]] == sizes
    assert max(OLD_ALONE, NEW_ALONE) < BOTH < OLD_ALONE + NEW_ALONE


def test_a_run_on_the_new_data_is_refused_by_who_has_paid_most(tmp_path, place):
    """New people alone could pay for it, and a run on them is let in."""
    old, new = (Dataset.open(tmp_path / name) for name in ("old", "new"))
    came = sorted(set(new.people()) - set(old.people()))

    def asks(ids, limit):
        applicant = BudgetRequest(place, ids, "train", limit, tmp_path / "run")
        applicant.expect_room(applicant.entry("run 3", OF_NEW, (0.0, 0.0), ""))

    with refuses("limit_epsilon", says="a run that fits"):
        asks(new.train.user_ids(), Limit(BOTH, DELTA))
    with refuses("limit_epsilon", says="a run that fits"):
        asks([*came, old.train.user_ids()[0]], Limit(BOTH, DELTA))
    asks(came, Limit(BOTH, DELTA))
    asks(new.train.user_ids(), Limit(2 * BOTH, DELTA))


def test_who_was_left_out_and_comes_back_still_pays_for_the_past(tmp_path, place):
    without = built(tmp_path / "without", [user for user in range(20) if user != 7])
    with open_locked(place) as ledger:
        counted(ledger, 3, without, OF_NEW)
    back = built(tmp_path / "back", [7, 30])
    assert of(place, ["user 7"])["epsilon"] == pytest.approx(BOTH, rel=1e-6)
    assert of(place, back.people())["epsilon"] == pytest.approx(BOTH, rel=1e-6)
    assert of(place, ["user 8"])["epsilon"] > 1.01 * BOTH


def test_several_people_pay_for_all_runs_together(tmp_path, place):
    """Each run reads no more of them than it has."""
    new = Dataset.open(tmp_path / "new")
    found = of(place, new.people())["several"]
    assert [row["people"] for row in found] == [1, 2, 5, 10]
    phases = [*OF_OLD, *OF_NEW]
    for row in found:
        expected = accounting.epsilon(accounting.for_people(phases, row["people"]), DELTA)
        assert row["epsilon"] == pytest.approx(expected, rel=1e-3) and row["how"] == "theorem"
        assert row["epsilon"] <= accounting.group_epsilon(phases, DELTA, row["people"])
    few = ["user 0", "user 1", "user 22", "user 23", "user 24"]  # the first run has two of them
    mixed = [*accounting.for_people(OF_OLD, 2), *accounting.for_people(OF_NEW, 5)]
    five = of(place, few)["several"][-1]
    assert five["epsilon"] == pytest.approx(accounting.epsilon(mixed, DELTA), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (PureEvent(0.1), ""),
        (allocated_event(3.0, 5), "random allocation"),
        (cyclic_event(3.0, 0.05, 1, 5), "cyclic sampling, perhaps with correlated noise, in a dir"),
    ],
)
def test_a_run_whose_loss_is_not_known_for_several_is_named(tmp_path, place, event, reason):
    new = Dataset.open(tmp_path / "new")
    with open_locked(place) as ledger:
        counted(ledger, 3, new, [(event, 5)], place="/none/there")
    found = of(place, new.people())
    why = found["runs"][-1]["by_group"]
    assert why.startswith(reason) and bool(why) == bool(reason)
    phases = [*OF_OLD, *OF_NEW, (event, 5)]
    two = found["several"][1]
    assert two["how"] == ("group privacy" if reason else "theorem")
    if reason:
        expected = accounting.group_epsilon(phases, DELTA, 2)
        assert expected <= two["epsilon"] < 1.01 * expected
    else:
        expected = accounting.epsilon(accounting.for_people(phases, 2), DELTA)
        assert two["epsilon"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("noise", "reason"), [({}, ""), ({"noise": "correlated"}, "correlated noise")]
)
def test_the_ledger_of_a_run_says_whether_its_noise_is_correlated(monkeypatch, noise, reason):
    planned = [(cyclic_event(2.0, 0.1, 1, 4), 8)]
    entry = Entry(1, "sealed", "train", "run", "", "", planned, (0.0, 0.0))
    head = {"key_seal": "sealed", "plan": noise}
    monkeypatch.setattr(run_ledger, "head", lambda _: head)
    assert why_by_group(RunCost(entry, planned, "released")) == reason


def test_without_a_guarantee_several_are_promised_nothing(tmp_path, place):
    new = Dataset.open(tmp_path / "new")
    with open_locked(place) as ledger:
        counted(ledger, 3, new, OF_OLD, label="a known seed")
    found = of(place, new.people())
    assert found["several"] == [] and float(found["epsilon"]) == math.inf


def test_the_command_shows_several_people(tmp_path, place, capsys):
    args = ["budget", tmp_path / "new", "--budget-ledger", place, "--delta", DELTA]
    main([*map(str, args), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [row["people"] for row in found["several"]] == [1, 2, 5, 10]
    main([*map(str, args)])
    said = " ".join(capsys.readouterr().out.split())
    assert "Of several users together, all runs promise epsilon = " in said
    assert "named before anybody saw a release" in said and "delta is to be multiplied" in said
    assert "only if no run was chosen by looking at the releases of others" in said
    assert "losses of held-out users that were computed without noise" in said


@pytest.mark.slow
@pytest.mark.ci
def test_the_same_people_in_capitals_are_told_before_a_training(tmp_path, capsys):
    texts = write_texts(tmp_path / "texts.parquet")
    shown = {"num-steps": 2, "budget-ledger": tmp_path / "ledger"}
    main(command(texts, tmp_path / "runs" / "one", **shown))
    table = pq.read_table(texts)
    ids = pa.array([each.upper() for each in table["user_id"].to_pylist()])
    other = tmp_path / "other.parquet"
    pq.write_table(table.set_column(0, "user_id", ids), other)
    assert "look like users" not in capsys.readouterr().err
    main(command(other, tmp_path / "runs" / "two", **shown))
    said = capsys.readouterr().err
    assert re.search(r"warning: \d+ of these users look like users of counted runs \(1\)", said), (
        said
    )
