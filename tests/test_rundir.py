"""Who may start in a directory, and with which settings a run goes on."""

import json
import stat

import pytest

from fedsim import rundir
from fedsim.config import OPERATIONAL, ConfigError, PrivacyConfig, RunConfig, as_dict
from fedsim.keys import SecretKey

CONFIG = {
    "identity": {"algorithm": "els", "data_seal": "abc"},
    "privacy": {"epsilon": 4.0, "delta": None, "group_size": 2},
    "run": {"data": "pydocs", "model": "tiny", "num_workers": None, "seed": 3},
}


def start(run_dir, key):
    """Start a run and let go of it."""
    with rundir.start(run_dir, CONFIG, key):
        pass


def test_a_run_is_loaded_with_what_it_was_started_with(run_dir, key):
    start(run_dir, key)
    assert rundir.load(run_dir) == rundir.stored_config(run_dir, resume=True) == CONFIG
    loaded = SecretKey.load(run_dir)
    assert loaded.generator("units", 0).random() == key.generator("units", 0).random()


def test_only_the_owner_can_look_into_a_run(run_dir, key):
    start(run_dir, key)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "secret.json").stat().st_mode) == 0o600
    assert json.loads((run_dir / "secret.json").read_text())["secret"] not in json.dumps(
        rundir.load(run_dir)
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_may_start_where_there_is_nothing(resume, run_dir):
    assert rundir.stored_config(run_dir, resume=resume) is None
    run_dir.mkdir()
    assert rundir.stored_config(run_dir, resume=resume) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_was_killed_may_be_repeated(resume, run_dir, key, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rundir, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            start(run_dir, key)
    (run_dir / "config.json.tmp").write_text("{")
    assert (run_dir / "secret.json").exists()
    assert rundir.stored_config(run_dir, resume=resume) is None
    start(run_dir, SecretKey.create(seed=8))
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "lock", "secret.json"]


def test_a_run_is_not_overwritten(run_dir, key):
    start(run_dir, key)
    with pytest.raises(ConfigError, match="run_dir=.*--resume"):
        rundir.stored_config(run_dir, resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_something_else_is_refused(resume, run_dir):
    run_dir.mkdir()
    (run_dir / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="run_dir=.*expected a new or empty directory"):
        rundir.stored_config(run_dir, resume=resume)


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_is_refused(resume, run_dir):
    run_dir.touch()
    with pytest.raises(ConfigError, match="run_dir=.*found a file"):
        rundir.stored_config(run_dir, resume=resume)


def test_a_directory_without_a_run_cannot_be_loaded(run_dir):
    with pytest.raises(ConfigError, match="run=.*expected the directory of a run"):
        rundir.load(run_dir)


def changed(section, name, value):
    return {**CONFIG, section: {**CONFIG[section], name: value}}


def test_the_same_settings_are_accepted(run_dir):
    rundir.expect_same(run_dir, {**CONFIG, "plan": {"delta": 1e-5}}, CONFIG)


@pytest.mark.parametrize(
    "section, name, value, was",
    [
        ("identity", "algorithm", "uls", "els"),
        ("privacy", "epsilon", 4.5, "4.0"),
        ("privacy", "delta", 1e-5, "None"),
        ("privacy", "group_size", None, "2"),
        ("run", "model", "small", "tiny"),
        ("run", "seed", None, "3"),
        ("run", "a_new_setting", 1, "None"),
    ],
)
def test_a_changed_setting_is_refused_by_name(section, name, value, was, run_dir):
    with pytest.raises(ConfigError, match=f"^{name}={value}: expected {was}"):
        rundir.expect_same(run_dir, CONFIG, changed(section, name, value))


def test_other_data_are_refused_by_their_place(run_dir):
    with pytest.raises(ConfigError, match=f"^data=pydocs: expected the data with which {run_dir}"):
        rundir.expect_same(run_dir, CONFIG, changed("identity", "data_seal", "abd"))


@pytest.mark.parametrize("name, value", [("data", "elsewhere"), ("num_workers", 4)])
def test_what_is_operational_may_change(name, value, run_dir):
    rundir.expect_same(run_dir, CONFIG, changed("run", name, value))


def test_what_can_change_the_guarantee_is_never_operational():
    privacy = as_dict(PrivacyConfig(epsilon=1.0, num_steps=1))
    run = as_dict(RunConfig(data="pydocs", run_dir="run"))
    assert not OPERATIONAL & privacy.keys()
    assert OPERATIONAL < run.keys()
    assert not OPERATIONAL & {"seed", "model", "optimizer", "num_lanes", "threads_per_worker"}


def test_of_two_processes_one_starts_the_run(run_dir, key):
    with rundir.start(run_dir, CONFIG, key):
        with pytest.raises(ConfigError, match="no other process"), rundir.lock(run_dir):
            pass
        with (
            pytest.raises(ConfigError, match="run_dir="),
            rundir.start(run_dir, CONFIG, SecretKey.create()),
        ):
            pass
    assert SecretKey.load(run_dir).generator("a").random() == key.generator("a").random()
    with rundir.lock(run_dir):  # free again
        pass
