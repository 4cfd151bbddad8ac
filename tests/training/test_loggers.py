"""Which metrics leave the machine, and what the loggers do with them."""

import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
from refused import refuses

import fedsim
from fedsim.run import may_leave, visible
from fedsim.training import loggers
from fedsim.training.callbacks import Calls
from fedsim.training.loggers import LoggedRun, Logger, open_loggers

TINY = {"epsilon": 8.0, "num_steps": 2, "batch_size": 12, "max_length": 24, "model": "micro"}
TINY |= {
    "engine": "local",
    "strategy": "scan",
    "rows_per_pass": 2,
    "eval_examples": 8,
    "log_every": 1,
}
TINY |= {"user": "author", "text": "body"}
POSTS = [{"author": f"zeta{i % 40}", "body": f"quagmire {i} zeppelin"} for i in range(120)]
PRIVATE = ["non_private/loss", "eval/loss", "performance/step_seconds"]
PRIVATE += ["performance/tokens_per_second", "non_private/norm_median", "performance/busy_share"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The plan and settings of a tiny run."""
    return fedsim.train(
        "uls", POSTS, run_dir=tmp_path_factory.mktemp("run") / "run", log_to=[], **TINY
    ).stored


# ---- What leaves --------------------------------------------------------------------------------


@pytest.mark.privacy
def test_only_what_anyone_may_see_leaves_the_machine(stored):
    allows = may_leave(stored.plan)
    assert not any(map(allows, PRIVATE))
    for name in ("privacy/epsilon", "privacy/loss", "privacy/clip_norm", "performance/workers"):
        assert allows(name)
    assert allows("learning_rate")


@pytest.mark.privacy
def test_without_noise_and_with_noisy_evaluations_other_metrics_leave(stored):
    fields = stored.plan.as_dict()
    bare = type(stored.plan).from_dict({**fields, "noise_multiplier": 0.0})
    assert may_leave(bare)("privacy/epsilon") and not may_leave(bare)("privacy/clip_norm")
    noisy = types.SimpleNamespace(noise_multiplier=1.0)
    noisy.evaluations = object()
    assert may_leave(noisy)("eval/loss") and not may_leave(noisy)("non_private/eval_examples_loss")


def test_what_a_cluster_shows_may_leave(stored):
    names = ["privacy/epsilon", "privacy/loss", "performance/worker_restarts"]
    names += ["performance/workers", "performance/redispatched_lanes"]
    assert [*visible(stored.plan, dict.fromkeys([*names, *PRIVATE], 1.0))] == names


@pytest.mark.privacy
def test_a_clip_norm_that_follows_the_data_without_noise_is_not_seen(stored):
    values = {"privacy/clip_norm": 0.3, "privacy/epsilon": math.inf}
    bare = type(stored.plan).from_dict({**stored.plan.as_dict(), "noise_multiplier": 0.0})
    assert visible(stored.plan, values) == values
    assert visible(bare, values) == {"privacy/epsilon": math.inf}


# ---- Loggers ------------------------------------------------------------------------------------


class Recorder(Logger):
    """A logger that keeps what it gets, and fails at a step."""

    fails_at = math.inf

    def start(self):
        self.seen, self.closed = [], False

    def log(self, step, metrics):
        if step == self.fails_at:
            raise OSError("no\nroute")
        self.seen.append((step, sorted(metrics)))

    def finish(self):
        self.closed = True


@pytest.fixture
def recorder(monkeypatch):
    """A class whose instances stand for a service, and the instance that was made last."""
    made = []

    class Kept(Recorder):
        def start(self):
            super().start()
            made.append(self)

    monkeypatch.setitem(loggers.CLASSES, "wandb", Kept)
    return made


def steps_of(stored, steps, notes, **changed):
    """Call the loggers of a run as `Trainer` does."""
    run = fedsim.config.changed_run(stored.run, log_to=["wandb"], **changed)
    logged = LoggedRun(run.run_dir, "ab" * 32, -1, {"delta": 0.1})
    with open_loggers(run, logged, notes.append) as opened:
        calls = Calls([], stored.plan)
        calls.add(opened)
        for step, values in steps:
            calls.step(step, values)


@pytest.mark.privacy
@pytest.mark.parametrize("non_private", [False, True])
def test_a_logger_gets_the_plan_and_what_may_leave(non_private, stored, recorder):
    steps = [(1, {"privacy/epsilon": 1.0, "non_private/loss": 2.0, "eval/loss": 3.0})]
    steps += [(2, {"non_private/loss": 2.0})]
    steps_of(stored, steps, [], log_non_private=non_private)
    every = [(1, ["non_private/loss", "privacy/epsilon"]), (2, ["non_private/loss"])]
    assert recorder[0].seen == (every if non_private else [(1, ["privacy/epsilon"])])
    assert recorder[0].run.name == "run-ababab"


def test_a_logger_that_fails_is_named_and_left_out(stored, recorder, monkeypatch):
    notes = []
    monkeypatch.setattr(Recorder, "fails_at", 2)
    steps_of(stored, [(step, {"privacy/epsilon": 1.0}) for step in range(1, 5)], notes)
    assert [step for step, _ in recorder[0].seen] == [1]
    assert notes == ["wandb gets no more metrics: OSError: no route"]


def test_of_weights_and_biases_all_that_looks_at_the_machine_is_off(tmp_path, monkeypatch):
    given = {}

    def init(**settings):
        given.update(settings)
        (tmp_path / "wandb").mkdir()
        (tmp_path / "wandb" / "log").symlink_to("/dev/null")
        return types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)

    module = types.SimpleNamespace(Settings=lambda **settings: settings, init=init)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    run = LoggedRun(tmp_path, "ab" * 32, -1, {"delta": 0.1})
    loggers.WandB("wandb", run, pytest.fail, False)
    off = {name for name, value in given["settings"].items() if value is True}
    assert {"disable_code", "disable_git", "x_disable_meta", "x_disable_stats"} <= off
    assert "x_disable_machine_info" in off and given["settings"]["console"] == "off"
    assert (given["id"], given["resume"], given["project"]) == ("ab" * 8, "allow", "fedsim")
    assert not (tmp_path / "wandb" / "log").is_symlink()  # with a link, the run is not resumed


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.mark.privacy
@pytest.mark.parametrize("non_private", [False, True])
def test_the_plan_says_what_a_logger_gets(non_private, run_dir, recorder, monkeypatch, capsys):
    monkeypatch.setattr("fedsim.training.launch.expect_loggers", lambda _: None)
    settings = {**TINY, "log_to": ["wandb"], "run_dir": run_dir}
    run = fedsim.train("uls", POSTS, log_non_private=non_private, **settings)
    names = {name for _, values in recorder[0].seen for name in values}
    fact = {"fact": "logger", "of": "wandb"}
    assert (fact in run.summary["non_private"]) == non_private
    assert any(name.startswith("non_private/") for name in names) == non_private
    assert "privacy/epsilon" in names and recorder[0].closed and not (run_dir / "tb").exists()
    sent = "wandb: all metrics" if non_private else "wandb: the plan, epsilon, and metrics with"
    assert sent in capsys.readouterr().err
    if not non_private:
        with refuses("log_non_private=True"):
            fedsim.train("uls", POSTS, log_non_private=True, resume=True, **settings)


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_without_a_network_files_have_no_metric_without_noise(kind, tmp_path, monkeypatch):
    """By the package itself, where it is installed."""
    pytest.importorskip(kind)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {**TINY, "log_to": [kind], "run_dir": str(tmp_path / "run")}
    script = f"import fedsim; fedsim.train('uls', {POSTS!r}, **{settings!r})"
    assert not subprocess.run([sys.executable, "-c", script]).returncode  # they start threads
    place = {"wandb": "run/wandb", "mlflow": "run/mlflow.db", "trackio": "trackio"}[kind]
    place = tmp_path / place
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    written = b"".join(Path(path).read_bytes() for path in files)
    assert b"privacy/epsilon" in written
    for word in (b"non_private/", b"eval/loss", b"step_seconds", b"quagmire", b"zeta"):
        assert word not in written, word
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_symlink()]
