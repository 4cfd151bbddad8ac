"""Ends what is left of a private cluster when the process that started it is killed.

A program of its own, `python warden.py DIRECTORY PID:STARTED ...`, that needs nothing but Python.
Its input is a pipe which only that process holds, so it ends when the process does, however that
comes. Ray ends most of a cluster itself then; the agents of a node look for its head for a minute,
and the directory stays.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LOOK_S = 2.0  # between two looks at who belongs to the cluster


class Process(NamedTuple):
    """A process that is never mistaken for a later one with its number."""

    pid: int
    started: int
    """Clock ticks from the start of the system to that of the process."""

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    @property
    def is_there(self) -> bool:
        """Whether it has not been waited for, and the number is still its own."""
        found = _parent_and_start(self.pid)
        return found is not None and found[1] == self.started


def process(pid: int) -> Process:
    """The process that has a number now. Raises: ProcessLookupError: none has it."""
    found = _parent_and_start(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return Process(pid, found[1])


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # what follows its name: from the third field on
    return int(fields[1]), int(fields[19])


def children(pid: int) -> set[Process]:
    """The processes that a process has started and that have not ended."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return set()
    found = {int(child): _parent_and_start(int(child)) for line in lists for child in line.split()}
    return {Process(child, of[1]) for child, of in found.items() if of and of[0] == pid}


def family(processes: set[Process]) -> set[Process]:
    """These processes, what they have started, and so on."""
    found = {each: children(each.pid) for each in processes}
    started = set().union(*(those for each, those in found.items() if each.is_there))
    return processes | (family(started) if started else set())


def end(processes: set[Process]) -> None:
    """Kill those of these processes that are there; never another that was given a number since."""
    for each in processes:
        with suppress(ProcessLookupError, PermissionError):
            held = os.pidfd_open(each.pid)  # from here on the number cannot pass to another
            try:
                if each.is_there:
                    signal.pidfd_send_signal(held, signal.SIGKILL)
            finally:
                os.close(held)


def main(directory: str, *processes: str) -> None:
    """Wait for the end of the process that has the other end of stdin; then clear up."""
    first = {Process(*map(int, each.split(":"))) for each in processes}
    known = set(first)
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        known |= family(first)
    end(known)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
