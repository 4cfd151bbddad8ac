"""Committed records follow from their rows."""

import json
import re
from pathlib import Path

import pytest

from experiments.harness import records
from experiments.harness.outcomes import KEPT
from experiments.harness.rows import kept

RECORDS = {records.name_of(file): file for file in records.committed()}
CHECKS = {name: check for name, file in RECORDS.items() if (check := records.check_of(file))}


def test_every_record_is_judged_and_its_claims_are_on_a_page_of_the_lab():
    pages = [page.read_text() for page in (Path(__file__).parents[2] / "docs/lab").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"^```\{record\} (\S+)$", page, re.M)}
    assert CHECKS.keys() <= shown


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_verdicts_and_numbers_follow_from_the_rows(name):
    file = RECORDS[name]
    rows = records.read_rows(file.with_suffix(".csv"))
    if name in CHECKS:  # those of closed studies stay as they were judged
        assert records.as_claims(CHECKS[name](rows)) == json.loads(file.read_text())["claims"]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_rows_that_follow_from_other_records_are_what_these_give(name):
    found = records.derived(RECORDS[name])
    assert found in (None, records.read_rows(RECORDS[name].with_suffix(".csv")))


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_says_where_it_came_from(name):
    file = RECORDS[name]
    record = json.loads(file.read_text())
    assert set(records.PROVENANCE) <= set(record)
    assert re.fullmatch(r"[0-9a-f]{7,12}(-dirty)?", record["commit"])
    folder = file.parent.name
    assert record["scale"] == (folder if folder in records.FOLDERS else "paper")
    for each in record["data"].values():
        assert not isinstance(each, dict) or re.fullmatch(r"[0-9a-f]{64}", each["sha256"])
    if folder not in KEPT:  # there trainings are in one file for all experiments
        trainings = kept(file.with_suffix(".jsonl"))
        seeds = records.seeds_run(trainings) or records.seeds_of(record["settings"])
        assert record["seeds"] == seeds
        assert record.get("trainings", {}) == records.trained_at(trainings)


def test_rows_of_trainings_are_those_that_were_kept():
    file = RECORDS["real_model"]
    kept_rows = records.as_written(kept(file.with_suffix(".jsonl")))
    rows = records.read_rows(file.with_suffix(".csv"))
    for row, kept_row in zip(rows, kept_rows, strict=True):
        assert kept_row.items() <= row.items()
