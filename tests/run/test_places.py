"""Where paths lead that no shell has expanded, and machines without a home directory.

They come from a TOML file, from variables of the environment and from Python.
"""

import pwd
from pathlib import Path

import pytest
from refused import refuses

from fedsim.budget.ledger import place_of
from fedsim.config import DataConfig, run_config
from fedsim.files import cache_dir, expand_home

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


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_names_no_place_for_each_working_directory(home, monkeypatch, name):
    monkeypatch.setenv(name, "here")
    with refuses(f"{name}=here"):
        place_of(None), cache_dir()


ENTRIES = [
    lambda path: DataConfig(path).source,
    lambda path: run_config(data="x", run_dir=path).run_dir,
    lambda path: run_config(data="x", run_dir="r", budget_ledger=path).budget_ledger,
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_tilde_in_settings_is_the_home_directory(entry, home):
    assert str(entry("~/a")) == str(home / "a")
