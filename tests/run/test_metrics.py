"""Two sinks that agree: metrics.jsonl and what TensorBoard reads back."""

import itertools
import json
import math

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from fedsim.run import metrics
from fedsim.run.metrics import Metrics
from fedsim.training.loggers import LoggedRun, TensorBoard


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A second goes by at every look, as between a run and its resumption."""
    seconds = itertools.count(1_700_000_000.0)
    monkeypatch.setattr("time.time", lambda: next(seconds))


def values(step):
    """Metrics of a step; the last comes at every second step only."""
    found = {"privacy/epsilon": step / 7, "non_private/loss": -math.log(1 + step)}
    return found | ({"eval/loss": 10.0 - step} if step % 2 == 0 else {})


class Sinks:
    """The file of metrics and a board, which get the same."""

    def __init__(self, directory, last_step=-1, **settings):
        self.file = Metrics(directory, last_step)
        run = LoggedRun(directory, "ab" * 32, last_step, settings)
        self.board = TensorBoard("tensorboard", run, pytest.fail, True)

    def log(self, step, values):
        self.file.log(step, values)
        self.board.log(step, values)

    def close(self):
        self.file.close()
        self.board.close()


def log(directory, steps, last_step=-1):
    """One process that logs these steps."""
    sink = Sinks(directory, last_step)
    for step in steps:
        sink.log(step, values(step))
    sink.close()


def board(directory):
    """What TensorBoard knows of a run."""
    accumulator = EventAccumulator(str(directory / "tb"), size_guidance={"scalars": 0})
    return accumulator.Reload()


def scalars(directory):
    """{name: [(step, value), ...]} from TensorBoard."""
    events = board(directory)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def recorded(directory):
    """The same from metrics.jsonl, rounded as TensorBoard rounds."""
    found = {}
    for line in metrics.read(directory):
        step = line.pop("step")
        for name, value in line.items():
            found.setdefault(name, []).append((step, float(np.float32(value))))
    return found


def test_both_sinks_have_every_value(tmp_path):
    log(tmp_path, range(6))
    assert metrics.read(tmp_path) == [{"step": step, **values(step)} for step in range(6)]
    assert scalars(tmp_path) == recorded(tmp_path)
    assert [step for step, _ in scalars(tmp_path)["eval/loss"]] == [0, 2, 4]


def test_values_that_are_not_finite_are_in_both(tmp_path):
    sink = Sinks(tmp_path)
    sink.log(1, {"epsilon": math.inf, "loss": math.nan})
    sink.close()
    (line,) = metrics.read(tmp_path)
    assert (line["epsilon"], line["loss"]) == ("inf", "nan")  # JSON has no such numbers
    found = scalars(tmp_path)
    assert found["epsilon"] == [(1, math.inf)] and math.isnan(found["loss"][0][1])


def test_steps_that_are_run_again_replace_what_was_logged_of_them(tmp_path):
    log(tmp_path, range(9))
    log(tmp_path, range(5, 7), last_step=4)
    assert [line["step"] for line in metrics.read(tmp_path)] == list(range(7))
    found = scalars(tmp_path)
    assert found == recorded(tmp_path)
    assert [step for step, _ in found["non_private/loss"]] == list(range(7))


def test_tensorboard_forgets_later_steps_before_they_are_run_again(tmp_path):
    log(tmp_path, range(9))
    log(tmp_path, [], last_step=4)
    assert [step for step, _ in scalars(tmp_path)["non_private/loss"]] == list(range(5))
    assert scalars(tmp_path) == recorded(tmp_path)


def test_a_run_that_starts_over_keeps_nothing(tmp_path):
    log(tmp_path, range(4))
    log(tmp_path, range(2))
    assert [line["step"] for line in metrics.read(tmp_path)] == [0, 1]
    assert scalars(tmp_path) == recorded(tmp_path)


def test_a_run_that_goes_on_within_the_second_keeps_what_was_logged(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    # Files of one second are read in the order of this number as text: 10 would come before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    log(tmp_path, range(5))
    log(tmp_path, range(3, 6), last_step=2)
    assert scalars(tmp_path) == recorded(tmp_path)
    assert [step for step, _ in scalars(tmp_path)["non_private/loss"]] == list(range(6))


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    log(tmp_path, range(3))
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 3, "non_pri')
    log(tmp_path, [3], last_step=2)
    assert [line["step"] for line in metrics.read(tmp_path)] == [0, 1, 2, 3]


def test_a_line_is_in_the_file_when_log_returns(tmp_path):
    sink = Sinks(tmp_path)
    sink.log(1, {"a": 1.0})
    assert json.loads((tmp_path / metrics.FILE).read_text()) == {"step": 1, "a": 1.0}
    sink.close()


def test_a_step_is_on_the_board_while_the_run_goes_on(tmp_path):
    sink = Sinks(tmp_path)
    sink.log(1, {"a": 1.0})
    assert scalars(tmp_path) == {"a": [(1, 1.0)]}
    sink.close()


def test_settings_outlive_a_resumption(tmp_path):
    for last_step in (-1, 4):
        Sinks(tmp_path, last_step, model="tiny").close()
    tags = board(tmp_path).PluginTagToContent("hparams")
    assert any("session_start_info" in tag for tag in tags)
