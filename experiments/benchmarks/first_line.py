"""How long every command takes from Enter to its first line, on standard output or standard error.

    python -m experiments.benchmarks.first_line [--quick] [--json]     (5 minutes; quick: 45 s)

Each command is a process of its own on a small made-up data set and a run of four steps; it is
killed once its first line is there. `cpu` are the seconds that it computed until then: on a busy
machine they are the ones to read. --quick measures each once instead of five times.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.benchmarks.common import at_most, circumstances, parser_of

SHORT = (
    "--epsilon 8 --num-steps 4 --batch-size 8 --max-length 24 --model micro --engine local".split()
)
ACCOUNT = "--num-steps 100 --sampling-prob 0.01 --delta 1e-6".split()
COMMANDS = {
    "train": ["train", "uls", "--data", "texts.parquet", "--run-dir", "new", *SHORT],
    "evaluate": ["evaluate", "run"],
    "generate": ["generate", "run"],
    "export": "export run --out exported".split(),
    "audit": ["audit", "uls", "--data", "texts.parquet", "--run-dir", "new", *SHORT],
    "budget": ["budget", "built"],
    "report": ["report", "run"],
    "verify": ["verify", "run"],
    "account": ["account", "uls", *ACCOUNT, "--noise-multiplier", "1"],
    "calibrate": ["calibrate", "uls", *ACCOUNT, "--epsilon", "4"],
    "recommend": "recommend --data built --epsilon 4 --num-steps 9 --engine local".split(),
    "select": "select --out s --dry-run --set algorithm=uls --set data=built --set epsilon=4 "
    "--set num_steps=2".split(),
    "data build": "data build texts.parquet --out other".split(),
    "data stats": ["data", "stats", "built"],
    "a mistake": ["tran", "uls"],
    "train --help": ["train", "--help"],
}
BOUND_S = 2.0


def write_texts(place: Path) -> None:
    """Texts of forty users."""
    users = [f"user {i % 40}" for i in range(400)]
    texts = [f"the text number {i} of somebody who wrote it" for i in range(400)]
    pq.write_table(pa.table({"user_id": users, "text": texts}), place / "texts.parquet")


def prepared(place: Path) -> None:
    """Texts, a data set built of them, and a run."""
    write_texts(place)
    call: dict[str, Any] = {"cwd": place, "check": True, "capture_output": True}
    train = ["train", "uls", "--data", "texts.parquet", "--run-dir", "run", *SHORT]
    for words in (["data", "build", "texts.parquet", "--out", "built"], train):
        subprocess.run([sys.executable, "-m", "fedsim.cli", *words], **call)


def first_line(words: list[str], place: Path) -> tuple[float, float, str]:
    """Seconds, and seconds of computing, until a command's first line, and the line."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None, "a pipe"
    line = process.stdout.readline()
    seconds = time.perf_counter() - start
    process.kill()
    _, _, used = os.wait4(process.pid, 0)
    process.stdout.close()
    return seconds, used.ru_utime + used.ru_stime, line.decode(errors="replace").strip()


def measured(repeats: int) -> list[dict]:
    """Medians of each command."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        prepared(place)
        for name, words in COMMANDS.items():
            found = [first_line(words, place) for _ in range(repeats)]
            seconds, cpu, lines = zip(*found, strict=True)
            row = {"command": name, "seconds": statistics.median(seconds)}
            rows.append({**row, "cpu": statistics.median(cpu), "line": lines[0]})
    return rows


def main() -> None:
    args = parser_of(__doc__, "each command once").parse_args()
    rows = measured(1 if args.quick else 5)
    slowest = max(rows, key=lambda row: row["cpu"])
    bars = [at_most("seconds of computing before a first line", slowest["cpu"], BOUND_S)]
    if args.json:
        print(
            json.dumps({**circumstances("fedsim", "pydantic", "rich"), "rows": rows, "bars": bars})
        )
        return
    for row in rows:
        print(f"{row['command']:13} {row['seconds']:5.2f} s {row['cpu']:5.2f} s  {row['line']}")
    print(f"slowest: {slowest['command']}, {slowest['cpu']:.2f} s of computing")


if __name__ == "__main__":
    main()
