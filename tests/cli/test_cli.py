"""The command line as a person meets it: what each command prints, and how it refuses."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from refused import refuses

from fedsim import accounting
from fedsim.cli import main
from fedsim.cli.account import Account, Calibrate
from fedsim.cli.tuning import AdvisedRun, Recommend
from fedsim.config import DataConfig, MechanismConfig, PrivacyConfig, PrivacyTarget


def run(*args, capsys):
    """(exit code, stdout, stderr) of `fedsim ARGS` in this process."""
    try:
        main.main([str(arg) for arg in args])
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code or 0, *capsys.readouterr()


ADVISED = AdvisedRun(DataConfig("pydocs"))
WORDS = "the cat sat on a mat and saw that dog run far away from his old house today".split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A Parquet file of 60 users' sentences."""
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(60) for _ in range(rng.integers(1, 9))]
    sentences = [" ".join(rng.choice(WORDS, 8)) for _ in users]
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(
        pa.table({"user_id": users, "text": sentences, "year": [2020] * len(users)}), path
    )
    return path


def train_args(texts, run_dir, **flags):
    flags = {
        "data": texts,
        "epsilon": 8,
        "num_steps": 3,
        "batch_size": 12,
        "engine": "local",
        **flags,
    }
    flags = {
        "run_dir": run_dir,
        "seed": 1,
        "max_length": 24,
        "model": "micro",
        "group_size": 2,
        **flags,
    }
    return [x for k, v in flags.items() if v is not None for x in (f"--{k.replace('_', '-')}", v)]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_train_writes_a_run_whose_epsilon_account_confirms(algorithm, texts, run_dir, capsys):
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
    account = [x for name in flags for x in (f"--{name.replace('_', '-')}", repr(summary[name]))]
    code, out, _ = run("account", algorithm, *account, "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["epsilon"] == summary["epsilon"]
    code, out, _ = run("evaluate", run_dir, "--json", capsys=capsys)
    assert code == 0 and json.loads(out)["eval/loss"] == pytest.approx(summary["final_eval_loss"])


@pytest.mark.parametrize(
    "fault, field",
    [
        ({"noise": "correlated", "sampling": "allocation"}, "noise"),
        ({"noise": "correlated", "sampling": "poisson"}, "sampling"),
        ({"participations": 2}, "participations"),
        ({"sampling": "allocation", "participations": 3}, "participations"),
        ({"bands": 2}, "bands"),
        ({"sampling": "cyclic", "bands": 11}, "bands"),
    ],
    ids=str,
)
def test_all_commands_refuse_the_same_mechanisms(fault, field):
    target = PrivacyTarget(1.0, 10)
    for ask in (
        lambda: PrivacyConfig(1.0, 10, **fault),
        lambda: Account("uls", 10, 0.05, 1.0, delta=1e-5, **fault)(),
        lambda: Calibrate("uls", 1.0, 1e-5, 10, 0.05, **fault)(),
        lambda: Recommend(target, MechanismConfig(**fault), ADVISED)(),
    ):
        with refuses(field):
            ask()


@pytest.mark.slow
@pytest.mark.ci
def test_infinite_epsilon_is_labelled_non_private(texts, run_dir, capsys):
    args = train_args(texts, run_dir, epsilon="inf")
    code, out, err = run("train", "els", *args, "--json", capsys=capsys)
    assert code == 0 and "non-private: trained without noise" in err
    summary = json.loads(out)
    assert summary["epsilon"] == "inf" and summary["noise_multiplier"] == 0


@pytest.mark.slow
@pytest.mark.ci
def test_a_toml_file_gives_defaults_that_flags_override(texts, run_dir, capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'data = "{texts}"\nepsilon = 8\nnum_steps = 9\nengine = "local"\n'
        "budget = 12\nmax_length = 24\ngroup_size = 1\nresume = false\n"
    )
    args = [f"--config={file}", "--run-dir", run_dir, "--num-steps", 2, "--json"]
    code, out, err = run("train", "uls", *args, capsys=capsys)
    assert code == 0, err
    summary = json.loads(out)
    assert (summary["num_steps"], summary["budget"], summary["group_size"]) == (2, 12, 1)


@pytest.mark.parametrize(
    "content, message",
    [
        ("epsilon = ", "expected a TOML file"),
        ("lerning_rate = 1", "expected names of flags, found lerning_rate"),
        ("[privacy]\nepsilon = 1", "expected names of flags, found privacy"),
        ("epsilon = [1, 2]", r"epsilon=\[1, 2\]: expected"),
        ("num_workers = 0", "num_workers=0: expected >= 1"),
    ],
)
def test_a_mistake_in_a_toml_file_is_named(content, message, texts, run_dir, capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(content)
    args = train_args(texts, run_dir)
    code, _, err = run("train", "uls", f"--config={file}", *args, capsys=capsys)
    assert code == 2 and re.search(message, err), err


@pytest.mark.slow
@pytest.mark.ci
def test_build_then_stats_then_train(texts, run_dir, tmp_path, capsys, monkeypatch):
    built = tmp_path / "built"
    code, out, err = run("data", "build", texts, "--out", built, "--max-length", 24, capsys=capsys)
    assert code == 0 and "num users" in out, err
    for columns, tables in ((50, 3), (80, 1)):  # a table beside the other, or one under it
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        _, out, _ = run("data", "stats", built, capsys=capsys)
        assert max(map(len, out.splitlines())) <= columns
        assert out.count("num users ") == tables and "eval_examples" in out
    code, out, _ = run("data", "stats", built, "--json", capsys=capsys)
    splits = json.loads(out)["splits"]
    assert splits["train"]["num_users"] + splits["eval_users"]["num_users"] == 60
    args = train_args(built, run_dir, max_length=None)
    assert run("train", "uls", *args, capsys=capsys)[0] == 0


def test_calibrate_meets_its_target(capsys):
    settings = ["--delta", 1e-6, "--num-steps", 50, "--sampling-prob", 0.02, "--group-size", 3]
    code, out, _ = run("calibrate", "els", "--epsilon", 2, *settings, "--json", capsys=capsys)
    assert code == 0
    sigma = json.loads(out)["noise_multiplier"]
    for factor, holds in ((1.0, True), (0.98, False)):
        noise = ["--noise-multiplier", repr(sigma * factor)]
        _, out, _ = run("account", "els", *noise, *settings, "--json", capsys=capsys)
        assert (json.loads(out)["epsilon"] <= 2) == holds


@pytest.mark.parametrize("wanted", ["num_steps", "noise_multiplier"])
def test_calibrate_finds_whichever_of_two_is_not_given(wanted, capsys):
    given = {"num_steps": 200, "sampling_prob": 0.01, "noise_multiplier": 1.5}
    found = given.pop(wanted)
    event = accounting.StepEvent(1.5, 0.01, 4)
    target = {"epsilon": accounting.epsilon([(event, 200)], 1e-6), "delta": 1e-6, "group_size": 4}
    args = as_flags({**target, **given})
    result = json.loads(run("calibrate", "els", *args, "--json", capsys=capsys)[1])
    assert result[wanted] == pytest.approx(found, rel=1e-2)
    assert {**target, **given}.items() <= result.items()


def test_calibrate_says_that_it_looks_for_no_more_steps(capsys, monkeypatch):
    monkeypatch.setattr(accounting, "num_steps", lambda **_: accounting.MOST_STEPS)
    asked = calibrate(noise_multiplier=100, sampling_prob=1e-3)
    said = run(*asked, capsys=capsys)[1]
    assert said == "num steps 10000000 or more (nothing above is looked for)\n"
    found = json.loads(run(*asked, "--json", capsys=capsys)[1])
    assert (found["num_steps"], found["at_least"]) == (10**7, True)
    monkeypatch.setattr(accounting, "num_steps", lambda **_: 7)
    assert json.loads(run(*asked, "--json", capsys=capsys)[1])["at_least"] is False


def test_an_epsilon_that_cannot_be_resolved_is_explained(capsys):
    code, out, err = run(*account(delta=1e-16, num_steps=100), capsys=capsys)
    assert code == 0 and out.startswith("epsilon inf at delta")
    assert err.startswith("delta=1e-16: too small")


def test_the_group_size_of_uls_does_not_reach_the_accountant(capsys):
    settings = ["--num-steps", 10, "--sampling-prob", 0.1, "--noise-multiplier", 1, "--delta", 1e-5]
    epsilons = [
        json.loads(run("account", "uls", *settings, "--group-size", g, "--json", capsys=capsys)[1])[
            "epsilon"
        ]
        for g in (1, 16)
    ]
    assert epsilons[0] == epsilons[1]


@pytest.fixture
def odd_files(tmp_path):
    """Files that cannot be trained on, by what is wrong with them."""
    tables = {
        "no_column": {"who": ["a"], "text": ["x"]},
        "null_user": {"user_id": ["a", None, "b"], "text": ["x", "y", "z"]},
        "empty": {"user_id": pa.array([], pa.string()), "text": pa.array([], pa.string())},
        "no_text": {"user_id": ["a", "b"], "text": ["", ""]},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    return tmp_path


MISTAKES = {
    "missing file": ({"data": "none.parquet"}, "none.parquet"),
    "missing column": ({"data": "no_column.parquet"}, "user_column=user_id"),
    "null users": ({"data": "null_user.parquet"}, "user_id"),
    "empty data": ({"data": "empty.parquet"}, "num_rows=0|empty|no rows|0 rows"),
    "no text": ({"data": "no_text.parquet"}, "text"),
    "hub": ({"data": "hf:stack_overflow"}, "hf:stack_overflow"),
    "epsilon": ({"epsilon": 0}, r"epsilon=0.0: expected > 0"),
    "epsilon nan": ({"epsilon": "nan"}, r"epsilon=nan: expected > 0"),
    "delta": ({"delta": 1}, r"delta=1.0: expected in \(0, 1\)"),
    "negative delta": ({"delta": -0.1}, r"delta=-0.1: expected in \(0, 1\)"),
    "group size": ({"group_size": 0}, r"group_size=0: expected >= 1"),
    "steps": ({"num_steps": 0}, r"num_steps=0: expected >= 1"),
    "clip norm": ({"clip_norm": 0}, r"clip_norm=0.0: expected in \[1e-6, 1e6\]"),
    "learning rate": ({"learning_rate": -1}, r"learning_rate=-1.0: expected > 0"),
    "cohort too large": ({"batch_size": 400}, r"batch_size=400: expected"),
    "indivisible": ({"batch_size": 13}, r"batch_size=13: expected a multiple of group_size=2"),
    "optimizer": ({"optimizer": "adamant"}, r"optimizer=adamant: expected"),
    "optimizer needs more": ({"optimizer": "lbfgs"}, r"optimizer=lbfgs: expected"),
    "model": ({"model": "huge"}, r"model=huge: expected"),
    "run directory": ({"run_dir": "full"}, r"run_dir=.*full: expected"),
    "run directory is a file": ({"run_dir": "null_user.parquet"}, "expected a directory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_and_leaves_nothing(
    mistake, texts, odd_files, monkeypatch, capsys
):
    monkeypatch.chdir(odd_files)
    (odd_files / "full").mkdir()
    (odd_files / "full" / "thesis.txt").touch()
    changed, message = MISTAKES[mistake]
    before = sorted(odd_files.rglob("*"))
    args = train_args(texts, **{"run_dir": "new", "max_length": None, **changed})
    code, out, err = run("train", "uls", *args, "--json", capsys=capsys)
    away = "the same command goes on" in err  # the Hub is out of reach, which is no mistake
    assert code == (1 if away and mistake == "hub" else 2) and out == ""
    lines = [line for line in err.splitlines() if line.startswith("fedsim: error:")]
    assert len(lines) == 1 and err.endswith(lines[0] + "\n"), err
    assert re.search(message, lines[0]), lines[0]
    assert sorted(odd_files.rglob("*")) == before


@pytest.mark.privacy
@pytest.mark.parametrize("other", ["--url-column", "--owners"])
def test_users_are_named_in_one_way(other, odd_files, capsys):
    """Else the unit that is protected would be another one than was asked for."""
    flags = ["--user-column", "author", other, "url", "--out", str(odd_files / "out")]
    code, _, err = run("data", "build", str(odd_files / "no_column.parquet"), *flags, capsys=capsys)
    name = other[2:].replace("-", "_")
    assert code == 2 and f"user_column=author: expected none beside {name}=url" in err


def test_statistics_are_of_what_is_built(odd_files, capsys):
    code, _, err = run("data", "stats", str(odd_files / "no_column.parquet"), capsys=capsys)
    assert code == 2 and "no_column.parquet: expected a directory made by" in err


def test_els_budget_beyond_the_pool(texts, run_dir, capsys):
    args = train_args(texts, run_dir, batch_size=1000)
    code, _, err = run("train", "els", *args, capsys=capsys)
    assert code == 2 and "the size of the pool" in err and not run_dir.exists()


def account(**changed):
    flags = {"num_steps": 1, "sampling_prob": 0.5, "noise_multiplier": 1, "delta": 1e-5, **changed}
    return ("account", "els", *as_flags(flags))


def calibrate(**given):
    return ("calibrate", "els", *as_flags({"epsilon": 1.0, "delta": 1e-5, **given}))


def train(**changed):
    flags = {"data": "pydocs", "epsilon": 1, "run_dir": "run", **changed}
    return ("train", "uls", *as_flags(flags))


def as_flags(values):
    return [x for name, value in values.items() for x in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.parametrize(
    "args, message",
    [
        (account(sampling_prob=1.5), "sampling_prob=1.5: expected"),
        (account(sampling_prob="nan"), r"sampling_prob=nan: expected in \(0, 1\]$"),
        (
            ("account", "uls", *account(sampling_prob="nan", sampling="allocation")[2:]),
            r"sampling_prob=nan: expected in \(0, 1\]$",
        ),
        (
            ("account", "uls", *account(sampling_prob="inf", sampling="allocation")[2:]),
            r"sampling_prob=inf: expected in \(0, 1\]$",
        ),
        (calibrate(sampling_prob="nan", num_steps=10), r"sampling_prob=nan: expected in \(0, 1\]$"),
        (account(noise_multiplier=0), "noise_multiplier=0.0: expected"),
        (account(delta=0), "delta=0.0: expected"),
        (account(epsilon=1), "delta=1e-05: expected a delta or an epsilon, and not both"),
        (account(group_size=0), r"group_size=0: expected in \[1, 10000000\]"),
        (account(num_steps=0), "num_steps=0: expected"),
        (account(num_steps=10**8), "num_steps=100000000: expected at most 10000000$"),
        (train(num_steps=10**9), "num_steps=1000000000: expected at most 10000000$"),
        (calibrate(num_steps=10**8, sampling_prob=0.1), "num_steps=100000000: expected"),
        (account(noise_multiplier=1e100), r"noise_multiplier=1e\+100: expected in .1e-10, 1e\+10"),
        (account(noise_multiplier=1e-300), "noise_multiplier=1e-300: expected in .1e-10, "),
        (account(sampling_prob=1e-300), "sampling_prob=1e-300: expected at least 1e-12$"),
        (
            account(noise_multiplier=1e6, sampling_prob=1e-9),
            r"noise_multiplier=1000000.0: expected at most 10000 with sampling_prob=1e-09$",
        ),
        (calibrate(sampling_prob=0.1), "noise_multiplier=None: expected"),
        (
            calibrate(num_steps=3, sampling_prob=0.1, noise_multiplier=1),
            "noise_multiplier=1.0: expected one of num_steps and noise_multiplier",
        ),
        (calibrate(num_steps=0, sampling_prob=0.1), "num_steps=0: expected a whole number >= 1"),
        (("evaluate", "nowhere"), "run_dir=nowhere|run=nowhere"),
        (("data", "stats", "nowhere"), "nowhere"),
        (("train", "uls", "--config", "none.toml"), "config=none.toml: expected"),
    ],
)  # fmt: skip
def test_other_mistakes_are_one_line_too(args, message, capsys):
    code, out, err = run(*args, capsys=capsys)
    assert code == 2 and out == ""
    *before, last = err.splitlines()  # what it is doing, at most
    assert len(before) <= 1 and last.startswith("fedsim: error: ") and re.search(message, last), err


def test_the_command_starts_without_importing_jax():
    parsing = "from fedsim.cli.main import Command, parse; parse(Command, ['data', 'stats', 'x'])"
    code = f"import sys; {parsing}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_noise_grows_as_epsilon_shrinks(capsys):
    settings = ["--delta", 1e-5, "--num-steps", 10, "--sampling-prob", 0.1, "--json"]
    sigmas = [
        json.loads(run("calibrate", "uls", "--epsilon", e, *settings, capsys=capsys)[1])[
            "noise_multiplier"
        ]
        for e in (0.5, 2, 8)
    ]
    assert sigmas[0] > sigmas[1] > sigmas[2] > 0 and math.isfinite(sigmas[0])
