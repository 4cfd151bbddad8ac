"""How long `train` and `recommend` take from Enter to the first step, phase by phase.

    SMOLLM2_GGUF=FILE python -m experiments.benchmarks.first_step [--quick] [--json]     (2 minutes)

With adapters of rank 8 on the model of the file (without one: `micro`, whole), on short texts of
forty users, with a cache of its own, so that nothing is compiled and nothing remembered. Phases end
with the lines that the commands print; to be run where nothing else runs. --quick leaves the long
form of `recommend` out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.benchmarks.common import circumstances
from experiments.benchmarks.first_line import write_texts

STEPS = "--epsilon 4 --num-steps 2 --batch-size 32 --data texts.parquet".split()
COMMANDS = {
    "train": ["train", "uls", "--eval-examples", "64", "--run-dir", "new", "--verbose"],
    "recommend": ["recommend", "--verbose"],
    "recommend --plan-only": ["recommend", "--plan-only"],
}
PHASES = {
    "train": {
        "first line": "reading",
        "all settings are shown": "workers",
        "a way to compute the clipped sum is chosen": "gradient method",
        "both steps are done": "step 2/2",
    },
    "recommend": {"first line": "reading", "the answer": "Use "},
    "recommend --plan-only": {},
}
"""What has happened when a line begins so."""


def phases(name: str, place: Path) -> list[dict]:
    """Seconds since Enter at which the phases of a command ended."""
    model = os.environ.get("SMOLLM2_GGUF")
    adapters = ["--model", model, "--lora-rank", "8"] if model else ["--model", "micro"]
    start, rows = time.perf_counter(), []
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli", *COMMANDS[name], *STEPS, *adapters],
        cwd=place,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "FEDSIM_CACHE_DIR": str(place / name)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None, "a pipe"
    left = dict(PHASES[name])
    for line in process.stdout:
        for phase in [phase for phase, begins in left.items() if line.startswith(begins)]:
            del left[phase]
            rows.append(row(name, phase, time.perf_counter() - start))
    if process.wait() != 0 or left:
        raise RuntimeError(f"{name}: exit code {process.returncode}, never seen: {list(left)}")
    return [*rows, row(name, "all", time.perf_counter() - start)]


def row(command: str, phase: str, seconds: float) -> dict:
    """A number of the table."""
    return {"command": command, "phase": phase, "seconds": round(seconds, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the long `recommend`")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write_texts(place)
        names = [name for name in COMMANDS if not (args.quick and name == "recommend")]
        rows = [each for name in names for each in phases(name, place)]
    if args.json:
        model = Path(os.environ.get("SMOLLM2_GGUF", "micro")).name
        print(json.dumps({**circumstances("fedsim", "jax"), "model": model, "rows": rows}))
        return
    for each in rows:
        print(f"{each['command']:22} {each['seconds']:6.1f} s  {each['phase']}")


if __name__ == "__main__":
    main()
