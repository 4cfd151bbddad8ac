"""The ledger of the data: every run on some people's texts, in the order in which they began.

    budget.jsonl   a line when a run begins (what it will release at most) and when it ends (what it
                   released); lines are never changed, so a run that is deleted stays
    last.json      the last line's number and link: lines that are cut off show
    users/         whose texts runs saw; see `people`
    steps/         how far runs that have not ended have come; see `marks`
    secret.json    the key of links and fingerprints
    lock           held while a process reads and writes

Each line ends with a keyed digest of its bytes and all lines before it: who has not the key can
change, insert or remove none. Who has it, and restores an older copy of everything, is found out by
the receipts in the runs' own directories. All of it is the data owner's, mode 0700: who is in which
data, how many they are and where runs lie is not for others. The events themselves say no more than
the runs' own ledgers, which are made to be published; what `fedsim budget --json` prints may be.
"""

import dataclasses
import fcntl
import hashlib
import io
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim.accounting import Event, of_words, to_words
from fedsim.errors import ConfigError, FileDamaged
from fedsim.files import (
    LEDGER,
    directory_of,
    expand_home,
    make_directory,
    read_json,
    remove_cut_off_line,
    sync_directory,
    write_atomically,
    write_durably,
    write_json,
)
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.run import ChainedLog, LedgerError, Reached

FILE, LAST, LOCK = "budget.jsonl", "last.json", "lock"
USERS, STEPS = "users", "steps"
SHARED = 0o660
OPENED, CLOSED, LIMIT = "opened", "closed", "limit"
ELSEWHERE = f"--budget-ledger or {LEDGER} names another one"

Seal = Callable[[str], str]
Released = list[tuple[Event, int]] | None
"""Events, each with its number of times; None: without noise."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run in the ledger of its data."""

    number: int
    """Of its first line: runs in the order in which they began."""
    run: str
    """What it is known by: the key's seal, which the run's own ledger has, too."""
    kind: str
    """train, audit, pretrain, ..."""
    place: str
    """Where its directory was."""
    users: str
    """The name of its users' fingerprints."""
    label: str
    """Why its epsilon is no guarantee; empty where it is."""
    planned: Released
    """What it releases at most."""
    slack: tuple[float, float]
    """(epsilon, delta) for noise that is not ideal."""
    released: Released = dataclasses.field(default_factory=list)
    """What it released when it last ended."""
    outcome: str = ""
    """How it ended; empty: it has not, or was killed."""
    began: str = ""
    marked: bool = False
    """Whether the ledger notes how far it has come, until it ends."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """What the owner of the data has set for some users."""

    epsilon: float
    delta: float
    users: str | None = None


class Mark(NamedTuple):
    """How far a run has come."""

    steps: int
    chain: str
    """Of its own ledger after so many steps; empty: not known."""

    def expect_reached(self, chains: Sequence[str], run_dir: Path, ledger: Path) -> None:
        """Raises LedgerError: the run in `run_dir` has not come as far, or has taken other steps.

        Args: chains: of its own ledger after 0, 1, ... steps; empty where they are not known.
        """
        if (steps := len(chains) - 1) < self.steps:
            more = f"{ledger} has {self.steps} steps of it, and here are {steps}"
            raise LedgerError(f"{run_dir}: is an older copy of a run: {more}")
        if self.chain and chains[self.steps] not in ("", self.chain):
            other = f"{ledger} has another step {self.steps} of it than there is here"
            raise LedgerError(f"{run_dir}: is a copy that went another way: {other}")


def place_of(directory: str | Path | None) -> Path:
    """Where the ledger is: the directory that was given, that of FEDSIM_BUDGET_LEDGER, or fedsim/
    in the account's state.

    Raises: ConfigError: it depends on the working directory, or no home directory is known.
    """
    if directory:
        return Path(expand_home("budget_ledger", directory)).absolute()
    return directory_of(LEDGER).absolute()


class BudgetLedger:
    """The ledger, held by this process: see `hold`."""

    def __init__(self, directory: Path):
        """Read it, or start it. Raises: LedgerError, FileDamaged: it is not what was written."""
        self.directory, self._path = directory, directory / FILE
        self._mode = _mode(directory)
        if not (directory / KEY).exists() and not self._path.exists():
            SecretKey.create().save(directory)
            (directory / KEY).chmod(self._mode)
        try:
            self.key = SecretKey.load(directory)
        except FileNotFoundError:
            raise FileDamaged(f"{directory / KEY}: expected the key of {self._path}") from None
        self._log = ChainedLog(self._path, _check, self._link, self._mode)
        self._expect_whole()
        self.entries: dict[str, Entry] = {}
        self.limits: list[Limit] = []
        for number, line in enumerate(self._log.lines, 1):
            self._take(line, number)

    @property
    def chain(self) -> str:
        """The hash that the next line will hold of this one and all before it."""
        return self._log.chain

    @property
    def num_lines(self) -> int:
        """How many lines the ledger has."""
        return len(self._log.lines)

    def line(self, number: int) -> dict[str, Any]:
        """The line of this number, from 1."""
        return self._log.lines[number - 1]

    def users(self, ids: Sequence[str]) -> np.ndarray:
        """The fingerprints of users' ids."""
        return fingerprints(ids, self.key)

    def save_users(self, users: np.ndarray) -> str:
        """Keep a set of fingerprints; returns its name, the digest of its content."""
        self._make(USERS)
        path = self._users_path(name := _digest(users))
        if not path.exists():
            content = io.BytesIO()
            np.save(content, users, allow_pickle=False)
            write_atomically(path, content.getvalue(), mode=self._mode)
        return name

    def _make(self, name: str) -> None:
        place = self.directory / name
        if not place.exists():
            make_directory(place)
            place.chmod(0o770 if self._mode == SHARED else 0o700)

    def users_of(self, name: str) -> np.ndarray:
        """The fingerprints that were saved under a name. Raises: FileDamaged."""
        path = self._users_path(name)
        try:
            users = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise FileDamaged(f"{path}: expected fingerprints of users ({error})") from None
        if users.dtype != np.uint64 or _digest(users) != name:
            raise FileDamaged(f"{path}: was changed")
        return users

    def _users_path(self, name: str) -> Path:
        return self.directory / USERS / f"{name}.npy"

    def begin(self, entry: Entry) -> None:
        """Count a run with all that it plans, durable when this returns: a new one, or one that
        goes on."""
        planned = None if entry.planned is None else to_words(entry.planned)
        names = ("run", "kind", "place", "users", "label", "marked")
        fields = {name: getattr(entry, name) for name in names}
        self._append({"what": OPENED, **fields, "slack": [*entry.slack], "planned": planned})

    def end(self, run: str, released: Released, outcome: str) -> None:
        """Note what a run released, and how it ended; its mark is not needed any more."""
        words = None if released is None else to_words(released)
        self._append({"what": CLOSED, "run": run, "outcome": outcome, "released": words})
        _mark_path(self.directory, run).unlink(missing_ok=True)

    def mark(self, run: str) -> Mark | None:
        """How far a run has come that has not ended; None if that is not noted.

        Raises: FileDamaged: it was, and the file is gone or was changed.
        """
        known, path = self.entries.get(run), _mark_path(self.directory, run)
        found = _read_mark(path, self.key.seal)
        if found is None and known is not None and known.marked and not known.outcome:
            raise FileDamaged(f"{path}: expected how far {known.place} has come")
        return found

    def marking(self, run: str, name: Path) -> AbstractContextManager[Reached]:
        """What notes how far a run has come. Args and Raises: see `marks.held`."""
        self._make(STEPS)
        path = _mark_path(self.directory, run)
        return _hold_marks(path, self.key.seal, self._mode, name)

    def limit(self, limit: Limit) -> None:
        """Set a limit for some users."""
        self._append({"what": LIMIT, **dataclasses.asdict(limit)})

    def expect_line(self, number: int, chain: str, name: str) -> None:
        """Raises LedgerError, naming `name`: the ledger has lost this line."""
        if not (0 < number <= self.num_lines and self._log.chain_after(number) == chain):
            raise LedgerError(f"{self._path}: was cut or replaced: {name} is line {number} of it")

    def _append(self, fields: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._log.append({**fields, "time": now})
        self._take(self._log.lines[-1], self.num_lines)
        write_json(
            self.directory / LAST, {"lines": self.num_lines, "chain": self.chain}, self._mode
        )
        (self.directory / LAST).chmod(self._mode)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _link(self, chain: str, body: bytes) -> str:
        return self.key.seal(f"budget {chain} {hashlib.sha256(body).hexdigest()}")

    def _expect_whole(self) -> None:
        """A crash may come between a line and the note of it, never the other way round."""
        path = self.directory / LAST
        if not path.exists():
            if self.num_lines > 1:
                raise FileDamaged(f"{path}: expected the last line of {self._path}")
            return
        last = read_json(path)
        number, chain = last.get("lines", 0), last.get("chain")
        if not isinstance(number, int) or number > self.num_lines:
            raise LedgerError(f"{self._path}: was cut: it has {self.num_lines} of {number} lines")
        self.expect_line(number, str(chain), str(path))

    def _take(self, line: dict[str, Any], number: int) -> None:
        if line["what"] == LIMIT:
            self.limits.append(Limit(line["epsilon"], line["delta"], line["users"]))
        elif line["what"] == CLOSED:
            was = self.entries[line["run"]]
            changes = {"released": _phases(line["released"]), "outcome": line["outcome"]}
            self.entries[was.run] = dataclasses.replace(was, **changes)
        else:
            known = self.entries.get(line["run"])
            fields = {n: line[n] for n in ("run", "kind", "place", "users", "label")}
            self.entries[line["run"]] = Entry(
                **fields,
                number=known.number if known else number,
                planned=_phases(line["planned"]),
                slack=(float(line["slack"][0]), float(line["slack"][1])),
                released=known.released if known else [],
                marked=bool(line.get("marked")),  # earlier versions noted nothing
                began=known.began if known else line["time"],
            )


@contextmanager
def hold(directory: Path) -> Iterator[BudgetLedger]:
    """The ledger, for this process alone; another one waits.

    Raises: ConfigError: it cannot be written there. LedgerError, FileDamaged: it was changed.
    """
    try:
        make_directory(directory, 0o700)
        lock = open(directory / LOCK, "a")
    except OSError as error:
        place = f"a place to write to ({error}); {ELSEWHERE}"
        raise ConfigError.of("budget_ledger", directory, place) from None
    with lock:
        if os.fstat(lock.fileno()).st_uid == os.getuid():
            os.fchmod(lock.fileno(), _mode(directory))
        fcntl.flock(lock, fcntl.LOCK_EX)
        with closing(BudgetLedger(directory)) as ledger:
            yield ledger


@contextmanager
def look(directory: Path) -> Iterator[BudgetLedger]:
    """The ledger, to be read alone; where there is none an empty one, and nothing is written there.

    Raises: what `hold` raises.
    """
    with ExitStack() as stack:
        if not any((directory / name).exists() for name in (KEY, FILE, LAST)):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedsim-")))
        yield stack.enter_context(hold(directory))


def fingerprints(ids: Iterable[str], key: SecretKey) -> np.ndarray:
    """uint64 [users], ascending: of each id a number that says nothing without the key."""
    secret = bytes.fromhex(key.seal("users"))
    digests = b"".join(
        hashlib.blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8, key=secret).digest()
        for each in ids
    )
    return np.unique(np.frombuffer(digests, np.uint64))


def _digest(users: np.ndarray) -> str:
    return hashlib.sha256(users.astype("<u8").tobytes()).hexdigest()[:32]


def _mode(directory: Path) -> int:
    """Of the ledger's files: its group may write them where it may write to the directory."""
    return SHARED if directory.stat().st_mode & stat.S_IWGRP else 0o600


def _phases(words: Any) -> Released:
    return None if words is None else of_words(words)


def _check(line: dict[str, Any], number: int) -> None:
    """Raises ValueError, TypeError or KeyError unless the line can be relied upon."""
    if line["what"] == OPENED:
        _phases(line["planned"])
        [float(each) for each in line["slack"]]
        [str(line[name]) for name in ("run", "kind", "place", "users", "label", "time")]
    elif line["what"] == CLOSED:
        _phases(line["released"])
        [str(line[name]) for name in ("run", "outcome")]
    elif line["what"] == LIMIT:
        Limit(float(line["epsilon"]), float(line["delta"]), line["users"])
    else:
        raise ValueError(f"what={line['what']}")


def _mark_path(ledger: Path, run: str) -> Path:
    """Path of the marks of a run; the name gives nothing of the key's seal away."""
    return ledger / STEPS / hashlib.sha256(run.encode()).hexdigest()[:32]


def _read_mark(path: Path, seal: Seal) -> Mark | None:
    """The last mark in a file; None if there is no file. Raises: FileDamaged: it was changed."""
    if not path.exists():
        return None
    lines = path.read_text(errors="replace").split("\n")[:-1]  # a crash may have cut off the last
    if not lines:  # it was killed before the first line, hence before its first step
        return Mark(0, "")
    steps, _, rest = lines[-1].partition(" ")
    chain, _, digest = rest.partition(" ")
    if not steps.isdecimal() or digest != seal(_mark_text(path, steps, chain)):
        raise FileDamaged(f"{path}: expected how far a run has come")
    return Mark(int(steps), chain)


@contextmanager
def _hold_marks(path: Path, seal: Seal, mode: int, run_dir: Path) -> Iterator[Reached]:
    """Lock the marks of a run; yields a function that appends one.

    Raises: LedgerError: another process works on the run.
    """
    is_new = not path.exists()
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(
                f"{run_dir}: is a copy: another process works on the same run"
            ) from None
        if is_new:
            path.chmod(mode)
            sync_directory(path.parent)
        remove_cut_off_line(path)

        def reached(steps: int, chain: str) -> None:
            digest = seal(_mark_text(path, str(steps), chain))
            write_durably(file, f"{steps} {chain} {digest}\n".encode())

        yield reached


def _mark_text(path: Path, steps: str, chain: str) -> str:
    return f"steps {path.name} {steps} {chain}"
