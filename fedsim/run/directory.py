"""The run directory: its files, its owner and lock, and the settings that a run was started with.

config.json    settings, plan and model, written once: a `StoredRun`
secret.json    the key, mode 0600
budget.json    where the ledger of the data counts the run
tokenizer.json of the data, so that the model can be used without the data
model/         files of the initial model that training does not change
ledger.jsonl   metrics.jsonl   tb/   checkpoints/   summary.json
report.html   report.md   audit.json, by the commands report and audit
"""

import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim import keys
from fedsim.config import (
    OPERATIONAL,
    PLANNED,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    as_dict,
    expect_format,
    run_config,
)
from fedsim.data import TEMPLATE, is_table
from fedsim.errors import ConfigError, FileDamaged, expect
from fedsim.files import (
    make_directory,
    named,
    near,
    private_directory,
    read_json,
    sha256_of,
    write_atomically,
    write_json,
)
from fedsim.keys import SecretKey
from fedsim.models import weights
from fedsim.plan import Plan
from fedsim.run import formats, ledger

CONFIG, SUMMARY, RECEIPT, LOCK = "config.json", "summary.json", "budget.json", "lock"
TOKENIZER, MODEL = "tokenizer.json", "model"
NOT_READ = ("0.1.", "0.2.", "0.3.")
"""Starts of versions whose runs are refused: they have other keys, checkpoints and adjacency."""
ANOTHER_KEY = "another key than the ledger was begun with"
REST = ("versions", "model", "strategy", "files", "tokenizer")
"""Fields of a `StoredRun` that may be empty, beside the plan."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Algorithm, model and data of a run, which must not change when it is resumed."""

    algorithm: str
    """els or uls."""
    model: str | None
    """sha256 of the initial pretrained parameters; None for fresh ones."""
    data_seal: str
    """Keyed digest of the data's fingerprint."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """The content of `config.json`."""

    identity: Identity
    privacy: PrivacyConfig
    run: RunConfig
    """Settings without the seed, which is stored with the key alone."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The task's description of its model; see `Task.describe`."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Versions of the packages at the start of the run."""
    plan: Plan | None = None
    """None before the run is planned."""
    strategy: str = ""
    """The clipping strategy, such as direct:4."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """sha256 of each file in model/."""
    tokenizer: str = ""
    """sha256 of tokenizer.json; empty if there is none, or for a run of an earlier version."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of config.json."""
        run = {name: value for name, value in as_dict(self.run).items() if name != "seed"}
        rest = {name: getattr(self, name) for name in ("plan", *REST)}
        if self.plan is not None:
            rest["plan"] = self.plan.as_dict()
        return {
            "identity": dataclasses.asdict(self.identity),
            "privacy": as_dict(self.privacy),
            "run": run,
            **{name: value for name, value in rest.items() if value},
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any], run_dir: Path) -> "StoredRun":
        """Parse the JSON object of config.json. Raises KeyError, TypeError or ValueError: it is
        malformed."""
        identity = Identity(**record["identity"])
        Algorithm(identity.algorithm)
        privacy = PrivacyConfig(**record["privacy"])
        run = run_config(**{**record["run"], "run_dir": run_dir})
        rest = {name: record[name] for name in REST if name in record}
        return cls(identity, privacy, run, plan=Plan.from_dict(record["plan"]), **rest)


def load(run_dir: Path) -> StoredRun:
    """Load the settings that a run was started with.

    Raises:
      ConfigError: there is no run in the directory, or it is of a version before 0.4.
      FileDamaged: config.json or the tokenizer was changed since the start of the run.
    """
    path = run_dir / CONFIG
    if not run_dir.exists():
        beside = near(run_dir, f"*/{ledger.FILE}")
        raise ConfigError.of("run", run_dir, f"a directory that exists{beside}")
    record = read_json(path) if path.is_file() else None
    if record is None or "model_type" in record:  # of a model
        also = "`fedsim verify` takes a published folder, too"
        if record is not None:
            also += ", but not an exported model: it cannot check the README.md"
        raise ConfigError.of("run", run_dir, f"the directory of a run, with its {CONFIG}; {also}")
    versions = record.get("versions")
    was = str(versions.get("fedsim", "")) if isinstance(versions, dict) else ""
    if was.startswith(NOT_READ):
        raise ConfigError.of("run", run_dir, f"a run of fedsim 0.4 or later; {was} reads this one")
    sha256 = sha256_of(path)
    if ledger.head(run_dir).get("config_sha256", sha256) != sha256:
        raise FileDamaged(f"{path}: was changed since the run was started")
    try:
        stored = StoredRun.from_dict(record, run_dir)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileDamaged(f"{path}: expected the settings of a run ({error})") from None
    kept = run_dir / TOKENIZER
    if stored.tokenizer and kept.is_file() and sha256_of(kept) != stored.tokenizer:
        raise FileDamaged(f"{kept}: was changed since the run was started")
    return stored


def summary_of(run_dir: Path) -> dict[str, Any] | None:
    """The content of summary.json; None if the run has not ended. Raises FileDamaged: it is
    malformed."""
    path = run_dir / SUMMARY
    if not path.exists():
        return None
    record = read_json(path)
    try:
        expect_format(formats.Summary, record)
    except ValueError as error:
        raise FileDamaged(f"{path}: expected the summary of a run ({error})") from None
    return record


def find(run_dir: Path, *, resume: bool) -> StoredRun | None:
    """The run in `run_dir`, or None if a new run may start there.

    Raises:
      ConfigError: the directory holds a run and `resume` is false, or something else; or it cannot
        be written, or other users of the machine could write there.
    """
    there = (run_dir / CONFIG).exists()
    expected = "a new directory, or its run with `resume=True`"
    expect("run_dir", run_dir, resume or not there, expected)
    if there:
        _expect_ours(run_dir)
        return load(run_dir)
    if run_dir.exists():
        expect("run_dir", run_dir, run_dir.is_dir(), "a directory, found a file")
        # A run that was killed before its first step leaves these files at most.
        names = {path.name.removesuffix(".tmp") for path in run_dir.iterdir()}
        is_new = names <= {LOCK, CONFIG, MODEL, keys.FILE, TOKENIZER}
        expect("run_dir", run_dir, is_new, "a new or empty directory, or one with a run")
        _expect_ours(run_dir)
        private_directory("run_dir", run_dir)
    above = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    expect("run_dir", run_dir, os.access(above, os.W_OK | os.X_OK), "a place to write to")
    return None


def of_others(run_dir: Path) -> str:
    """Describe the first file of a run that is another user's, or a link; empty if there is none.

    Through a link, a run would read and write where someone else decides.
    """
    for path in (run_dir, *sorted(run_dir.rglob("*"))):
        try:
            status = path.lstat()
        except FileNotFoundError:  # of a process that writes to the run now
            continue
        if status.st_uid != os.getuid():
            return f"{path}: belongs to another user, {status.st_uid}"
        if path != run_dir and stat.S_ISLNK(status.st_mode):
            return f"{path}: a link to {os.readlink(path)}"
    there = run_dir.stat().st_uid
    return "" if there == os.getuid() else f"{run_dir}: belongs to another user, {there}"


def _expect_ours(run_dir: Path) -> None:
    if fault := of_others(run_dir):
        raise ConfigError.of("run_dir", run_dir, f"your own files and no links; {fault}")


@contextmanager
def lock(run_dir: Path, *, to_read: bool = False) -> Iterator[None]:
    """Lock the run; two processes could release two gradients under one ledger line.

    Args:
      to_read: share the lock with other readers; a copy without a lock file is read without one.

    Raises: ConfigError: another process holds the lock.
    """
    if to_read and not (run_dir / LOCK).exists():
        yield
        return
    with open(run_dir / LOCK, "r" if to_read else "a") as file:
        try:
            with named(run_dir / LOCK):
                fcntl.flock(file, (fcntl.LOCK_SH if to_read else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            expected = "a run that no other process is working on"
            raise ConfigError.of("run_dir", run_dir, expected) from None
        yield


@contextmanager
def create(
    run_dir: Path,
    stored: StoredRun,
    key: SecretKey,
    tokenizer: Path | None = None,
    model: Path | None = None,
    template: Path | None = None,
) -> Iterator[None]:
    """Create the directory of a run, and hold its lock.

    Writes the key, the tokenizer and files of the initial model, and last config.json, which marks
    the directory as a run.

    Args:
      tokenizer: of the data.
      model: directory of files of the initial model.
      template: chat template of the data, which takes the place of the model's.

    Raises: ConfigError: it cannot be written, or another process was faster.
    """
    private_directory("run_dir", run_dir)
    with lock(run_dir):
        find(run_dir, resume=False)
        key.save(run_dir)
        if tokenizer is not None:
            write_atomically(run_dir / TOKENIZER, tokenizer.read_bytes())
            stored = dataclasses.replace(stored, tokenizer=sha256_of(run_dir / TOKENIZER))
        if model is not None or template is not None:
            make_directory(run_dir / MODEL)
            if model is not None:
                weights.copy_side_files(model, run_dir / MODEL)
            if template is not None:
                write_atomically(run_dir / MODEL / TEMPLATE, template.read_bytes())
            names = weights.side_files(run_dir / MODEL)
            digests = {name: sha256_of(run_dir / MODEL / name) for name in names}
            stored = dataclasses.replace(stored, files=digests)
        # The ledger has this file's digest. Without a secret part, whoever guesses the settings
        # would learn from it what follows from the data, such as its seal.
        write_json(run_dir / CONFIG, {**stored.as_dict(), "blind": key.seal(CONFIG)})
        yield


def stored_key(run: RunConfig) -> SecretKey:
    """The key of a run that is resumed.

    Raises:
      ConfigError: `run` has another seed than the run was started with.
      FileDamaged: the key does not belong to the run's ledger.
    """
    key = SecretKey.load(run.run_dir)
    if ledger.head(run.run_dir).get("key_seal", key.seal("ledger")) != key.seal("ledger"):
        raise FileDamaged(f"{run.run_dir / keys.FILE}: {ANOTHER_KEY}")
    same = run.seed is None or run.seed == key.seed
    expect("seed", run.seed, same, "the one the run was started with, or none")
    return key


def expect_same(stored: StoredRun, now: StoredRun) -> None:
    """Raise ConfigError for the first setting that a resumed run would change, the data first."""
    run_dir = stored.run.run_dir
    same = stored.identity.data_seal == now.identity.data_seal
    expect("data", now.run.data.source, same, f"the data with which {run_dir} was started")
    for before, after in (
        (dataclasses.asdict(stored.identity), dataclasses.asdict(now.identity)),
        (as_dict(stored.privacy), as_dict(now.privacy)),
        (as_dict(stored.run), as_dict(now.run)),
    ):
        for name, value in after.items():
            was = before.get(name)
            left_out = name in PLANNED and value is None
            # Names of tables follow from the cache; that the rows are the same is in the identity.
            left_out |= name == "data" and is_table(str(value)) and is_table(str(was))
            if name not in OPERATIONAL | {"seed"} and value != was and not left_out:
                new = f"; a new run with model={run_dir} trains that model on, at its own epsilon"
                new *= name in vars(stored.privacy) and "task" not in stored.model
                raise ConfigError.of(name, value, f"{was}, with which {run_dir} was started{new}")
