"""Who may start in a directory, and with which settings a run goes on."""

import dataclasses
import json
import stat

import pytest
from refused import refuses
from test_console import PLAN

from fedsim.config import OPERATIONAL, PrivacyConfig, as_dict, changed_run, run_config
from fedsim.keys import SecretKey
from fedsim.run import directory
from fedsim.run.directory import Identity, StoredRun

PRIVACY = PrivacyConfig(epsilon=4.0, num_steps=2, group_size=2)
IDENTITY = Identity("els", None, "abc")


def stored(run_dir, *, plan=PLAN, **changed):
    """What a run was started with, but for what is changed."""
    identity = {n: changed.pop(n) for n in vars(IDENTITY).keys() & changed.keys()}
    privacy = {n: changed.pop(n) for n in vars(PRIVACY).keys() & changed.keys()}
    run = run_config(**{"data": "pydocs", "run_dir": run_dir, **changed})
    same = dataclasses.replace(IDENTITY, **identity), dataclasses.replace(PRIVACY, **privacy)
    return StoredRun(*same, run, plan=plan)


def start(run_dir, key):
    """Start a run and let go of it."""
    with directory.create(run_dir, stored(run_dir), key):
        pass


def test_a_run_is_loaded_with_what_it_was_started_with(run_dir, key):
    start(run_dir, key)
    assert directory.load(run_dir) == directory.find(run_dir, resume=True) == stored(run_dir)
    loaded = SecretKey.load(run_dir)
    assert loaded.generator("units", 0).random() == key.generator("units", 0).random()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "secret.json").stat().st_mode) == 0o600
    secret = json.loads((run_dir / "secret.json").read_text())["secret"]
    assert secret not in (run_dir / "config.json").read_text()


def test_what_can_change_the_guarantee_is_never_operational():
    assert not OPERATIONAL & as_dict(PRIVACY).keys()
    assert not OPERATIONAL & {"seed", "model", "optimizer", "strategy"}


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_may_start_where_there_is_nothing(resume, run_dir):
    assert directory.find(run_dir, resume=resume) is None
    run_dir.mkdir(mode=0o700)
    assert directory.find(run_dir, resume=resume) is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_was_killed_may_be_repeated(resume, run_dir, key, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            start(run_dir, key)
    (run_dir / "config.json.tmp").write_text("{")
    assert (run_dir / "secret.json").exists()
    assert directory.find(run_dir, resume=resume) is None
    start(run_dir, SecretKey.create(seed=8))
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.json", "lock", "secret.json"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_of_something_else_is_refused(resume, run_dir):
    run_dir.mkdir()
    (run_dir / "thesis.tex").touch()
    with refuses(f"run_dir={run_dir}", says="a new or empty directory"):
        directory.find(run_dir, resume=resume)


@pytest.mark.parametrize("version, read", [("0.3.0", False), ("0.1.3", False), ("0.30.0", True)])
def test_runs_before_0_4_are_refused_by_their_version(version, read, run_dir, key):
    start(run_dir, key)
    config = json.loads((run_dir / "config.json").read_text())
    config["versions"] = {"fedsim": version}
    (run_dir / "config.json").write_text(json.dumps(config))
    if read:
        assert directory.load(run_dir).run == stored(run_dir).run
        return
    for load in (directory.load, lambda place: directory.find(place, resume=True)):
        with refuses("run", says=f"0.4 or later; {version} reads this one"):
            load(run_dir)


CHANGED = [("algorithm", "uls", "els"), ("epsilon", 4.5, "4.0"), ("delta", 1e-5, "None")]
CHANGED += [("group_size", None, "2"), ("model", "small", "tiny"), ("lora_rank", 1, "0")]
CHANGED += [("optimizer", "sgd", "None")]


@pytest.mark.parametrize("name, value, was", CHANGED)
def test_a_changed_setting_is_refused_by_name(name, value, was, run_dir):
    now = stored(run_dir)
    if name == "model":  # of the run; in the identity it is a digest
        now = dataclasses.replace(now, run=changed_run(now.run, model=value))
    else:
        now = stored(run_dir, **{name: value})
    on = f"; a new run with model={run_dir} trains " * (name in ("epsilon", "delta", "group_size"))
    with refuses(f"{name}={value}", says=f"expected {was}, with which {run_dir} was started{on}"):
        directory.expect_same(stored(run_dir), now)


def test_the_seed_is_not_stored_and_not_compared(run_dir):
    assert "seed" not in stored(run_dir, seed=3).as_dict()["run"]
    directory.expect_same(stored(run_dir), stored(run_dir, seed=3))


def test_of_two_processes_one_starts_the_run(run_dir, key):
    with directory.create(run_dir, stored(run_dir), key):
        with refuses("run_dir", says="no other process"), directory.lock(run_dir):
            pass
        with refuses("run_dir"), directory.create(run_dir, stored(run_dir), SecretKey.create()):
            pass
    assert SecretKey.load(run_dir).generator("a").random() == key.generator("a").random()
    with directory.lock(run_dir):  # free again
        pass
