"""`fit_limit` trains as many steps as fit under the limit, and no more."""

import dataclasses
import json
import shutil

import pytest
from test_verify import write_texts

from fedsim import accounting
from fedsim.accounting import Slack
from fedsim.budget.ledger import Limit, open_locked, place_of
from fedsim.budget.spending import books
from fedsim.cli.main import main
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.plan import Plan

LIMIT, DELTA, STEPS = 2.0, 1e-2, 24


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("rest")
    build(write_texts(place / "t.parquet", num_users=40), place / "data", max_length=24)
    return place / "data"


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))


def arguments(texts, run_dir, *more, **flags):
    flags = {"data": texts, "run-dir": run_dir, "delta": DELTA, "num-steps": STEPS, **flags}
    flags = {
        "batch_size": 8,
        "model": "micro",
        "engine": "local",
        "strategy": "scan",
        "rows_per_pass": 1,
        **flags,
    }
    return ["train", "uls", *(str(x) for n, v in flags.items() for x in (f"--{n}", v)), *more]


def refused(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.privacy
def test_where_users_take_part_once_in_a_window_whole_windows_are_trained(texts, tmp_path, capsys):
    cell = {"sampling": "allocation", "participations": 8, "epsilon": 1.5, "checkpoint-every": 1}
    flags = arguments(texts, tmp_path / "first", **cell)
    at = flags.index("--batch_size")
    del flags[at : at + 2]  # it follows from the participations
    main(flags)
    flags[flags.index("--run-dir") + 1] = str(tmp_path / "rest")
    capsys.readouterr()
    main([*flags, "--limit-epsilon", str(LIMIT), "--fit-limit", "--json"])
    summary = json.loads(capsys.readouterr().out)
    steps, parts = summary["num_steps"], summary["sampling"]["participations"]
    assert 0 < steps == 3 * parts < STEPS and summary["steps_done"] == steps
    assert steps % 8  # so that the participations that were given would not do
    main(["verify", str(tmp_path / "rest")])
    for path in sorted((tmp_path / "rest" / "checkpoints").glob("*"))[1:]:
        path.unlink()  # as if it had been killed
    capsys.readouterr()
    main([*flags, "--limit-epsilon", str(LIMIT), "--fit-limit", "--json", "--resume"])
    again = json.loads(capsys.readouterr().out)
    same = ("num_steps", "steps_done", "epsilon")
    assert [again[name] for name in same] == [summary[name] for name in same]
    assert again["lost_steps"] > 0
    with open_locked(place_of(None)) as ledger:
        known = books(ledger, Dataset.open(texts).train.user_ids(), Limit(LIMIT, DELTA))
        assert known.total(DELTA).adaptive <= LIMIT


@pytest.mark.slow
@pytest.mark.privacy
def test_what_fits_leaves_room_for_noise_that_is_not_ideal(texts, tmp_path, monkeypatch):
    main(arguments(texts, tmp_path / "first", epsilon=1.5))
    whole = Plan.slack_after

    def large(plan, *steps):
        """Of correlated noise for very many parameters."""
        return Slack(3e-3 * plan.num_steps, whole(plan, *steps).delta)

    monkeypatch.setattr(Plan, "slack_after", large)
    own = {"epsilon": 1.5, "limit-epsilon": LIMIT}
    main(arguments(texts, tmp_path / "rest", "--fit-limit", **own))
    with open_locked(place_of(None)) as ledger:
        known = books(ledger, Dataset.open(texts).train.user_ids(), Limit(LIMIT, DELTA))
        assert len(known.charges) == 2 and known.charges[-1].entry.slack[0] > 0.01
        assert known.total(DELTA).adaptive <= LIMIT


@pytest.mark.slow
@pytest.mark.privacy
def test_as_many_steps_are_trained_as_fit_and_a_run_that_goes_on_keeps_them(
    texts, tmp_path, capsys
):
    main(arguments(texts, tmp_path / "first", epsilon=1.5))
    own = {"epsilon": 1.5, "limit-epsilon": LIMIT, "checkpoint-every": 1}
    said = refused(arguments(texts, tmp_path / "rest", **own), capsys)
    assert "limit_epsilon=2: expected a run that fits" in said
    args = arguments(texts, tmp_path / "rest", "--fit-limit", "--json", **own)
    main(args)
    summary = json.loads(capsys.readouterr().out)
    steps, event = (
        summary["num_steps"],
        accounting.StepEvent(summary["noise_multiplier"], summary["sampling_prob"]),
    )
    assert 0 < steps == summary["steps_done"] < STEPS
    assert summary["epsilon"] == accounting.epsilon([(event, steps)], DELTA) < 1.5
    whole = json.loads((tmp_path / "first" / "summary.json").read_text())["noise_multiplier"]
    assert summary["noise_multiplier"] == pytest.approx(whole, rel=1e-3)  # that of all steps
    users = Dataset.open(texts).train.user_ids()
    with open_locked(place_of(None)) as ledger:
        known = books(ledger, users, Limit(LIMIT, DELTA))
        last = known.charges[-1]
        assert known.total(DELTA).adaptive <= LIMIT
        entry = dataclasses.replace(last.entry, planned=[(event, steps + 1)])
        one_more = dataclasses.replace(last, entry=entry, released=entry.planned)
        assert known.total(DELTA, more=one_more).adaptive > LIMIT
    for path in sorted((tmp_path / "rest" / "checkpoints").glob("*"))[1:]:
        path.unlink()  # as if it had been killed
    main([*args, "--resume"])
    again = json.loads(capsys.readouterr().out)
    same = ("num_steps", "steps_done", "epsilon")
    assert [again[name] for name in same] == [summary[name] for name in same]
    assert again["lost_steps"] > 0
    own["epsilon"] = 1.0
    said = refused(arguments(texts, tmp_path / "none", "--fit-limit", **own), capsys)
    assert "expected a run that fits" in said and not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_was_started_without_it_keeps_its_settings(texts, tmp_path, capsys):
    main(arguments(texts, tmp_path / "run", epsilon=1.5, **{"num-steps": 2}))
    other = arguments(texts, tmp_path / "run", "--fit-limit", "--resume", epsilon=1.5)
    said = refused([*other, "--limit-epsilon", "9"], capsys)
    assert "num_steps=24: expected 2" in said


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
    """It differs with one user: how many steps are left, and what all runs cost together."""
    hidden = {"adjacency": "add-or-remove", "epsilon": 1.5, "num-steps": 2}
    said = refused(arguments(texts, tmp_path / "none", "--fit-limit", **hidden), capsys)
    assert "fit_limit=True: expected false with adjacency=add-or-remove" in said
    for number in (1, 2):
        main(arguments(texts, tmp_path / f"run{number}", **hidden))
    main(["report", str(tmp_path / "run2"), "--out", str(tmp_path / "page")])
    for file in (tmp_path / "page").iterdir():
        assert "which together cost nobody more" not in file.read_text()
    assert "not said here" in (tmp_path / "page" / "report.md").read_text()
    open_ = {**hidden, "adjacency": "zero-out"}
    main(arguments(texts, tmp_path / "run3", **open_))  # of which it would tell of the hidden ones
    main(["report", str(tmp_path / "run3"), "--out", str(tmp_path / "other")])
    told = "which together cost nobody more"
    assert told not in (tmp_path / "other" / "report.md").read_text()
    rest = ["--fit-limit", "--limit-epsilon", "9"]
    said = refused(arguments(texts, tmp_path / "none", *rest, **open_), capsys)
    assert "fit_limit=True: expected false: a run in the ledger hides who its users are" in said
    alone = {**open_, "budget-ledger": tmp_path / "another"}
    main(arguments(texts, tmp_path / "run4", **alone))
    main(["report", str(tmp_path / "run4"), "--out", str(tmp_path / "alone")])
    assert f"1, {told}" in (tmp_path / "alone" / "report.md").read_text()
