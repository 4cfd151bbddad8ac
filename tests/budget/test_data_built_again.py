"""Whose budget is spent where data are built again."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget import Entry, open_locked
from fedsim.data import Dataset, build
from fedsim.trust import budget

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
