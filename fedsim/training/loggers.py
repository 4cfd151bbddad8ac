"""Loggers of metrics: TensorBoard, Weights & Biases, MLflow and trackio, each a callback.

TensorBoard's files stay in the run's directory. The other three can send what they get to another
machine, at once or when someone synchronises their files. So they get only the plan and the metrics
that `run.visible` leaves, and nothing else that these packages would collect: no output of the
terminal, code, command line or use of the machine.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedsim.run import BOARD
from fedsim.training.callbacks import Callback

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
