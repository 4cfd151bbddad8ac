"""The data pipeline at the size of Stack Overflow.

    python -m experiments.benchmarks.data [--quick] [--json]     (20 minutes; quick: 30 s)

A made-up source of 135,818,730 short texts of 342,477 users is written, built with the tokenizer
`bytes` (17 tokens an example), and read by a process of its own. Times are warm: the files have
just been written. Memory is what the processes hold themselves (RssAnon), with pages of mapped
files beside it: those are the system's cache, shared by all processes. Needs 14 GB of disk; --quick
takes a hundredth of everything. Rows of other stores in the record are of a script that
docs/lab/performance.md names.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from experiments.benchmarks.common import at_most, parser_of, write
from experiments.data import synthetic
from fedsim.data import UserStore
from fedsim.keys import SecretKey
from fedsim.sampling import draw_groups

T = TypeVar("T")

COHORT, GROUP, POOLED, LENGTH = 4_096, 64, 4_096, 128


def write_source(directory: Path, shape: synthetic.Shape) -> dict:
    start = time.perf_counter()
    files = synthetic.write(directory, shape)
    size = sum(file.stat().st_size for file in files)
    return {"name": "write source", "bytes": size, "seconds": time.perf_counter() - start}


def build_store(source: Path, out: Path, *flags: str) -> dict:
    """The command as a person runs it, with more flags if any, its time and memory."""
    command = [sys.executable, "-m", "fedsim.cli.main", "data", "build", str(source / "*.parquet")]
    command += ["--out", str(out), "--eval-users", "0", "--no-eval-examples", "--json", *flags]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        peak = {"RssAnon": 0, "VmRSS": 0}
        watch = threading.Thread(target=_watch, args=(process, peak))
        watch.start()
        output, _ = process.communicate()
        watch.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    found = json.loads(output.splitlines()[-1])["splits"]["train"]
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {
        "name": "build",
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak["RssAnon"],
        "peak_memory_with_mapped_files_bytes": peak["VmRSS"],
        "bytes": size,
        **{key: found[key] for key in ("num_examples", "num_users", "num_tokens")},
        **found["examples_per_user"],
    }


def _watch(process: subprocess.Popen, peak: dict[str, int]) -> None:
    """The largest memory of a process and its children together."""
    while process.poll() is None:
        total = dict.fromkeys(peak, 0)
        for pid in _family(process.pid):
            for name, value in memory(pid).items():
                total[name] += value
        for name in peak:
            peak[name] = max(peak[name], total[name])
        time.sleep(0.3)


def _family(root: int) -> list[int]:
    found, left = [], [root]
    while left:
        found.append(left.pop())
        try:
            children = Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text()
            left += map(int, children.split())
        except OSError:
            pass
    return found


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes a process holds itself, and with its pages of mapped files."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {"RssAnon": 0, "VmRSS": 0}
    values = dict(line.split(":", 1) for line in lines)
    return {n: int(values.get(n, "0 kB").split()[0]) * 1024 for n in ("RssAnon", "VmRSS")}


def read_store(train: Path) -> dict:
    """Everything a step reads, in a fresh process."""
    command = [sys.executable, "-m", "experiments.benchmarks.data", "--read", str(train)]
    return json.loads(subprocess.check_output(command))


def reads(train: Path) -> dict:
    before = memory()
    opened, store = timed(lambda: UserStore(train), 1)
    rng, key = np.random.default_rng(0), SecretKey.create(seed=0)
    share = min(1.0, COHORT / store.num_users)

    def cohort() -> int:
        users = np.flatnonzero(rng.random(store.num_users) < share)
        rows = draw_groups(store.offsets, users, GROUP, key, 0)
        store.gather(rows.ravel(), LENGTH)
        return len(users)

    cohort_s, num_users = timed(cohort, 5)
    pooled_s, _ = timed(
        lambda: store.gather(rng.integers(0, store.num_examples, POOLED), LENGTH), 9
    )
    held = memory()["RssAnon"] - before["RssAnon"]
    scan_s, scanned = timed(
        lambda: sum(len(lengths) for lengths, _ in store.blocks(0, store.num_examples)), 1
    )
    return {
        "name": "read",
        "open_s": opened,
        "cohort_s": cohort_s,
        "cohort_users": num_users,
        "pooled_s": pooled_s,
        "memory_bytes": held,
        "scan_examples_per_s": scanned / scan_s,
    }


def timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median seconds, and the last result."""
    seconds, values = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        values = [call()]
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), values[0]


def bars(rows: list[dict], quick: bool) -> list[dict]:
    found = {row["name"]: row for row in rows}
    built, read = found["build"], found["read"]
    limits = [
        at_most("build, s", built["seconds"], 720),
        at_most("build, memory, GB", built["peak_memory_bytes"] / 1e9, 3),
        at_most("open, s", read["open_s"], 0.3),
        at_most("cohort of 4,096 users x 64 rows, s", read["cohort_s"], 1),
        at_most("4,096 pooled examples, s", read["pooled_s"], 0.5),
        at_most("memory of a reader, MB", read["memory_bytes"] / 1e6, 200),
    ]
    if not quick:
        limits.append(at_most("store, GB", built["bytes"] / 1e9, 10))
    return limits


def main() -> None:
    parser = parser_of(__doc__, "a hundredth of it")
    parser.add_argument("--directory", help="where to work; default: a temporary directory")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(reads(arguments.read)))
        return
    shape = synthetic.STACK_OVERFLOW
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        source, out = directory / "source", directory / "built"
        rows = [write_source(source, shape.scaled(0.01) if arguments.quick else shape)]
        rows += [build_store(source, out), read_store(out / "train")]
    for row in rows:
        print(row, file=sys.stderr)
    found, packages = bars(rows, arguments.quick), ("numpy", "pyarrow")
    write(found, packages, arguments.json, rows=rows)


if __name__ == "__main__":
    main()
