"""The file of all metrics of a run."""

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


def test_a_run_that_continues_replaces_what_was_logged_of_later_steps(tmp_path):
    log(tmp_path, range(9))
    log(tmp_path, range(5, 7), last_step=4)
    assert steps_of(tmp_path) == [*range(7)]
    log(tmp_path, range(2))
    assert steps_of(tmp_path) == [0, 1]
