"""Memory and CPUs that this process may use: the machine's, or less in a control group, by which
Linux limits containers."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""File and directory of the kernel."""
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group of version 2 and 1: its limit, its use, and, in memory.stat, the cached
files in it, which the kernel drops when memory is wanted."""


def free_memory(
    meminfo: Path = Path("/proc/meminfo"),
    membership: Path = MEMBERSHIP,
    top: Path = GROUPS,
) -> int:
    """Return the free bytes of memory: of the machine, or of this process's container if less.

    Args:
      meminfo, membership, top: files and directory of the kernel.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if found := re.search(r"MemAvailable:\s*(\d+) kB", _text(meminfo)):
        available = int(found[1]) * 1024
    return min([available, *_free_in_groups(_text(membership), top)])


def _free_in_groups(membership: str, top: Path) -> list[int]:
    """Free bytes of each control group that limits this process's memory."""
    found = []
    for place in _groups(membership, top, "memory"):
        for limit, used, cached in LIMITS:
            most, now = _text(place / limit).strip(), _text(place / used).strip()
            if most.isdecimal() and now.isdecimal():
                kept = re.search(rf"^{cached} (\d+)$", _text(place / "memory.stat"), re.M)
                found.append(int(most) - int(now) + int(kept[1] if kept else 0))
    return found


def cpus(membership: Path = MEMBERSHIP, top: Path = GROUPS) -> int:
    """Return the number of CPUs that this process may use: those it may run on, or the quota of
    its container, rounded up, if that is less.

    Args:
      membership, top: file and directory of the kernel.
    """
    found = [float(len(os.sched_getaffinity(0)))]
    for place in _groups(_text(membership), top, "cpu"):
        quota, _, period = _text(place / "cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota = _text(place / "cpu.cfs_quota_us").strip()
            period = _text(place / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return max(1, math.ceil(min(found)))


def _groups(membership: str, top: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups of a controller, and those above."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = top / controller if controllers else top
        group = root / path.lstrip("/")
        yield from (place for place in (group, *group.parents) if place.is_relative_to(root))


def _text(path: Path) -> str:
    """Content of a file of the kernel; empty if there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
