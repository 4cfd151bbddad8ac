"""Callbacks: code of the user that a training calls between its steps, and may be stopped by.

A callback sees what the run releases, and stopping by that is covered: a run that ended early
claims the epsilon of all its planned steps. A callback with `reads_non_private` also sees metrics
that are computed without noise. Where such a run ends may depend on them, which no epsilon covers;
the plan, and so the ledger and the report, say that.

Loggers are callbacks, which write metrics for TensorBoard, W&B, MLflow or Trackio.
"""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError, brief, expect, such_as
from fedsim.plan import Caveat, Fact, Plan, private_fields
from fedsim.run import BOARD, visible


class Callback:
    """Base class of callbacks: override the methods that you need.

    Metrics are those that anyone may see: epsilon, what was released with noise, and facts about
    the workers. All methods are called in the process and thread of `train`. An exception ends the
    training, which can be resumed.

    Attributes:
      reads_non_private: see the metrics and results that are computed without noise, too. The plan
        of the run then says so; a run that was started without it cannot be resumed with it.
    """

    reads_non_private: bool = False

    def on_run_begin(self, plan: Mapping[str, Any], step: int) -> None:
        """Called before the first step, or before the next one of a resumed run.

        Args:
          plan: the public constants of the run, as in the first line of its ledger.
          step: number of steps that were done before.
        """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after each step. Return True to stop the run here, as a signal does.

        Args:
          step: number of the step, from 1.
          metrics: of the step, by name. privacy/epsilon is there after each tenth of the run.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called when an evaluation has ended, which may be after the next step. Return True to
        stop the run.

        Args:
          step: the step that was evaluated; 0 is the start.
          metrics: losses on held-out users, if they have noise (`eval_epsilon`).
        """

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Called when `summary.json` is written, after the last step or the one that stopped the
        run.

        Args: summary: its content, without losses that have no noise and sizes of draws.
        """


def expect_callbacks(callbacks: Any) -> None:
    """Raise ConfigError unless these are callbacks, without methods `on_...` that nothing calls."""
    several = isinstance(callbacks, Collection)
    fits = several and all(isinstance(callback, Callback) for callback in callbacks)
    expect("callbacks", callbacks, fits, "a list of objects of subclasses of fedsim.Callback")
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    kinds = [kind for callback in callbacks for kind in type(callback).__mro__]
    for kind in (kind for kind in kinds if issubclass(kind, Callback)):
        for name in sorted({name for name in vars(kind) if name.startswith("on_")} - {*methods}):
            expected = f"a method of fedsim.Callback{such_as(name, methods, cutoff=0)}"
            raise ConfigError.of("callbacks", f"{kind.__name__}.{name}", expected)


def facts_of_callbacks(callbacks: Sequence[Callback]) -> list[Caveat]:
    """A fact for each callback that sees what the guarantee does not cover."""
    seeing = [callback for callback in callbacks if callback.reads_non_private]
    return [Caveat(Fact.CALLBACK, type(callback).__name__) for callback in seeing]


class Calls:
    """Calls the callbacks and loggers of a run, each with what it may see.

    Attributes:
      stopped: a callback wants the run to end.
    """

    def __init__(
        self,
        plan: Plan,
        callbacks: Sequence[Callback],
        loggers: Sequence[Callback],
        warn: Callable[[str], None],
    ):
        """Args: loggers: callbacks of which a failure is one warning."""
        self._plan, self._callbacks, self._loggers = plan, [*callbacks, *loggers], loggers
        self._warn, self.stopped = warn, False

    def begin(self, step: int) -> None:
        """The run has done `step` steps and continues."""
        self._each(lambda callback: callback.on_run_begin(self._plan.as_dict(), step))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step has ended."""
        self._each(lambda callback: callback.on_step(step, self._seen(callback, values)))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation has ended."""
        self._each(lambda callback: callback.on_evaluate(step, self._seen(callback, values)))

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run has ended."""
        hidden = private_fields(self._plan)
        public = {name: value for name, value in summary.items() if name not in hidden}
        self._each(
            lambda each: each.on_run_end(dict(summary if each.reads_non_private else public))
        )

    def _each(self, call: Callable[[Callback], bool | None]) -> None:
        for callback in [*self._callbacks]:
            try:
                self.stopped |= bool(call(callback))
            except Exception as error:
                if callback not in self._loggers:
                    raise
                self._callbacks.remove(callback)
                reason = brief(f"{type(error).__name__}: {error}", 200)
                self._warn(f"no more metrics for {type(callback).__name__}: {reason}")

    def _seen(self, callback: Callback, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values) if callback.reads_non_private else visible(self._plan, values)


PROJECT = "fedsim"  # unless the environment variable of the service names another


class Logger(Callback):
    """A callback that gives metrics to a service; `Calls` warns of its first failure."""

    def __init__(self, run_dir: Path, identity: str, settings: Mapping[str, Any]):
        """Args: identity: of the run, in hexadecimal digits. settings: public ones, to show."""
        self.run_dir, self.identity, self.settings = run_dir.absolute(), identity, dict(settings)
        self.name = f"{self.run_dir.name}-{identity[:6]}"

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        # The loss of an evaluation, which may be of an earlier step, is logged when it has ended.
        self.on_evaluate(step, {name: x for name, x in metrics.items() if name != "eval/loss"})


class TensorBoard(Logger):
    """Event files in `tb/` of a run's directory."""

    def on_run_begin(self, plan: Mapping[str, Any], step: int) -> None:
        from tensorboard.summary import Writer

        self._board = Writer(str(self.run_dir / BOARD))

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()  # a board shows them at once

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._board.close()


class WandB(Logger):
    """A run of Weights & Biases. With WANDB_MODE=offline it stays in `wandb/` of the run's
    directory."""

    def on_run_begin(self, plan: Mapping[str, Any], step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it sends tracebacks
        import wandb  # pyright: ignore

        limits = wandb.Settings(
            console="off",  # lines of the terminal show losses without noise
            reinit="create_new",  # another run of this process goes on
            silent=True,
            symlink=False,
            disable_code=True,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        place = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "dir": self.run_dir}
        run = {"id": self.identity[:16], "name": self.name, "config": self.settings}
        self._run = wandb.init(**place, **run, resume="allow", settings=limits)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._run.log(dict(metrics), step=step)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._run.finish()


class MLflow(Logger):
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in `mlflow.db` of the run's directory."""

    def on_run_begin(self, plan: Mapping[str, Any], step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # pyright: ignore

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.run_dir}/mlflow.db"
        self._client = client = MlflowClient(place)
        title, tags = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), {"run": self.identity}
        known = client.get_experiment_by_name(title)
        number = known.experiment_id if known else client.create_experiment(title)
        earlier = client.search_runs([number], f"tags.run = '{self.identity}'")
        run = earlier[0] if earlier else client.create_run(number, run_name=self.name, tags=tags)
        self._run = run.info.run_id
        for name, value in {} if earlier else self.settings.items():
            client.log_param(self._run, name, value)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._run, name, value, step=step)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._run)


class Trackio(Logger):
    """A run of trackio: at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, or else in TRACKIO_DIR, by
    default a directory in the user's cache."""

    def on_run_begin(self, plan: Mapping[str, Any], step: int) -> None:
        import trackio  # pyright: ignore

        project, self._finish = os.environ.get("TRACKIO_PROJECT", PROJECT), trackio.finish
        run = {"name": self.name, "config": self.settings, "resume": "allow"}
        limits = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(sys.stderr):  # stdout is for results
            self._run = trackio.init(project, **run, **limits)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._run.log(dict(metrics), step=step)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()  # the run's own `finish` would be called again when the process ends


LOGGERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
