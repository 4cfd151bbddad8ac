"""Metrics of a run: `metrics.jsonl`, which has all of them, and those that anyone may see.

Metrics that are computed from private data without noise are named `non_private/...`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsim.config import to_json
from fedsim.errors import FileDamaged
from fedsim.files import named, whole_lines, write_atomically
from fedsim.plan import Plan

FILE = "metrics.jsonl"
BOARD = "tb"
"""Directory of TensorBoard's files in that of a run."""
SENDING = frozenset({"wandb", "mlflow", "trackio"})
"""Loggers that can send what they get to another machine."""


class Metrics:
    """Writes metrics to the file."""

    def __init__(self, run_dir: Path, last_step: int = -1):
        """Continue after `last_step`, and drop the metrics of later steps."""
        path = run_dir / FILE
        kept = [line for line in read(run_dir) if line["step"] <= last_step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars, by name, after `step` steps."""
        record = {name: to_json(value) for name, value in values.items()}
        with named(Path(self._file.name)):
            self._file.write(json.dumps({"step": step, **record}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, each with its `step`. Raises FileDamaged: a line is damaged."""
    lines = whole_lines(run_dir / FILE)
    if not all(isinstance(line.get("step"), int) for line in lines):
        raise FileDamaged(f"{run_dir / FILE}: expected a step in every line")
    return lines


def visible(plan: Plan, values: Mapping[str, float]) -> dict[str, float]:
    """Those of a run's metrics that everyone may see.

    They follow from public numbers or were released with noise. The name of a loss on held-out
    users is the same with noise and without: the plan tells.
    """
    names = {"learning_rate", "privacy/epsilon"}
    names |= {"privacy/clip_norm", "privacy/loss"} if plan.noise_multiplier else set()
    names |= {"eval/loss"} if plan.evaluations else set()
    return {name: value for name, value in values.items() if name in names}
