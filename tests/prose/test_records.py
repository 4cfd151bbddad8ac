"""Committed records follow from their rows, and pages from the records."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from experiments.claims import CLAIMS
from experiments.harness import records
from experiments.harness.claims import judge

ROOT = Path(__file__).parents[2]
RECORDS = {records.name_of(file): file for file in records.committed()}
spec = importlib.util.spec_from_file_location("records_of_pages", ROOT / "docs/records.py")
in_pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(in_pages)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_verdicts_and_numbers_follow_from_the_rows(name):
    file = RECORDS[name]
    rows = records.read_rows(file.with_suffix(".csv"))
    if claims := CLAIMS.get(file.stem):  # those of closed studies stay as they were judged
        assert judge(claims, rows) == json.loads(file.read_text())["claims"]
        shown = re.compile(rf"^<!-- record {name}\s", re.M)
        assert any(shown.search(page.read_text()) for page in in_pages.pages())


@pytest.mark.parametrize("page", in_pages.pages(), ids=lambda page: page.stem)
def test_numbers_of_a_page_are_those_of_the_records(page):
    text = page.read_text()
    assert in_pages.filled(text) == text, "python docs/records.py writes them"
    assert "{record" not in text


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_says_where_it_came_from(name):
    record = json.loads(RECORDS[name].read_text())
    assert set(records.PROVENANCE) <= set(record)
    assert re.fullmatch(r"[0-9a-f]{7,12}(-dirty)?", record["commit"])
    folder = RECORDS[name].parent.name
    assert record["scale"] == (folder if folder in records.FOLDERS else "paper")
    for each in record["data"].values():
        assert not isinstance(each, dict) or re.fullmatch(r"[0-9a-f]{64}", each["sha256"])


def test_earlier_tests_are_of_claims_that_there_are():
    for name, tests in tomllib.loads((records.RESULTS / "earlier.toml").read_text()).items():
        claims = json.loads(RECORDS[name].read_text())["claims"]
        assert tests.keys() <= {claim["claim"] for claim in claims}
