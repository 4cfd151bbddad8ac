"""Settings that were renamed are taken by their old names too, for a release."""

import hashlib
import json
from types import SimpleNamespace

import pytest
from refused import refuses

from fedsim.cli.arguments import parse
from fedsim.cli.main import Command
from fedsim.library.run import configs_of
from fedsim.training.open import key_context
from fedsim.tuning.sweep import jobs_of

TRAIN = "train uls --data pydocs --epsilon 8 --num-steps 3 --run-dir run".split()
GIVEN = {"data": "pydocs", "epsilon": 8.0, "num_steps": 3}


@pytest.mark.parametrize("words", [["--batch-size", "48"], ["--budget", "48"], ["--budget=48"]])
def test_the_command_line_takes_both_names(words):
    assert parse(Command, [*TRAIN, *words]).privacy.batch_size == 48
    advised = "recommend --data pydocs --epsilon 8 --num-steps 3".split()
    assert parse(Command, [*advised, *words]).target.batch_size == 48
    assert parse(Command, ["audit", *TRAIN[1:], *words]).privacy.batch_size == 48


@pytest.mark.parametrize("name", ["batch_size", "budget"])
def test_a_file_python_and_a_sweep_take_both_names(name, tmp_path):
    (tmp_path / "run.toml").write_text(f"{name} = 48\n")
    train = parse(Command, [*TRAIN, "--config", str(tmp_path / "run.toml")])
    assert train.privacy.batch_size == 48
    assert configs_of({**GIVEN, name: 48, "run_dir": "run"})[0].batch_size == 48
    settings = {**GIVEN, name: 48, "algorithm": "uls"}
    (job,) = jobs_of([settings, {**GIVEN, "batch_size": 48, "algorithm": "uls"}], tmp_path)
    assert job.privacy.batch_size == 48 and json.dumps(job.settings).count("48") == 1


def test_what_is_derived_from_names_stays_as_it_was(tmp_path):
    """The key of a seed and the name of a sweep's run have the name that the setting first had."""
    privacy, run = configs_of({**GIVEN, "batch_size": 48, "run_dir": "run"})
    users = SimpleNamespace(train=SimpleNamespace(fingerprint="f"))
    context = key_context("uls", None, privacy, run, users)
    assert '"budget": 48' in context and "batch_size" not in context
    kept = {"budget": 48, "data": "pydocs", "epsilon": 8.0, "num_steps": 3}
    digest = hashlib.sha256(json.dumps(["uls", kept], sort_keys=True).encode()).hexdigest()
    (job,) = jobs_of([{**GIVEN, "batch_size": 48, "algorithm": "uls"}], tmp_path)
    assert job.name == f"uls-{digest[:12]}"


def test_both_names_at_once_are_one_too_many():
    with refuses("budget=48"):
        configs_of({**GIVEN, "budget": 48, "batch_size": 48, "run_dir": "run"})


def test_the_ledger_keeps_its_flags_and_its_command():
    train = parse(Command, [*TRAIN, "--budget-ledger", "ledger"])
    assert str(train.run.budget_ledger) == "ledger"
    assert parse(Command, ["budget", "pydocs"]).__class__.__name__ == "Budget"
