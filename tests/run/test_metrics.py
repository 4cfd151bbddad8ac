"""The file of all metrics of a run."""

import json
import math

from fedsim.run import metrics
from fedsim.run.metrics import Metrics


def log(directory, steps, last_step=-1):
    """One process that logs these steps."""
    file = Metrics(directory, last_step)
    for step in steps:
        file.log(step, {"privacy/epsilon": step / 7})
    file.close()


def steps_of(directory):
    """The steps in the file."""
    return [line["step"] for line in metrics.read(directory)]


def test_values_that_are_not_finite_are_text_and_in_the_file_when_log_returns(tmp_path):
    Metrics(tmp_path).log(1, {"epsilon": math.inf, "loss": math.nan, "a": 1.0})
    line = json.loads((tmp_path / metrics.FILE).read_text())
    assert line == {"step": 1, "epsilon": "inf", "loss": "nan", "a": 1.0}


def test_a_run_that_continues_replaces_what_was_logged_of_later_steps(tmp_path):
    log(tmp_path, range(9))
    log(tmp_path, range(5, 7), last_step=4)
    assert steps_of(tmp_path) == [*range(7)]
    log(tmp_path, range(2))
    assert steps_of(tmp_path) == [0, 1]


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path):
    log(tmp_path, range(3))
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 3, "non_pri')
    log(tmp_path, [3], last_step=2)
    assert steps_of(tmp_path) == [0, 1, 2, 3]
