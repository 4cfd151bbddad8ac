"""Committed records follow from their rows."""

import json
import re

import pytest

from experiments.harness import records
from experiments.harness.outcomes import FILE, KEPT
from experiments.harness.rows import kept

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
def test_rows_that_follow_from_other_records_are_what_these_give(name):
    found = records.derived(RECORDS[name])
    assert found in (None, records.read_rows(RECORDS[name].with_suffix(".csv")))
    assert found is not None or name != "table_tuned_els"


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


@pytest.mark.parametrize("name", ["regime", "real_model", "table_pretraining"])
def test_rows_of_trainings_are_those_that_were_kept(name):
    file = RECORDS[name]
    kept_rows = records.as_written(kept(file.with_suffix(".jsonl")))
    rows = records.read_rows(file.with_suffix(".csv"))
    for row, kept_row in zip(rows, kept_rows, strict=True):
        assert kept_row.items() <= row.items()
