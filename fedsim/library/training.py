"""`fedsim.train`: what the command `fedsim train` does, called from Python."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from fedsim.config import (
    Algorithm,
    PrivacyConfig,
    RunConfig,
    SamplingName,
    flags_of,
    renamed,
    run_config,
    typed,
    types_of,
)
from fedsim.engine import Task, set_threads
from fedsim.errors import ConfigError, MissingColumn, expect
from fedsim.library.own_task import OwnTask
from fedsim.library.run import Run
from fedsim.library.tables import source_of
from fedsim.run import Console

USER, TEXT = "user_id", "text"


class TrainSettings(TypedDict, total=False):
    """The flags of `fedsim train` that `train` takes by name, with their types; what each means is
    in `config.PrivacyConfig` and `config.RunConfig`."""

    # PrivacyConfig: can change the guarantee.
    batch_size: int
    delta: float | None
    clipping: Literal["normalised", "plain"]
    max_changed: int
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
    assumed_population: int | None
    chosen_on_data: str
    # RunConfig: cannot.
    user_column: str | None
    text_column: str | None
    normalise_ids: str | None
    tokenizer: str | None
    max_length: int | None
    model: str
    lora_rank: int
    lora_layers: str
    lora_alpha: float | None
    remat: bool
    compute_dtype: Literal["float32", "bfloat16"]
    recipe: Literal["default", "paper"]
    optimizer: str | None
    learning_rate: float | None
    schedule: Literal["constant", "linear", "cosine"] | None
    ema: float | None
    warmup: float
    weight_decay: float
    local_steps: int
    local_learning_rate: float
    seed: int | None
    engine: Literal["ray", "local"]
    num_workers: int | None
    num_lanes: int
    threads_per_worker: int
    devices_per_worker: int | None
    mesh: str | None
    strategy: str
    accelerator: Literal["auto", "cpu", "gpu", "tpu"]
    wait_for_workers: float
    eval_every: int | None
    eval_examples: int
    checkpoint_every: int
    log_every: int
    resume: bool
    budget_ledger: str | Path | None
    limit_epsilon: float | None
    spend_rest: bool


def train(
    algorithm: str,
    data: Any,
    *,
    epsilon: float,
    num_steps: int,
    run_dir: str | Path | None = None,
    user: str | None = None,
    text: str | None = None,
    task: Task | None = None,
    callback: Callable[[int, dict[str, float]], None] | None = None,
    **settings: Unpack[TrainSettings],
) -> Run:
    """Fine-tune a model with user-level differential privacy.

    With the same settings the parameters have the bits that `fedsim train` gives. A signal (Ctrl-C
    in a notebook) finishes the step and saves it: the same call with `resume=True` goes on.
    Args:
      algorithm: "els" samples and clips examples, "uls" samples and clips users.
      data: a pandas DataFrame or chunks of one, a Hugging Face `Dataset`, an Arrow table, files (a
        path, a pattern, or a list of Parquet files), a directory that `fedsim data build` made,
        hf:NAME or pydocs.
        With `task`: whose each of its rows is, [rows], or a dict of that for the splits train,
        eval_users, eval_examples and test.
      epsilon: the target; math.inf trains without noise, and is not private.
      num_steps: T.
      run_dir: where the run is kept. Default: a new directory in runs/.
      user, text: the columns that say whose a row is (user_id) and what is written in it (text).
      task: a model of your own instead of a language model.
      callback: called after every step with its number, from 1, and its metrics, the last known
        eval/loss among them. Those named `non_private/...` were computed from the data without
        protection.
      settings: the flags of `fedsim train`, with underscores: batch_size, group_size, model,
        lora_rank, engine, seed, resume, ...
    Raises: ConfigError: a mistake of yours, in one line, as the command says it. EngineError: the
      workers are lost.
    """
    expect("algorithm", algorithm, algorithm in list(Algorithm), "els or uls")
    calls = callback is None or callable(callback)
    expect("callback", callback, calls, "a function of a step's number and its metrics")
    if run_dir is None:
        run_dir = Path("runs") / f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Columns of a DataFrame without names are numbered.
    user, text = (str(n) if type(n) is int else n for n in (user, text))
    flags: dict[str, Any] = {"epsilon": epsilon, "num_steps": num_steps, **settings}
    flags["run_dir"] = str(run_dir)
    source = None
    if task is not None:
        source = OwnTask(task, data, settings.get("normalise_ids"))
        name = task.describe().get("task", type(task).__qualname__)
        flags |= {"data": f"{name} (rows of its own)", "model": f"{name} (a task)"}
    else:
        flags["data"] = source_of(data, user or USER, text or TEXT)
        columns = {"user_column": user, "text_column": text}
        flags |= {name: column for name, column in columns.items() if column is not None}
    privacy, run = configs_of(flags)
    set_threads(run.engine)
    from fedsim.training import train as train_run  # imports JAX, which reads the threads

    console = Console(log_every=run.log_every)
    try:
        summary = train_run(
            Algorithm(algorithm), privacy, run, console, source=source, callback=callback
        )
    except MissingColumn as error:  # which names the setting; here it may be an argument
        name = str(error.field).removesuffix("_column")
        if name not in ("user", "text") or {name, f"{name}_column"} & settings.keys():
            raise
        line = str(error).removeprefix(f"{name}_column")
        raise MissingColumn(f"{name}{line}", field=name) from None
    console.summary(summary, run.run_dir)
    return Run(run.run_dir)


def configs_of(settings: Mapping[str, Any]) -> tuple[PrivacyConfig, RunConfig]:
    """The two configs from settings by the names of their flags.

    Raises: ConfigError: a name is unknown, or a value of another type.
    """
    settings, types = renamed(settings), types_of(PrivacyConfig) | types_of(RunConfig)
    for name in settings.keys() - types.keys():
        raise ConfigError.of(name, settings[name], "the name of a setting of train")
    values = {name: typed(name, value, types[name]) for name, value in settings.items()}
    privacy = {name: values.pop(name) for name in flags_of(PrivacyConfig) if name in values}
    return PrivacyConfig(**privacy), run_config(**values)
