"""Pages of the lab have their numbers from the records (`docs/records.py`)."""

import contextlib
import io
import json
import re
import warnings
from pathlib import Path

import pytest

from experiments.harness import records

ROOT = Path(__file__).parents[2]
CONF = f"""
import sys
sys.path[:0] = [{str(ROOT / "docs")!r}, {str(ROOT)!r}]
extensions = ["myst_nb", "records"]  # as docs/conf.py has: one process cannot have both
"""
CLAIMS_OF_PAGES = re.compile(r"^```\{record\} ([\w/]+)$", re.M)


def build(folder: Path, page: str) -> tuple[str, str]:
    """The text of a page of the site, and the warnings."""
    from sphinx.cmd.build import build_main

    (folder / "docs").mkdir()
    (folder / "docs/conf.py").write_text(CONF)
    (folder / "docs/index.md").write_text("# A page\n\n" + page)
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")  # Sphinx's own
        build_main(["-q", "-b", "text", str(folder / "docs"), str(folder / "site")])
    shown = folder / "site/index.txt"
    assert shown.exists(), said.getvalue()
    return shown.read_text(), said.getvalue()


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A record and a benchmark in an empty folder of results."""
    rows = [
        {"algorithm": a, "epsilon": e, "seed": s, "loss": 4 - e / 100 + s / 10}
        for a in ("els", "uls")
        for e in (1.0, float("inf"))
        for s in (0, 1)
        if (a, e) != ("els", float("inf"))
    ]
    record = {"scale": "small", "commit": "abc1234", "date": "2026-01-02", "seeds": [0, 1]}
    record |= {"data": {"posts": {}}, "model": {"num_parameters": 1234}}
    record["claims"] = [{"claim": "a | b", "held": False, "numbers": "in 1 of 3"}]
    bar = {"name": "seconds", "value": 0.12345, "bound": 1, "holds": True}
    benchmark = {"machine": {"cpu_count": 2}, "versions": {"jax": "9.9"}, "bars": [bar]}
    benchmark["rows"] = [{"name": "a step", "bytes": 2_500_000_000, "seconds": {"plain:4": 1.5}}]
    (tmp_path / "small").mkdir()
    (tmp_path / "small/figure.json").write_text(json.dumps(record))
    (tmp_path / "benchmark.json").write_text(json.dumps(benchmark))
    text = "\n".join(",".join(map(str, r.values())) for r in rows)
    (tmp_path / "small/figure.csv").write_text(",".join(rows[0]) + "\n" + text + "\n")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import records as extension

    monkeypatch.setattr(extension, "RESULTS", tmp_path)
    return tmp_path / "site"


def test_a_page_has_claims_tables_and_numbers_of_its_records(made_up, tmp_path):
    made_up.mkdir()
    page = """```{record} figure
```

```{record-table} figure
:where: epsilon < 100
:columns: algorithm; loss (.1f) as held-out loss
```

```{record-table} figure
:columns: algorithm
:across: epsilon as ε
:values: loss (.2f)
```

```{record} benchmark
```

```{record-table} benchmark
:columns: name; seconds.plain:4 (.2f) as plain
```

Of {record}`benchmark:rows[name=a step].bytes / 1e9 .1f` GB,
{record}`figure:claims[claim=a | b].numbers`,
{record}`figure:rows[algorithm=els][seed=1].loss .3f`.
"""
    text, said = build(made_up, page)
    assert said == ""
    words = re.sub(r"[\s|+=-]+", " ", text)
    assert "a b no in 1 of 3" in words.replace("**no**", "no")
    assert "Scale small; a model of 1,234 parameters; seeds 0, 1; data posts" in re.sub(
        '"', "", words
    )
    assert "2026 01 02, commit abc1234" in words
    assert "els 4.0 els 4.1 uls 4.0 uls 4.1" in words
    assert "ε 1 ε ∞ els 4.04 uls 4.04 ∞" in words
    assert "seconds yes 0.123 (1) cpu_count 2, jax 9.9." in words
    assert "plain a step 1.50" in words
    assert "Of 2.5 GB, in 1 of 3, 4.090." in words


@pytest.mark.parametrize(
    "page, fault",
    [
        ("```{record} nothing\n```", "no record 'nothing'"),
        ("{record}`nothing:rows`", "no record 'nothing'"),
        ("{record}`figure:losses.0 .3f`", "losses"),
        ("{record}`figure:rows[epsilon=1].loss .3f`", "4 elements instead of one"),
        ("{record}`figure:rows[epsilon=3].loss .3f`", "0 elements instead of one"),
        ("{record}`figure:rows`", "no single value"),
        ("{record}`figure:claims .3f and more`", "is not NAME:PATH"),
        ("{record}`figure:scale .3f`", "'scale' is no number"),
        ("```{record-table} figure\n:columns: rate\n```", "rate"),
        ("```{record-table} figure\n:where: rate == 1\n:columns: loss\n```", "rate"),
        ("```{record-table} figure\n:where: seed == 7\n:columns: loss\n```", "no rows where"),
        ("```{record-table} figure\n:columns: loss;\n```", "has an empty column"),
        ("```{record-table} figure\n```", "columns"),
    ],
)
def test_what_a_record_does_not_have_is_a_warning(page, fault, made_up):
    made_up.mkdir()
    _, said = build(made_up, page)
    assert "index.md:3: WARNING: record: " in said and fault in said


def test_the_claims_of_every_record_are_on_a_page_of_the_lab():
    pages = [page.read_text() for page in ROOT.glob("docs/lab/*.md")]
    shown = {name for page in pages for name in CLAIMS_OF_PAGES.findall(page)}
    committed = {
        records.name_of(file): json.loads(file.read_text()) for file in records.committed()
    }
    judged = {name for name, record in committed.items() if record["claims"]}
    assert judged <= shown
