"""The run directory: who owns it, what it was started with, what it ended with.

config.json    settings, plan and model, written once: a `StoredRun`
secret.json    the key, mode 0600
budget.json    where the ledger of the data counts the run
tokenizer.json of the data, so that the model can be used without them
ledger.jsonl   metrics.jsonl   tb/   checkpoints/   summary.json
released/      of the steps since the last checkpoint, mode 0700
report.html   report.md   audit.html   audit.md   audit.json, if they were asked for
"""

import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedsim import keys
from fedsim.config import (
    OPERATIONAL,
    Algorithm,
    PretrainConfig,
    PrivacyConfig,
    RunConfig,
    as_dict,
    run_config,
)
from fedsim.errors import ConfigError, FileDamaged, expect
from fedsim.files import make_directory, read_json, write_atomically, write_json
from fedsim.keys import SecretKey
from fedsim.plan import Plan
from fedsim.recipe import UPDATE
from fedsim.run import ledger

CONFIG, SUMMARY, RECEIPT, LOCK = "config.json", "summary.json", "budget.json", "lock"
TOKENIZER = "tokenizer.json"
ANOTHER_KEY = "another key than the ledger was begun with"
PRETRAIN = "pretrain"


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
            **{name: dict(getattr(self, name)) for name in ("versions", "model", "strategy")},
            "host": self.host,
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
            settings = PrivacyConfig(**{**record["privacy"], "epsilon": epsilon})
            plan = Plan.from_dict(record["plan"])
        run = run_config(**{**record["run"], "run_dir": run_dir})
        rest = {n: record[n] for n in ("model", "versions", "host", "strategy") if n in record}
        return cls(identity, settings, run, plan=plan, **rest)


def load(run_dir: Path) -> StoredRun:
    """What a run was started with.

    Raises: ConfigError: there is none. FileDamaged: it is not what the ledger was begun with.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"run={run_dir}: expected the directory of a run, with a {CONFIG}")
    record = read_json(path)
    recorded = ledger.head(run_dir).get("config_sha256", config_sha256(run_dir))
    if recorded != config_sha256(run_dir):
        raise FileDamaged(f"{path}: was changed since the run was started")
    try:
        return StoredRun.from_dict(record, run_dir)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileDamaged(f"{path}: expected the settings of a run ({error})") from None


def find(run_dir: Path, *, resume: bool) -> StoredRun | None:
    """The run that `run_dir` holds, or None if a run may start there.

    Raises: ConfigError: it holds a run and `resume` is false, or something that is no run, or
      nothing can be written there. FileDamaged: its ledger is gone.
    """
    path = run_dir / CONFIG
    if path.exists() and not resume:
        raise ConfigError(
            f"run_dir={run_dir}: expected a new directory, or --resume to go on with its run"
        )
    if path.exists():
        stored, book = load(run_dir), run_dir / ledger.FILE
        if stored.private and (run_dir / RECEIPT).exists() and not book.exists():
            raise FileDamaged(f"{book}: expected what was released: {RECEIPT} says it was begun")
        return stored
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir={run_dir}: expected a directory, found a file")
    # A run that was killed before its first step leaves its key, and nothing else.
    leftovers = {LOCK, *(name + end for name in (keys.FILE, TOKENIZER) for end in ("", ".tmp"))}
    leftovers |= {CONFIG + ".tmp"}
    if run_dir.exists() and {path.name for path in run_dir.iterdir()} - leftovers:
        raise ConfigError(
            f"run_dir={run_dir}: expected a new or empty directory, or one with a run"
        )
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        why = f"{there}: {error.strerror}"
        raise ConfigError(f"run_dir={run_dir}: expected a place to write to ({why})") from None
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
def create(
    run_dir: Path, stored: StoredRun, key: SecretKey, tokenizer: Path | None = None
) -> Iterator[None]:
    """Make the directory and hold it; write key, tokenizer and settings. config.json, the last,
    marks a run.

    Raises: ConfigError: it cannot be written, or another process was faster.
    """
    try:
        make_directory(run_dir, 0o700)
        run_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: expected a place to write to ({error})") from None
    with lock(run_dir):
        find(run_dir, resume=False)
        key.save(run_dir)
        if tokenizer is not None:
            write_atomically(run_dir / TOKENIZER, tokenizer.read_bytes())
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
                raise ConfigError(
                    f"{name}={value}: expected {was}, with which {run_dir} was started"
                )


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
    return hashlib.sha256((run_dir / CONFIG).read_bytes()).hexdigest()
