"""Loggers of metrics: TensorBoard, Weights & Biases, MLflow and trackio, each a callback.

TensorBoard's files stay in the run's directory. The other three can send what they get to another
machine, at once or when someone synchronises their files. So they get only the plan and the metrics
that `run.may_leave` allows, unless the run has `log_non_private`; and nothing else that these
packages would collect: no output of the terminal, code, command line or use of the machine.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.config import RunConfig
from fedsim.errors import ConfigError, brief
from fedsim.installation import EXTRAS, expect_installed, is_installed
from fedsim.run import BOARD, SENDING
from fedsim.training.callbacks import Callback

PROJECT = "fedsim"
"""Project or experiment of a service, unless its own environment variable names another."""
EVAL_LOSS = "eval/loss"


class LoggedRun(NamedTuple):
    """The run that a logger shows."""

    directory: Path
    identity: str
    """Of the run, in hexadecimal digits; the same when it is resumed."""
    last_step: int
    """The step after which it continues; -1 for a new run."""
    settings: Mapping[str, Any]
    """Its plan and other public settings."""

    @property
    def name(self) -> str:
        """The name of the run for a service."""
        return f"{self.directory.absolute().name}-{self.identity[:6]}"


class Logger(Callback):
    """A callback that gives metrics to a service.

    A failure is shown once and does not end the run, because `metrics.jsonl` has all metrics.
    """

    def __init__(
        self, kind: str, run: LoggedRun, warn: Callable[[str], None], reads_non_private: bool
    ):
        """Start or continue the run at the service."""
        self.run, self.reads_non_private = run, reads_non_private
        self._kind, self._warn, self._failed = kind, warn, False
        self.start()

    def start(self) -> None:
        """Start or continue the run."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics, by name. A step that is repeated has the same values."""

    def finish(self) -> None:
        """Write what is buffered, and end."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        # The loss of an evaluation, which may be of an earlier step, is logged when it has ended.
        self.on_evaluate(step, {name: x for name, x in metrics.items() if name != EVAL_LOSS})

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._try(lambda: self.log(step, dict(metrics)))

    def close(self) -> None:
        """Finish, unless it has failed before."""
        self._try(self.finish)

    def _try(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # a network fails
            self._failed = True
            self._warn(f"{self._kind} gets no more metrics: {_reason(error)}")


class TensorBoard(Logger):
    """Event files in `tb/` of a run's directory."""

    def start(self) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = EventFileWriter(str(self.run.directory / BOARD))
        # With it, TensorBoard drops the events of later steps.
        self._add(self.run.last_step + 1, session_log=SessionLog(status=SessionLog.START))
        values = self.run.settings.items()
        plain = {name: x if isinstance(x, int | float) else str(x) for name, x in values}
        self._add(0, summary=hparams_pb(plain))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=Summary(value=scalars))
        self._events.flush()  # a board shows them at once

    def finish(self) -> None:
        self._events.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore

        self._events.add_event(Event(wall_time=time.time(), step=step, **content))


class WandB(Logger):
    """A run of Weights & Biases. With WANDB_MODE=offline it stays in `wandb/` of the run's
    directory."""

    def start(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it sends tracebacks
        import wandb  # pyright: ignore

        how = wandb.Settings(
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
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.run.identity[:16],
            name=self.run.name,
            resume="allow",
            config=dict(self.run.settings),
            dir=self.run.directory,
            settings=how,
        )
        self._remove_links()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)  # those of a repeated step are dropped

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._try(self._remove_links)

    def finish(self) -> None:
        self._run.finish()
        self._remove_links()

    def _remove_links(self) -> None:
        """Remove links to logs: a run with a link in its directory is not resumed."""
        for path in (self.run.directory / "wandb").rglob("*"):
            if path.is_symlink():
                path.unlink()


class MLflow(Logger):
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in `mlflow.db` of the run's directory."""

    def start(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient  # pyright: ignore

        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), self.run.directory.absolute()
        self._client = client = MlflowClient(uri or f"sqlite:///{place}/mlflow.db")
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if (experiment := client.get_experiment_by_name(title)) is not None:
            number = experiment.experiment_id
        else:
            artifacts = None if uri else str(place / "mlflow")
            number = client.create_experiment(title, artifact_location=artifacts)
        tags = {"fedsim_run": self.run.identity}
        earlier = client.search_runs([number], f"tags.fedsim_run = '{self.run.identity}'")
        started = earlier or [client.create_run(number, run_name=self.run.name, tags=tags)]
        self._run = started[0].info.run_id
        client.update_run(self._run, status="RUNNING")
        for name, value in {} if earlier else self.run.settings.items():
            client.log_param(self._run, name, value)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore

        now = int(time.time() * 1000)
        values = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run, metrics=values)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


class Trackio(Logger):
    """A run of trackio: at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, or else in TRACKIO_DIR, by
    default a directory in the user's cache."""

    def start(self) -> None:
        import trackio  # pyright: ignore

        self._finish = trackio.finish
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            self._run = trackio.init(
                os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=self.run.name,
                config=dict(self.run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._finish()  # the run's own `finish` would be called again when the process ends


CLASSES = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


def expect_loggers(names: Iterable[str]) -> None:
    """Check for the packages of loggers, TensorBoard's apart: a run goes on without it.

    Raises: MissingPackage: one is not installed.
    """
    for name in SENDING.intersection(names):
        # mlflow is installed as mlflow-skinny, which leaves out its store: mlflow itself needs an
        # older pyarrow
        expect_installed(*EXTRAS[name].split())


@contextmanager
def open_loggers(
    settings: RunConfig, run: LoggedRun, warn: Callable[[str], None]
) -> Iterator[list[Logger]]:
    """Open the loggers of a run, and close them at the end of the context.

    Args:
      warn: receives a message if a logger is missing or fails later on.
    Raises: ConfigError: a logger does not start.
    """
    opened: list[Logger] = []
    with contextlib.ExitStack() as stack:
        for kind in settings.log_to:
            if kind == "tensorboard" and not is_installed(kind):
                warn("no TensorBoard logs: the package tensorboard is not installed")
                continue
            everything = settings.log_non_private or kind not in SENDING
            try:
                logger = CLASSES[kind](kind, run, warn, everything)
            except Exception as error:  # each package has errors of its own
                expected = f"a logger that starts ({_reason(error)})"
                raise ConfigError.of("log_to", kind, expected) from None
            opened.append(logger)
            stack.callback(logger.close)
        yield opened


def _reason(error: Exception) -> str:
    return brief(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)
