"""`fedsim.train` and the `Run` it returns: training, results and their checks from Python.

`dry_run`, `recommend` and `audit` return the answers of the commands of these names, as dicts.
"""

import functools
import inspect
import math
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, TypeVar, Unpack, get_type_hints

from fedsim.config import (
    Algorithm,
    AuditConfig,
    EngineConfig,
    LoggerName,
    MechanismConfig,
    PrivacyConfig,
    PrivacyTarget,
    RunConfig,
    Sampling,
    SamplingName,
    changed_run,
    config_of,
    configs_of,
    flags_of,
    unknown_setting,
)
from fedsim.data import BuildSettings, source_of
from fedsim.engine import Task, set_threads
from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home
from fedsim.library.own_task import OwnTask
from fedsim.run import Console, StoredRun, checkpoint, directory, guarantee_line, spent, verbosity
from fedsim.training import Callback, expect_callbacks
from fedsim.trust import Check

COLUMNS = {"user": "user_column", "text": "text_column", "messages": "messages_column"}
"""Arguments of `train` that stand for a longer flag."""
Function = TypeVar("Function", bound=Callable[..., Any])


def load(run_dir: str | Path) -> "Run":
    """Open the run in a directory.

    Raises:
      ConfigError: the directory holds no run.
      FileDamaged: the run's settings were changed.
    """
    return Run(run_dir)


class Run:
    """A run: its results, read from its directory when they are accessed, and what follows them.

    Attributes:
      run_dir: the run's directory.
      stored: its settings, plan and model, as `config.json` has them.
    """

    def __init__(self, run_dir: str | Path):
        """See `load`."""
        self.run_dir = Path(expand_home("run_dir", run_dir))
        self.stored: StoredRun = directory.load(self.run_dir)

    def __repr__(self) -> str:
        if not (self.run_dir / directory.SUMMARY).exists():
            return f"Run({str(self.run_dir)!r}: not ended)"
        steps = f"{self.summary['steps_done']} of {self.summary['num_steps']} steps"
        about = f"{self.stored.identity.algorithm}, {steps}, eval loss {self.eval_loss:.4g}"
        return f"Run({str(self.run_dir)!r}: {about}; {guarantee_line(self.summary)})"

    @property
    def summary(self) -> dict[str, Any]:
        """Content of `summary.json`.

        Raises: ConfigError: the run has not ended.
        """
        if (content := directory.summary_of(self.run_dir)) is None:
            raise ConfigError.of("run", self.run_dir, "a run that has ended")
        return content

    @property
    def epsilon(self) -> float:
        """The claimed user-level epsilon at `delta`; inf without noise.

        It includes the slack of noise that is not ideal. A run that ended early costs as much as
        all its planned steps, because what it had released may be why it was stopped.
        """
        return spent(self.summary)

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return float(self.summary["delta"])

    @property
    def eval_loss(self) -> float:
        """The last loss on held-out users, in nats per token or byte; nan if there are none."""
        loss = self.summary["final_eval_loss"]
        return math.nan if loss is None else float(loss)

    @property
    def finished(self) -> bool:
        """True if all steps have been trained."""
        return self.summary["steps_done"] == self.summary["num_steps"]

    @functools.cached_property
    def params(self) -> Any:
        """Parameters of the last checkpoint, of the model or its adapters: a tree of NumPy arrays.

        Raises: ConfigError: there is no checkpoint.
        """
        newest = checkpoint.latest(self.run_dir)
        if newest is None:
            raise ConfigError.of("run", self.run_dir, "a run with a checkpoint")
        return checkpoint.load_params(newest)

    def evaluate(self) -> dict[str, Any]:
        """Losses on all held-out examples, in nats per token: not protected, not to be published.

        Returns: Losses by metric name, such as eval/loss.
        """
        run = changed_run(self.stored.run, engine="local", accelerator="auto")
        set_threads(run.engine)
        from fedsim.evaluate import evaluate_run

        return evaluate_run(self.stored, run, Console())

    def verify(
        self, *, replay: bool = False, whole: bool = False, data: str | Path | None = None
    ) -> list[Check]:
        """Check every promise of the run, as `fedsim verify` does.

        Args:
          replay: compute the last steps again, and compare every bit.
          whole: compute all steps again.
          data: where the data are now. Default: where they were at the start of the run.

        Returns: A `Check` for each promise, in order.
        """
        again = "whole" if whole else "last" if replay else ""
        set_threads(self.stored.run.engine if again else EngineConfig("local"))
        from fedsim.trust import verify

        place = None if data is None else expand_home("data", data)
        return verify(self.run_dir, data=place, again=again, console=Console())

    def report(self, out: str | Path | None = None) -> dict[str, Any]:
        """Write the privacy report.

        Args: out: directory for report.html and report.md. Default: the run's.

        Returns: The claim, its epsilon and delta, and the paths of the files.

        Raises: ReportError: a promise is violated, or there is no model to report of.
        """
        from fedsim.trust import report

        return report(self.run_dir, Path(expand_home("out", out or self.run_dir)), Console())

    def publish(self, out: str | Path | None = None) -> Path:
        """Write what may be published of the run into a new folder, checked; returns the folder.

        Args: out: the folder. Default: `public` in the run's directory.

        Raises:
          ConfigError: the run has not ended or has no guarantee, or the folder exists.
          ReportError: a promise is violated.
        """
        from fedsim.trust import publish

        place = None if out is None else Path(expand_home("out", out))
        return Path(publish(self.run_dir, place, Console())["out"])

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 64,
        seed: int = 0,
        **sampling: float,
    ) -> str:
        """Text that the model writes after a prompt.

        Args:
          prompt: the beginning of the text; for a model with a chat template, what the user says.
          max_tokens: largest number of tokens to write.
          seed: of the draw.
          sampling: temperature and top_p, as flags of `fedsim generate`.
        """
        from fedsim.generate import generate_text

        how = config_of(Sampling, sampling)
        drawn = {"max_tokens": max_tokens, "how": how, "seed": seed}
        return generate_text(str(self.run_dir), prompt, **drawn)["text"]

    def to_hf(self, out: str | Path) -> Path:
        """Write the model as a Hugging Face directory, adapters merged; returns the directory."""
        from fedsim.export import export

        return Path(export(str(self.run_dir), out)["out"])

    def to_peft(self, out: str | Path) -> Path:
        """Write the adapters of a run with LoRA in PEFT's format; returns the directory."""
        from fedsim.export import export

        return Path(export(str(self.run_dir), out, adapter=True)["out"])


class TrainSettings(TypedDict, total=False):
    """Keyword arguments of `train`: flags of `fedsim train`, which `PrivacyConfig` and `RunConfig`
    describe, and user, text and messages for the flags that name columns."""

    epsilon: Required[float]
    num_steps: Required[int]
    run_dir: str | Path | None
    user: str | None
    text: str | None
    messages: str | None
    batch_size: int
    delta: float | None
    clipping: Literal["normalised", "plain"]
    max_shared_groups: int
    sampling: SamplingName | None
    participations: int | None
    noise: Literal["independent", "correlated"]
    bands: int | None
    adjacency: Literal["zero-out", "add-or-remove"]
    group_size: int | None
    clip_norm: float
    group_size_epsilon: float | None
    clip_quantile: float | None
    loss_bound: float | None
    eval_epsilon: float | None
    eval_loss_bound: float | None
    tuned_on_data: str
    user_column: str | None
    text_column: str | None
    tokenizer: str | None
    max_length: int | None
    messages_column: str | None
    model: str
    lora_rank: int
    lora_modules: str | Sequence[str]
    lora_alpha: float | None
    lora_scaling: Literal["standard", "rslora"]
    frozen_dtype: Literal["stored", "float32", "bfloat16", "int8"]
    remat: bool
    compute_dtype: Literal["float32", "bfloat16"]
    optimizer: str | None
    learning_rate: float | None
    schedule: Literal["constant", "linear", "cosine"] | None
    ema: float | None
    seed: int | None
    engine: Literal["ray", "local"]
    num_workers: int | None
    num_lanes: int
    threads_per_worker: int
    strategy: Literal["auto", "scan", "direct", "ghost"]
    rows_per_pass: int | None
    accelerator: Literal["auto", "cpu", "gpu", "tpu"]
    wait_for_workers: float
    worker_timeout: float
    eval_every: int | None
    eval_examples: int | None
    checkpoint_every: int
    log_to: Sequence[LoggerName]
    strict: bool
    output: Literal["quiet", "normal"]
    resume: bool
    budget_ledger: str | Path | None
    limit_epsilon: float | None


def with_settings(function: Function) -> Function:
    """Write the settings, which a type checker has from TrainSettings, into `help(function)`."""
    flags, written = flags_of(PrivacyConfig) | flags_of(RunConfig), inspect.signature(function)
    *first, _ = written.parameters.values()
    named, texts = [], []
    for name, kind in get_type_hints(TrainSettings).items():
        flag = None if name == "run_dir" else flags.get(name)  # which has a default here
        default = inspect.Parameter.empty if flag and flag.default is ... else flag and flag.default
        keyword = inspect.Parameter.KEYWORD_ONLY
        named.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
        if flag:
            text = f"{name}: {' '.join(flag.text.split())}"
            texts += textwrap.wrap(text, 96, initial_indent="  ", subsequent_indent="    ")
    head, returns, tail = (inspect.getdoc(function) or "").partition("\n\nReturns:")
    function.__doc__ = "\n".join([head, *texts]) + returns + tail
    vars(function)["__signature__"] = written.replace(parameters=[*first, *named])
    return function


@with_settings
def train(
    algorithm: str | type,
    data: Any,
    *,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[TrainSettings],
) -> Run:
    """Fine-tune a model with user-level differential privacy.

    Equal settings give the same bits as the command `fedsim train`. A signal (Ctrl-C in a notebook)
    finishes the step and saves it; the same call with its `run_dir` and `resume=True` resumes it.

    Args:
      algorithm: "els" samples and clips examples, "uls" samples and clips users. Or a subclass of
        `fedsim.ELS` or `fedsim.ULS` with its own event, draw or gradient, which gets the settings
        of its base; that its event holds is for its author to prove.
      data: a pandas or polars DataFrame, a Hugging Face `Dataset`, an Arrow table, a list of dicts,
        a dict of lists, a file or a pattern of files, a directory made by `fedsim data build`,
        hf:NAME, or pydocs. With `task`: the owner of each row, [rows], or a dict of that for the
        splits train, eval_users, eval_examples and test.
      task: your own model, instead of a language model.
      callbacks: called at the start and end of the run, and after its steps and evaluations; see
        `Callback`.
      settings: flags of `fedsim train`, with underscores: those below, of which epsilon and
        num_steps are required.
      run_dir: directory of the run. Default: a new one in runs/.
      user: column with the user of a row, or with a list of the users who own it together.
        Default: user_id.
      text: column with the text. Default: text.
      messages: column with chats, lists of {"role": ..., "content": ...}. Default: messages, if
        there is no text.

    Returns: The run, finished or stopped by a signal.

    Raises:
      ConfigError: a setting or the data are wrong; one line says how.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "normal")):
        base, kind = algorithm_of(algorithm)
        expect_callbacks(callbacks)
        custom = None
        if task is None:
            privacy, run = configs_for(data, settings, base)
        else:
            is_task = callable(getattr(task, "losses", None))
            expect("task", type(task).__name__, is_task, "an object of a subclass of fedsim.Task")
            for name in (*COLUMNS, *COLUMNS.values(), "model", "tokenizer", "max_length"):
                expect(name, settings.get(name), settings.get(name) is None, "nothing beside task")
            custom = OwnTask(task, data)
            name = task.describe().get("task", type(task).__qualname__)
            model = {"model": f"{name} (a task)"}
            privacy, run = configs_for(f"{name} (rows of its own)", {**settings, **model}, base)
        set_threads(run.engine)
        from fedsim.training import train as train_run  # imports JAX, which reads the threads

        console = Console()
        summary = train_run(
            base, privacy, run, console, custom=custom, callbacks=callbacks, kind=kind
        )
        console.summary(summary, run.run_dir)
        return Run(run.run_dir)


def dry_run(algorithm: str, data: Any, **settings: Unpack[TrainSettings]) -> dict[str, Any]:
    """Plan a training, and show its noise and the size of a step; train, write and spend nothing.

    Args: as for `train`, with "els" or "uls".

    Returns: what `fedsim train --dry-run --json` prints: the public constants of the run.
    """
    with verbosity(settings.get("output", "normal")):
        expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
        privacy, run = configs_for(data, settings, algorithm)
        run = changed_run(run, engine="local", accelerator="auto")
        set_threads(run.engine)
        from fedsim.training import dry_run as plan_run  # imports JAX, which reads the threads

        return plan_run(Algorithm(algorithm), privacy, run, Console())


def algorithm_of(algorithm: str | type) -> tuple[Algorithm, type | None]:
    """(The algorithm of the paper whose settings it has, its class if it is one of one's own)."""
    if isinstance(algorithm, type):
        from fedsim.plan import METHODS  # imports JAX, as the module of the class did

        for base, kind in METHODS.items():
            if issubclass(algorithm, kind):
                return base, algorithm if algorithm is not kind else None
        algorithm = algorithm.__qualname__
    known = "els, uls or a subclass of fedsim.ELS or fedsim.ULS"
    expect("algorithm", algorithm, algorithm in list(Algorithm), known)
    return Algorithm(algorithm), None


def configs_for(
    data: Any, settings: Mapping[str, Any], name: str
) -> tuple[PrivacyConfig, RunConfig]:
    """The configs of a training. Without run_dir, it is one in runs/ of this name and second."""
    settings = {COLUMNS.get(field, field): value for field, value in settings.items()}
    alone = "the name of a setting; fedsim.dry_run plans without training"
    expect("dry_run", settings.get("dry_run"), "dry_run" not in settings, alone)
    columns = {n: settings[n] for n in COLUMNS.values() if settings.get(n) is not None}
    if settings.get("run_dir") is None:
        expect("run_dir", None, not settings.get("resume"), "the directory of the run to resume")
        settings["run_dir"] = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return configs_of({**settings, "data": source_of(data, BuildSettings(**columns).columns)})


def recommend(
    data: Any, *, users: int | None = None, **settings: Unpack[TrainSettings]
) -> dict[str, Any]:
    """Recommend els or uls, and its settings, for some data, an epsilon and a batch size.

    It looks at the data without protection; "non_private" says at what.

    Args:
      users: number of users whose gradients are measured. Default: 128; 16 for a pretrained model.
      data, settings: as for `train`; run_dir is the parent of the recommended directories, by
        default runs/.

    Returns:
      What `fedsim recommend --json` prints: the better algorithm is `answer["recommended"]`, and
      `answer["els"]["settings"]` are arguments of `train("els", ...)`.

    Raises:
      ConfigError: a setting or the data are wrong, or settings has one that is recommended.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        known = flags_of(PrivacyTarget) | flags_of(MechanismConfig) | flags_of(RunConfig)
        for name in settings.keys() - known.keys() - COLUMNS.keys():
            raise unknown_setting(name, settings.get(name), known)
        privacy, run = configs_for(data, {"run_dir": "runs", **settings}, "")
        set_threads(run.engine)
        from fedsim.tuning import recommend as advise  # imports JAX, which reads the threads

        return advise(privacy, run, Console(), num_users=users)


def audit(
    algorithm: str,
    data: Any,
    *,
    gradient_canaries: int = 400,
    confidence: float = 0.999,
    **settings: Unpack[TrainSettings],
) -> dict[str, Any]:
    """Attack a training: plant made-up users (canaries), train, and guess which took part.

    Args:
      algorithm, data, settings: the training, as for `train`.
      gradient_canaries: number of made-up users; see `AuditConfig`.
      confidence: of a refutation.

    Returns:
      The content of audit.json, which `fedsim audit --json` prints. "holds" is False if the claim
      is refuted, True if it could have been and was not, None if it could not.

    Raises:
      ConfigError: a setting or the data are wrong; one line says how.
      EngineError: the workers are lost.
    """
    with verbosity(settings.get("output", "quiet")):
        expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
        attack = AuditConfig(gradient_canaries, confidence)
        privacy, run = configs_for(data, settings, f"audit-{algorithm}")
        set_threads(run.engine)
        from fedsim.trust import audit as attack_training

        return attack_training(Algorithm(algorithm), attack, privacy, run, Console())
