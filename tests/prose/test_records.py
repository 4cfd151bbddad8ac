"""Committed records follow from their rows, and pages say what records say."""

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from experiments import common, correlated, records
from experiments.rows import by, kept

ROOT = Path(__file__).parents[2]
RECORDS = {file.stem: file for file in records.committed()}
CHECKS = {n: f.check for n, f in ((n, records.module_of(f)) for n, f in RECORDS.items()) if f}
CHECKS |= correlated.CHECKS
PAGES = sorted(ROOT.glob("docs/lab/*.md"))
PROSE = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# Versions, identifiers, settings, aims, constants of a method, and texts that are shown.
NOT_MEASURED = {
    "README.md": {"3.11", "3.13"},
    "experiments/README.md": {"0.5", "3.1"},  # of the paper: sigma, and its conjecture
    "docs/accelerators.md": {
        *("3.11", "0.11", "3.13", "3.14", "3.15", "2.4", "2.5"),  # versions
        *("64 MB", "95 %", "40 %"),  # parts of a file, and the aims
    },
    "docs/budget.md": {"0.1", "0.2", "0.043", "1.08"},  # q, sigma, --eval-users
    "docs/commands.md": {"0.2", "1.2"},
    "docs/data.md": {"3.1", "3.10", "7.0"},
    "docs/guarantees.md": {"2.0", "256 MiB"},  # a version, and what is kept
    "docs/noise.md": {"3.65", "3.911", "1.62", "0.03"},  # the ziggurat's end, grid, and beyond
    "docs/performance.md": {"0.2", "0.6", "1.41"},  # versions, and an aim
    "docs/quickstart.md": {"3.11", "3.13"},
    "docs/shared.md": {"0.01", "0.1", "0.3"},  # q, and an order
    "docs/tuning.md": {"0.01", "0.1", "0.2", "7.2", "9.0"},  # flags, q, constants
    "docs/lab/fig01_accounting.md": {"1.25"},  # what a claim allows
    "docs/lab/real_model.md": {"95 %"},
}
# Held against the page, or seen, where they are computed: tests/budget/test_story.py,
# tests/trust/test_audit.py and tests/test_shared.py.
ELSEWHERE = {
    "docs/budget.md": {
        *("3.04e-4", "6.574", "8.173", "8.57", "4.62", "6.57", "8.79", "5.15", "7.05"),
        *("41 %", "46 %"),
    },
    "docs/shared.md": {"90 %"},
    "docs/guarantees.md": {
        *("0.00", "0.01", "0.05", "0.15"),
        *("1.23", "1.20", "2.43", "2.25", "3.18"),
    },
}
CELL = ("data", "source", "rank", "algorithm", "epsilon", "group", "group_size", "budget", "times")
OVER_SEEDS = ("loss", "closed", "closed_allocation")
BYTES = (1e3, 1e6, 1e9, 2**20, 2**30)
LONGEST = 600  # characters of a row of the index
QUOTED = r"(?<![\w.,/-])(?!\d{4}\.\d{5}\b)\d+\.\d+(?:e-\d+)?(?![\w.]*\d)"
"""Numbers with a point, but for versions and identifiers of arXiv."""
UNITS = "s|seconds|minutes|hours|GiB|GB|MiB|MB|kB|ms|µs|ns|nats|%"
MEASURED = rf"(?<![\w.,/^-])(\d+(?:,\d{{3}})*)(?= (?:(?:to|and|or) [\d.]+ )?({UNITS})(?!\w))"
"""Whole numbers with a unit."""


def test_every_record_and_every_page_is_judged_by_a_test_of_its_own():
    assert set(RECORDS) - set(CHECKS) == {"regime_norms"}  # which claims nothing
    assert {page.stem for page in PAGES} <= set(CHECKS) and len(CHECKS) > 25


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
    assert record["seeds"] == (records.seeds_run(trainings) or records.seeds_of(record["settings"]))
    assert record.get("trainings", {}) == records.trained_at(trainings)
    assert record["scale"] == ("small" if file.parent.name == "small" else "paper")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_of_a_page_are_in_its_record_or_one_that_their_paragraph_names(page):
    known, missing = known_of(page), {}
    for paragraph in re.split(r"\n\s*\n", without_code(page.read_text())):
        values = [value for name in named(paragraph) | {page.stem} for value in EVERY[name]]
        if lost := not_found(paragraph, values + deltas(paragraph)) - known:
            missing[paragraph[:80]] = lost
    assert missing == {}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_numbers_of_the_index_and_of_documents_are_in_a_record_that_is_named_beside(page):
    known, missing = known_of(page), {}
    for heading, section in sections(without_code(page.read_text())):
        values = [value for name in named(section) for value in EVERY[name]]
        if lost := not_found(section, values) - known:
            missing[heading] = lost
    assert missing == {}


def test_what_is_known_of_a_page_is_still_there():
    for name, numbers in (*NOT_MEASURED.items(), *ELSEWHERE.items()):
        assert ROOT / name in [*PROSE, *PAGES]
        assert numbers <= asked_of((ROOT / name).read_text()), name


def test_a_number_that_no_record_of_its_section_has_is_found():
    text = "# A page\n0.02\n## A part\nof table_quoted 18.65\n## Another\n18.65"
    parts = dict(sections(text))
    assert [named(part) for part in parts.values()] == [set(), set(), {"table_quoted"}, set()]
    assert found("18.65", EVERY["table_quoted"]) and not found("18.66", EVERY["table_quoted"])
    versions = "3.11.7, 2407.07737, v0.12 and 1,000.25"
    assert asked_of(f"{versions}, but 0.5 and 1.5e-7") == {"0.5", "1.5e-7"}
    of_units = {"1,200 s", "3 %", "40 %", "5 MB"}
    assert asked_of("8 texts took 1,200 s, or 3 to 40 % of 5 MB") == of_units
    assert not_found("1.5e-7, 9.1e-8, 7 %, 12 s", [1.46e-7, 0.07, 0.12]) == {"9.1e-8", "12 s"}


def test_the_index_can_be_read():
    index = (ROOT / "experiments" / "README.md").read_text()
    assert max(map(len, index.splitlines())) <= LONGEST
    model = json.loads(RECORDS["fig06_privacy_loss"].read_text())["model"]
    assert f"{model['num_parameters']:,} parameters" in " ".join(index.splitlines()[:6])


def without_code(text: str) -> str:
    """A page but for its blocks of commands and output."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def sections(text: str) -> list[tuple[str, str]]:
    """(Heading, text) of each part of a page."""
    parts = re.split(r"^(#+ .*)$", text, flags=re.M)
    return list(zip(["", *parts[1::2]], parts[::2], strict=True))


def named(section: str) -> set[str]:
    """The records that a text names: by their files, pages or commands."""
    return {name for name in EVERY if re.search(rf"\b{name.replace('_', '[_s.]+', 1)}\b", section)}


def numbers_of(name: str) -> list[float]:
    """All numbers of a record's claims and rows; its minutes; millions of parameters."""
    file = RECORDS[name]
    record = json.loads(file.read_text())
    text = json.dumps([record["claims"], record["minutes"], record.get("run_minutes")])
    values = [float(number) for number in re.findall(r"\d+\.?\d*", text)]
    values += [n / 1e6 for n in (record["model"] or {}).values() if isinstance(n, int)]
    rows = records.read_rows(file.with_suffix(".csv"))
    for row in rows:
        values += [float(value) for value in row.values() if isinstance(value, int | float)]
    return values + over_seeds(rows)


def over_seeds(rows: list[dict]) -> list[float]:
    """Mean and range of what came of each cell, where rows are of its seeds."""
    values = []
    for name in OVER_SEEDS:
        own = [row for row in rows if "seed" in row and row.get(name) is not None]
        for same in by(own, lambda row: tuple(row.get(each) for each in CELL)).values():
            each = [row[name] for row in same]
            values += [statistics.mean(each), max(each) - min(each)]
    return values


def floats(text: str) -> list[float]:
    """All numbers of a text with a point in them."""
    return [float(number) for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", text)]


def of_benchmark(file: Path) -> list[float]:
    """All numbers of a benchmark; sizes in every unit; times beside those of the best plain
    gradient, which pages have of peers."""
    text = file.read_text()
    rows = json.loads(text).get("rows", [])
    sizes = [float(size) for size in re.findall(r'bytes": (\d+)', text)]
    sizes += [float(size) * 2**30 for size in re.findall(r'gib": ([\d.]+)', text)]
    values = floats(text) + [size / unit for size in sizes for unit in BYTES]
    for seconds, best in ((r["seconds"], r["best_plain"]) for r in rows if "best_plain" in r):
        values += [each / seconds[best] for each in seconds.values()]
    return values


def known_of(page: Path) -> set[str]:
    """The numbers of a page that no record has to have."""
    name = str(page.relative_to(ROOT))
    return NOT_MEASURED.get(name, set()) | ELSEWHERE.get(name, set())


def asked_of(text: str) -> set[str]:
    """The numbers of a text that have a point or a unit; whole ones with their unit."""
    return set(re.findall(QUOTED, text)) | {" ".join(each) for each in re.findall(MEASURED, text)}


def not_found(text: str, values: list[float]) -> set[str]:
    """The numbers of a text that none of the values is, as far as they are written."""
    return {number for number in asked_of(text) if not found(number, values)}


def found(number: str, values: list[float]) -> bool:
    """Whether one of the values is this number, as far as it is written. A share may be in %."""
    digits, _, unit = number.replace(",", "").partition(" ")
    mantissa, e, _ = digits.partition("e")
    form = f".{len(mantissa.partition('.')[2])}{'e' if e else 'f'}"
    values = values + [100 * value for value in values] if unit == "%" else values
    return any(float(f"{value:{form}}") == float(digits) for value in values)


def deltas(text: str) -> list[float]:
    """The paper's delta, n^-1.1, of every number of examples of a text, and of ten times it."""
    counts = [int(n.replace(",", "")) for n in re.findall(r"\b\d{1,3}(?:,\d{3})+\b", text)]
    return [(times * n) ** -1.1 for n in counts for times in (1, 10)]


EVERY = {name: numbers_of(name) for name in RECORDS}
for file in records.RESULTS.glob("benchmark_*.json"):
    EVERY[file.stem] = of_benchmark(file)
for rows in records.RESULTS.glob("**/*.jsonl"):
    EVERY[rows.stem] = EVERY.get(rows.stem, []) + floats(rows.read_text())
