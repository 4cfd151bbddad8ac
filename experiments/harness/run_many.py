"""Many runs, and what came of them: losses before and after training, on validation and test data.

Test losses are what the paper reports after tuning on validation data. Stack Overflow's test split
are the later examples; CC-News has none, and its reserved examples stand in, as in the paper.

At the scale `long` what came of runs is appended to a file beside the results, of some at a time.
Another machine goes on from there, wherever data and model lie; but only one on which the starting
model has the same bits, which are others on another kind of processor.
"""

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from experiments.benchmarks.common import processor
from experiments.harness.records import came_from
from experiments.harness.rows import Row, Rows, append, kept
from fedsim import engine
from fedsim.config import changed_run
from fedsim.data import Dataset
from fedsim.errors import ConfigError
from fedsim.evaluate import SPLITS, VALIDATION, evaluate, last_model
from fedsim.keys import SecretKey
from fedsim.run import Console, StoredRun, directory, find_model, make_task, metrics, model_sha256
from fedsim.tuning import Job, jobs_of, outcomes_of

AT_ONCE = 16
"""Runs after which what came of them is kept."""
DIVERGED = re.compile("(the loss|the largest parameter) is .* after step")
REPORTED = ("test", "eval_users", "eval_examples")  # the first that there is
Settings = dict[str, Any]


@dataclasses.dataclass
class Runs:
    """The runs of an experiment: where they are kept, how they are computed, what came of them."""

    directory: Path
    file: Path | None = None
    """To which what came of them is appended."""
    in_turn: bool = False
    """They have all workers of the cluster, one after another; else each is a process of one
    thread."""
    here: bool = False
    """One after another in this process, as tests have them."""
    known: dict[str, Row] = dataclasses.field(default_factory=dict)
    """What came of runs, by their names."""
    asked: set[str] = dataclasses.field(default_factory=set)
    """The names of those that results are of."""

    @property
    def minutes(self) -> float:
        """Of one worker, runs that were kept included."""
        return round(sum(self.known[name]["seconds"] for name in self.asked) / 60, 1)

    def side_by_side(self, function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        """function(job) of each job, in their order: in a process for each, as many at a time as
        there are cores, unless they are to be `here` or `in_turn`. Args: function: of a module."""
        if self.here or self.in_turn:
            return [function(job) for job in jobs]
        os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu"}
        spawn = multiprocessing.get_context("spawn")
        # The commit is that of when it begins, whatever is committed while it computes.
        with ProcessPoolExecutor(os.cpu_count() or 1, spawn, initializer=came_from) as pool:
            return list(pool.map(function, jobs))


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Of a model of a run on test data."""

    run_dir: Path
    max_examples: int | None
    before: bool = False
    """The model that the run started from, instead of the one it made."""


def run_many(
    settings: Sequence[Settings], most: int | None, runs: Runs, *, tested: bool = False
) -> Rows:
    """A row for each run, which is run if need be: `before` and `after`, its losses on validation
    data, the latter infinite if it diverged; `seconds`; `model` and `num_parameters`.

    Args:
      most: test examples, evenly spaced; None: all.
      tested: with `test_before` and `test`, the losses on test data.
    Raises: SystemExit: a run failed. ConfigError: runs that were kept began elsewhere.
    """
    known, file = runs.known, runs.file
    if file:
        tested = True
        known.update({row["run"]: row for row in kept(file)})
        expect_same_start(settings, known, file)
    names = [name_of(each, runs) for each in settings]
    wanted = "test" if tested else "after"
    each = zip(names, settings, strict=True)
    todo = {name: own for name, own in each if wanted not in known.get(name, {})}
    waiting = list(todo)
    while waiting:
        size = AT_ONCE if file else len(waiting)
        part, waiting = {name: todo[name] for name in waiting[:size]}, waiting[size:]
        failed: dict[str, str] = {}
        try:
            failed = train_all(list(part.values()), runs)
        finally:
            diverged = {name for name, error in failed.items() if DIVERGED.search(error)}
            found = ended(part, most, runs, tested, diverged)
            known.update(found)
            if file:
                append(file, found.values())
        if faults := [error for name, error in failed.items() if name not in diverged]:
            raise SystemExit(f"{len(faults)} runs failed, the first: {faults[0]}")
    runs.asked.update(names)
    return [known[name] for name in names]


def train_all(settings: Sequence[Settings], runs: Runs) -> dict[str, str]:
    """Train the runs that have not finished. Returns: the errors of those that failed, by job."""
    jobs = [job for job in jobs_of(settings, runs.directory) if job.summary is None]
    engine = "ray" if runs.in_turn else "local"
    jobs = [dataclasses.replace(job, run=changed_run(job.run, engine=engine)) for job in jobs]
    errors = zip(jobs, runs.side_by_side(train_one, jobs), strict=True)
    return {job.name: error for job, error in errors if error}


def train_one(job: Job) -> str:
    """The error that ended a run; empty if it finished."""
    ((_, error),) = outcomes_of([job])
    return " ".join(str(error).split()) if error is not None else ""


def name_of(settings: Settings, runs: Runs) -> str:
    """What a run is known by; in a file not by where its data and model lie."""
    if not runs.file:
        return jobs_of([settings], runs.directory)[0].name
    own = {"data": fingerprint(settings["data"]), "model": sha256(settings["model"])}
    return json.dumps({**settings, **own}, sort_keys=True)


@functools.cache
def fingerprint(data: str) -> str:
    """Of a data set that is built."""
    return Dataset.open(Path(data)).train.fingerprint


@functools.cache
def sha256(model: str) -> str | None:
    """Of a model's files."""
    return model_sha256(find_model(model))


def expect_same_start(settings: Sequence[Settings], known: dict[str, Row], file: Path) -> None:
    """Raises ConfigError: of the runs that were kept, none began with these data and this model."""
    begun = {(each["data"], each["model"]) for each in map(json.loads, known)}
    asked = {(fingerprint(each["data"]), sha256(each["model"])) for each in settings}
    if begun and begun.isdisjoint(asked):
        here, there = (sorted(str(model)[:12] for _, model in each) for each in (asked, begun))
        expected = f"a file of runs that began as they would here, with model {here[0]}, and not "
        expected += f"with {there[0]}: go on with the starting model that is kept where they were "
        raise ConfigError.of("runs", file, f"{expected}made, or move the file away")


def ended(
    settings: dict[str, Settings],
    most: int | None,
    runs: Runs,
    tested: bool,
    diverged: Collection[str] = (),
) -> dict[str, Row]:
    """The rows of those runs that have ended, by their names. Args: diverged: jobs' names."""
    every = {name: jobs_of([each], runs.directory)[0] for name, each in settings.items()}
    jobs = {name: job for name, job in every.items() if job.summary}
    origin = {**came_from(), "cpu": processor()}
    found = {name: {"run": name, **came_of(job), **origin} for name, job in jobs.items()}
    for name, job in every.items():
        if job.name in diverged:
            found[name] = {"run": name, **came_of_diverged(job), **origin}
    if tested and jobs:
        # All runs of a data set and a seed start from one model.
        starts = {name: (settings[name]["data"], settings[name]["seed"]) for name in jobs}
        first = {starts[name]: job for name, job in jobs.items()}
        asked = [Evaluation(job.run.run_dir, most) for job in jobs.values()]
        asked += [Evaluation(job.run.run_dir, most, before=True) for job in first.values()]
        losses = runs.side_by_side(evaluate_one, asked)
        before = dict(zip(first, losses[len(jobs) :], strict=True))
        for name, loss in zip(jobs, losses[: len(jobs)], strict=True):
            found[name] |= {"test_before": before[starts[name]], "test": loss}
    return found


def came_of(job: Job) -> Row:
    """What a finished run says of itself. Its losses are those of held-out users, or where there
    are none of held-out examples."""
    run_dir, summary = job.run.run_dir, job.summary
    assert summary is not None, "it has finished"
    losses = [float(summary[name]) for name in ("initial_eval_loss", "final_eval_loss")]
    if not all(map(math.isfinite, losses)):
        name = "non_private/eval_examples_loss"
        seen = [float(line[name]) for line in metrics.read(run_dir) if name in line]
        losses = [seen[0], seen[-1]] if seen else [math.inf, math.inf]
    stored, what = directory.load(run_dir), ("before", "after")
    return {
        **dict(zip(what, losses, strict=True)),
        "seconds": summary["wall_seconds"],
        **model_of(stored),
    }


def came_of_diverged(job: Job) -> Row:
    """What is known of a run whose parameters ran away: no model is worse."""
    run_dir = job.run.run_dir
    lines, stored = metrics.read(run_dir), directory.load(run_dir)
    losses = VALIDATION.values()
    before = [float(line[name]) for line in lines for name in losses if name in line]
    seconds = sum(float(line.get("performance/step_seconds", 0.0)) for line in lines)
    return {
        **{"before": before[0] if before else math.nan, "after": math.inf},
        **{"test_before": math.nan, "test": math.inf, "seconds": round(seconds, 1)},
        **model_of(stored),
    }


def model_of(stored: StoredRun) -> Row:
    """What a run started from, and how much of it is trained."""
    count = stored.plan and stored.plan.num_parameters
    return {"model": stored.identity.model, "num_parameters": count}


def evaluate_one(asked: Evaluation) -> float:
    """Runs in a process apart."""
    stored = directory.load(asked.run_dir)
    run = changed_run(stored.run, engine="local")
    task, params, data, _ = last_model(stored, run, Console())
    if asked.before:
        fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
        _, params = make_task(run, find_model(run.model.source), data, fresh)
    split = next(name for name in REPORTED if getattr(data, name) is not None)
    workers = engine.create(run.engine, task)
    losses = evaluate(workers, params, data, asked.max_examples, {split: SPLITS[split]})
    return losses[SPLITS[split]]
