"""Committed records follow from their rows."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from experiments.harness import common, records
from experiments.harness.outcomes import FILE, KEPT
from experiments.harness.rows import kept

ROOT = Path(__file__).parents[2]
RECORDS = {records.name_of(file): file for file in records.committed()}
CHECKS = {name: check for name, file in RECORDS.items() if (check := records.check_of(file))}


def test_every_record_is_judged_by_a_test_of_its_own():
    # These claim nothing.
    assert set(RECORDS) - set(CHECKS) == {"regime_norms", "law_predictions"}
    assert len(CHECKS) > 25


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_verdicts_and_numbers_follow_from_the_rows(name):
    file = RECORDS[name]
    rows = records.read_rows(file.with_suffix(".csv"))
    found = records.as_claims(CHECKS[name](rows)) if name in CHECKS else []
    assert found == json.loads(file.read_text())["claims"]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_says_where_it_came_from(name):
    file = RECORDS[name]
    record = json.loads(file.read_text())
    assert set(records.PROVENANCE) <= set(record)
    assert re.fullmatch(r"[0-9a-f]{7,12}(-dirty)?", record["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])
    trainings = kept(file.with_suffix(".jsonl"))
    if file.parent.name in KEPT:  # in one file for all experiments
        of_all = records.trained_at(kept(file.with_name(FILE)))
        assert record["trainings"]["number"] <= of_all["number"]
        assert {*record["trainings"]["commits"]} <= {*of_all["commits"]}
        trainings = []
        del record["trainings"]
    assert record["seeds"] == (records.seeds_run(trainings) or records.seeds_of(record["settings"]))
    assert record.get("trainings", {}) == records.trained_at(trainings)
    folder = file.parent.name
    assert record["scale"] == (folder if folder in records.FOLDERS else "paper")
    stand_ins = re.findall(r"scotus|reddit_links|allsides_news", json.dumps(record["data"]))
    assert not (stand_ins and record["scale"] == "paper")
    assert "Stack Overflow" not in record["data"] and "CC-News" not in record["data"]
    of_files = [each for each in record["data"].values() if isinstance(each, dict)]
    assert all(re.fullmatch(r"[0-9a-f]{64}", each["sha256"]) for each in of_files)
    assert all(each.get("fingerprint", "not built") for each in of_files)
    if record["model"] is not None:
        sizes = [size for key, size in record["model"].items() if "parameters" in key]
        assert sizes and all(sizes), record["model"]
        assert record["model"].get("sha256", "made here") and record["model"].get(
            "model", "no file"
        )


def test_rows_that_are_appended_do_not_make_a_commit_dirty(tmp_path, monkeypatch):
    here = tmp_path / "experiments"
    files = [tmp_path / "code.py", here / "figure.py", here / "results" / "small" / "rows.jsonl"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("as committed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for more in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *more], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "HERE", here)
    monkeypatch.setattr(records, "RESULTS", here / "results")
    files[-1].write_text("a row more")
    records._git.cache_clear()
    clean = records.came_from()["commit"]
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    for file in files[:-1]:
        file.write_text("changed")
        records._git.cache_clear()
        assert records.came_from()["commit"] == f"{clean}-dirty"
        file.write_text("as committed")
    records._git.cache_clear()  # it is this repository's again


@pytest.mark.parametrize("name", ["regime", "real_model", "table_pretraining"])
def test_rows_of_trainings_are_those_that_were_kept(name):
    file = RECORDS[name]
    kept_rows = records.as_written(kept(file.with_suffix(".jsonl")))
    rows = records.read_rows(file.with_suffix(".csv"))
    for row, kept_row in zip(rows, kept_rows, strict=True):
        assert kept_row.items() <= row.items()


def test_rows_that_are_written_are_those_that_are_judged(tmp_path):
    rows = [{"loss": 1 / 3, "group": 2, "inside": True, "rate": None, "name": "a"}]
    common.write_csv(tmp_path / "rows.csv", rows)
    assert records.read_rows(tmp_path / "rows.csv") == records.as_written(rows)
    assert records.as_written(rows)[0]["loss"] == 0.333333
    later = [*rows, {**rows[0], "cpu": "a processor"}]
    common.write_csv(tmp_path / "rows.csv", later)
    assert records.read_rows(tmp_path / "rows.csv") == [
        {**each, "cpu": each.get("cpu")} for each in records.as_written(later)
    ]
