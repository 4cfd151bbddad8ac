"""Metrics of a run: `metrics.jsonl`, which is authoritative, and the loggers.

Metrics that are computed from private data without noise are named `non_private/...`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.config import to_json
from fedsim.errors import FileDamaged
from fedsim.files import named, whole_lines, write_atomically
from fedsim.run.loggers import MetricLogger

FILE = "metrics.jsonl"


class Metrics:
    """Writes metrics to the file, and gives them to the loggers. Steps that are repeated after a
    crash replace their metrics."""

    def __init__(self, run_dir: Path, last_step: int = -1, loggers: Sequence[MetricLogger] = ()):
        """Continue after `last_step`, and drop the metrics of later steps."""
        path = run_dir / FILE
        kept = [line for line in read(run_dir) if line["step"] <= last_step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file, self.loggers = open(path, "a"), loggers

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars, by name, after `step` steps."""
        record = {name: to_json(value) for name, value in values.items()}
        with named(Path(self._file.name)):
            self._file.write(json.dumps({"step": step, **record}) + "\n")
            self._file.flush()
        for logger in self.loggers:
            logger.log(step, values)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        for logger in self.loggers:
            logger.close()

    def flush(self) -> None:
        """Have the loggers write what they buffer."""
        for logger in self.loggers:
            logger.flush()


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, each with its `step`.

    Raises:
      FileDamaged: a line is damaged.
    """
    lines = whole_lines(run_dir / FILE)
    if not all(isinstance(line.get("step"), int) for line in lines):
        raise FileDamaged(f"{run_dir / FILE}: expected a step in every line")
    return lines
