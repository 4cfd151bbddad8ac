"""The ledger of the data: every run on the texts of some users, in the order of their starts.

    budget.jsonl   a line when a run starts or goes on (with all it plans to release) and one when
                   it ends (with what it released); lines never change, so a deleted run counts
    last.json      number and chain of the last line, so that removed lines show
    users/         for each set of users, 64 bits of a keyed hash of each id, which show the overlap
                   of data sets; and another such set of what ids that look alike have in common
    steps/         marks: for each run that has not ended, a line per line of the run's own ledger,
                   with its number, its chain and a keyed digest of both
    secret.json    the key of chain, fingerprints and marks
    lock           held while a process reads and writes

Each line ends with a keyed digest of its bytes and all lines before it: without the key, no line
can be changed, inserted or removed. If an older copy of the whole ledger is restored, the receipts
in the directories of runs show it.

A mark is durable before anything of its step becomes visible. A run is resumed only if its ledger
begins with the last mark: an older copy would release steps that nobody counts, under noise of
their own. The process that works on a run locks its marks, so that of two copies on hosts that
share the ledger one is refused.

The ledger belongs to the owner of the data, mode 0700: users, their number and the places of runs
are private, and so is the output of `fedsim budget`.
"""

import dataclasses
import fcntl
import hashlib
import io
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedsim.accounting import Event, of_words, to_words
from fedsim.data import user_ids
from fedsim.errors import ConfigError, FileDamaged, expect
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
MODE = 0o600
OPENED, CLOSED, LIMIT = "opened", "closed", "limit"
IDS, LOOKS = "users", "looks of users"
"""Purposes of fingerprints: of ids, and of what ids that look alike have in common."""
ALIKE = (
    "{:,} of these users look like users of {:,} counted runs that have other ids there, such as "
    "Ann and ann. If they are the same people, what they spent there is missing here, and no limit "
    "sees it: build the data with the ids of those runs"
)
ELSEWHERE = f"budget_ledger or {LEDGER} names another one"

Released = list[tuple[Event, int]] | None
"""Events of the accountant with their counts; None: released without noise."""


class Head(NamedTuple):
    """How far a run has come."""

    count: int
    """Number of lines of its own ledger; of releases, where it has none."""
    chain: str
    """Chain of its own ledger after these; empty where it has none."""

    def expect_begins(self, chains: Sequence[str], run_dir: Path, ledger: Path) -> None:
        """Raise LedgerError unless a run's directory begins with this: if it is an older copy, or
        one that went another way.

        Args:
          chains: after each line of the run's own ledger; empty strings where it has none.
          ledger: directory of the ledger of the data, for the error.
        """
        if len(chains) < self.count:
            more = f"{ledger} has {self.count} lines of its ledger, and here are {len(chains)}"
            raise LedgerError(f"{run_dir}: is an older copy of a run: {more}")
        if self.count and chains[self.count - 1] != self.chain:
            other = f"{ledger} has another line {self.count} of its ledger than there is here"
            raise LedgerError(f"{run_dir}: is a copy that went another way: {other}")


NO_HEAD = Head(0, "")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run in the ledger of its data."""

    number: int
    """Number of its first line, which orders runs by their starts; see `number_again`."""
    run: str
    """Identifier: the seal of the run's key, which the run's own ledger also has."""
    kind: str
    """The command: train, audit, ..."""
    place: str
    """The run's directory when it was counted."""
    users: str
    """Name of the file with its users' fingerprints."""
    label: str
    """Reason why its epsilon is no guarantee; empty if it is one."""
    planned: Released
    """All that it planned to release."""
    slack: tuple[float, float]
    """(epsilon, delta) to add for noise that is not ideal."""
    released: Released = dataclasses.field(default_factory=list)
    """All that it had released when it last ended."""
    outcome: str = ""
    """released or stopped; empty if it is running or was killed."""
    began: str = ""
    looks: str = ""
    """Name of the file with fingerprints of what its users look like."""
    head: Head = NO_HEAD
    """How far it had come when it last began or ended."""

    @property
    def marked(self) -> bool:
        """True if the ledger keeps marks of its steps until it ends: it has a guarantee."""
        return self.planned is not None and not self.label

    def number_again(self, number: int) -> int:
        """Its number when it goes on at the line `number`: the first one, unless it had ended
        without a release, so that runs were admitted since without counting it."""
        return number if self.outcome and self.released == [] else self.number


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit that the owner of the data has set for some users."""

    epsilon: float
    delta: float
    users: str | None = None


def place_of(directory: str | Path | None) -> Path:
    """Directory of the ledger: `directory`, else FEDSIM_BUDGET_LEDGER, else fedsim/ in the user
    account's state directory.

    Raises: ConfigError: it depends on the working directory, or no home directory is known.
    """
    if directory:
        return Path(expand_home("budget_ledger", directory)).absolute()
    return directory_of(LEDGER).absolute()


class BudgetLedger:
    """The ledger, locked by this process; see `open_locked`."""

    def __init__(self, directory: Path):
        """Read the ledger, or start it.

        Raises: LedgerError, FileDamaged: it was changed.
        """
        self.directory, self._path = directory, directory / FILE
        if not (directory / KEY).exists() and not self._path.exists():
            SecretKey.create().save(directory)
        self.key = SecretKey.load(directory)
        self.entries: dict[str, Entry] = {}
        self.limits: list[Limit] = []
        self._log = ChainedLog(self._path, self._take, self._link, MODE)
        self._expect_whole()

    @property
    def chain(self) -> str:
        """The digest of all lines."""
        return self._log.chain

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self._log.lines)

    def users(self, ids: Sequence[str]) -> np.ndarray:
        """Fingerprints of users' ids: keyed hashes, uint64 [users], ascending, without repeats."""
        return np.unique(_hashes(ids, self.key, IDS))

    def save_users(self, users: np.ndarray) -> str:
        """Keep a set of fingerprints; returns its name, the digest of its content."""
        make_directory(self.directory / USERS, 0o700)
        name = _digest(users)
        path = self.directory / USERS / f"{name}.npy"
        if not path.exists():
            content = io.BytesIO()
            np.save(content, users, allow_pickle=False)
            write_atomically(path, content.getvalue(), mode=MODE)
        return name

    def save_people(self, ids: Sequence[str]) -> dict[str, str]:
        """Keep fingerprints of users' ids and of their looks; returns fields of `Entry`."""
        looks = np.unique(_hashes(_looks(ids), self.key, LOOKS))
        return {"users": self.save_users(self.users(ids)), "looks": self.save_users(looks)}

    def lookalike_warning(self, ids: Sequence[str]) -> str:
        """A warning if users look like users of counted runs that have other ids; else empty."""
        entries = [
            entry
            for entry in self.entries.values()
            if entry.looks and not (entry.outcome and entry.released == [])
        ]
        if not entries:  # hashing takes long for many users
            return ""
        users, looks = _hashes(ids, self.key, IDS), _hashes(_looks(ids), self.key, LOOKS)
        alike, runs = np.zeros(len(users), bool), 0
        for entry in entries:
            known = np.isin(users, self.users_of(entry.users))
            found = np.isin(looks, self.users_of(entry.looks)) & ~known
            alike, runs = alike | found, runs + bool(found.any())
        return ALIKE.format(int(alike.sum()), runs) if runs else ""

    def users_of(self, name: str) -> np.ndarray:
        """Load the fingerprints with this name.

        Raises: FileDamaged: they are missing or were changed.
        """
        path = self.directory / USERS / f"{name}.npy"
        try:
            users = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise FileDamaged(f"{path}: expected fingerprints of users ({error})") from None
        if users.dtype != np.uint64 or _digest(users) != name:
            raise FileDamaged(f"{path}: was changed")
        return users

    def begin(self, entry: Entry) -> None:
        """Count a new or resumed run with all that it plans; durable when this returns."""
        planned = None if entry.planned is None else to_words(entry.planned)
        names = ("run", "kind", "place", "users", "looks", "label", "head")
        fields = {name: getattr(entry, name) for name in names}
        self._append({"what": OPENED, **fields, "slack": [*entry.slack], "planned": planned})

    def end(self, run: str, released: Released, outcome: str, head: Head = NO_HEAD) -> None:
        """Note what a run released and how it ended, and remove its marks."""
        words = None if released is None else to_words(released)
        ended = {"what": CLOSED, "run": run, "outcome": outcome, "head": head}
        self._append({**ended, "released": words})
        self._mark_path(run).unlink(missing_ok=True)

    def head(self, run: str) -> Head:
        """How far a run has come, by its last mark; if it has ended, by its last line. Raises
        FileDamaged: the marks are missing or were changed."""
        entry, path = self.entries.get(run), self._mark_path(run)
        if not path.exists():
            if entry is not None and entry.marked and not entry.outcome:
                raise FileDamaged(f"{path}: expected how far {entry.place} has come")
            return entry.head if entry else NO_HEAD
        *lines, _ = path.read_text(errors="replace").split("\n")  # the last may be cut off
        if not lines:  # killed before the first line, hence before the first step
            return NO_HEAD
        mark, _, digest = lines[-1].rpartition(" ")
        count, _, chain = mark.partition(" ")
        if not count.isdecimal() or digest != self._seal_of(path, count, chain):
            raise FileDamaged(f"{path}: expected how far a run has come")
        return Head(int(count), chain)

    def _seal_of(self, path: Path, count: int | str, chain: str) -> str:
        """The keyed digest of a mark."""
        return self.key.seal(f"steps {path.name} {count} {chain}")

    @contextmanager
    def marking(self, run: str, run_dir: Path) -> Iterator[Reached]:
        """Lock a run's marks; yields a function that appends one. Raises LedgerError: another
        process works on the run. Args: run_dir: its directory, for errors."""
        make_directory(self.directory / STEPS, 0o700)
        path = self._mark_path(run)
        with open(path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = "is a copy: another process works on the same run"
                raise LedgerError(f"{run_dir}: {why}") from None
            path.chmod(MODE)
            sync_directory(path.parent)
            remove_cut_off_line(path)

            def reached(count: int, chain: str) -> None:
                digest = self._seal_of(path, count, chain)
                write_durably(file, f"{count} {chain} {digest}\n".encode())

            yield reached

    def _mark_path(self, run: str) -> Path:
        """Path of the marks of a run; the name gives nothing of the key's seal away."""
        return self.directory / STEPS / hashlib.sha256(run.encode()).hexdigest()[:32]

    def limit(self, limit: Limit) -> None:
        """Append a limit for some users."""
        self._append({"what": LIMIT, **dataclasses.asdict(limit)})

    def expect_line(self, number: int, chain: str, name: str) -> dict[str, Any]:
        """The line that the file `name` refers to, from 1. Raises LedgerError: it is missing, or
        another one."""
        if not (0 < number <= self.num_lines and self._log.chain_after(number) == chain):
            raise LedgerError(f"{self._path}: was cut or replaced: {name} is line {number} of it")
        return self._log.lines[number - 1]

    def _append(self, fields: dict[str, Any]) -> None:
        if not self.num_lines:  # so that a full disk cannot leave lines without this file
            self._note_last()
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._log.append({**fields, "time": now})
        self._note_last()

    def _note_last(self) -> None:
        last = {"lines": self.num_lines, "chain": self.chain}
        write_json(self.directory / LAST, last, MODE)

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _link(self, chain: str, body: bytes) -> str:
        return self.key.seal(f"budget {chain} {hashlib.sha256(body).hexdigest()}")

    def _expect_whole(self) -> None:
        """Check the last line that last.json notes; a crash may leave more lines, never fewer."""
        path = self.directory / LAST
        if not path.exists():
            if self.num_lines > 1:
                raise FileDamaged(f"{path}: expected the last line of {self._path}")
            return
        last = read_json(path)
        number, chain = last.get("lines", 0), last.get("chain")
        if not isinstance(number, int) or number > self.num_lines:
            raise LedgerError(f"{self._path}: was cut: it has {self.num_lines} of {number} lines")
        if number:
            self.expect_line(number, str(chain), str(path))

    def _take(self, line: dict[str, Any], number: int) -> None:
        """Take account of a line, which may lack fields in ledgers of earlier versions."""
        if line["what"] == LIMIT:
            limit = Limit(float(line["epsilon"]), float(line["delta"]), line["users"])
            self.limits.append(limit)
        elif line["what"] == CLOSED:
            was, released = self.entries[line["run"]], _phases(line["released"])
            # Without a head: a run has at least a line for each step.
            head = Head(*line.get("head", (num_releases(released), "")))
            ended = {"released": released, "outcome": str(line["outcome"]), "head": head}
            self.entries[was.run] = dataclasses.replace(was, **ended)
        elif line["what"] == OPENED:
            before, (epsilon, delta) = self.entries.get(line["run"]), line["slack"]
            self.entries[line["run"]] = Entry(
                **{n: str(line[n]) for n in ("run", "kind", "place", "users", "label")},
                looks=str(line.get("looks", "")),  # ledgers of earlier versions have none
                number=before.number_again(number + 1) if before else number + 1,
                planned=_phases(line["planned"]),
                slack=(float(epsilon), float(delta)),
                released=before.released if before else [],
                head=Head(*line.get("head", NO_HEAD)),
                began=before.began if before else str(line["time"]),
            )
        else:
            raise ValueError(f"what={line['what']}")


@contextmanager
def open_locked(directory: Path) -> Iterator[BudgetLedger]:
    """Open and lock the ledger in a directory; other processes wait.

    Raises:
      ConfigError: the directory cannot be written, or is another user's.
      LedgerError, FileDamaged: the ledger was changed.
    """
    try:
        make_directory(directory, 0o700)
        _expect_ours(directory)
        lock = open(directory / LOCK, "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        place = f"a place to write to, with locks ({error}); {ELSEWHERE}"
        raise ConfigError.of("budget_ledger", directory, place) from None
    with lock, closing(BudgetLedger(directory)) as ledger:
        yield ledger


def _expect_ours(directory: Path) -> None:
    """Raise ConfigError unless directory and key are this user's or root's: whoever has the key
    writes what others have spent. Root may use every user's."""
    for path in filter(Path.exists, (directory, directory / KEY)):
        owner = path.stat().st_uid
        expected = f"a directory of your own; {path.name} belongs to another user, {owner}"
        ours = os.getuid() in (0, owner) or owner == 0
        expect("budget_ledger", directory, ours, f"{expected}; {ELSEWHERE}")


@contextmanager
def open_read_only(directory: Path) -> Iterator[BudgetLedger]:
    """Open and lock the ledger to read it; if there is none, an empty one that is not kept.

    Raises: ConfigError, LedgerError, FileDamaged: as `open_locked`.
    """
    with ExitStack() as stack:
        if not is_in(directory):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedsim-")))
        yield stack.enter_context(open_locked(directory))


def is_in(directory: Path) -> bool:
    """True if a directory has a ledger, or what is left of one."""
    return any((directory / name).exists() for name in (KEY, FILE, LAST))


def _hashes(texts: Iterable[str], key: SecretKey, purpose: str) -> np.ndarray:
    """Keyed hashes, uint64 [texts]; those of one purpose say nothing about those of another."""
    secret = bytes.fromhex(key.seal(purpose))
    digests = b"".join(
        hashlib.blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8, key=secret).digest()
        for each in texts
    )
    return np.frombuffer(digests, np.uint64)


def _looks(ids: Sequence[str]) -> list[str]:
    """For each id what ids that look alike have in common."""
    readable = [each.encode("utf-8", "replace").decode() for each in ids]
    return user_ids.look_alike_keys(pa.array(readable, pa.string())).to_pylist()


def _digest(users: np.ndarray) -> str:
    return hashlib.sha256(users.astype("<u8").tobytes()).hexdigest()[:32]


def _phases(words: Any) -> Released:
    return None if words is None else of_words(words)


def num_releases(released: Released) -> int:
    """Total number of releases."""
    return sum(count for _, count in released or [])
