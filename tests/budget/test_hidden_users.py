"""Damaged data cost nothing, and no report says who the hidden users are."""

import shutil

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


def refused(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_data_that_a_disk_has_damaged_cost_nothing(texts, tmp_path, capsys):
    shutil.copytree(texts, tmp_path / "data")
    tokens = tmp_path / "data" / "train" / "tokens.npy"
    kept = tokens.read_bytes()
    tokens.write_bytes(kept[:128] + bytes(len(kept) - 128))  # zeros, as after a reset
    said = refused(arguments(tmp_path / "data", tmp_path / "run", epsilon=1.5), capsys)
    assert "changed since it was built: another fingerprint" in said
    assert not (tmp_path / "run").exists() and not (tmp_path / "ledger").exists()


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
