"""How long `train` and `recommend` take from Enter to the first step, phase by phase.

    SMOLLM2_GGUF=FILE python -m experiments.benchmarks.first_step [--quick] [--json]     (6 minutes)

With adapters of rank 8 on the model of the file (without one: `micro`, whole), on short texts of
forty users or those of --data, with a cache of its own, so that nothing is compiled and nothing
remembered; then again with what the first run left. Phases end with the lines that the commands
print, the first step with its line of the ledger. Wall-clock seconds are to be measured where
nothing else runs; processor seconds are those of the command and of all processes that it started,
Ray's among them. --quick measures `train` once and `recommend --plan-only`. --before TREE measures
each command with the fedsim of another tree, too, in turn.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from experiments.benchmarks.common import circumstances, parser_of
from experiments.benchmarks.first_line import write_texts
from experiments.harness import smollm2

STEPS = "--epsilon 4 --num-steps 2 --batch-size 32".split()
TRAIN = "train uls --eval-examples 64 --run-dir new --verbose --engine".split()
COMMANDS = {
    "train": [*TRAIN, "ray"],
    "train --engine local": [*TRAIN, "local"],
    "recommend": ["recommend", "--verbose"],
    "recommend --plan-only": ["recommend", "--plan-only"],
}
QUICK = "train", "recommend --plan-only"
OF_TRAINING = {
    "first line": "reading",
    "texts are tokenised": "sorted",
    "all settings are shown": "workers",
    "a way to compute the clipped sum is chosen": "gradient method",
    "both steps are done": "step 2/2",
}
PHASES = {
    "train": OF_TRAINING,
    "train --engine local": OF_TRAINING,
    "recommend": {"first line": "reading", "the answer": "Use "},
    "recommend --plan-only": {},
}
"""What has happened when a line begins so."""
ONCE = "texts are tokenised"  # which a second run does not say
TICKS = os.sysconf("SC_CLK_TCK")


class Timeline:
    """Phases of a command that runs, with the seconds since Enter at which each ended."""

    def __init__(self, process: subprocess.Popen, ledger: Path):
        """Args: ledger: has a second line once the first step is done."""
        self.rows: list[dict] = []
        self._process, self._ledger = process, ledger
        self._start, self._cpu = time.perf_counter(), 0.0
        self._watch = threading.Thread(target=self._until_it_ends)
        self._watch.start()

    def end(self, phase: str) -> None:
        """Note the end of a phase."""
        seconds = time.perf_counter() - self._start
        of_phase = {"seconds": round(seconds, 2), "cpu_seconds": round(self._cpu, 2)}
        self.rows.append({"phase": phase, **of_phase})

    def close(self) -> None:
        """Note the end of the command, which has ended."""
        self._watch.join()
        self.end("all")

    def _until_it_ends(self) -> None:
        stepped = False
        while self._process.poll() is None:
            self._cpu = max(self._cpu, cpu_seconds(self._process.pid))
            if not stepped and self._ledger.exists():
                if stepped := self._ledger.read_bytes().count(b"\n") > 2:
                    self.end("the first step is done")
            time.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process, its descendants, and those of them that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for file in tasks for child in file.read_text().split()]
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS + sum(map(cpu_seconds, children))


def phases(name: str, texts: Path, place: Path, tree: Path, *, again: bool) -> list[dict]:
    """Measure the phases of a command.

    Args:
      place: directory of its run and its cache.
      tree: directory with the package fedsim.
      again: a run with the same cache came before.
    """
    adapters = ["--model", "micro"]
    if smollm2.VARIABLE in os.environ:
        adapters = ["--model", str(smollm2.directory()), "--lora-rank", "8"]
    shutil.rmtree(place / "new", ignore_errors=True)
    found = {"FEDSIM_CACHE_DIR": str(place / name), "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli", *COMMANDS[name], *STEPS, "--data", texts, *adapters],
        cwd=place,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **found},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None, "a pipe"
        timeline = Timeline(process, place / "new" / "ledger.jsonl")
        left = {phase: x for phase, x in PHASES[name].items() if not (again and phase == ONCE)}
        for line in process.stdout:
            for phase in [phase for phase, begins in left.items() if line.startswith(begins)]:
                del left[phase]
                timeline.end(phase)
    timeline.close()
    if process.returncode != 0 or left:
        raise RuntimeError(f"{name}: exit code {process.returncode}, never seen: {list(left)}")
    return [{"command": name, "cache": "warm" if again else "cold", **x} for x in timeline.rows]


def main() -> None:
    parser = parser_of(__doc__, "less of it")
    parser.add_argument("--data", type=Path, help="texts with a column user_id")
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=[*COMMANDS])
    parser.add_argument("--cold", action="store_true", help="no second run")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another tree with fedsim")
    args = parser.parse_args()
    names, cold = QUICK if args.quick else args.only, args.quick or args.cold
    trees = {"now": Path(__file__).parents[2]}
    if args.before:
        trees = {"before": args.before.absolute(), **trees}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for tree in trees:
            (Path(directory) / tree).mkdir()
        write_texts(Path(directory))
        texts = (args.data or Path(directory) / "texts.parquet").absolute()
        for name in names:
            for again in (False,) if cold else (False, True):
                for tree, path in trees.items():
                    found = phases(name, texts, Path(directory) / tree, path, again=again)
                    rows += [{"tree": tree, **row} for row in found]
    if args.json:
        model = Path(os.environ.get(smollm2.VARIABLE, "micro")).name
        print(json.dumps({**circumstances("fedsim", "jax"), "model": model, "rows": rows}))
        return
    for row in rows:
        where = f"{row['tree']:6} {row['command']:22} {row['cache']}"
        print(f"{where} {row['seconds']:6.1f} s {row['cpu_seconds']:6.1f} s  {row['phase']}")


if __name__ == "__main__":
    main()
