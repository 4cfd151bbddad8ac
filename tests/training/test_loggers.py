"""Which metrics leave the machine, and what the loggers do with them."""

import math
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fedsim
from fedsim.run import visible
from fedsim.training import callbacks as loggers
from fedsim.training.callbacks import Calls

TINY = {"epsilon": 8.0, "num_steps": 2, "batch_size": 12, "max_length": 24, "model": "micro"}
TINY |= {"engine": "local", "strategy": "scan", "rows_per_pass": 2}
TINY |= {"eval_examples": 8, "user": "author", "text": "body"}
POSTS = [{"author": f"zeta{i % 40}", "body": f"quagmire {i} zeppelin"} for i in range(120)]
PRIVATE = ["non_private/loss", "eval/loss", "performance/step_seconds"]
PRIVATE += ["performance/tokens_per_second", "non_private/norm_median"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The plan and settings of a tiny run."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    return fedsim.train("uls", POSTS, run_dir=run_dir, log_to=[], **TINY).stored


# ---- What leaves --------------------------------------------------------------------------------


@pytest.mark.privacy
def test_only_what_anyone_may_see_leaves_the_machine(stored):
    public = ["privacy/epsilon", "privacy/loss", "privacy/clip_norm", "learning_rate"]
    assert [*visible(stored.plan, dict.fromkeys([*public, *PRIVATE], 1.0))] == public


@pytest.mark.privacy
def test_without_noise_and_with_noisy_evaluations_other_metrics_leave(stored):
    fields = stored.plan.as_dict()
    bare = type(stored.plan).from_dict({**fields, "noise_multiplier": 0.0})
    values = {"privacy/epsilon": 1.0, "privacy/clip_norm": 1.0}
    assert visible(bare, values) == {"privacy/epsilon": 1.0}
    noisy = types.SimpleNamespace(noise_multiplier=1.0, evaluations=object())
    losses = {"eval/loss": 1.0, "non_private/eval_examples_loss": 1.0}
    assert visible(noisy, losses) == {"eval/loss": 1.0}


# ---- Loggers ------------------------------------------------------------------------------------


class Recorder(loggers.Logger):
    """A logger that keeps what it gets, and fails at a step."""

    seen, ends, fails_at = [], 0, math.inf

    def on_run_begin(self, plan, step):
        type(self).seen, type(self).ends = [], 0

    def on_evaluate(self, step, metrics):
        if step == self.fails_at:
            raise OSError("no\nroute")
        self.seen.append((step, sorted(metrics)))

    def on_run_end(self, summary):
        type(self).ends += 1


def test_a_logger_that_fails_is_named_and_left_out(stored, monkeypatch):
    warnings = []
    monkeypatch.setattr(Recorder, "fails_at", 2)
    logger = Recorder(stored.run.run_dir, "ab" * 32, {})
    assert logger.name == "run-ababab"
    calls = Calls(stored.plan, [], [logger], warnings.append)
    calls.begin(0)
    for step in range(1, 5):
        calls.step(step, {"privacy/epsilon": 1.0})
    assert logger.seen == [(1, ["privacy/epsilon"])]
    assert warnings == ["no more metrics for Recorder: OSError: no route"]


@pytest.mark.privacy
def test_of_weights_and_biases_all_that_looks_at_the_machine_is_off(tmp_path, monkeypatch):
    given = {}
    module = types.SimpleNamespace(Settings=dict, init=lambda **settings: given.update(settings))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    loggers.WandB(tmp_path, "ab" * 32, {"delta": 0.1}).on_run_begin({}, 0)
    on = {name for name, value in given["settings"].items() if value is True}
    assert {"disable_code", "disable_git", "x_disable_meta", "x_disable_stats"} <= on
    assert "x_disable_machine_info" in on and given["settings"]["console"] == "off"
    assert given["settings"]["symlink"] is False
    assert (given["id"], given["resume"], given["project"]) == ("ab" * 8, "allow", "fedsim")
    assert given["config"] == {"delta": 0.1}


# ---- Runs ---------------------------------------------------------------------------------------


@pytest.mark.privacy
def test_a_logger_gets_no_metric_without_noise(run_dir, monkeypatch):
    monkeypatch.setitem(loggers.LOGGERS, "wandb", Recorder)
    settings = {**TINY, "log_to": ["wandb"], "run_dir": run_dir}
    fedsim.train("uls", POSTS, **settings)
    names = {name for _, values in Recorder.seen for name in values}
    assert names == {"privacy/epsilon"} and Recorder.ends == 1 and not (run_dir / "tb").exists()


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
