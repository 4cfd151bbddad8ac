"""What evaluations with noise released: `evaluations.jsonl`, a line for each, never changed.

A run that goes on after a crash evaluates some steps again. Were their parameters other bits, on
another host or with other packages, a second loss under the same noise would give the difference of
the two away. So a loss is written down before anyone sees it, and never computed twice.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from fedsim.errors import FileDamaged
from fedsim.files import remove_cut_off_line, sync_directory, whole_lines

FILE = "evaluations.jsonl"


class Evaluated:
    """The evaluations of a run, by step."""

    def __init__(self, run_dir: Path):
        """Raises: FileDamaged."""
        self._path = run_dir / FILE
        self.losses: dict[int, float] = {}
        for line in whole_lines(self._path):
            step, loss = line.get("step"), line.get("loss")
            if not isinstance(step, int) or not isinstance(loss, float) or step in self.losses:
                raise FileDamaged(f"{self._path}: expected a step, once, and its loss in each line")
            self.losses[step] = loss

    def release(self, step: int, compute: Callable[[], float]) -> float:
        """The loss after `step`: what was released of it, or what is computed now, durable."""
        if step not in self.losses:
            loss = compute()
            remove_cut_off_line(self._path)
            is_new = not self._path.exists()
            with open(self._path, "a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if is_new:
                sync_directory(self._path.parent)
            self.losses[step] = loss
        return self.losses[step]
