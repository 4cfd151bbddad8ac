"""`fedsim.train`: what the command `fedsim train` does, called from Python."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsim.config import (
    Algorithm,
    PrivacyConfig,
    RunConfig,
    flags_of,
    renamed,
    run_config,
    typed,
    types_of,
)
from fedsim.engine.environment import set_threads
from fedsim.engine.task import Task
from fedsim.errors import ConfigError, MissingColumn, expect
from fedsim.library.own_task import OwnTask
from fedsim.library.run import Run
from fedsim.library.tables import source_of
from fedsim.run.console import Console

USER, TEXT = "user_id", "text"


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
    **settings: Any,
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
    given = {"epsilon": epsilon, "num_steps": num_steps, **settings}
    if run_dir is None:
        run_dir = Path("runs") / f"{algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    # Columns of a DataFrame without names are numbered.
    user, text = (str(n) if type(n) is int else n for n in (user, text))
    source = None
    if task is not None:
        source = OwnTask(task, data, settings.get("normalise_ids"))
        name = task.describe().get("task", type(task).__qualname__)
        given |= {"data": f"{name} (rows of its own)", "model": f"{name} (a task)"}
    else:
        given["data"] = source_of(data, user or USER, text or TEXT)
        columns = {"user_column": user, "text_column": text}
        given |= {name: value for name, value in columns.items() if value is not None}
    privacy, run = configs_of({**given, "run_dir": str(run_dir)})
    set_threads(run.engine)
    from fedsim.training import train as train_run  # imports JAX, which reads the threads

    console = Console(log_every=run.log_every)
    how = {"source": source, "callback": callback}
    try:
        summary = train_run(Algorithm(algorithm), privacy, run, console, **how)
    except MissingColumn as error:  # which names the setting; here it may be an argument
        name = str(error.field).removesuffix("_column")
        if name not in ("user", "text") or {name, f"{name}_column"} & settings.keys():
            raise
        line = str(error).removeprefix(f"{name}_column")
        raise MissingColumn(f"{name}{line}", field=name) from None
    console.summary(summary, run.run_dir)
    return Run(run.run_dir)


def configs_of(given: dict[str, Any]) -> tuple[PrivacyConfig, RunConfig]:
    """The two configs from settings by the names of their flags.

    Raises: ConfigError: a name is unknown, or a value of another type.
    """
    given, types = renamed(given), types_of(PrivacyConfig) | types_of(RunConfig)
    for name in given.keys() - types.keys():
        raise ConfigError.of(name, given[name], "the name of a setting of train")
    values = {n: v if n == "run_dir" else typed(n, v, types[n]) for n, v in given.items()}
    own = flags_of(PrivacyConfig).keys() & values.keys()
    privacy = PrivacyConfig(**{name: values.pop(name) for name in own})
    return privacy, run_config(**values)
