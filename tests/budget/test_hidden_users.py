"""No report says who the hidden users are."""

import pytest
from test_verify import write_texts

from fedsim.cli.main import main
from fedsim.data.building.build import build

DELTA, STEPS = 1e-2, 24


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("rest")
    build(write_texts(place / "t.parquet", num_users=40), place / "data", max_length=24)
    return place / "data"


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))


def arguments(texts, run_dir, **flags):
    flags = {"data": texts, "run-dir": run_dir, "delta": DELTA, "num-steps": STEPS, **flags}
    flags = {"batch_size": 8, "model": "micro", "engine": "local", **flags}
    flags = {"strategy": "scan", "rows_per_pass": 1, **flags}
    return ["train", "uls", *(str(x) for n, v in flags.items() for x in (f"--{n}", v))]


@pytest.mark.slow
@pytest.mark.privacy
def test_what_earlier_runs_read_is_not_told_where_nobody_may_know_who_the_users_are(
    texts, tmp_path, capsys
):
    """It differs with one user: what all runs cost together."""
    hidden = {"adjacency": "add-or-remove", "epsilon": 1.5, "num-steps": 2}
    main(arguments(texts, tmp_path / "run1", **hidden))
    for name, own in {"run2": hidden, "run3": {**hidden, "adjacency": "zero-out"}}.items():
        main(arguments(texts, tmp_path / name, **own))
        main(["report", str(tmp_path / name), "--out", str(tmp_path / f"of-{name}")])
        text = (tmp_path / f"of-{name}" / "report.md").read_text()
        assert name in text and "run1" not in text and "not counted here" in text
