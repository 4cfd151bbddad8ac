"""What was released, step by step: append-only, chained, and the only source of a run's epsilon.

`ledger.jsonl` has a head (what is fixed for the life of the run, and in `before` what was released
before the first step) and one line per step, written *before* anything of it becomes visible. A
step that is run again after a crash draws the same units and the same noise, so it is no second
release: its line is there already and must agree.
Each line carries the sha256 of the line before it, so that a change in the past shows.
"""

import hashlib
import itertools
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedsim.accounting import StepEvent, epsilon
from fedsim.config import FedsimError
from fedsim.files import remove_cut_off_line, sync_directory, whole_lines
from fedsim.pure import PureEvent

FILE = "ledger.jsonl"


class LedgerError(FedsimError):
    """The ledger does not say what the run is about to do."""


class Ledger:
    """The ledger of a run directory, open for appending."""

    def __init__(self, directory: Path, head: dict[str, Any]):
        """Open or start it. Raises LedgerError if it belongs to another run or was changed."""
        path = directory / FILE
        remove_cut_off_line(path)
        lines = read(directory)
        if lines and lines[0].get("head") != head:
            raise LedgerError(f"{path}: was written by a run with other settings or data")
        self._chain = lines[-1]["chain"] if lines else ""
        self._events = [line["event"] for line in lines[1:]]
        self._file = open(path, "a")
        if not lines:
            self._append({"head": head})
            sync_directory(directory)

    def record(self, step: int, event: StepEvent | None, **fields: Any) -> None:
        """Note that `step` (from 0) is about to be released; durable when this returns.

        Args:
          event: what the step is to the accountant; None for a step without noise.
        """
        line = {"step": step, "event": event and asdict(event), **fields}
        if step > self.num_steps:
            raise LedgerError(f"step={step}: expected {self.num_steps}, the next one")
        if step == self.num_steps:
            self._append(line)
            self._events.append(line["event"])
        elif line["event"] != self._events[step]:
            raise LedgerError(
                f"step={step}: expected event {self._events[step]}, as released before"
            )

    @property
    def num_steps(self) -> int:
        """Released steps."""
        return len(self._events)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._chain = _link(self._chain, line)
        self._file.write(json.dumps({**line, "chain": self._chain}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def released_epsilon(directory: Path, delta: float) -> float:
    """Epsilon of what a run has released, recomputed from its ledger; inf without noise."""
    lines = read(directory)
    events = [line["event"] for line in lines[1:]]
    if None in events:
        return math.inf
    phases = [(StepEvent(**event), len(list(same))) for event, same in itertools.groupby(events)]
    first = [each for line in lines[:1] for each in line["head"].get("before", [])]
    before = [(PureEvent(each["epsilon"]), 1) for each in first]
    return epsilon([*before, *phases], delta)


def read(directory: Path) -> list[dict[str, Any]]:
    """All lines of a run's ledger, the head first. Raises LedgerError if they were changed."""
    try:
        lines = whole_lines(directory / FILE)
    except ValueError as error:
        raise LedgerError(f"{directory / FILE}: a line is not JSON ({error})") from error
    check_chain(lines)
    return lines


def check_chain(lines: list[dict[str, Any]]) -> None:
    """Raises LedgerError if a line was changed, put in, or removed before one that is there."""
    chain = ""
    for number, line in enumerate(lines):
        chain = _link(chain, {name: value for name, value in line.items() if name != "chain"})
        if line.get("chain") != chain or line.get("step", -1) != number - 1:
            raise LedgerError(
                f"line {number + 1} of the ledger was changed, or one before it removed"
            )


def _link(chain: str, line: dict[str, Any]) -> str:
    return hashlib.sha256((chain + json.dumps(line, sort_keys=True)).encode()).hexdigest()
