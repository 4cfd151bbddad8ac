"""How far runs have come: a high-water mark, by which an older copy of a killed run is recognised.

    steps/NAME   a line for each step of a run that has not ended: the number of steps, the chain of
                 the run's own ledger after it, and a keyed digest of both

A line is durable before anything of its step becomes visible. So a run's directory with fewer steps
than its mark is a copy from before, and a step that it released again, on another host or with
other packages, could be another gradient under the same noise. When a run ends the ledger itself
says what it released, and the file is removed. The process that works on a run holds a lock on it:
of two copies, on hosts that share the ledger, one is refused.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fedsim.errors import FileDamaged
from fedsim.files import remove_cut_off_line, sync_directory, write_durably
from fedsim.run import LedgerError, Reached

DIRECTORY = "steps"

Seal = Callable[[str], str]


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


def path_of(ledger: Path, run: str) -> Path:
    """The file of a run, which has a name without secrets."""
    return ledger / DIRECTORY / hashlib.sha256(run.encode()).hexdigest()[:32]


def read(path: Path, seal: Seal) -> Mark | None:
    """The last line; None if there is no file. Raises: FileDamaged: it was changed."""
    if not path.exists():
        return None
    lines = path.read_text(errors="replace").split("\n")[:-1]  # a crash may have cut off the last
    if not lines:  # it was killed before the first line, hence before its first step
        return Mark(0, "")
    steps, _, rest = lines[-1].partition(" ")
    chain, _, digest = rest.partition(" ")
    if not steps.isdecimal() or digest != seal(_text(path, steps, chain)):
        raise FileDamaged(f"{path}: expected how far a run has come")
    return Mark(int(steps), chain)


@contextmanager
def held(path: Path, seal: Seal, mode: int, name: Path) -> Iterator[Reached]:
    """The file of a run, for this process alone; yields what notes how far it has come.

    Args: name: of the run's directory, for errors.
    Raises: LedgerError: another process works on the run.
    """
    is_new = not path.exists()
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(f"{name}: is a copy: another process works on the same run") from None
        if is_new:
            path.chmod(mode)
            sync_directory(path.parent)
        remove_cut_off_line(path)

        def reached(steps: int, chain: str) -> None:
            digest = seal(_text(path, str(steps), chain))
            write_durably(file, f"{steps} {chain} {digest}\n".encode())

        yield reached


def _text(path: Path, steps: str, chain: str) -> str:
    return f"steps {path.name} {steps} {chain}"
