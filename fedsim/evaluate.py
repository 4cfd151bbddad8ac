"""Held-out loss: on users outside of training, and on held-out examples of the trained users.

Loss on examples of trained users, and on a test split that some of them wrote, comes from the data
of protected users without noise: these metrics are `non_private`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import engine
from fedsim.config import RunConfig
from fedsim.data import Dataset
from fedsim.engine import Engine
from fedsim.errors import ConfigError, expect
from fedsim.keys import SecretKey
from fedsim.models import LanguageModelTask
from fedsim.run import (
    Console,
    StoredRun,
    checkpoint,
    expect_language_model,
    find_model,
    load_data,
    make_task,
    model_sha256,
)

VALIDATION = {"eval_users": "eval/loss", "eval_examples": "non_private/eval_examples_loss"}
"""Metric by split, for monitoring a training and choosing settings."""
SPLITS = {**VALIDATION, "test": "non_private/test_loss"}


def evaluate(
    workers: Engine,
    params,
    dataset: Dataset,
    max_examples: int | None = None,
    splits: Mapping[str, str] = VALIDATION,
    at: engine.At = engine.ignore,
) -> dict[str, float]:
    """Compute the mean loss in nats per token on each existing split, by metric name.

    Args:
      workers: the engine that computes it.
      params: tree of float32 arrays.
      dataset: the splits.
      max_examples: use this many evenly spaced examples of a split, always the same; None: all.
      splits: metric by split.
      at: shows how much is done, as if each split took as long.
    """
    losses, there = {}, [split for split in splits if getattr(dataset, split) is not None]
    for number, split in enumerate(there):
        total = getattr(dataset, split).num_examples
        rows = np.linspace(0, total - 1, min(total, max_examples or total)).astype(np.int64)

        def at_all(done: int, of: int, before: int = number) -> None:
            at(before * of + done, len(there) * of)

        losses[splits[split]] = workers.mean_nats(params, split, rows, at_all)
    return losses


def headline(losses: dict[str, float]) -> float:
    """Return the loss on held-out users, who are not protected; nan without such a split."""
    return losses.get(VALIDATION["eval_users"], math.nan)


def evaluate_run(stored: StoredRun, run: RunConfig, console: Console) -> dict[str, Any]:
    """Compute the losses of a run's last checkpoint on all examples of all held-out splits.

    Args:
      stored: the run.
      run: the settings of the run, with the engine of this evaluation.
      console: receives messages.
    Raises: ConfigError: there is no checkpoint, or the data are not those of the run.
    """
    engine.keep_compiled()
    task, params, data, path = last_model(stored, run, console)
    workers = engine.create(run.engine, task)
    try:
        workers.ready()
        with console.phase("evaluation") as at:
            losses = evaluate(workers, params, data, splits=SPLITS, at=at)
    finally:
        workers.close()
    about = {"run_dir": str(run.run_dir), "checkpoint": path.name, "loss_unit": data.loss_unit}
    return {**about, **losses}


def last_model(
    stored: StoredRun, run: RunConfig, console: Console
) -> tuple[LanguageModelTask, Any, Dataset, Path]:
    """Load (task, parameters, data, file) of a run's last checkpoint.

    Raises: ConfigError: there is no checkpoint, the data are not those of the run, or its model is
      a task of the user's own.
    """
    path = checkpoint.latest(run.run_dir)
    if path is None:
        raise ConfigError.of("run_dir", run.run_dir, "a checkpoint, found none")
    expect_language_model(stored)
    model = find_model(run.model.source, console, as_stored=run.model.lora_rank > 0)
    data = load_data(run.data, model, console.note)
    found = SecretKey.load(run.run_dir).seal(data.train.fingerprint)
    expect("data", run.data.source, found == stored.identity.data_seal, "the data of the run")
    same = model_sha256(model) == stored.identity.model
    expect("model", run.model.source, same, "the model of the run")
    key = SecretKey.create(0).jax_key("init")
    task, _ = make_task(run, model, data, key)
    path = checkpoint.latest(run.run_dir) or path  # a training may have written others meanwhile
    return task, checkpoint.load_params(path), data, path
