"""A run, from its settings to its first step: what is asked is checked, planned and counted."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fedsim.budget.admission import GROUP_SIZE, Applicant, shortened
from fedsim.clipping import Strategy
from fedsim.clipping.clip import num_coordinates
from fedsim.config import Algorithm, EngineConfig, PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.engine import Engine
from fedsim.engine.environment import versions
from fedsim.errors import expect
from fedsim.plan import (
    REPRODUCTION,
    Evaluations,
    Plan,
    before_of,
    complete,
    drawn_once,
    evaluations_of,
    expect_affordable,
    make_plan,
    method_for,
    planned_phases,
    sharing,
)
from fedsim.recipe import Noise, settled
from fedsim.run import directory
from fedsim.run.assemble import OpenRun, Plant, Source, open_run, wait_for
from fedsim.run.console import Console
from fedsim.run.cost import cost, cost_rows
from fedsim.run.directory import StoredRun
from fedsim.run.warnings import warnings_of
from fedsim.sampling import Allocation, Cyclic
from fedsim.training.held_out import Counted
from fedsim.training.resolve import (
    FITTED,
    as_started,
    expect_local_steps,
    expect_strategy,
    outside,
    settled_by,
    strategy_for,
    update_of,
)
from fedsim.training.trainer import Callback, Trainer
from fedsim.uls import ULS

NOTHING_PROMISED = (
    "this run promises nothing, and counts so for its users from its first step on, in {}: no "
    "limit can be kept for them then (--budget-ledger names another ledger, for trials)"
)


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    source: Source | None = None,
    plant: Plant | None = None,
    callback: Callback | None = None,
    trial: bool = False,
    count: bool = True,
    held_out: bool = True,
    rehearsed: EngineConfig | None = None,
) -> dict[str, Any]:
    """Train, or go on training; returns what `summary.json` holds.

    Nothing is written to the run directory before everything has been found in order.
    Args:
      source: data and task, instead of those that the settings name.
      plant: of an audit.
      callback: called after every step with its number, from 1, and its metrics.
      trial: it is one of a private selection, which is counted in the ledger of the data instead.
      count: count it in the ledger of the data; False: a replay, which releases nothing new.
      held_out: evaluate on held-out users, which is done without noise.
      rehearsed: train nothing and write nothing, but return the plan and what it would cost with
        this engine; see `run.cost`.
    Raises: ConfigError (a user's mistake), EngineError (workers), LedgerError.
    """
    privacy = as_started(privacy, run)
    update_of(settled(run, Noise(1.0, 1.0, 1)), privacy.num_steps)  # a mistake is found now
    expect_strategy(run.engine)
    share = privacy.group_size_epsilon
    counts = "none in a dry run, where nothing counts what a draw costs: give it --group-size"
    expect("group_size_epsilon", share, share is None or rehearsed is None, counts)
    with open_run(algorithm, privacy, run, console, source=source, plant=plant) as opened:
        if not held_out:
            opened.data = dataclasses.replace(opened.data, eval_users=None)
        goes_on, uncounted = opened.stored is not None, trial or not count
        draws = share is not None and not goes_on and not uncounted
        # A draw is paid for, so all that can be refused without it is refused before it.
        started = opened.start_engine() if draws else None
        pay = functools.partial(_pay, opened, privacy) if draws else None
        completed, non_private = _completed(opened, algorithm, privacy, pay)
        method = method_for(algorithm, completed, opened.data.train, opened.key)
        kind = "train" if plant is None else "audit"
        applicant = Applicant.of(run, opened.data.train, completed.delta, kind)
        if not uncounted and rehearsed is None:
            applicant.expect_place()
        workers, task, params = started or opened.start_engine()
        doubtful: list[str] = []
        if opened.stored:
            plan = _plan_again(opened.stored, opened, method)
        else:
            facts = (num_coordinates(params), non_private, opened.identity.data_seal)
            with console.phase("calibrating the noise"):
                asked = (opened, algorithm, method, applicant, completed, *facts)
                completed, plan = _new_plan(*asked, trial=trial)
            doubtful = warnings_of(plan, opened.data, default_delta=privacy.delta is None)
            doubtful += filter(None, [opened.data.cut_off()])
            if not (plan.guarantee or uncounted):
                doubtful.append(NOTHING_PROMISED.format(applicant.place))
        for doubt in doubtful:
            console.note(f"warning: {doubt}")
        planned = planned_phases(plan, method)
        expect_affordable(plan, planned)
        entry = applicant.entry(opened.key.seal("ledger"), planned, plan.slack, plan.label)
        counted = Counted.of(applicant, entry, plan, opened.data, opened.key)
        if not uncounted:
            counted.expect_room()
        wait_for(workers, console)
        run = settled_by(plan, opened.stored, run, fresh=opened.model is None)
        opened.run = run
        console.plan(plan, workers)
        console.update(run)
        update = update_of(run, plan.num_steps)
        strategy, why = _strategy(opened, workers, params, method, plan)
        if rehearsed is not None:
            drawn = next(rows for rows in map(method.draw, itertools.count()) if len(rows))
            asked = (workers, task, drawn, params, plan, strategy, update, rehearsed)
            found = cost(*asked, averaged=bool(run.ema))
            console.rows(cost_rows(found))
            return {**plan.as_dict(), **found}
        host = workers.host(params)
        named = {"name": str(strategy), "why": why}
        stored = opened.begin(task, plan=plan, host=host, strategy=named)
        drawing = directory.drawing_key(opened.key, stored)
        if drawing is not opened.key:  # of a seed; the pool of ELS takes seconds for many users
            method = method_for(algorithm, completed, opened.data.train, opened.key, drawing)
        console.note(f"{'clipped sum':17} {strategy} ({why})")
        trainer = Trainer(
            method=method,
            plan=plan,
            data=opened.data,
            transformation=update,
            engine=workers,
            strategy=strategy,
            run=run,
            console=console,
            host=host,
            other_bits=_other_bits(opened, stored, host),
            resumed=goes_on,
            replays=not count,
            plant=plant,
            callback=callback,
        )
        admitted = nullcontext() if uncounted else counted.admitted()
        return trainer.fit(params, opened.key, admitted)


def _pay(opened: OpenRun, privacy: PrivacyConfig, delta: float) -> None:
    """Count the draw of a group size, before anyone sees it or anything that follows from it: even
    that the run is refused. Counted again with all that it plans, the run takes its place.

    Raises: ConfigError: a limit would be broken.
    """
    applicant = Applicant.of(opened.run, opened.data.train, delta, GROUP_SIZE)
    applicant.expect_place()
    label = "" if opened.key.seed is None else REPRODUCTION
    run, drawn = opened.key.seal("ledger"), before_of(privacy)
    applicant.released(applicant.entry(run, drawn, (0.0, 0.0), label))


def _completed(
    opened: OpenRun,
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    pay: Callable[[float], None] | None,
) -> tuple[PrivacyConfig, list[str]]:
    """The settings with nothing left out, and all that the guarantee does not cover."""
    run, own_task = opened.run, opened.source is not None
    completed, non_private = complete(algorithm, privacy, opened.data, key=opened.key, pay=pay)
    if opened.stored and opened.stored.plan:  # of versions that might choose otherwise
        completed = dataclasses.replace(completed, bands=opened.stored.plan.bands_given)
    expect_local_steps(run, completed.group_size if algorithm == Algorithm.ULS else None)
    not_covered = outside(run, fresh_model=opened.model is None, own_task=own_task)
    return completed, non_private + not_covered


def _new_plan(
    opened: OpenRun,
    algorithm: Algorithm,
    method: ELS | ULS,
    applicant: Applicant,
    completed: PrivacyConfig,
    *facts: Any,
    trial: bool,
) -> tuple[PrivacyConfig, Plan]:
    """The settings and the plan of a run that begins; --spend-rest leaves them the steps that fit.

    Args: facts, trial: of `make_plan`.
    """

    def plan_of(settings: PrivacyConfig) -> Plan:
        asked = (algorithm, settings, opened.data.train, method, *facts)
        return make_plan(*asked, trial=trial, evaluations=_evaluations(opened, settings))

    plan = plan_of(completed)
    if opened.run.spend_rest:
        asked = (method, completed, plan, before_of(completed))
        fewer = shortened(applicant, opened.key.seal("ledger"), *asked)
        if fewer is not completed:
            completed, plan = fewer, plan_of(fewer)
        fitting = {name: getattr(completed, name) for name in FITTED}
        opened.settings = dataclasses.replace(opened.settings, **fitting)
    return completed, plan


def _plan_again(stored: StoredRun, opened: OpenRun, method: ELS | ULS) -> Plan:
    """The plan of a run that goes on.

    Raises: ConfigError: it would draw from other texts, or users might take part again too soon.
    """
    assert stored.plan is not None, "a run of train has one"
    same = sharing(opened.data.train, method, opened.key) == stored.plan.shared
    again = "the pool or the groups that the run began with: go on with its packages"
    expect("data", "other texts of the same ones", same, again)
    changed = directory.other_bits(stored, versions(), stored.host) or "as they were"
    if stored.plan.drawn_once:
        same = drawn_once(method, stored.plan.num_steps, opened.key) == stored.plan.drawn_once
    else:  # of an earlier version, which kept no seal
        turns, now = stored.plan.sampling_run in (Cyclic.name, Allocation.name), versions()
        drawing = ("numpy", "randomgen")
        same = not turns or all(stored.versions.get(name) == now[name] for name in drawing)
    again = "those that draw the pool and users' turns as when it began"
    expect("packages", changed, same, again)
    if (how := stored.plan.evaluations) is not None:
        again = "the held-out users that the run began with"
        expect("data", opened.run.data.source, how.seal == _held_out_seal(opened), again)
    return stored.plan


def _evaluations(opened: OpenRun, privacy: PrivacyConfig) -> Evaluations | None:
    """What is to be released of held-out users, who are the same to the end."""
    found = evaluations_of(privacy, opened.run, opened.data.eval_users)
    return found and dataclasses.replace(found, seal=_held_out_seal(opened))


def _held_out_seal(opened: OpenRun) -> str:
    held_out = opened.data.eval_users
    return "" if held_out is None else opened.key.seal(held_out.fingerprint)


def _strategy(
    opened: OpenRun, workers: Engine, params: Any, method: ELS | ULS, plan: Plan
) -> tuple[Strategy, str]:
    """How clipped sums are computed, and why; what takes long is told."""
    units = plan.num_steps * plan.expected_count
    what = "compiling, and timing ways to compute the clipped sum"
    with opened.console.phase(what) as phase:
        asked = (opened.run.engine, opened.stored, workers, params, method, plan.clip)
        return strategy_for(*asked, num_units=units, heard=phase.at)


def _other_bits(opened: OpenRun, stored: StoredRun, host: str) -> str:
    """Why a step that is run again may have other bits, which a run that goes on is told."""
    doubt = directory.other_bits(stored, versions(), host)
    if opened.stored and doubt:
        kept = "what it released is taken as it was kept, or left out"
        again = f"a step that is run again may have other bits: {doubt}: then {kept}"
        opened.console.note(again)
    return doubt
