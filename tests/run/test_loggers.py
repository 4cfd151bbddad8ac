"""Which metrics leave the machine, and what the loggers do with them."""

import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
from refused import refuses

import fedsim
from fedsim.run import loggers, may_leave, open_loggers, visible

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


class Recorder:
    """A logger that keeps what it gets, and fails at a step."""

    def __init__(self, *given, fails_at=math.inf):
        self.given, self.seen, self.closed, self._fails_at = given, [], False, fails_at

    def log(self, step, values):
        if step == self._fails_at:
            raise OSError("no\nroute")
        self.seen.append((step, values))

    def flush(self):
        pass

    def close(self):
        self.closed = True


def opened(monkeypatch, stored, recorder, notes, **changed):
    monkeypatch.setattr(loggers, "WandB", lambda *given: recorder(*given))
    run = fedsim.config.changed_run(stored.run, log_to=["wandb"], **changed)
    tables = {"plan": {"delta": 0.1}, "run": {"data": "secret"}, "hparams": {"model": "micro"}}
    return open_loggers(run, stored.plan, tables, "ab" * 32, -1, notes.append)


@pytest.mark.privacy
@pytest.mark.parametrize("non_private", [False, True])
def test_a_logger_gets_the_plan_and_what_may_leave(non_private, stored, monkeypatch):
    found = []

    def recorder(*given):
        found.append(Recorder(*given))
        return found[-1]

    (logger,) = opened(monkeypatch, stored, recorder, [], log_non_private=non_private)
    logger.log(1, {"privacy/epsilon": 1.0, "non_private/loss": 2.0, "eval/loss": 3.0})
    logger.log(2, {"non_private/loss": 2.0})
    seen = [(step, sorted(values)) for step, values in found[0].seen]
    every = ["eval/loss", "non_private/loss", "privacy/epsilon"]
    assert seen == (
        [(1, every), (2, ["non_private/loss"])] if non_private else [(1, ["privacy/epsilon"])]
    )
    _, name, identity, settings = found[0].given
    assert name == "run-ababab" and identity == "ab" * 32
    assert settings == {"delta": 0.1, "model": "micro"}


def test_a_logger_that_fails_is_named_and_left_out(stored, monkeypatch):
    notes, recorder = [], Recorder(fails_at=2)
    (logger,) = opened(monkeypatch, stored, lambda *_: recorder, notes)
    for step in range(1, 5):
        logger.log(step, {"privacy/epsilon": 1.0})
    logger.close()
    assert [step for step, _ in recorder.seen] == [1]
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
    loggers.WandB(tmp_path, "run-ab", "ab" * 32, {"delta": 0.1})
    off = {name for name, value in given["settings"].items() if value is True}
    assert {"disable_code", "disable_git", "x_disable_meta", "x_disable_stats"} <= off
    assert "x_disable_machine_info" in off and given["settings"]["console"] == "off"
    assert (given["id"], given["resume"], given["project"]) == ("ab" * 8, "allow", "fedsim")
    assert not (tmp_path / "wandb" / "log").is_symlink()  # with a link, the run is not resumed


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.mark.privacy
@pytest.mark.parametrize("non_private", [False, True])
def test_the_plan_says_what_a_logger_gets(non_private, run_dir, monkeypatch, capsys):
    recorder = Recorder()
    monkeypatch.setattr(loggers, "WandB", lambda *_: recorder)
    monkeypatch.setattr(loggers, "expect_loggers", lambda _: None)
    monkeypatch.setattr("fedsim.training.launch.expect_loggers", lambda _: None)
    settings = {**TINY, "log_to": ["wandb"], "run_dir": run_dir}
    run = fedsim.train("uls", POSTS, log_non_private=non_private, **settings)
    names = {name for _, values in recorder.seen for name in values}
    fact = "metrics computed from private data without noise, which wandb gets (log_non_private)"
    assert (fact in run.summary["non_private"]) == non_private
    assert any(name.startswith("non_private/") for name in names) == non_private
    assert "privacy/epsilon" in names and recorder.closed and not (run_dir / "tb").exists()
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
