"""The ledger of a run: what each step released; the only source of the run's epsilon.

`ledger.jsonl` has a head (what is fixed for the life of the run), a line for each segment, and a
line for each step, written *before* anything of the step becomes visible. An index is used once,
ever: a run that is resumed begins a segment, with a fresh nonce in all that its steps draw, at the
index after the last line. The steps after its checkpoint are lost: paid for, and not applied
(docs/theory/segments.md).

The file is a `ChainedLog`: JSON lines that are only appended, each with a digest of itself and all
lines before it. A changed byte or a missing line shows, unless the last lines are missing: their
presence is checked against checkpoint, metrics and summary. A chain is no signature: someone who
rewrites all of these files leaves no trace in them (`fedsim verify --whole` computes again).
"""

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from jax.tree import leaves

from fedsim.accounting import Event, StepEvent, epsilon
from fedsim.config import expect_format
from fedsim.errors import FedsimError
from fedsim.files import open_to_append, write_durably
from fedsim.plan import Plan, accounted_events, events_before
from fedsim.run import formats

LINK = ', "chain": "{}"}}'
LINK_SIZE = len(LINK.format("0" * 64))

Link = Callable[[str, bytes], str]
"""(chain before a line, the line's bytes without its own chain) -> chain after the line."""
Check = Callable[[dict[str, Any], int], None]
"""(line, its number from 0); raises ValueError, TypeError or KeyError for a malformed line."""


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

    def __init__(
        self,
        path: Path,
        check: Check,
        link: Link = link,
        mode: int | None = None,
        *,
        own: Check | None = None,
    ):
        """Read the file; without one the log is empty, and the first line creates it.

        Args:
          check: validates each line.
          link: `link`, or a keyed function.
          mode: of a new file; None: by the umask.
          own: `check` of lines that are appended, which their writer has built; None: the same.

        Raises: LedgerError: a byte was changed, or a line before the last one removed.
        """
        self.path = path
        self._own, self._link, self._mode = own or check, link, mode
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
        """Append a line; it is durable when this returns.

        Raises: LedgerError: it is malformed, or may not follow.
        """
        body = json.dumps(line).encode()[:-1]
        line = {**line, "chain": self._link(self.chain, body)}
        _expect_line(line, len(self.lines), str(self.path), self._own)
        if self._file is None:
            self._file = open_to_append(self.path, self._mode)
        write_durably(self._file, body + LINK.format(line["chain"]).encode() + b"\n")
        self.lines.append(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def parse(data: bytes, name: str, check: Check, link: Link = link) -> list[dict[str, Any]]:
    """Parse the bytes of a chained log, without a last line that a crash has cut off.

    Args: name: of the file, for errors.

    Raises: LedgerError: a line was changed, removed or malformed.
    """
    *whole, rest = data.split(b"\n")
    chain, lines = "", []
    for number, line in enumerate(whole):
        chain = link(chain, line[:-LINK_SIZE])
        if line[-LINK_SIZE:] != LINK.format(chain).encode():
            raise LedgerError(f"{name}: line {number + 1} was changed, or one before it removed")
        lines.append(_expect_line(line, number, name, check))
    # A crash leaves the beginning of a line, and nothing after a line's end.
    end = rest.rfind(LINK.partition("{")[0].encode())
    if end >= 0 and len(rest) > end + LINK_SIZE:
        raise LedgerError(f"{name}: line {len(whole) + 1} was changed")
    return lines


def _expect_line(line: Any, number: int, name: str, check: Check) -> dict[str, Any]:
    """Check a line, or parse and check its bytes. Raises LedgerError: it may not be there."""
    try:
        record = json.loads(line) if isinstance(line, bytes) else line
        check(record, number)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise LedgerError(f"{name}: line {number + 1} is none of a ledger: {error}") from None
    return record


FILE = "ledger.jsonl"
PIECE = 2**20  # bytes that are hashed at a time

Reached = Callable[[int, str], None]
"""(number of lines, chain after them) -> None; notes durably how far a run has come."""


def unnoted(num_lines: int, chain: str) -> None:
    """A `Reached` of a run that no ledger of the data counts."""


class Differs(LedgerError):
    """A step that a replay computes again differs from what it released."""

    def __init__(self, step: int, computed_on: str):
        """Args: computed_on: as of a segment, of the replay."""
        super().__init__(f"step={step}: expected what was released, of the same bits")
        self.step, self.computed_on = step, computed_on


class Ledger:
    """The ledger of a run directory, open for appending."""

    def __init__(
        self, directory: Path, head: dict[str, Any], *, least: int = 0, least_chain: str = ""
    ):
        """Open the ledger, or start it with `head`.

        Args:
          least: number of steps that the checkpoint has.
          least_chain: the chain after these steps in the checkpoint; empty if it has none.

        Raises: LedgerError: it was changed or cut, or ledger and checkpoint are of different runs.
        """
        order = Order()
        self._log = ChainedLog(directory / FILE, order, own=order.follow)
        self.segments, self._steps = order.segments, order.steps
        self.reached: Reached = unnoted
        """Called with each line, once it is durable and before it is visible."""
        path, lines = self._log.path, self._log.lines
        if self.num_steps < least:
            missing = f"{self.num_steps} steps, and the checkpoint has {least}"
            raise LedgerError(f"{path}: was cut: it has {missing}")
        if lines and lines[0]["head"] != head:
            raise LedgerError(f"{path}: was written by a run with other settings or data")
        if lines and least_chain and self.chain_after(least) != least_chain:
            other = f"another chain after step {least} than the checkpoint"
            raise LedgerError(f"{path}: has {other}: one of the two is of another run")
        if not lines:
            self._log.append({"head": head})

    def begin(self, segment: formats.Segment) -> None:
        """Note a segment before its first step; durable when this returns.

        Raises:
          LedgerError: it does not go on where the ledger ends, or has the nonce of another one.
        """
        self._append({"segment": dataclasses.asdict(segment)})

    def record(self, step: int, **fields: Any) -> None:
        """Note that `step` (from 0) is about to be released; durable when this returns.

        Args: fields: the other fields of `StepLine`; the event as of `event_fields`.

        Raises: LedgerError: it is not the next step, or no segment has begun.
        """
        self._append({"step": step, **fields})

    def _append(self, line: dict[str, Any]) -> None:
        self._log.append(line)
        self.reached(len(self._log.lines), self.chain)

    def chain_after(self, num_steps: int) -> str:
        """The digest of all lines up to that of the last of `num_steps` steps."""
        return self._steps[num_steps - 1]["chain"] if num_steps else self._log.chain_after(1)

    @property
    def chain(self) -> str:
        """The digest of all lines."""
        return self._log.chain

    @property
    def num_steps(self) -> int:
        """Released steps: the next index."""
        return len(self._steps)

    @property
    def released_sha256(self) -> str:
        """The digest of all that the steps released."""
        digests = [line.get("gradient_sha256") for line in self._steps]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


class Replayed(Ledger):
    """The ledger of a run whose steps are computed again: nothing is written."""

    computed_on = ""
    """As of a segment, of the replay."""

    def record(self, step: int, **fields: Any) -> None:
        """Compare a step with what it released.

        Raises: Differs: it had another event or another `gradient_sha256`.
        """
        line = self._steps[step]
        if any(fields[name] != line.get(name) for name in ("event", "gradient_sha256")):
            raise Differs(step, self.computed_on)


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of steps among those of a ledger."""
    return [line for line in lines if "step" in line]


def segments_of(lines: list[dict[str, Any]]) -> list[formats.Segment]:
    """The segments in the lines of a ledger."""
    return [formats.Segment(**line["segment"]) for line in lines if "segment" in line]


def number_of(segments: Sequence[formats.Segment], step: int) -> int:
    """Number, from 0, of the last segment whose first index is at most `step`."""
    return bisect.bisect_right(segments, step, key=lambda segment: segment.first) - 1


def lost_steps(segments: Sequence[formats.Segment], steps: int) -> int:
    """Number of indices below `steps` that the state after them does not have.

    A segment's state is that of a checkpoint of an earlier one, so losses add up along these.
    """
    number = number_of(segments, steps)
    if number < 1:
        return 0
    segment = segments[number]
    return lost_steps(segments[:number], segment.after) + segment.first - segment.after


def out_of_order(
    segment: formats.Segment, before: Sequence[formats.Segment], num_steps: int
) -> str:
    """Why a segment cannot follow; empty if it can. Args: num_steps: released before it."""
    if segment.first != num_steps or segment.after > num_steps:
        return f"first={segment.first}, after={segment.after}: expected {num_steps}, and no more"
    return "nonce: occurs twice" if segment.nonce in {each.nonce for each in before} else ""


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
    events = [line["event"] for line in steps_of(lines)]
    if None in events:
        return None
    plan = lines[0]["head"].get("plan", {}) if lines else {}
    return [
        *events_before(plan.get("group_size_epsilon")),
        *((StepEvent(**event), len(list(same))) for event, same in itertools.groupby(events)),
    ]


def read(directory: Path) -> list[dict[str, Any]]:
    """All lines of a run's ledger, the head first, without a last one that a crash has cut off.

    Raises: LedgerError: a byte was changed, or a line before the last one removed.
    """
    return ChainedLog(directory / FILE, Order()).lines


def head(directory: Path) -> dict[str, Any]:
    """The head of a run's ledger, or empty without one. Raises LedgerError: it was changed."""
    path = directory / FILE
    if not path.exists():
        return {}
    with open(path, "rb") as file:
        first = file.readline()
    return next((line["head"] for line in parse(first, str(path), Order())), {})


class Order:
    """Validates the lines of a ledger one after another; see `Check`."""

    def __init__(self):
        self.steps: list[dict[str, Any]] = []
        self.segments: list[formats.Segment] = []

    def __call__(self, record: dict[str, Any], number: int) -> None:
        rest = formats.SegmentLine if "segment" in record else formats.StepLine
        expect_format(rest if number else formats.FirstLine, record)
        self.follow(record, number)

    def follow(self, record: dict[str, Any], number: int) -> None:
        """Take a line of the right format. Raises ValueError: it may not be the next one."""
        if "segment" in record:
            segment = formats.Segment(**record["segment"])
            if fault := out_of_order(segment, self.segments, len(self.steps)):
                raise ValueError(fault)
            self.segments.append(segment)
        elif number:
            if not self.segments:
                raise ValueError("a step before any segment, as versions before 0.4 write it")
            if record["step"] != len(self.steps):
                raise ValueError(f"step={record['step']}: expected {len(self.steps)}")
            self.steps.append(record)
