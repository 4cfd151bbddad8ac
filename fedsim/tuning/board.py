"""Rows of TensorBoard's table of runs, for a sweep."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

Value = bool | int | float | str

_api: Any = api_pb2  # generated: type checkers do not see what is in them
_messages: Any = plugin_data_pb2


def write_session(
    directory: Path,
    settings: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    *,
    succeeded: bool = True,
) -> None:
    """Write a row of TensorBoard's table of runs: settings, and metrics step by step.

    Replaces an earlier row. TensorBoard makes the columns from all rows below its directory.
    Args: records: values by metric name, each with its `step`.
    """
    shutil.rmtree(directory, ignore_errors=True)
    shown = {name: _shown(value) for name, value in settings.items()}
    events = [Event(wall_time=time.time(), summary=summary_v2.hparams_pb(shown))]
    for record in records:
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if name != "step" and value is not None
        ]
        step = int(record["step"])
        events.append(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    status = _api.Status.Value("STATUS_SUCCESS" if succeeded else "STATUS_FAILURE")
    end = _messages.SessionEndInfo(end_time_secs=time.time(), status=status)
    content = _messages.HParamsPluginData(session_end_info=end)
    # The library's own function for it wants TensorFlow.
    tagged = summary_v2._summary_pb(metadata.SESSION_END_INFO_TAG, content)
    events.append(Event(wall_time=time.time(), summary=tagged))
    _write(directory, events)


def _shown(value: Any) -> Value:
    """Whole numbers as floats, since a column has one type."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    return "default" if value is None else str(value)


def _write(directory: Path, events: Sequence[Event]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(directory))
    for event in events:
        writer.add_event(event)
    writer.close()
