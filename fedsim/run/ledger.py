"""The ledger of a run: what each step released; the only source of the run's epsilon.

`ledger.jsonl` has a head (what is fixed for the life of the run, and in `before` what was released
before the first step) and one line per step, written *before* anything of the step becomes visible,
with a digest of the privatised gradient. A step that is repeated after a crash draws the same units
and the same noise, so it is no second release: its line exists and must agree.

The file is a `ChainedLog`: JSON lines that are only appended, each with a digest of itself and all
lines before it. A changed byte or a missing line shows, unless the last lines are missing: their
presence is checked against checkpoint, metrics and summary. A chain is no signature: someone who
rewrites all of these files leaves no trace in them (`fedsim verify --whole` computes again).
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from jax.tree import leaves

from fedsim.accounting import Event, PureEvent, StepEvent, epsilon, event_fields, event_of
from fedsim.errors import FedsimError
from fedsim.files import open_to_append, write_durably
from fedsim.plan import Plan, accounted_events
from fedsim.run import formats

LINK = ', "chain": "{}"}}'
LINK_SIZE = len(LINK.format("0" * 64))

Link = Callable[[str, bytes], str]
"""(chain before a line, the line's bytes without its own chain) -> chain after the line."""
Check = Callable[[dict[str, Any], int], None]
"""(line, its number from 0) -> None; raises ValueError, TypeError or KeyError for a malformed
line."""


class LedgerError(FedsimError):
    """A ledger was changed or cut, or contradicts the run."""


def link(chain: str, body: bytes) -> str:
    """Unkeyed chain, which anyone can check: sha256, in hex."""
    return hashlib.sha256(chain.encode() + body).hexdigest()


class ChainedLog:
    """An append-only file of JSON lines, each with a digest of itself and all lines before it.

    A crash may leave the beginning of a last line: it is ignored, and removed by the next append.
    Only one process may write at a time; the caller holds a lock.
    """

    def __init__(self, path: Path, check: Check, link: Link = link, mode: int | None = None):
        """Read the file; without one the log is empty, and the first line creates it.

        Args:
          check: validates each line.
          link: `link`, or a keyed function.
          mode: of a new file; None: by the umask.

        Raises:
          LedgerError: a byte was changed, or a line before the last one removed.
        """
        self.path = path
        self._link, self._mode = link, mode
        self._file: IO[bytes] | None = None
        self.lines = parse(path.read_bytes() if path.exists() else b"", str(path), check, link)

    @property
    def chain(self) -> str:
        """The digest of all lines."""
        return self.chain_after(len(self.lines))

    def chain_after(self, num_lines: int) -> str:
        """The digest of the first `num_lines` lines; empty for none."""
        return self.lines[num_lines - 1]["chain"] if num_lines else ""

    def append(self, line: dict[str, Any]) -> None:
        """Append a line; it is durable when this returns."""
        body = json.dumps(line).encode()[:-1]
        chain = self._link(self.chain, body)
        if self._file is None:
            self._file = open_to_append(self.path, self._mode)
        write_durably(self._file, body + LINK.format(chain).encode() + b"\n")
        self.lines.append({**line, "chain": chain})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def parse(data: bytes, name: str, check: Check, link: Link = link) -> list[dict[str, Any]]:
    """Parse the bytes of a chained log, without a last line that a crash has cut off.

    Args:
      name: of the file, for errors.

    Raises:
      LedgerError: a line was changed, removed or malformed.
    """
    *whole, rest = data.split(b"\n")
    chain, lines = "", []
    for number, line in enumerate(whole):
        chain = link(chain, line[:-LINK_SIZE])
        if line[-LINK_SIZE:] != LINK.format(chain).encode():
            raise LedgerError(f"{name}: line {number + 1} was changed, or one before it removed")
        try:
            check(record := json.loads(line), number)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LedgerError(f"{name}: line {number + 1} is none of a ledger: {error}") from None
        lines.append(record)
    # A crash leaves the beginning of a line, and nothing after a line's end.
    end = rest.rfind(LINK.partition("{")[0].encode())
    if end >= 0 and len(rest) > end + LINK_SIZE:
        raise LedgerError(f"{name}: line {len(whole) + 1} was changed")
    return lines


FILE = "ledger.jsonl"
PIECE = 2**20  # bytes that are hashed at a time

Reached = Callable[[int, str], None]
"""(steps, chain after them) -> None; notes durably how far a run has come."""

_WITNESSES: dict[Path, Reached] = {}


class OtherBits(LedgerError):
    """A repeated step differs from what it released before."""


class Ledger:
    """The ledger of a run directory, open for appending."""

    def __init__(
        self, directory: Path, head: dict[str, Any], *, least: int = 0, least_chain: str = ""
    ):
        """Open the ledger, or start it with `head`.

        Args:
          least: number of steps that the checkpoint has.
          least_chain: the chain after these steps in the checkpoint; empty if it has none.

        Raises:
          LedgerError: it was changed or cut, or ledger and checkpoint are of different runs.
        """
        self._log = ChainedLog(directory / FILE, check)
        self._directory = directory
        path, lines = self._log.path, self._log.lines
        if (steps := max(0, self.num_steps)) < least:
            missing = f"{steps} steps, and the checkpoint has {least}"
            raise LedgerError(f"{path}: was cut: it has {missing}")
        if lines and lines[0]["head"] != head:
            raise LedgerError(f"{path}: was written by a run with other settings or data")
        if least_chain and self.chain_after(least) != least_chain:
            other = f"another chain after step {least} than the checkpoint"
            raise LedgerError(f"{path}: has {other}: one of the two is of another run")
        if not lines:
            self._log.append({"head": head})

    def record(self, step: int, event: StepEvent | None, **fields: Any) -> None:
        """Note that `step` (from 0) is about to be released; durable when this returns, also for
        the `witness`.

        Args:
          event: the accountant's event of the step; None without noise.
          fields: other fields of `StepLine`.

        Raises:
          LedgerError: it is not the next step, or was released with another event.
          OtherBits: it was released with another `gradient_sha256`.
        """
        line = {"step": step, "event": event and event_fields(event), **fields}
        if step > self.num_steps:
            raise LedgerError(f"step={step}: expected {self.num_steps}, the next one")
        if step == self.num_steps:
            self._log.append(line)
            note(self._directory, self.num_steps, self.chain)
            return
        (was, digest), (now, new_digest) = map(_identity, (self._line(step), line))
        if now != was:
            raise LedgerError(f"step={step}: expected event {was}, as released before")
        if digest and new_digest != digest:
            raise OtherBits(
                f"step={step}: expected the gradient that was released before, of the same bits: "
                "go on with the packages, and on the kind of host, that the run was started with"
            )

    def digest(self, step: int) -> str | None:
        """The `gradient_sha256` of a released step."""
        return self._line(step).get("gradient_sha256")

    def noise_row(self, step: int) -> str | None:
        """The seal of the row of correlated noise of a released step, if the ledger has it."""
        return self._line(step).get("noise_row")

    def chain_after(self, num_steps: int) -> str:
        """The digest of the head and the lines of the first `num_steps` steps."""
        return self._log.chain_after(1 + num_steps)

    @property
    def chain(self) -> str:
        """The digest of all lines."""
        return self._log.chain

    @property
    def num_steps(self) -> int:
        """Released steps."""
        return len(self._log.lines) - 1

    def close(self) -> None:
        """Close the file."""
        self._log.close()

    def _line(self, step: int) -> dict[str, Any]:
        return self._log.lines[1 + step]


@contextmanager
def witness(directory: Path, reached: Reached) -> Iterator[None]:
    """Call `reached` for each step of the run in `directory`, before the step becomes visible.

    The registry is by directory, so that every ledger opened there reports its steps.
    """
    place = directory.absolute()
    _WITNESSES[place] = reached
    try:
        yield
    finally:
        del _WITNESSES[place]


def note(directory: Path, num_steps: int, chain: str) -> None:
    """Report to the witness of the run in `directory`, if there is one, how far the run has
    come."""
    if (reached := _WITNESSES.get(directory.absolute())) is not None:
        reached(num_steps, chain)


def gradient_sha256(gradient: Any) -> str:
    """sha256 over the sha256 of each piece of 1 MiB of each array, computed on all cores.

    Args:
      gradient: the privatised gradient, so that the digest gives away no more than the step does.
    """
    arrays = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves(gradient)]
    pieces = [array[at : at + PIECE] for array in arrays for at in range(0, array.size, PIECE)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def claimed_epsilon(directory: Path, plan: Plan) -> float:
    """Epsilon that a run may claim, recomputed from its ledger: that of its `accounted_events` at
    the plan's delta; inf without noise."""
    return epsilon_of(accounted_events(plan, phases(read(directory))), plan.delta)


def epsilon_of(released: list[tuple[Event, int]] | None, delta: float) -> float:
    """Epsilon of `phases`; inf without noise."""
    return math.inf if released is None else epsilon(released, delta)


def phases(lines: list[dict[str, Any]]) -> list[tuple[Event, int]] | None:
    """The accountant's events in the lines of a ledger, with their counts; None without noise."""
    if any(line["event"] is None for line in lines[1:]):
        return None
    before = [each for line in lines[:1] for each in line["head"].get("before", [])]
    steps = itertools.groupby(line["event"] for line in lines[1:])
    return [
        *((PureEvent(each["epsilon"]), 1) for each in before),
        *((event_of(event), len(list(same))) for event, same in steps),
    ]


def read(directory: Path) -> list[dict[str, Any]]:
    """All lines of a run's ledger, the head first, without a last one that a crash has cut off.

    Raises:
      LedgerError: a byte was changed, or a line before the last one removed.
    """
    return ChainedLog(directory / FILE, check).lines


def head(directory: Path) -> dict[str, Any]:
    """The head of a run's ledger; empty if there is none yet.

    Raises:
      LedgerError: it was changed.
    """
    path = directory / FILE
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        first = file.readline()
    return next((line["head"] for line in parse(first, str(path), check)), {})


def head_of(directory: Path, run: str) -> dict[str, Any]:
    """The head of the ledger in a directory; empty unless it can be read and is this run's.

    Args:
      run: the seal of the run's key.
    """
    try:
        found = head(directory)
    except (FedsimError, OSError):
        return {}
    return found if found.get("key_seal") == run else {}


def _identity(line: dict[str, Any]) -> tuple[Any, str | None]:
    """Fields of a step's line that must not change when the step is repeated."""
    return line["event"], line.get("gradient_sha256")


def check(record: dict[str, Any], number: int) -> None:
    """Validate a line, the head or a step; see `Check`."""
    formats.check(formats.StepLine if number else formats.FirstLine, record)
    if number and record["step"] != number - 1:
        raise ValueError(f"step={record['step']}: expected {number - 1}")
