"""Metrics of a run: `metrics.jsonl`, which is authoritative, and TensorBoard event files.

Metrics that are computed from private data without noise are named `non_private/...`.
"""

import json
import time
from pathlib import Path
from typing import Any

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore
    from tensorboard.plugins.hparams import summary_v2 as hparams
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ModuleNotFoundError:  # then metrics.jsonl alone is written
    EventFileWriter = None

from fedsim.config import to_json
from fedsim.errors import FileDamaged
from fedsim.files import named, whole_lines, write_atomically

FILE = "metrics.jsonl"
DIRECTORY = "tb"


class Metrics:
    """Writes metrics to both places. Steps that are repeated after a crash replace their
    metrics."""

    def __init__(self, run_dir: Path, last_step: int = -1):
        """Continue after `last_step`, and drop the metrics of later steps."""
        path = run_dir / FILE
        kept = [line for line in read(run_dir) if line["step"] <= last_step]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a")
        self._events = EventFileWriter and EventFileWriter(str(run_dir / DIRECTORY))
        if self._events:
            # Tells TensorBoard to drop events of later steps, which an earlier process logged.
            self._add(last_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars, by name, after `step` steps."""
        record = {name: to_json(value) for name, value in values.items()}
        with named(Path(self._file.name)):
            self._file.write(json.dumps({"step": step, **record}) + "\n")
            self._file.flush()
        if not self._events:
            return
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=scalars))

    def table(self, name: str, values: dict[str, Any]) -> None:
        """Log names and values as a table."""
        if not self._events:
            return
        rows = "".join(f"| {key} | {value} |\n" for key, value in values.items())
        markdown = "| setting | value |\n|---|---|\n" + rows
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        value = Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._add(0, summary=Summary(value=[value]))

    def hparams(self, values: dict[str, Any]) -> None:
        """Log settings for TensorBoard's table of runs."""
        if not self._events:
            return
        shown = {
            k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()
        }
        self._add(0, summary=hparams.hparams_pb(shown))

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._events:
            self._events.close()

    def flush(self) -> None:
        """Write buffered events to TensorBoard's file."""
        if self._events:
            self._events.flush()

    def _add(self, step: int, **content: Any) -> None:
        assert self._events, "checked by the callers"
        self._events.add_event(Event(wall_time=time.time(), step=step, **content))


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All records of metrics.jsonl, each with its `step`.

    Raises:
      FileDamaged: a line is damaged.
    """
    lines = whole_lines(run_dir / FILE)
    if not all(isinstance(line.get("step"), int) for line in lines):
        raise FileDamaged(f"{run_dir / FILE}: expected a step in every line")
    return lines
