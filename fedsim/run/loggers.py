"""Loggers of metrics: TensorBoard, Weights & Biases, MLflow and trackio.

TensorBoard's files stay in the run's directory. The other three can send what they get to another
machine, at once or when someone synchronises their files. So they get only the plan and what
`may_leave` allows, unless the run has `log_non_private`; and nothing else that these packages would
collect: no output of the terminal, code, command line or use of the machine.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedsim.config import RunConfig
from fedsim.errors import ConfigError, brief
from fedsim.installation import EXTRAS, expect_installed, is_installed
from fedsim.plan import Plan

DIRECTORY = "tb"
PROJECT = "fedsim"
"""Project or experiment of a service, unless its own environment variable names another."""
SENDING = frozenset({"wandb", "mlflow", "trackio"})
"""Loggers that can send what they get to another machine."""
WORKERS = re.compile(r"performance/(\w+_restarts|redispatched_lanes|workers)")

Tables = Mapping[str, Mapping[str, Any]]
"""Settings by name, in named tables: `plan`, `run` and, for a table of runs, `hparams`."""


class MetricLogger(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log metrics, by name, after `step` steps. A step that is repeated has the same values."""
        ...

    def flush(self) -> None:
        """Write what is buffered."""
        ...

    def close(self) -> None:
        """Write what is buffered, and end."""
        ...


def expect_loggers(names: Iterable[str]) -> None:
    """Check for the packages of loggers, TensorBoard's apart: a run goes on without it.

    Raises: MissingPackage: one is not installed.
    """
    for name in SENDING.intersection(names):
        # mlflow is installed as mlflow-skinny, which leaves out its store: mlflow itself needs an
        # older pyarrow
        expect_installed(*EXTRAS[name].split())


def may_leave(plan: Plan) -> Callable[[str], bool]:
    """A function of a metric's name: may everyone see it?

    They may if it follows from public numbers, was released with noise, or is about the workers
    alone. The name of a loss on held-out users is the same with noise and without: the plan tells.
    """
    names = {"learning_rate", "privacy/epsilon"}
    names |= {"privacy/clip_norm", "privacy/loss"} if plan.noise_multiplier else set()
    names |= {"eval/loss"} if plan.evaluations else set()
    return lambda name: name in names or WORKERS.fullmatch(name) is not None


def visible(plan: Plan, values: Mapping[str, float]) -> dict[str, float]:
    """Those of a run's metrics that everyone may see; see `may_leave`."""
    allows = may_leave(plan)
    return {name: value for name, value in values.items() if allows(name)}


def receivers(run: RunConfig) -> list[str]:
    """The loggers of a run that can send what they get to another machine."""
    return [name for name in run.log_to if name in SENDING]


def not_covered(run: RunConfig) -> list[str]:
    """A line of the plan for each logger that gets what the guarantee does not cover."""
    return [
        f"metrics computed from private data without noise, which {name} gets (log_non_private)"
        for name in (receivers(run) if run.log_non_private else ())
    ]


def open_loggers(
    run: RunConfig,
    plan: Plan,
    tables: Tables,
    identity: str,
    last_step: int,
    warn: Callable[[str], None],
) -> list[MetricLogger]:
    """Open the loggers of a run.

    Args:
      tables: settings to show beside the metrics; the tables `plan` and `hparams` may be sent.
      identity: of the run, in hexadecimal digits; the same when it is resumed.
      last_step: the step after which it continues; -1 for a new run.
      warn: receives a message if a logger is missing or fails later on.

    Raises:
      ConfigError: a logger does not start.
    """
    allows = (lambda _: True) if run.log_non_private else may_leave(plan)
    settings = {**tables.get("plan", {}), **tables.get("hparams", {})}
    name = f"{run.run_dir.absolute().name}-{identity[:6]}"
    opened: list[MetricLogger] = []
    with contextlib.ExitStack() as stack:
        for kind in run.log_to:
            if kind == "tensorboard":
                if not is_installed(kind):
                    warn("no TensorBoard logs: the package tensorboard is not installed")
                    continue
                opened.append(TensorBoard(run.run_dir, last_step, tables))
            else:
                start = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio}[kind]
                try:
                    inner = start(run.run_dir, name, identity, settings)
                except Exception as error:  # each package has errors of its own
                    expected = f"a logger that starts ({_reason(error)})"
                    raise ConfigError.of("log_to", kind, expected) from None
                opened.append(Guarded(kind, inner, allows, warn))
            stack.callback(opened[-1].close)
        stack.pop_all()
    return opened


def _reason(error: Exception) -> str:
    return brief(f"{type(error).__name__}: {' '.join(str(error).split())}", 200)


class Guarded:
    """A logger that can send: it gets what `allows` allows, and its failure does not end a run."""

    def __init__(
        self,
        kind: str,
        inner: MetricLogger,
        allows: Callable[[str], bool],
        warn: Callable[[str], None],
    ):
        """See `open_loggers`."""
        self._kind, self._inner, self._allows, self._warn = kind, inner, allows, warn
        self._failed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log those of the values that may leave the machine."""
        if sent := {name: value for name, value in values.items() if self._allows(name)}:
            self._try(lambda: self._inner.log(step, sent))

    def flush(self) -> None:
        """Write what is buffered."""
        self._try(self._inner.flush)

    def close(self) -> None:
        """Write what is buffered, and end."""
        self._try(self._inner.close)

    def _try(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # a network fails; metrics.jsonl has all metrics
            self._failed = True
            self._warn(f"{self._kind} gets no more metrics: {_reason(error)}")


class TensorBoard:
    """Event files in `tb/` of a run's directory, with all metrics."""

    def __init__(self, run_dir: Path, last_step: int = -1, tables: Tables | None = None):
        """Continue after `last_step`; TensorBoard drops the events of later steps."""
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events = EventFileWriter(str(run_dir / DIRECTORY))
        self._add(last_step + 1, session_log=SessionLog(status=SessionLog.START))
        for name, values in (tables or {}).items():
            (self._hparams if name == "hparams" else self._table)(name, values)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=scalars))

    def flush(self) -> None:
        """Write buffered events."""
        self._events.flush()

    def close(self) -> None:
        """Write buffered events, and end."""
        self._events.close()

    def _table(self, name: str, values: Mapping[str, Any]) -> None:
        """Write names and values as a text."""
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore
            SummaryMetadata,  # pyright: ignore
        )
        from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore

        rows = "".join(f"| {key} | {value} |\n" for key, value in values.items())
        markdown = "| setting | value |\n|---|---|\n" + rows
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        value = Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._add(0, summary=Summary(value=[value]))

    def _hparams(self, _: str, values: Mapping[str, Any]) -> None:
        """Write settings for TensorBoard's table of runs."""
        from tensorboard.plugins.hparams import summary_v2

        shown = {
            k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in values.items()
        }
        self._add(0, summary=summary_v2.hparams_pb(shown))

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore

        self._events.add_event(Event(wall_time=time.time(), step=step, **content))


class WandB:
    """A run of Weights & Biases. With WANDB_MODE=offline it stays in `wandb/` of the run's
    directory."""

    def __init__(self, run_dir: Path, name: str, identity: str, settings: dict[str, Any]):
        """Start or continue the run. Args: settings: shown beside the metrics."""
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
            id=identity[:16],
            name=name,
            resume="allow",
            config=settings,
            dir=run_dir,
            settings=how,
        )
        self._directory = run_dir / "wandb"
        self.flush()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log metrics; those of a repeated step are dropped."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Remove links: a run with a link in its directory is not resumed. Another process
        writes."""
        for path in self._directory.rglob("*"):
            if path.is_symlink():  # to the log of that process
                path.unlink()

    def close(self) -> None:
        """End the run, when everything is sent or written."""
        self._run.finish()
        self.flush()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in `mlflow.db` of the run's directory."""

    def __init__(self, run_dir: Path, name: str, identity: str, settings: dict[str, Any]):
        """Start or continue the run. Args: settings: its parameters."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient  # pyright: ignore
        from mlflow.entities import Metric, Param  # pyright: ignore

        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), run_dir.absolute()
        self._metric, self._client = Metric, MlflowClient(uri or f"sqlite:///{place}/mlflow.db")
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        if (experiment := self._client.get_experiment_by_name(title)) is not None:
            number = experiment.experiment_id
        else:
            artifacts = None if uri else str(place / "mlflow")
            number = self._client.create_experiment(title, artifact_location=artifacts)
        found = self._client.search_runs([number], f"tags.fedsim_run = '{identity}'")
        tags = {"fedsim_run": identity}
        run = found[0] if found else self._client.create_run(number, run_name=name, tags=tags)
        self._run = run.info.run_id
        if found:
            self._client.update_run(self._run, status="RUNNING")
        else:
            params = [Param(name, str(value)) for name, value in settings.items()]
            self._client.log_batch(self._run, params=params)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log metrics."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def flush(self) -> None:
        """Do nothing: a metric is written when `log` returns."""

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run)


class Trackio:
    """A run of trackio: at TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, or else in TRACKIO_DIR, by
    default a directory in the user's cache."""

    def __init__(self, run_dir: Path, name: str, identity: str, settings: dict[str, Any]):
        """Start or continue the run. Args: settings: shown beside the metrics."""
        import trackio  # pyright: ignore

        self._finish = trackio.finish
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            self._run = trackio.init(
                os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=name,
                config=settings,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log metrics."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Do nothing: a thread writes."""

    def close(self) -> None:
        """End the run, when everything is sent or written."""
        with contextlib.redirect_stdout(sys.stderr):
            self._finish()  # the run's own `finish` would be called again when the process ends
