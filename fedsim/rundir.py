"""The run directory: who owns it, what it was started with, what it ended with.

config.json    settings, plan and model, written once
secret.json    the key, mode 0600
tokenizer.json of the data, so that the model can be used without them
ledger.jsonl   metrics.jsonl   tb/   checkpoints/   summary.json
report.html   report.md   audit.html   audit.md   audit.json, if they were asked for
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim import keys, ledger
from fedsim.config import OPERATIONAL, ConfigError, PrivacyConfig, RunConfig, changed, expect
from fedsim.data.dataset import Dataset
from fedsim.files import FileDamaged, read_json, write_json
from fedsim.keys import SecretKey

CONFIG, SUMMARY, LOCK = "config.json", "summary.json", "lock"
TOKENIZER = "tokenizer.json"
ANOTHER_KEY = "another key than the ledger was begun with"


class Busy(ConfigError):
    """Another process is working on the run."""


def stored_config(run_dir: Path, *, resume: bool) -> dict[str, Any] | None:
    """The settings of the run that `run_dir` holds, or None if a run may start there.

    Raises: ConfigError: it holds a run and `resume` is false, or something that is no run.
    """
    path = run_dir / CONFIG
    if path.exists() and not resume:
        raise ConfigError(
            f"run_dir={run_dir}: expected a new directory, or --resume to go on with its run"
        )
    if path.exists():
        return load(run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir}: expected a directory, found a file")
    # A run that was killed before its first step leaves its key, and nothing else.
    leftovers = {LOCK, keys.FILE, keys.FILE + ".tmp", CONFIG + ".tmp", TOKENIZER}
    if run_dir.exists() and {path.name for path in run_dir.iterdir()} - leftovers:
        raise ConfigError(
            f"run_dir={run_dir}: expected a new or empty directory, or one with a run"
        )
    return None


@contextmanager
def lock(run_dir: Path, *, to_read: bool = False) -> Iterator[None]:
    """Hold the run: two processes at once would release steps under one ledger line.

    Args: to_read: beside others who read; nothing is written, as in a copy that has no lock.
    Raises: Busy: another process holds it.
    """
    if to_read and not (run_dir / LOCK).exists():
        yield
        return
    with open(run_dir / LOCK, "r" if to_read else "a") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if to_read else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "expected a run that no other process is working on"
            raise Busy(f"run_dir={run_dir}: {message}") from None
        yield


@contextmanager
def start(
    run_dir: Path, config: dict[str, Any], key: SecretKey, tokenizer: Path | None = None
) -> Iterator[None]:
    """Make the directory and hold it; write key, tokenizer and settings. config.json, the last,
    marks a run.

    Raises: ConfigError: it cannot be written, or another process was faster.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        run_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: expected a place to write to ({error})") from None
    with lock(run_dir):
        stored_config(run_dir, resume=False)
        key.save(run_dir)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, run_dir / TOKENIZER)
        write_json(run_dir / CONFIG, config)
        yield


def key_of(run: RunConfig, stored: dict[str, Any] | None) -> SecretKey | None:
    """The key of a stored run.

    Raises: ConfigError: it came from another seed than `run` has. FileDamaged: it is not the one
      that the ledger was begun with.
    """
    if stored is None:
        return None
    key = SecretKey.load(run.run_dir)
    if ledger.head(run.run_dir).get("key_seal", key.seal("ledger")) != key.seal("ledger"):
        raise FileDamaged(f"{run.run_dir / keys.FILE}: {ANOTHER_KEY}")
    same = run.seed is None or run.seed == key.seed
    expect("seed", run.seed, same, "the one the run was started with, or none")
    return key


def create_key(seed: int | None, config: dict[str, Any], data: Dataset) -> SecretKey:
    """A key that no run with other settings or data has, even from the same seed.

    Settings at their defaults are left out: one that is new changes no earlier run. A pretrained
    model is known by its parameters, wherever it lies, as data are.
    """
    settings = {n: v for n, v in config["run"].items() if n not in OPERATIONAL}
    if config["identity"]["model"] is not None:
        del settings["model"]
    own = [changed(PrivacyConfig, config["privacy"]), changed(RunConfig, settings)]
    context = [config["identity"], *own, data.train.fingerprint]
    return SecretKey.create(seed, json.dumps(context, sort_keys=True))


def expect_same(run_dir: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ConfigError naming what a resumed run would do otherwise; its data first."""
    same = stored["identity"]["data_seal"] == now["identity"]["data_seal"]
    expect("data", now["run"]["data"], same, f"the data with which {run_dir} was started")
    for section, values in now.items():
        for name, value in values.items():
            if name not in OPERATIONAL and value != stored[section].get(name):
                was = stored[section].get(name)
                raise ConfigError(
                    f"{name}={value}: expected {was}, with which {run_dir} was started"
                )


def other_bits(stored: dict[str, Any], versions: dict[str, str], host: str) -> str:
    """Why computing on `host` may give other bits than the run that was started has; empty if it
    gives the same. Accelerators add up in any order."""
    was = stored["versions"]
    changed = [name for name, now in versions.items() if now != was.get(name)]
    other = [f"{name} {versions[name]}, not {was.get(name)}" for name in changed]
    if other:
        return "other packages: " + ", ".join(other)
    if stored.get("host", host) != host:
        return f"another kind of host: {host}, not {stored['host']}"
    return "" if ", cpu," in host else f"{host} adds up in no fixed order"


def load(run_dir: Path) -> dict[str, Any]:
    """The settings of a run.

    Raises: ConfigError: there is none. FileDamaged: they are not what the ledger was begun with.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"run={run_dir}: expected the directory of a run, with a {CONFIG}")
    stored = read_json(path)
    if not all(isinstance(stored.get(section), dict) for section in ("identity", "run")):
        raise FileDamaged(f"{path}: expected the settings of a run, found something else")
    recorded = ledger.head(run_dir).get("config_sha256", config_sha256(run_dir))
    if recorded != config_sha256(run_dir):
        raise FileDamaged(f"{path}: was changed since the run was started")
    return stored


def config_sha256(run_dir: Path) -> str:
    """Of the settings of a run as they were written."""
    return hashlib.sha256((run_dir / CONFIG).read_bytes()).hexdigest()
