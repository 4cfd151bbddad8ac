"""The command line as a person meets it: what each command prints, and how it refuses."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from refused import refuses

from fedsim.cli import main
from fedsim.cli.account import Accounted, account, calibrate
from fedsim.config import PrivacyConfig


def run(*args, capsys):
    """(exit code, stdout, stderr) of `fedsim ARGS` in this process."""
    try:
        main.main([str(arg) for arg in args])
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code or 0, *capsys.readouterr()


WORDS = "the cat sat on a mat and saw that dog run far away from his old house today".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A Parquet file of 60 users' sentences."""
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(60) for _ in range(rng.integers(1, 9))]
    sentences = [" ".join(rng.choice(WORDS, 8)) for _ in users]
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(pa.table({"user_id": users, "text": sentences}), path)
    return path


def train_args(texts, run_dir, **flags):
    flags = {"epsilon": 8, "num_steps": 3, "batch_size": 12, "engine": "local", **flags}
    flags = {"seed": 1, "max_length": 24, "model": "micro", "group_size": 2, **flags}
    flags = {"data": texts, "run_dir": run_dir, **flags}
    return [x for k, v in flags.items() if v is not None for x in (f"--{k.replace('_', '-')}", v)]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_train_writes_a_run_whose_epsilon_account_confirms(
    algorithm, texts, run_dir, capsys, monkeypatch
):
    args = train_args(texts, run_dir)
    code, out, err = run("train", algorithm, *args, "--json", capsys=capsys)
    assert code == 0, err
    summary = json.loads(out)
    assert summary == json.loads((run_dir / "summary.json").read_text())
    names = """algorithm epsilon delta adjacency noise_multiplier clip_norm group_size sampling_prob
        num_steps steps_done num_users num_examples sampling_run sampling_accounted
        initial_eval_loss final_eval_loss params_sha256 gradients_computed wall_seconds"""
    assert set(names.split()) <= set(summary)
    assert summary["delta"] == 1e-6
    assert 7.9 < summary["epsilon"] <= 8
    flags = ["num_steps", "sampling_prob", "noise_multiplier", "group_size", "delta"]
    again = [x for name in flags for x in (f"--{name.replace('_', '-')}", repr(summary[name]))]
    code, out, _ = run("account", algorithm, *again, "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["epsilon"] == summary["epsilon"]
    monkeypatch.setattr("fedsim.run.terminal.SILENT_S", -1.0)
    code, out, err = run("evaluate", run_dir, "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["eval/loss"] == pytest.approx(summary["final_eval_loss"])
    assert "evaluation: " in err


@pytest.mark.parametrize(
    "fault, field",
    [
        ({"noise": "correlated", "sampling": "allocation"}, "sampling"),
        ({"noise": "correlated", "sampling": "poisson"}, "sampling"),
        ({"participations": 2}, "participations"),
        ({"sampling": "allocation", "participations": 3}, "participations"),
        ({"bands": 2}, "bands"),
        ({"sampling": "cyclic", "bands": 0}, "bands"),
        ({"sampling": "cyclic", "bands": 11}, "bands"),
    ],
    ids=str,
)
def test_all_commands_refuse_the_same_mechanisms(fault, field):
    given = {"algorithm": "uls", "num_steps": 10, "sampling_prob": 0.05, "delta": 1e-5, **fault}
    words = ["--data", "pydocs", "--epsilon", 1, "--num-steps", 10, *as_flags(fault)]
    for ask in (
        lambda: PrivacyConfig(1.0, 10, **fault),
        lambda: account(Accounted(**given, noise_multiplier=1.0)),
        lambda: calibrate(Accounted(**given, epsilon=1.0)),
        lambda: main.parse(["recommend", *map(str, words)])(),
    ):
        with refuses(field):
            ask()


@pytest.mark.privacy
def test_users_are_named_in_one_way(texts, tmp_path, capsys):
    """Else the unit that is protected would be another one than was asked for."""
    flags = ["--user-column", "author", "--owners", "url", "--out", str(tmp_path / "out")]
    code, _, err = run("data", "build", texts, *flags, capsys=capsys)
    assert code == 2 and "user_column=author: expected none beside owners=url" in err


def as_flags(values):
    return [x for name, value in values.items() for x in (f"--{name.replace('_', '-')}", value)]
