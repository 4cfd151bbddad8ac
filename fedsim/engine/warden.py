"""A program that ends a private cluster when the process that started it was killed.

`python warden.py DIRECTORY PID:STARTED ...` needs nothing but Python, so it is a file by itself.
Its input is a pipe that only the starting process holds, which closes when that process ends,
however it ends. Ray then ends most of a cluster; without this program, the agents of a node would
search for its head for a minute, and the directory would stay.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from errno import ENOSYS
from pathlib import Path
from typing import NamedTuple

LOOK_S = 2.0  # seconds between two looks at the cluster's processes


class Process(NamedTuple):
    """A process, distinguished from a later one with the same number by its start."""

    pid: int
    started: int
    """Clock ticks from the start of the system to the start of the process."""

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    @property
    def is_there(self) -> bool:
        """True if it has not been waited for, and its number has not passed to another process."""
        status = _parent_and_start(self.pid)
        return status is not None and status[1] == self.started

    @property
    def command(self) -> str:
        """Its words, each ended by a null character; empty if it has ended."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_text()
        except OSError:
            return ""


def process(pid: int) -> Process:
    """Return the process that has a number now. Raises ProcessLookupError if none has it."""
    status = _parent_and_start(pid)
    if status is None:
        raise ProcessLookupError(pid)
    return Process(pid, status[1])


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """Read (number of the parent, start) of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # from the third field on, after the name
    return int(fields[1]), int(fields[19])


def children(pid: int) -> set[Process]:
    """Return the child processes of a process that have not ended."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return set()
    numbers = [int(child) for line in lists for child in line.split()]
    statuses = {child: _parent_and_start(child) for child in numbers}
    return {Process(child, of[1]) for child, of in statuses.items() if of and of[0] == pid}


def family(processes: set[Process]) -> set[Process]:
    """Return these processes and all their descendants."""
    started = {parent: children(parent.pid) for parent in processes}
    below = set().union(*(some for parent, some in started.items() if parent.is_there))
    return processes | (family(below) if below else set())


def end(processes: set[Process]) -> None:
    """Kill these processes; never a later process with the number of one of them."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            try:
                descriptor = os.pidfd_open(process.pid)  # keeps the number from passing to another
            except (AttributeError, OSError) as error:
                if getattr(error, "errno", ENOSYS) != ENOSYS:
                    raise
                if process.is_there:  # before Linux 5.3: it might pass right now
                    os.kill(process.pid, signal.SIGKILL)
                continue
            try:
                if process.is_there:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def main(directory: str, *processes: str) -> None:
    """Wait until the process at the other end of stdin ends; then end the cluster."""
    first = {Process(*map(int, words.split(":"))) for words in processes}
    cluster = set(first)
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        cluster |= family(first)
    end(cluster)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
