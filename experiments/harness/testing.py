"""Test losses of finished runs: what the paper reports after tuning on validation data.

Stack Overflow's test split are the later examples; CC-News has none, and its reserved examples
stand in, as in the paper.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.harness import finetuning
from experiments.harness.finetuning import Arguments, Training
from experiments.harness.rows import Rows, over_seeds
from fedsim import engine
from fedsim.config import changed_run
from fedsim.errors import FedsimError
from fedsim.evaluate import SPLITS, evaluate, last_model
from fedsim.files import cache_dir
from fedsim.keys import SecretKey
from fedsim.run import Console, directory, find_model, make_task

REPORTED = ("test", "eval_users", "eval_examples")  # the first that there is


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to evaluate."""

    run_dir: Path
    max_examples: int | None
    before: bool = False
    """The model that the run started from, instead of the one it made."""


def with_test_losses(rows: Rows, training: Training, arguments: Arguments) -> Rows:
    """The rows of `tuned_losses` with test losses in the place of validation losses, which become
    `validation_loss`."""
    if not rows:  # a dry run
        return []
    dirs = [
        [finetuning.run_dir_of(row, training, arguments, seed) for seed in training.seeds]
        for row in rows
    ]
    first = {row["dataset"]: own[0] for row, own in zip(rows, dirs, strict=True)}
    most = training.test_examples
    jobs = [Job(directory, most) for own in dirs for directory in own]
    jobs += [Job(directory, most, before=True) for directory in first.values()]
    losses = dict(zip(jobs, side_by_side(evaluate_one, jobs, arguments), strict=True))
    found = []
    for row, own in zip(rows, dirs, strict=True):
        after = over_seeds([losses[Job(directory, most)] for directory in own])
        before = losses[Job(first[row["dataset"]], most, before=True)]
        found.append({**row, **after, "loss_before": before, "validation_loss": row["loss"]})
    return found


def evaluate_one(job: Job) -> float:
    """Runs in a process apart."""
    stored = directory.load(job.run_dir)
    run = changed_run(stored.run, engine="local")
    task, params, data, _ = last_model(stored, run, Console())
    if job.before:
        fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
        _, params = make_task(run, find_model(run.model.source), data, fresh)
    split = next(name for name in REPORTED if getattr(data, name) is not None)
    workers = engine.create(run.engine, task)
    losses = evaluate(workers, params, data, job.max_examples, {split: SPLITS[split]})
    return losses[SPLITS[split]]


def side_by_side(
    function: Callable[[Any], Any], jobs: Sequence[Any], arguments: Arguments
) -> list[Any]:
    """function(job) of each job, as many at a time as there is room for; at the scale that tests
    use, one after another in this process."""
    if arguments.scale == "smoke":
        return [function(job) for job in jobs]
    from fedsim.engine import ParallelRuns

    side = ParallelRuns(cache_dir=cache_dir() / "compiled")
    try:
        found = dict(side.run(function, jobs))
    finally:
        side.close()
    for each in found.values():
        if isinstance(each, FedsimError):
            raise each
    return [found[number] for number in range(len(jobs))]
