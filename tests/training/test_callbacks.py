"""Callbacks: what they see, how they stop a run, and what is left if one fails."""

import pytest
from refused import refuses

import fedsim
from fedsim.run import visible

SETTINGS = {"epsilon": 8.0, "num_steps": 4, "batch_size": 12, "max_length": 24, "model": "micro"}
SETTINGS |= {"engine": "local", "strategy": "scan", "rows_per_pass": 2, "eval_examples": 8}
SETTINGS |= {"eval_every": 1, "seed": 3, "checkpoint_every": 2, "log_to": []}
POSTS = [{"user_id": f"user {i % 40}", "text": f"post {i}"} for i in range(120)]


class Recorder(fedsim.Callback):
    """Keeps all calls. Stops the run, or fails, at a step."""

    def __init__(self, stop=0, fail=0):
        self.calls, self._stop, self._fail = [], stop, fail

    def on_run_begin(self, plan, step):
        self.calls.append(("begin", step, plan))

    def on_step(self, step, metrics):
        self.calls.append(("step", step, metrics))
        if step == self._fail:
            raise ZeroDivisionError
        return step == self._stop

    def on_evaluate(self, step, metrics):
        self.calls.append(("evaluate", step, metrics))

    def on_run_end(self, summary):
        self.calls.append(("end", summary["steps_done"], summary))

    def steps(self, event):
        return [step for name, step, _ in self.calls if name == event]

    def seen(self, event):
        return [what for name, _, what in self.calls if name == event]


class Curious(Recorder):
    reads_non_private = True


def train(run_dir, *callbacks, **changed):
    given = {**SETTINGS, "run_dir": run_dir, "callbacks": callbacks, **changed}
    return fedsim.train("uls", POSTS, **given)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A whole run, and the callback that watched it."""
    recorder = Recorder()
    return train(tmp_path_factory.mktemp("watched") / "run", recorder), recorder


def test_every_event_is_told_in_its_order(watched):
    run, recorder = watched
    assert recorder.steps("begin") == [0] and recorder.steps("end") == [4]
    assert recorder.steps("step") == [1, 2, 3, 4] and recorder.steps("evaluate") == [0, 1, 2, 3, 4]
    order = [name for name, _, _ in recorder.calls]
    assert order[0] == "begin" and order[-1] == "end"
    assert recorder.seen("begin") == [run.stored.plan.as_dict()]


@pytest.mark.privacy
def test_a_callback_sees_what_anyone_may_see(watched):
    run, recorder = watched
    seen = [*recorder.seen("step"), *recorder.seen("evaluate")]
    assert all(visible(run.stored.plan, metrics) == metrics for metrics in seen)
    epsilons = [metrics["privacy/epsilon"] for metrics in recorder.seen("step")]
    assert sorted(epsilons) == epsilons and epsilons[-1] == pytest.approx(run.epsilon)
    (summary,) = recorder.seen("end")
    hidden = {"final_eval_loss", "initial_eval_loss", "gradients_computed", "wall_seconds"}
    assert run.summary.keys() - summary.keys() == hidden | {"num_examples"}
    assert {*run.summary["private_fields"]} == hidden | {"num_examples"}


@pytest.mark.privacy
def test_one_that_sees_more_is_named_in_the_plan_and_cannot_come_later(watched, run_dir, tmp_path):
    curious = Curious(stop=2)
    run = train(run_dir, curious)
    assert "non_private/loss" in curious.seen("step")[0] and "eval/loss" in curious.seen("step")[0]
    assert "eval/loss" in curious.seen("evaluate")[0]
    (fact,) = (fact for fact in run.summary["non_private"] if fact["of"] == "Curious")
    report = run.report(tmp_path)
    assert "Curious" in (tmp_path / "report.md").read_text() and report["claim"]
    assert train(run_dir, Curious(), resume=True).finished  # known to the plan
    with refuses("callbacks=Curious"):
        train(watched[0].run_dir, Curious(), resume=True)


def test_one_that_returns_true_stops_the_run_which_goes_on_from_there(watched, run_dir):
    stopped = train(run_dir, Recorder(stop=2))
    assert not stopped.finished and stopped.summary["steps_done"] == 2
    assert stopped.epsilon == watched[0].epsilon  # that of all planned steps
    again = Recorder()
    done = train(run_dir, again, resume=True)
    assert again.steps("begin") == [2] and again.steps("step") == [3, 4]
    assert (done.summary["steps_done"], done.summary["lost_steps"]) == (4, 0)


@pytest.mark.parametrize("step", [1, 3])
def test_one_that_fails_leaves_a_run_that_goes_on(step, watched, run_dir):
    with pytest.raises(ZeroDivisionError):
        train(run_dir, Recorder(fail=step))
    done = train(run_dir, resume=True)
    assert done.finished and done.summary["lost_steps"] == 1  # it had no checkpoint yet
    assert all(check.holds for check in done.verify())
