"""From the settings of a run to its summary (`train`), or to an estimate of its cost (`dry_run`).

Time and memory are measured on a few units in this process. Evaluations, checkpoints and noise come
on top.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedsim.cgroups import cpus
from fedsim.config import ZERO_OUT, Algorithm, EngineConfig, PrivacyConfig, RunConfig, computed_by
from fedsim.engine import TRIAL_UNITS, place_workers
from fedsim.errors import ConfigError, expect
from fedsim.plan import Plan, in_words, warnings_of
from fedsim.run import (
    Console,
    duration,
    receivers,
    verbosity,
)
from fedsim.training.callbacks import Callback
from fedsim.training.loggers import expect_loggers
from fedsim.training.open import AuditHooks, CustomTask, OpenRun, Purpose, open_run
from fedsim.training.optimizers import Noise, update_of, with_defaults
from fedsim.training.prepare import PreparedRun, prepare_run
from fedsim.training.private_evaluation import Booking
from fedsim.training.trainer import Trainer

NOTHING_PROMISED = (
    "{}, so no privacy guarantee. The privacy budget of these users, in {}, will be infinite for "
    "ever, and no limit can be kept. For trials use a ledger of their own: --budget-ledger "
    "trial-ledger"
)


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    purpose: Purpose = Purpose.TRAIN,
    custom: CustomTask | None = None,
    audit: AuditHooks | None = None,
    held_out: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train, or resume training; return the contents of `summary.json`.

    Nothing is written to the run directory before all checks have passed.
    Args:
      custom: data and task, instead of those that the settings name.
      audit: canaries of an audit.
      held_out: evaluate held-out users during the training.
      callbacks: called between the steps.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    expect_runnable(privacy, run)
    if not purpose.is_counted:  # nobody else may learn how many trials there are
        sending = receivers(run)
        run = dataclasses.replace(run, log_to=[name for name in run.log_to if name not in sending])
    options: dict[str, Any] = {"purpose": purpose, "custom": custom, "audit": audit}
    with open_run(algorithm, privacy, run, console, held_out=held_out, **options) as opened:
        prepared = prepare_run(opened, callbacks=callbacks)
        show(prepared)
        return launch(prepared).fit()


def launch(prepared: PreparedRun) -> Trainer:
    """Write the run's directory if it is new, lock it, and return the Trainer of the run."""
    strategy = {"name": str(prepared.strategy), "why": prepared.why}
    prepared.opened.begin(prepared.task, plan=prepared.plan, strategy=strategy)
    return Trainer(prepared)


def show(prepared: PreparedRun) -> None:
    """Show the plan and what it warns of, before the first step."""
    opened, plan, booking = prepared.opened, prepared.plan, prepared.booking
    console, why = opened.console, prepared.why
    if opened.stored is None:
        for warning in _warnings(opened, plan, booking):
            console.warn(warning)
        if cut := opened.data.cut_off():
            console.note(cut)
    console.plan(plan, prepared.engine, opened.run)
    if names := receivers(opened.run):
        private = opened.run.log_non_private
        sent = "all metrics" if private else "the plan, epsilon, and metrics with noise"
        rest = "" if private else f"; the others stay in {opened.run.run_dir}"
        console.rows([("loggers", f"{', '.join(names)}: {sent}{rest}")])
    why = why if console.verbose else why.partition(":")[0]
    console.rows([("gradient method", f"{prepared.strategy} ({why})")])


def _warnings(opened: OpenRun, plan: Plan, booking: Booking | None) -> list[str]:
    """Warnings about a new run."""
    warnings = warnings_of(plan)
    if opened.data.eval_users is None and not opened.run.strict:
        warnings.append("no users are held out, so there will be no held-out loss")
    if booking is not None:
        request, _ = booking.requests[0]
        if not plan.guarantee:
            reasons = in_words(plan.reasons)
            warnings.append(NOTHING_PROMISED.format(reasons, request.place))
        if alike := request.lookalike_warning():
            warnings.append(alike)
    return warnings


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
    expect_runnable(privacy, run)
    with open_run(algorithm, privacy, run, console) as opened:
        prepared = prepare_run(opened, dry_run=True)
        show(prepared)
        estimate = cost(prepared, config)
        console.rows(cost_rows(estimate))
        return {**prepared.plan.as_dict(), **estimate}


def rehearse(algorithm: Algorithm, privacy: PrivacyConfig, run: RunConfig) -> None:
    """Prepare a trial of a private selection: what would refuse it refuses it here. Nothing is
    trained, written or paid for.

    Raises: ConfigError, EngineError: as in a training.
    """
    expect_runnable(privacy, run)
    with verbosity("quiet"):
        console = Console()
    run = computed_by(run, strategy="scan")  # which is not tried
    with open_run(algorithm, privacy, run, console, purpose=Purpose.TRIAL) as opened:
        prepare_run(opened, dry_run=True)


def cost(prepared: PreparedRun, config: EngineConfig) -> dict[str, Any]:
    """Estimate seconds and bytes of the steps of a plan from a trial on made-up rows here.

    Args:
      prepared: a run with the engine of this process.
      config: the engine to estimate for; its workers are assumed to be like this process.
    Returns: num_workers; step_seconds, seconds; worker_bytes, driver_bytes.
    Raises: ConfigError: not even a few units fit in memory here.
    """
    plan, params, run = prepared.plan, prepared.params, prepared.opened.run
    transformation, averaged = update_of(run, plan.num_steps), bool(run.ema)
    units = min(TRIAL_UNITS, plan.expected_count)
    rows = np.arange(units * plan.budget // plan.expected_count).reshape(units, -1)
    state = jax.eval_shape(transformation.init, params)
    workers = _workers(config)
    trial = prepared.engine.try_strategy(params, rows, plan.clip, prepared.strategy)
    if trial.fault:
        raise ConfigError.of("strategy", prepared.strategy, f"one that fits here: {trial.fault}")
    step_s = trial.seconds / len(rows) * plan.expected_count / workers
    trained, frozen = _num_bytes(params), _num_bytes(prepared.task.frozen)
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


def expect_runnable(privacy: PrivacyConfig, run: RunConfig) -> None:
    """Raise ConfigError if optimizer or strategy does not exist, or does not fit, if a logger's
    packages are missing, or if fit_limit would tell who the users are."""
    if privacy.adjacency != ZERO_OUT:  # how many steps fit depends on who the users are
        without = f"false with --adjacency {privacy.adjacency}"
        expect("fit_limit", run.fit_limit, not run.fit_limit, without)
    update_of(with_defaults(run, Noise(1.0, 1.0, 1)), privacy.num_steps)
    expect_loggers(run.log_to)
