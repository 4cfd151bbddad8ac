"""The control groups of this process, by which Linux limits what a container may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""File and directory of the kernel."""


def groups(membership: str, top: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups of a controller, and those above.

    Args:
      membership: content of the file MEMBERSHIP.
      top: the directory of all groups.
      controller: memory or cpu.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = top / controller if controllers else top
        group = root / path.lstrip("/")
        yield from (place for place in (group, *group.parents) if place.is_relative_to(root))


def cpus(membership: Path = MEMBERSHIP, top: Path = GROUPS) -> int:
    """Return the number of CPUs that this process may use: those it may run on, or the quota of
    its container, rounded up, if that is less.

    Args:
      membership, top: file and directory of the kernel.
    """
    found = [float(len(os.sched_getaffinity(0)))]
    for place in groups(text(membership), top, "cpu"):
        quota, _, period = text(place / "cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota = text(place / "cpu.cfs_quota_us").strip()
            period = text(place / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return max(1, math.ceil(min(found)))


def text(path: Path) -> str:
    """Content of a file of the kernel; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
