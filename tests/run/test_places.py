"""Where paths lead that no shell has expanded, and machines without a home directory.

They come from a TOML file, from variables of the environment and from Python.
"""

import dataclasses
import errno
import os
import pwd
from pathlib import Path

import pytest
from refused import refuses
from test_cli import WORDS

from fedsim.budget.ledger import place_of
from fedsim.cli.arguments import parse
from fedsim.cli.main import Command, _next_step, main
from fedsim.config import DataConfig, ModelConfig, Sampling, run_config
from fedsim.data import Dataset, Tokenizer, UserStore, corpora, load
from fedsim.data.building.build import build
from fedsim.data.building.hub import HubSource
from fedsim.data.building.sources import find_files
from fedsim.errors import ConfigError
from fedsim.export import export
from fedsim.files import cache_dir, expand_home
from fedsim.generate import generate_text
from fedsim.library import Run, train
from fedsim.models import pretrained
from fedsim.run.model_source import find_model
from fedsim.tuning.selection import _job

CACHE = str(cache_dir())  # of all tests, with what they have compiled
VARIABLES = ("FEDSIM_CACHE_DIR", "FEDSIM_BUDGET_LEDGER", "XDG_CACHE_HOME", "XDG_STATE_HOME")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory, and a working directory apart from it; no variable names a place."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


@pytest.fixture
def no_home(home, monkeypatch):
    """A user id without an account, and no HOME."""

    def unknown(*_):
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_tilde_is_the_home_directory_as_in_a_shell(home):
    assert expand_home("x", "~") == str(home)
    assert expand_home("x", Path("~/a b/~")) == f"{home}/a b/~"
    account = pwd.getpwuid(0)
    assert expand_home("x", f"~{account.pw_name}/a") == f"{account.pw_dir.rstrip('/')}/a"
    for path in ("", "a", "./~/a", "/a/~", "a~", "hf:a/b", "pydocs"):
        assert expand_home("x", path) == path


@pytest.mark.parametrize("path", ["~nobody-of-that-name/a", "~$texts.csv"])
def test_an_unknown_home_directory_is_refused(home, path):
    with refuses(f"data={path}"):
        expand_home("data", path)


@pytest.mark.parametrize("value", ["", "relative"])
def test_a_home_that_is_no_path_is_refused(home, monkeypatch, value):
    monkeypatch.setenv("HOME", value)
    with refuses("budget_ledger=~/b"):
        place_of("~/b")


def test_places_of_the_environment(home, monkeypatch):
    assert place_of(None) == home / ".local/state/fedsim/budget"
    monkeypatch.setenv("XDG_STATE_HOME", "~/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert (place_of(None), cache_dir()) == (home / "state/fedsim/budget", home / "caches/fedsim")
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", "~/budget")
    monkeypatch.setenv("FEDSIM_CACHE_DIR", "~/cache")
    assert (place_of(None), cache_dir()) == (home / "budget", home / "cache")
    assert place_of("~/other") == place_of(Path("~/other")) == home / "other"


@pytest.mark.parametrize("name", ["FEDSIM_BUDGET_LEDGER", "XDG_STATE_HOME"])
def test_a_variable_names_no_ledger_for_each_working_directory(home, monkeypatch, name):
    monkeypatch.setenv(name, "budget")
    with refuses(f"{name}=budget"):
        place_of(None)


@pytest.mark.slow
@pytest.mark.ci
def test_two_working_directories_have_one_ledger(home, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", CACHE)
    (home / "run.toml").write_text(
        'budget_ledger = "~/budget"\ndata = "~/texts.jsonl"\nrun_dir = "~/runs/first"\n'
        'engine = "local"\nmodel = "micro"\nepsilon = 8\ndelta = 1e-3\nnum_steps = 1\nbudget = 4\n'
        "max_length = 8\nlimit_epsilon = 10\neval_examples = 1\n"
    )
    rows = [f'{{"user_id": "u{n % 20}", "text": "{WORDS[n % 16]}"}}\n' for n in range(40)]
    (home / "texts.jsonl").write_text("".join(rows))
    command = ["train", "uls", "--config=~/run.toml"]
    main(command)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(SystemExit) as stop:
        main([*command, "--run-dir=~/runs/second"])
    assert stop.value.code == 2
    assert "limit_epsilon=10" in capfd.readouterr().err.splitlines()[-1]
    assert [path.name for path in (home / "runs").iterdir()] == ["first"]
    assert not [*(tmp_path / "work").iterdir(), *(tmp_path / "elsewhere").iterdir()]


def built_at_home(path):
    made = Path(os.environ["HOME"]) / "a"
    made.mkdir()
    (made / "metadata.json").write_text('{"kind": "dataset"}')
    return made if corpora.is_built(path) else "not seen"


HOW = {"num_tokens": 1, "how": Sampling(), "seed": 0}
BUILT = {"user_column": "user_id", "text_column": "text"}
ASKED = {"epsilon": 1, "num_steps": 1, "run_dir": "r", "engine": "local"}
ENTRIES = {
    "a source of train": lambda path: train("uls", path, **ASKED),
    "a list of files of train": lambda path: train("uls", [f"{path}.parquet"], **ASKED),
    "data of the settings": lambda path: DataConfig(path).source,
    "a tokenizer of the settings": lambda path: DataConfig("x", tokenizer=path).tokenizer,
    "a model of the settings": lambda path: ModelConfig(path).source,
    "a run directory": lambda path: run_config(data="x", run_dir=path).run_dir,
    "a ledger": lambda path: run_config(data="x", run_dir="r", budget_ledger=path).budget_ledger,
    "data.load": load,
    "data.load of the Hub's form": lambda path: HubSource.parse(f"hf:{path}", None, None),
    "is_built": built_at_home,
    "find_files": find_files,
    "a pattern": lambda path: find_files(f"{path}/*.csv"),
    "what is built": lambda path: build(["texts.csv"], path, **BUILT).path,
    "Dataset.open": Dataset.open,
    "UserStore.open": UserStore.open,
    "Tokenizer.load": Tokenizer.load,
    "Tokenizer.named": Tokenizer.named,
    "find_model": find_model,
    "pretrained.load": pretrained.load,
    "generate": lambda path: generate_text(path, "", **HOW),
    "export": lambda path: export(path, "out"),
    "Run": Run,
    "candidates": lambda path: _job({"algorithm": "els", "data": path, "epsilon": 1.0,
                                        "num_steps": 1}, Path("out")).run.data.source,
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_wherever_a_path_enters_a_tilde_is_the_home_directory(entry, home, monkeypatch):
    """What is there shows it, or what is said of its absence."""
    Path("~").mkdir()  # as versions before made it
    (Path("~") / "a").mkdir()
    (Path("~") / "a" / "b.csv").write_text("user_id,text\na,b\n")
    Path("texts.csv").write_text("user_id,text\n" + "".join(f"u{i},b\n" for i in range(12)))
    try:
        found = str(entry("~/a"))
    except (ConfigError, OSError) as error:
        found = str(error)
    assert str(home / "a") in found, found
    assert [file.name for file in (Path("~") / "a").iterdir()] == ["b.csv"]


@pytest.mark.parametrize(
    "words, field",
    [
        (["report", "run", "--out=~/a"], "out"),
        (["report", "~/a"], "run_dir"),
        (["budget", "--budget-ledger=~/a"], "budget_ledger"),
        (["export", "model", "--out=~/a"], "out"),
        (["data", "build", "x.csv", "--out=~/a"], "out"),
        (["data", "stats", "x", "--histogram=~/a"], "histogram"),
        (["select", "~/a", "--out=o"], "file"),
        (["recommend", "--data=x", "--epsilon=1", "--num-steps=1", "--plot=~/a"], "plot"),
        (["recommend", "--data=x", "--epsilon=1", "--num-steps=1", "--run-dir=~/a"], "run_dir"),
    ],
)
def test_a_flag_of_a_command_may_begin_with_a_tilde(words, field, home):
    def values(command):
        for each in dataclasses.fields(command):
            value = getattr(command, each.name)
            yield from values(value) if dataclasses.is_dataclass(value) else [(each.name, value)]

    assert (field, home / "a") in list(values(parse(Command, words)))


def answer(args, capfd):
    """The last line of a command that a person gets an error from."""
    with pytest.raises(SystemExit):
        main(args)
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err.splitlines()[-1]


TRAIN = "train uls --epsilon 1 --num-steps 1 --batch-size 2 --model micro --engine local".split()
TRAIN += ["--data", "texts.csv", "--run-dir", "r"]


def test_without_a_home_directory_a_line_says_what_to_set(no_home, capfd, monkeypatch, tmp_path):
    Path("texts.csv").write_text("user_id,text\n" + "".join(f"u{i},b\n" for i in range(12)))
    for name in ("FEDSIM_CACHE_DIR", "FEDSIM_BUDGET_LEDGER"):
        said = answer(TRAIN, capfd)
        assert "HOME=None: expected a home directory" in said
        assert "set FEDSIM_CACHE_DIR and FEDSIM_BUDGET_LEDGER" in said
        assert not Path("r").exists()
        monkeypatch.setenv(name, str(tmp_path / name))
    assert cache_dir() == tmp_path / "FEDSIM_CACHE_DIR"  # with both set none is needed
    assert place_of(None) == tmp_path / "FEDSIM_BUDGET_LEDGER"


def test_a_home_that_cannot_be_written_is_said_with_the_remedy(home, capfd, monkeypatch, tmp_path):
    Path("texts.csv").write_text("user_id,text\n" + "".join(f"u{i},b\n" for i in range(12)))
    monkeypatch.setenv("HOME", str(home / "file"))  # in which root cannot write, either
    (home / "file").touch()
    said = answer(TRAIN, capfd)
    assert f"{home}/file" in said
    assert said.endswith("; FEDSIM_CACHE_DIR can name another place")
    denied = PermissionError(errno.EACCES, "Permission denied", str(home / "file"))
    assert "; set FEDSIM_CACHE_DIR and FEDSIM_BUDGET_LEDGER to" in _next_step(denied, None)
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))
    said = answer(TRAIN, capfd)
    assert f"budget_ledger={home}/file/.local" in said
    assert said.endswith("FEDSIM_BUDGET_LEDGER names another one") and not Path("r").exists()
