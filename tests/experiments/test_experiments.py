"""A pulse of every experiment: its smallest scale runs, and it says what it would cost."""

import dataclasses
import importlib
import inspect
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from refused import refuses

from experiments import (
    __main__ as experiments_by_name,
    table_mutations,
)
from experiments.harness import common, finetuning, outcomes, planting
from experiments.harness.records import read_rows
from experiments.harness.rows import kept as rows_kept
from experiments.mistakes import MISTAKES
from fedsim.data import corpora

ROOT = Path(__file__).parents[2]
HELPERS = (
    "__init__ __main__ architecture pretraining attack_claims forecast_claims law_claims"
    " real_model_claims regime_claims regime_plots stand_ins starting_model synthetic_claims"
)
NAMES = sorted(p.stem for p in (ROOT / "experiments").glob("*.py") if p.stem not in HELPERS.split())


def run(name, monkeypatch, *flags):
    """`python -m experiments.NAME FLAGS`, in this process."""
    monkeypatch.setattr(sys, "argv", [name, *flags])
    runpy.run_path(str(ROOT / "experiments" / f"{name}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Where results go; experiments that are views of the same runs find them there."""
    return tmp_path_factory.mktemp("out")


# Eight seconds and more; what CI runs always is in TRAIN. The parts of the table, pre-training and
# training from what was made there, are test_pretraining.py's.
SLOW = dict.fromkeys(
    ("table_pretraining", "fig05_uls_heatmap", "fig06_privacy_loss", "fig08_num_users")
    + ("correlated", "real_model", "real_model_rates", "regime", "sampling")
    + ("synthetic_text", "law", "attack", "own_algorithm"),
    [pytest.mark.slow],
)
TRAIN = (
    *("table_mutations", "fig02_variance", "fig04_els_group_size", "fig14_tuner_suboptimality"),
    *("fig18_personalization", "optimizers"),
)
SLOW |= dict.fromkeys(TRAIN, [pytest.mark.slow, pytest.mark.ci])


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(n, marks=SLOW.get(n, ())) for n in NAMES])
def test_smoke(name, out, monkeypatch):
    before = set(out.iterdir())
    run(name, monkeypatch, "--scale", "smoke", "--out", str(out))
    suffixes = {path.suffix for path in set(out.iterdir()) - before}
    assert ({".csv"} if name.startswith("table") else {".csv", ".png"}) <= suffixes


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_dry_run_says_what_would_be_run_and_runs_nothing(
    name, scale, tmp_path, monkeypatch, capsys
):
    run(name, monkeypatch, "--scale", scale, "--dry-run", "--out", str(tmp_path))
    *plan, cost = capsys.readouterr().out.splitlines()
    assert plan and re.search(r"minutes|hours|gradients|no record", cost)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["fig04_els_group_size", "fig06_privacy_loss", "regime"])
def test_real_text_that_is_not_there_is_a_line_that_says_where_it_comes_from(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(common, "SHARED", tmp_path / "none")
    here = lambda train, cells, settings, *_: [train(cell, settings) for cell in cells]  # noqa: E731
    monkeypatch.setattr("experiments.harness.processes.compute", here)
    with pytest.raises(SystemExit) as stop:
        run(name, monkeypatch, "--scale", "small", "--out", str(tmp_path))
    said = f"experiments: error: {tmp_path}/none/debian_desc.parquet is not there: python -m "
    remedy = "experiments.stand_ins debian_desc --download builds it"
    assert capsys.readouterr().err == f"{said}{remedy}\n"
    assert stop.value.code == 2


def test_the_index_of_experiments_knows_them_all_and_what_is_recorded(capsys):
    assert experiments_by_name.names() == NAMES
    assert experiments_by_name.main(["status", "lemma", "table_verdicts", "conjecture"]) == 0
    lemma, table, _ = capsys.readouterr().out.splitlines()
    assert lemma.startswith("lemma (paper, 2026-") and lemma.endswith(": 1 yes; up to date")
    assert table.startswith("table_verdicts (small, 2026-") and "1 yes; up to date" in table
    assert experiments_by_name.main(["run", "lemma", "nothing"]) == 2
    assert "NAME=nothing: expected one of attack, audits, conjecture" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(experiments_by_name, "status", lambda _: importlib.import_module("absent"))
    assert experiments_by_name.main(["status", "lemma"]) == 2
    said = "experiments: error: absent is not installed: pip install -e '.[experiments]'\n"
    assert capsys.readouterr().err == said


def test_a_record_of_other_settings_or_another_verdict_is_out_of_date(monkeypatch, tmp_path):
    ((scale, file),) = experiments_by_name.files_of("lemma")
    record = json.loads(file.read_text())
    shutil.copy(file.with_suffix(".csv"), tmp_path)
    copy = tmp_path / file.name
    monkeypatch.setattr(experiments_by_name, "files_of", lambda _: [(scale, copy)])
    for changed, said in (
        ({"settings": {**record["settings"], "probs": [0.5]}}, "the settings were changed"),
        ({"claims": []}, "python -m experiments judge has it again"),
    ):
        copy.write_text(json.dumps({**record, **changed}))
        (line,) = experiments_by_name.status("lemma")
        assert line.endswith(f"out of date: {said}")


def test_ones_own_data_take_the_place_of_all_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = finetuning.parse_arguments("", ["--data", "data/posts", "--scale", "smoke"])
    assert given.out == Path("results/posts") and given.model == finetuning.FRESH_MODEL
    for settings in (*finetuning.COMPARISONS.values(), *finetuning.ULS_GRIDS.values()):
        training = finetuning.on_one(settings).training
        assert len(training.num_steps) == 1 and training.epsilons == settings.training.epsilons
        (name,) = training.num_steps
        assert finetuning.data_of(name, given) == "data/posts"
    rows = finetuning.named([{"dataset": name}], given.shown())
    assert rows == [{"dataset": "posts"}]
    assert finetuning.stands_for("posts") == finetuning.STACK_OVERFLOW
    assert not finetuning.assumption("posts")
    same_name = finetuning.parse_arguments("", ["--data", "data/reddit_links", "--dry-run"])
    (name,) = same_name.shown().values()
    assert finetuning.stands_for(name) == finetuning.STACK_OVERFLOW
    assert not finetuning.assumption(name)


def test_a_scale_that_an_experiment_does_not_have_is_one_line(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run("sampling", monkeypatch, "--scale", "medium", "--out", str(tmp_path))
    assert stop.value.code == 2
    said = "experiments: error: scale=medium: expected one of smoke, small, paper\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_figure_6_on_ones_own_data_is_one_command(tmp_path, monkeypatch):
    """Three minutes, most of them for the texts of pydocs."""
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    flags = ("--data", "pydocs", "--scale", "smoke", "--out", str(tmp_path))
    run("fig06_privacy_loss", monkeypatch, *flags)
    rows = read_rows(tmp_path / "fig06_privacy_loss.csv")
    assert {row["dataset"] for row in rows} == {"pydocs"} and len(rows) == 14


def test_every_experiment_and_every_figure_is_in_the_index_once():
    index = (ROOT / "experiments" / "README.md").read_text()
    rows = re.findall(r"^\| (.*?) \| \[`(\w+)`\]\((\w+).py\)", index, re.MULTILINE)
    assert sorted(name for _, name, _ in rows) == NAMES
    assert all(name == file for _, name, file in rows)
    numbers = [where for where, *_ in rows if re.fullmatch(r"[\d, ]+", where)]
    assert sorted(int(n) for where in numbers for n in where.split(",")) == list(range(1, 19))


@pytest.mark.slow
@pytest.mark.ci
def test_what_is_reported_are_test_losses_of_the_runs_that_were_tuned_on_others(tmp_path):
    arguments = finetuning.Arguments("smoke", tmp_path, None, dry_run=False)
    training = dataclasses.replace(finetuning.SMOKE_TRAINING, learning_rates=(1e-6, 0.1))
    cell = {"dataset": finetuning.STACK_OVERFLOW, "epsilon": 4.0, "algorithm": "uls"}
    rows = finetuning.tuned_losses([{**cell, "budget": 8}], training, arguments)
    (row,) = finetuning.with_test_losses(rows, training, arguments)
    assert row["learning_rate"] == 0.1  # 1e-6 learns nothing
    run_dir = finetuning.run_dir_of(row, training, arguments, seed=0)
    data = corpora.load(json.loads((run_dir / "config.json").read_text())["run"]["data"])
    assert data.test is None  # held-out users stand in, the same examples as in training
    assert row["validation_loss"] == pytest.approx(row["loss"], rel=1e-6)
    asked = outcomes.Evaluation(run_dir, training.test_examples, before=True)
    assert outcomes.evaluate_one(asked) == row["loss_before"] != row["loss"]


@pytest.mark.slow
@pytest.mark.ci
def test_another_machine_goes_on_from_what_came_of_runs_without_the_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "KEPT", ("smoke",))
    monkeypatch.setattr(outcomes, "fingerprint", lambda _: "of the same data")
    training = dataclasses.replace(finetuning.SMOKE_TRAINING, learning_rates=(0.03, 0.1))
    cell = {"dataset": finetuning.STACK_OVERFLOW, "epsilon": 4.0, "algorithm": "uls", "budget": 8}
    train_all, asked = outcomes.train_all, []

    def whole(settings, arguments):
        asked.append(len(settings))
        return train_all(settings, arguments)

    def cut_off(settings, arguments):
        whole(settings[:1], arguments)
        raise KeyboardInterrupt

    def found(how):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        monkeypatch.setattr(outcomes, "train_all", how)
        arguments = finetuning.Arguments("smoke", tmp_path, None, dry_run=False)
        rows = finetuning.tuned_losses([cell], training, arguments)
        rows = finetuning.with_test_losses(rows, training, arguments)
        return rows, arguments.tally.run_minutes

    with pytest.raises(KeyboardInterrupt):
        found(cut_off)
    file = tmp_path / outcomes.FILE
    file.write_text(file.read_text() + '{"run": "cut o')  # as where the machine was lost
    rest = found(whole)
    assert asked == [1, 1] and found(None) == rest
    assert [row["test"] for row in rows_kept(file)] and len(rows_kept(file)) == 2
    monkeypatch.setattr(outcomes, "sha256", lambda _: "of another processor")
    with refuses(f"runs={file}", says="with model of another"):
        found(None)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_diverges_is_the_worst_and_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "KEPT", ("smoke",))
    monkeypatch.setattr(outcomes, "AT_ONCE", 1)
    monkeypatch.setattr(outcomes, "fingerprint", lambda _: "of the same data")
    training = dataclasses.replace(finetuning.SMOKE_TRAINING, learning_rates=(0.1, 1e9))
    cell = {"dataset": finetuning.STACK_OVERFLOW, "epsilon": 4.0, "algorithm": "uls", "budget": 8}
    for _ in range(2):
        arguments = finetuning.Arguments("smoke", tmp_path, None, dry_run=False)
        (row,) = finetuning.tuned_losses([cell], training, arguments)
        assert row["learning_rate"] == 0.1 and math.isfinite(row["loss"])
    first, second = rows_kept(tmp_path / outcomes.FILE)
    assert math.isfinite(first["test"]) and second["after"] == second["test"] == math.inf
    assert second["cpu"] and math.isfinite(row["loss_before"])


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_every_mistake_can_be_planted_and_has_its_test(mistake, monkeypatch):
    """In the code as it is: what a patch replaces is there, and takes the arguments it names."""
    for patch in mistake.patches:
        place, name, right = patch.target()
        patch.expect_callable()
        patch.plant(monkeypatch.setattr)
        assert inspect.getattr_static(place, name) is not right
    file, _, test = mistake.test.partition("::")
    test, *_ = test.partition("[")  # of its parameters
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


def test_a_patch_that_no_longer_fits_is_noticed(monkeypatch):
    monkeypatch.setattr(common, "right", lambda epsilon, *, delta: epsilon + delta, raising=False)
    patch = planting.Patch(
        "experiments.harness.common", "right", lambda right, epsilon, *, delta: epsilon
    )
    patch.expect_callable()
    patch.plant(monkeypatch.setattr)
    assert common.right(3, delta=0.5) == 3
    for change in (
        lambda right, epsilon: epsilon,
        lambda right, epsilon, *, sigma, delta=0: epsilon,
        lambda right, sigma, **options: sigma,
    ):
        with pytest.raises(TypeError):
            dataclasses.replace(patch, change=change).expect_callable()
    with pytest.raises(AttributeError):
        dataclasses.replace(patch, name="wrong").plant(monkeypatch.setattr)


def test_a_mistake_that_cannot_run_is_not_what_a_test_noticed():
    said = """tests/test_uls.py:9: in test_a_step
    uls.gradient()
experiments/harness/planting.py:71: in wrong
    return self.change(right, *args, **kwargs)
{frame}
E   TypeError: unsupported operand
FAILED tests/test_uls.py::test_a_step[plain] - TypeError: unsupported operand
"""
    own, right = "experiments/mistakes/noise.py:9: in draw", "fedsim/uls.py:80: in gradient"
    library = "../venv/numpy/core.py:5: in add"
    frames = [right, f"{own}\n{right}\n{library}", own, f"{own}\n{library}"]
    found = [table_mutations.failing(said.replace("{frame}", frame)) for frame in frames]
    assert found == ["test_uls.py::test_a_step"] * 2 + [None] * 2


def test_a_mistake_is_in_what_a_test_starts_and_what_it_made_in_the_cache_of_no_other(tmp_path):
    (mistake,) = (each for each in MISTAKES if each.name == "the key in whatever prints it")
    sound, own = (table_mutations.place(tmp_path, each) for each in (None, mistake))
    show = "from fedsim import files, keys; print(keys.SecretKey(bytes(32)), files.cache_dir())"
    start = f"import conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}])"
    found = table_mutations.python(own, "-c", start, where=tmp_path).stdout.split()
    assert found == [f"SecretKey({bytes(32).hex()})", str(own / "cache")]
    assert own != sound and not (sound / "sitecustomize.py").exists()
    assert len({(each / "cache" / "compiled").resolve() for each in (own, sound)}) == 1


def test_an_interrupted_experiment_says_that_it_goes_on(capsys):
    with pytest.raises(SystemExit) as stopped, common.mistakes():
        raise KeyboardInterrupt
    assert stopped.value.code == 75 and "the same command goes on" in capsys.readouterr().err
