"""Ends what is left of a private cluster when the process that started it is killed.

A program of its own, `python warden.py DIRECTORY PID ...`, that needs nothing but Python. Its input
is a pipe which only that process holds, so it ends when the process does, however that comes. Ray
ends most of a cluster itself then; the agents of a node look for its head for a minute, and the
directory stays.
"""

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

LOOK_S = 2.0  # between two looks at who belongs to the cluster


def children(pid: int) -> set[int]:
    """The processes that a process has started and that have not ended."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has just ended
        return set()
    return {int(child) for line in lists for child in line.split()}


def family(pids: set[int]) -> set[int]:
    """These processes, what they have started, and so on."""
    found = set().union(*map(children, pids))
    return pids | (family(found) if found else set())


def end(pids: set[int], session: int) -> None:
    """Kill those of these processes that are there, and still of this session."""
    for pid in pids:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)


def main(directory: str, *pids: str) -> None:
    """Wait for the end of the process that has the other end of stdin; then clear up."""
    first = {int(pid) for pid in pids}
    known, session = set(first), os.getsid(min(first))
    while not select.select([sys.stdin], [], [], LOOK_S)[0]:
        known |= family(first)
    end(known, session)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
