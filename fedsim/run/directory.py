"""The run directory: who owns it, what it was started with, what it ended with.

config.json    settings, plan and model, written once: a `StoredRun`
secret.json    the key, mode 0600
budget.json    where the ledger of the data counts the run
tokenizer.json of the data, so that the model can be used without them
model/         files of the model it started from that training does not change
ledger.jsonl   metrics.jsonl   tb/   checkpoints/   summary.json
released/      of the steps since the last checkpoint, mode 0700
report.html   report.md   audit.html   audit.md   audit.json, if they were asked for
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedsim import keys
from fedsim.clipping import Strategy
from fedsim.config import (
    OPERATIONAL,
    UPDATE,
    Algorithm,
    PretrainConfig,
    PrivacyConfig,
    RunConfig,
    as_dict,
    renamed,
    run_config,
)
from fedsim.errors import ConfigError, FileDamaged, expect
from fedsim.files import (
    make_directory,
    private_directory,
    read_json,
    write_atomically,
    write_json,
)
from fedsim.keys import SecretKey
from fedsim.models import model_files
from fedsim.plan import Plan
from fedsim.run import formats, ledger

CONFIG, SUMMARY, RECEIPT, LOCK = "config.json", "summary.json", "budget.json", "lock"
TOKENIZER, MODEL = "tokenizer.json", "model"
ANOTHER_KEY = "another key than the ledger was begun with"
PRETRAIN = "pretrain"
REMOVED = {"trust_workers_with_noise": False}
"""Settings that only earlier versions had, each with the value that changes nothing."""
LAYERED = ("layers", "twice")
"""Strategies of earlier versions whose contributions are proven to be at most C."""


class Busy(ConfigError):
    """Another process is working on the run."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a run is about: a run that goes on must have the same."""

    algorithm: str
    """els, uls or pretrain."""
    model: str | None
    """sha256 of the pretrained parameters that it starts from; None for fresh ones."""
    data_seal: str
    """Keyed digest of the data's fingerprint."""
    reduction: str
    """How sums are added; see `engine.reduction`."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What `config.json` says of a run."""

    identity: Identity
    settings: PrivacyConfig | PretrainConfig
    run: RunConfig
    """Without the seed, which is stored nowhere but with the key."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the task says of its model; see `Task.describe`."""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The versions of the packages that the run was started with."""
    plan: Plan | None = None
    """None for pre-training, which promises nothing."""
    host: str = ""
    """What workers computed on."""
    strategy: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """`name` of the clipping strategy, and `why` it was taken."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """sha256 of each file in model/."""
    tokenizer: str = ""
    """sha256 of tokenizer.json; empty: there is none, or an earlier version kept no digest."""
    removed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of an earlier version that this one cannot train with."""

    @property
    def privacy(self) -> PrivacyConfig:
        """The settings of a private run."""
        assert isinstance(self.settings, PrivacyConfig), "a run of train"
        return self.settings

    @property
    def private(self) -> bool:
        """Whether it is a run of train, and not of pretrain."""
        return isinstance(self.settings, PrivacyConfig)

    def as_dict(self) -> dict[str, Any]:
        """What is written to config.json."""
        run = {name: value for name, value in as_dict(self.run).items() if name != "seed"}
        rest = {
            "plan": self.plan and self.plan.as_dict(),
            **{
                name: dict(getattr(self, name))
                for name in ("versions", "model", "strategy", "files")
            },
            "host": self.host,
            "tokenizer": self.tokenizer,
        }
        return {
            "identity": dataclasses.asdict(self.identity),
            ("privacy" if self.private else PRETRAIN): as_dict(self.settings),
            "run": run,
            **{name: value for name, value in rest.items() if value},
        }

    @classmethod
    def from_dict(cls, record: dict[str, Any], run_dir: Path) -> "StoredRun":
        """What `as_dict` wrote. Raises: KeyError, TypeError, ValueError: it is something else."""
        identity = Identity(**record["identity"])
        if identity.algorithm == PRETRAIN:
            settings, plan = PretrainConfig(**record[PRETRAIN]), None
        else:
            Algorithm(identity.algorithm)
            epsilon = float(record["privacy"]["epsilon"])
            settings = PrivacyConfig(**{**renamed(record["privacy"]), "epsilon": epsilon})
            plan = Plan.from_dict(record["plan"])
            name = str(record.get("strategy", {}).get("name", ""))
            if name and name not in LAYERED and _only_earlier_versions_have(name):
                plan = dataclasses.replace(plan, unproven=name)
        known, removed = _without_removed(record["run"])
        run = run_config(**{**known, "run_dir": run_dir})
        names = ("model", "versions", "host", "strategy", "files", "tokenizer")
        rest = {name: record[name] for name in names if name in record}
        return cls(identity, settings, run, plan=plan, removed=removed, **rest)


def _without_removed(run: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the settings of a run that this version has, those that it has no more)."""
    removed = {n: run[n] for n, unused in REMOVED.items() if run.get(n, unused) != unused}
    known = {name: value for name, value in run.items() if name not in REMOVED}
    if known.get("engine") == "spmd":
        removed["engine"] = known.pop("engine")
    if known.get("strategy") in LAYERED:
        removed["strategy"] = known.pop("strategy")
        known.pop("mesh", None)  # which had an axis more
    return known, removed


def _only_earlier_versions_have(strategy: str) -> bool:
    try:
        Strategy.parse(strategy)
    except ConfigError:
        return True
    return False


def load(run_dir: Path) -> StoredRun:
    """What a run was started with.

    Raises: ConfigError: there is none. FileDamaged: it is not what the ledger was begun with, or
      the tokenizer is another one.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError.of("run", run_dir, f"the directory of a run, with a {CONFIG}")
    record = read_json(path)
    recorded = ledger.head(run_dir).get("config_sha256", config_sha256(run_dir))
    if recorded != config_sha256(run_dir):
        raise FileDamaged(f"{path}: was changed since the run was started")
    try:
        stored = StoredRun.from_dict(record, run_dir)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileDamaged(f"{path}: expected the settings of a run ({error})") from None
    kept = run_dir / TOKENIZER
    if stored.tokenizer and kept.is_file() and _sha256(kept) != stored.tokenizer:
        raise FileDamaged(f"{kept}: was changed since the run was started")
    return stored


def summary_of(run_dir: Path) -> dict[str, Any] | None:
    """What a run ended with; None: it has not. Raises: FileDamaged: its summary is none."""
    path = run_dir / SUMMARY
    if not path.exists():
        return None
    record = read_json(path)
    if record.get("algorithm") != PRETRAIN:
        try:
            formats.check(formats.Summary, record)
        except ValueError as error:
            raise FileDamaged(f"{path}: expected the summary of a run ({error})") from None
    return record


def find(run_dir: Path, *, resume: bool) -> StoredRun | None:
    """The run that `run_dir` holds, or None if a run may start there.

    Raises: ConfigError: it holds a run and `resume` is false, or one of an earlier version with
      settings that are no more, or that would be planned otherwise now, or something that is no
      run, or nothing can be written there, or somebody else could have. FileDamaged: its ledger is
      gone.
    """
    path = run_dir / CONFIG
    if path.exists() and not resume:
        raise ConfigError.of(
            "run_dir", run_dir, "a new directory, or --resume to go on with its run"
        )
    if path.exists():
        _expect_ours(run_dir)
        stored, book = load(run_dir), run_dir / ledger.FILE
        if stored.private and (run_dir / RECEIPT).exists() and not book.exists():
            raise FileDamaged(f"{book}: expected what was released: {RECEIPT} says it was begun")
        for name, value in stored.removed.items():
            expected = "a run without it: one of an earlier version can be read, but not resumed"
            expect(name, value, False, expected)
        if (plan := stored.plan) is not None:
            same = plan.as_dict() == read_json(path)["plan"] and plan.unproven is None
            was = stored.versions.get("fedsim", "of unknown version")
            expected = f"a run of this version, not of an earlier one (fedsim {was})"
            expect("run_dir", run_dir, same, expected)
        return stored
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError.of("run_dir", run_dir, "a directory, found a file")
    # A run that was killed before its first step leaves its key, and nothing else.
    leftovers = {LOCK, *(name + end for name in (keys.FILE, TOKENIZER) for end in ("", ".tmp"))}
    leftovers |= {CONFIG + ".tmp", MODEL}
    if run_dir.exists() and {path.name for path in run_dir.iterdir()} - leftovers:
        raise ConfigError.of("run_dir", run_dir, "a new or empty directory, or one with a run")
    if run_dir.exists():
        _expect_ours(run_dir)
        private_directory("run_dir", run_dir)
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        why = f"{there}: {error.strerror}"
        raise ConfigError.of("run_dir", run_dir, f"a place to write to ({why})") from None
    return None


def of_others(run_dir: Path) -> str:
    """The first thing of a run that is not our own, or lies elsewhere; empty if there is none.

    A link would have a run write, or trust, what lies where somebody else says.
    """
    for path in (run_dir, *sorted(run_dir.rglob("*"))):
        found = path.lstat()
        if found.st_uid != os.getuid():
            return f"{path}: belongs to another user, {found.st_uid}"
        if path != run_dir and stat.S_ISLNK(found.st_mode):
            return f"{path}: a link to {os.readlink(path)}"
    there = run_dir.stat().st_uid
    return "" if there == os.getuid() else f"{run_dir}: belongs to another user, {there}"


def _expect_ours(run_dir: Path) -> None:
    if found := of_others(run_dir):
        raise ConfigError.of("run_dir", run_dir, f"your own files and no links; {found}")


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
            raise Busy(f"run_dir={run_dir}: {message}", field="run_dir") from None
        yield


@contextmanager
def create(
    run_dir: Path,
    stored: StoredRun,
    key: SecretKey,
    tokenizer: Path | None = None,
    model: Path | None = None,
) -> Iterator[None]:
    """Make the directory and hold it; write key, tokenizer, files of the model that it starts from,
    and settings. config.json, the last, marks a run.

    Raises: ConfigError: it cannot be written, or another process was faster.
    """
    private_directory("run_dir", run_dir)
    with lock(run_dir):
        find(run_dir, resume=False)
        key.save(run_dir)
        if tokenizer is not None:
            write_atomically(run_dir / TOKENIZER, tokenizer.read_bytes())
            stored = dataclasses.replace(stored, tokenizer=_sha256(run_dir / TOKENIZER))
        if model is not None:
            make_directory(run_dir / MODEL)
            model_files.copy_side_files(model, run_dir / MODEL)
        write_json(run_dir / CONFIG, stored.as_dict())
        yield


def stored_key(run: RunConfig) -> SecretKey:
    """The key of the run that goes on.

    Raises: ConfigError: it came from another seed than `run` has. FileDamaged: it is not the one
      that the ledger was begun with.
    """
    key = SecretKey.load(run.run_dir)
    if ledger.head(run.run_dir).get("key_seal", key.seal("ledger")) != key.seal("ledger"):
        raise FileDamaged(f"{run.run_dir / keys.FILE}: {ANOTHER_KEY}")
    same = run.seed is None or run.seed == key.seed
    expect("seed", run.seed, same, "the one the run was started with, or none")
    return key


def drawing_key(key: SecretKey, stored: StoredRun) -> SecretKey:
    """The key that units and noise are drawn with.

    That of a seed depends on all that bits depend on, the strategy, the packages and the host, too:
    else two runs of one seed would add the same noise to gradients that differ a little.
    """
    if key.seed is None:
        return key
    context = [stored.strategy["name"], dict(stored.versions), stored.host]
    return key.bound(json.dumps(context, sort_keys=True))


def expect_same(stored: StoredRun, now: StoredRun) -> None:
    """Raises ConfigError naming what a resumed run would do otherwise; its data first."""
    run_dir = stored.run.run_dir
    same = stored.identity.data_seal == now.identity.data_seal
    expect("data", now.run.data.source, same, f"the data with which {run_dir} was started")
    for before, after in (
        (dataclasses.asdict(stored.identity), dataclasses.asdict(now.identity)),
        (as_dict(stored.settings), as_dict(now.settings)),
        (as_dict(stored.run), as_dict(now.run)),
    ):
        for name, value in after.items():
            left_out = name in UPDATE and value is None
            if name not in OPERATIONAL | {"seed"} and value != before.get(name) and not left_out:
                was = before.get(name)
                raise ConfigError.of(name, value, f"{was}, with which {run_dir} was started")


def other_bits(stored: StoredRun, versions: Mapping[str, str], host: str) -> str:
    """Why computing on `host` may give other bits than the run that was started has; empty if it
    gives the same. Accelerators add up in any order."""
    was, known = stored.versions, dict.fromkeys((*stored.versions, *versions))
    changed = [name for name in known if versions.get(name) != was.get(name)]
    other = [f"{name} {versions.get(name)}, not {was.get(name)}" for name in changed]
    if other:
        return "other packages: " + ", ".join(other)
    if (stored.host or host) != host:
        return f"another kind of host: {host}, not {stored.host}"
    return "" if ", cpu," in host else f"{host} adds up in no fixed order"


def config_sha256(run_dir: Path) -> str:
    """The digest of a run's settings as they were written."""
    return _sha256(run_dir / CONFIG)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
