"""From the settings of a run to its summary (`train`), or to an estimate of its cost (`dry_run`).

Time and memory are measured on a few units in this process. Evaluations, checkpoints and noise come
on top.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from fedsim.cgroups import cpus
from fedsim.clipping import Strategy
from fedsim.config import ZERO_OUT, Algorithm, EngineConfig, PrivacyConfig, RunConfig, computed_by
from fedsim.engine import TRIAL_UNITS, Engine, Task, place_workers, versions
from fedsim.errors import ConfigError, expect
from fedsim.plan import Plan, method_for
from fedsim.run import (
    Console,
    directory,
    duration,
    receivers,
    released,
    speaking,
)
from fedsim.training.callbacks import Callback
from fedsim.training.loggers import expect_loggers
from fedsim.training.open import OpenRun, Plant, Source, open_run
from fedsim.training.optimizers import Noise, settled, update_of
from fedsim.training.planned import FITTED, PlannedRun, Unheard, plan_run
from fedsim.training.trainer import Trainer


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    source: Source | None = None,
    plant: Plant | None = None,
    callbacks: Sequence[Callback] = (),
    trial: bool = False,
    count: bool = True,
    held_out: bool = True,
) -> dict[str, Any]:
    """Train, or resume training; return the contents of `summary.json`.

    Nothing is written to the run directory before all checks have passed.
    Args:
      source: data and task to use in place of those that the settings name.
      plant: canaries of an audit.
      callbacks: called between the steps.
      trial: the run is a trial of a private selection, which the budget ledger counts in its place.
      count: count the run in the budget ledger; False for a replay, which releases nothing new.
      held_out: evaluate on held-out users without noise.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    privacy = runnable(privacy, run)
    held_out = held_out and not (run.strict and privacy.eval_epsilon is None)
    if trial or not count:  # nobody else may learn how many trials there are
        sending = receivers(run)
        run = dataclasses.replace(run, log_to=[name for name in run.log_to if name not in sending])
    with open_run(
        algorithm, privacy, run, console, source=source, plant=plant, held_out=held_out
    ) as opened:
        planned = plan_run(opened, counted=count and not trial, trial=trial, callbacks=callbacks)
        return launch(opened, planned, callbacks=callbacks, replays=not count).fit()


def launch(
    opened: OpenRun,
    planned: PlannedRun,
    *,
    callbacks: Sequence[Callback] = (),
    replays: bool = False,
) -> Trainer:
    """Write the run's directory if it is new, lock it, and return the Trainer of the run."""
    host = planned.engine.host(planned.params)
    strategy = {"name": str(planned.strategy), "why": planned.why}
    stored = opened.begin(planned.task, plan=planned.plan, host=host, strategy=strategy)
    drawing = directory.drawing_key(opened.key, stored)
    if drawing is not opened.key:  # of a seed; the pool of ELS takes seconds for many users
        users = opened.data.train
        method = method_for(opened.algorithm, planned.privacy, users, opened.key, drawing)
        planned = planned._replace(method=method)
    why = planned.why if opened.console.verbose else planned.why.partition(":")[0]
    opened.console.rows([("gradient method", f"{planned.strategy} ({why})")])
    elsewhere = directory.other_bits(stored, versions(), host)
    other_bits = elsewhere or released.elsewhere(opened.run.run_dir)
    if opened.stored and other_bits:
        opened.console.warn(
            f"a step that is run again may have other bits: {other_bits}: then what it released is "
            "taken as it was kept, or left out"
        )
    return Trainer(opened, planned, host, other_bits, replays, callbacks, elsewhere=bool(elsewhere))


def dry_run(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    config: EngineConfig,
) -> dict[str, Any]:
    """Plan a run and estimate its cost; nothing is trained, written or paid for.

    Args:
      run: settings with engine `local`.
      config: the engine to estimate for.
    Returns: fields of the plan, and those of `cost`.
    Raises: ConfigError, EngineError: as in a training.
    """
    privacy = runnable(privacy, run)
    with open_run(algorithm, privacy, run, console) as opened:
        plan, _, _, _, engine, task, params, strategy, _ = plan_run(opened, dry_run=True)
        update, averaged = update_of(opened.run, plan.num_steps), bool(opened.run.ema)
        estimate = cost(engine, task, params, plan, strategy, update, config, averaged=averaged)
        console.rows(cost_rows(estimate))
        return {**plan.as_dict(), **estimate}


def rehearse(algorithm: Algorithm, privacy: PrivacyConfig, run: RunConfig) -> None:
    """Plan a trial of a private selection, unseen: what would refuse it refuses it here. Nothing is
    trained, written or paid for.

    Raises: ConfigError, EngineError: as in a training.
    """
    privacy = runnable(privacy, run)
    with speaking("quiet"):
        console = Unheard()
    run = computed_by(run, strategy="scan")  # which is not tried
    with open_run(algorithm, privacy, run, console) as opened:
        plan_run(opened, counted=False, trial=True, dry_run=True)


def cost(
    worker: Engine,
    task: Task,
    params: Any,
    plan: Plan,
    strategy: Strategy,
    transformation: optax.GradientTransformation,
    config: EngineConfig,
    *,
    averaged: bool,
) -> dict[str, Any]:
    """Estimate seconds and bytes of the steps of a plan from a trial on made-up rows here.

    Args:
      worker: engine of this process, with its task.
      config: the engine to estimate for; its workers are assumed to be like this process.
      averaged: the run also keeps an average of the parameters.
    Returns: num_workers; step_seconds, seconds; worker_bytes, driver_bytes.
    Raises: ConfigError: not even a few units fit in memory here.
    """
    units = min(TRIAL_UNITS, plan.expected_count)
    rows = np.arange(units * plan.budget // plan.expected_count).reshape(units, -1)
    state = jax.eval_shape(transformation.init, params)
    workers = _workers(config)
    trial = worker.try_strategy(params, rows, plan.clip, strategy)
    if trial.fault:
        raise ConfigError.of("strategy", strategy, f"one that fits here: {trial.fault}")
    step_s = trial.seconds / len(rows) * plan.expected_count / workers
    trained, frozen = _num_bytes(params), _num_bytes(task.frozen)
    return {
        "num_workers": workers,
        "step_seconds": step_s,
        "seconds": step_s * plan.num_steps,
        # Parameters, sum and program, and the model that adapters sit on.
        "worker_bytes": 2 * trained + frozen + trial.memory,
        # Parameters, sum, noise and gradient; the same model, to hand it out; the average.
        "driver_bytes": (4 + averaged) * trained + frozen + _num_bytes(state),
    }


def _workers(config: EngineConfig) -> int:
    """Number of workers that an engine would have on this machine."""
    if config.kind == "local":
        return 1
    machine: dict[str, float] = {"CPU": cpus()}
    if (name := jax.default_backend().upper()) in ("GPU", "TPU"):
        machine[name] = jax.local_device_count()
    placement = place_workers(
        config.num_workers, config.threads_per_worker, [machine], config.accelerator
    )
    return placement.num_workers


def cost_rows(estimate: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of an estimate of `cost` for display."""
    step, steps = duration(estimate["step_seconds"]), duration(estimate["seconds"])
    driver = _size(estimate["driver_bytes"])
    worker = _size(estimate["worker_bytes"])
    workers = f"{estimate['num_workers']} worker(s) like this process"
    return [
        ("time", f"about {step} a step, {steps} in all, for gradients on {workers}"),
        ("memory", f"about {worker} a worker, {driver} here, beside what any process takes"),
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2g} MB" if num_bytes < 99e6 else f"{num_bytes / 1e6:,.0f} MB"


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def runnable(privacy: PrivacyConfig, run: RunConfig) -> PrivacyConfig:
    """The settings to run with (`as_started`), after the checks that need no data.

    Raises: ConfigError: optimizer or strategy does not exist, or does not fit; a logger's packages
      are missing; or spend_rest would tell who the users are.
    """
    if privacy.adjacency != ZERO_OUT:  # how many steps fit depends on who the users are
        without = f"false with --adjacency {privacy.adjacency}"
        expect("spend_rest", run.spend_rest, not run.spend_rest, without)
    privacy = as_started(privacy, run)
    update_of(settled(run, Noise(1.0, 1.0, 1)), privacy.num_steps)
    expect_loggers(run.log_to)
    return privacy


def as_started(privacy: PrivacyConfig, run: RunConfig) -> PrivacyConfig:
    """The settings, with the number of steps that fitted a limit when a resumed run was started."""
    if not (run.spend_rest and run.resume and (run.run_dir / directory.CONFIG).exists()):
        return privacy
    stored = directory.load(run.run_dir)
    if not stored.run.spend_rest:
        return privacy  # what differs is refused where all settings are compared
    return dataclasses.replace(privacy, **{name: getattr(stored.privacy, name) for name in FITTED})
