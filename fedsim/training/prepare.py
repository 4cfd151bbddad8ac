"""Prepare an open run: whatever can refuse it, then its private draws, its plan and its price.

The order of `prepare_run` is the safety of a private draw: nobody pays for a run that is refused.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.accounting import Event
from fedsim.budget import GROUP_SIZE, BudgetRequest, count_at_once, shortened
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import (
    UPDATE,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
    RunConfig,
)
from fedsim.els import ELS
from fedsim.engine import MADE_UP, Engine, Task, choose_strategy, versions
from fedsim.errors import ConfigError, expect
from fedsim.noise import predicted_error
from fedsim.plan import (
    ALL_COVERED,
    GIVEN,
    CorrelatedNoise,
    Evaluations,
    Fact,
    Plan,
    Stated,
    drawn_once,
    evaluations_of,
    events_before,
    expect_affordable,
    expect_enough_users,
    facts_of,
    fill_defaults,
    make_plan,
    method_for,
    planned_phases,
    sharing,
    smallest_group_size,
    voiding,
    with_group_size,
)
from fedsim.run import (
    StoredRun,
    directory,
    facts_of_loggers,
    model_name,
)
from fedsim.training.callbacks import Callback, expect_known, facts_of_callbacks
from fedsim.training.open import OpenRun, Purpose, wait_for
from fedsim.training.optimizers import Noise, with_defaults
from fedsim.training.private_evaluation import Booking
from fedsim.uls import ULS

SHORT_ROW = 3  # of `LanguageModelTask.dummy_batch`: a quarter of max_length

FITTED = ("num_steps", "participations", "epsilon")
"""Settings that --fit-limit changes."""


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """Everything that a `Trainer` needs for the first step."""

    opened: OpenRun
    plan: Plan
    method: ELS | ULS
    settings: PrivacyConfig
    """With nothing left to defaults."""
    booking: Booking | None
    """The run's entries in the budget ledger; None: it is not counted there."""
    engine: Engine
    task: Task
    params: Any
    strategy: Strategy
    why: str
    """The reason for this strategy, for display."""
    callbacks: Sequence[Callback]


def prepare_run(
    opened: OpenRun, *, callbacks: Sequence[Callback] = (), dry_run: bool = False
) -> PreparedRun:
    """Prepare a new run, or a resumed one; workers are ready on return.

    Args:
      callbacks: what they see may be a fact that the guarantee does not cover.
      dry_run: nothing will be released, so nothing is drawn or paid for.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    pays = opened.purpose.is_counted and not dry_run

    # 1. Settings: what they alone refuse is refused in a moment, before any worker starts.
    settings = _settings(opened, callbacks, dry_run=dry_run)
    public, facts = _without_draws(opened, settings)
    facts += facts_of_run(opened, callbacks)
    is_drawn = settings.group_size_epsilon is not None
    method = None if is_drawn else _method(opened, public)
    applicant = _applicant(opened, public)

    # 2. The engine: starting workers is what fails most, so it comes before anything is paid.
    engine, task, params = opened.start_engine()
    wait_for(engine, opened.console)

    # 3. Refusals, all of them here: after a draw even a refusal would tell of it, and would have
    #    been paid for in vain.
    _expect_fit(opened, applicant, pays=pays)
    if opened.stored is None and opened.custom is None:
        expect_finite_loss(engine, params, opened.run.model.source)
    strategy, why = _strategy(opened, engine, params, public, method)
    if method is None:
        _expect_plan_whatever_is_drawn(opened, settings, public, facts, params, applicant)

    # 4. Private draws: each is in the ledger of the data before it is made.
    completed = public
    if method is None:
        pay = functools.partial(_pay, opened, settings) if pays else None
        completed, _ = fill_defaults(
            opened.algorithm, settings, opened.data, key=opened.key, pay=pay
        )
        method = _method(opened, completed)

    # 5. The plan: it has the draws, and from here on everything that it states is public.
    if opened.stored:
        plan = _plan_again(opened.stored, opened, method)
    else:
        with opened.console.phase("calibrating the noise"):
            completed, plan = _plan(opened, completed, facts, method, params, applicant)
        if opened.run.fit_limit:
            fitting = {name: getattr(completed, name) for name in FITTED}
            opened.settings = dataclasses.replace(opened.settings, **fitting)
    expect_known(callbacks, plan)
    opened.run = with_plan(plan, opened.stored, opened.run, fresh=opened.model is None)

    # 6. The entry in the ledger of the data, for the whole run: the Trainer writes it under the
    #    ledger's lock, before the first step, in the place of the entry of a draw.
    booking = _booking(opened, plan, method, applicant)
    if opened.purpose.is_counted:
        booking.expect_room()
    return PreparedRun(
        opened=opened,
        plan=plan,
        method=method,
        settings=completed,
        booking=booking if opened.purpose.is_counted else None,
        engine=engine,
        task=task,
        params=params,
        strategy=strategy,
        why=why,
        callbacks=callbacks,
    )


def _settings(opened: OpenRun, callbacks: Sequence[Callback], *, dry_run: bool) -> PrivacyConfig:
    """The settings, with a default for the group size; those of a resumed run as planned."""
    expect_strict(opened, callbacks)
    if opened.stored and (plan := opened.stored.plan) is not None:
        kept = {"delta": plan.delta, "group_size": plan.group_size, "group_size_epsilon": None}
        return dataclasses.replace(opened.settings, **kept)
    expect_enough_users(opened.data.train.num_users, opened.settings.epsilon)
    settings = with_group_size(opened.algorithm, opened.settings, opened.data.train)
    if settings.group_size_epsilon is not None:
        counts = "a value in a dry run, which pays for no draw; a run draws one privately"
        expect("group_size", None, not dry_run, counts)
        given, els = settings.group_size, opened.algorithm == Algorithm.ELS
        expect("group_size_epsilon", settings.group_size_epsilon, els, "nothing with uls")
        expect("group_size", given, given is None, "none, or no group_size_epsilon")
    return settings


def _without_draws(opened: OpenRun, settings: PrivacyConfig) -> tuple[PrivacyConfig, list[Stated]]:
    """Completed settings, and their facts; with the smallest group size that can be drawn in the
    place of one that is still to be drawn."""
    public = settings
    if settings.group_size_epsilon is not None:
        least = smallest_group_size(settings, opened.data.train)
        public = dataclasses.replace(settings, group_size=least, group_size_epsilon=None)
    public, facts = fill_defaults(opened.algorithm, public, opened.data, key=opened.key)
    share = settings.group_size_epsilon
    if opened.stored and (plan := opened.stored.plan) is not None:
        bands, share = plan.sampling.bands_given, plan.group_size_epsilon
        public = dataclasses.replace(public, bands=bands)
    return dataclasses.replace(public, group_size_epsilon=share), facts


def _method(opened: OpenRun, settings: PrivacyConfig) -> ELS | ULS:
    """The algorithm. Args: settings: completed."""
    return method_for(opened.algorithm, settings, opened.data.train, opened.key)


def _applicant(opened: OpenRun, settings: PrivacyConfig) -> BudgetRequest:
    """The run as the ledger of the data sees it. Args: settings: completed."""
    kind = "audit" if opened.purpose == Purpose.AUDIT else "train"
    users, adjacency = opened.data.train, settings.adjacency
    return BudgetRequest.of(opened.run, users, settings.delta, kind, adjacency)


def _expect_fit(opened: OpenRun, applicant: BudgetRequest, *, pays: bool) -> None:
    """Raise ConfigError or FileDamaged if data, evaluations or the place of the ledger do not
    serve."""
    if opened.stored is None:
        _evaluations(opened, opened.settings)
    if not pays:
        return
    applicant.expect_place()
    if opened.stored is None and opened.purpose == Purpose.TRAIN and opened.custom is None:
        for store in opened.data.splits().values():
            store.check()  # before epsilon is spent on what a disk has damaged


def expect_finite_loss(engine: Engine, params: Any, source: str) -> None:
    """Raise ConfigError if a language model's loss is not finite before the first step.

    The loss of users would tell of them by whether the run starts, so made-up tokens are tried.
    """
    (loss,) = engine.begin_group_losses(params, MADE_UP, [np.array([SHORT_ROW])])()
    expected = f"a model with a finite loss before the first step, got {loss:g} on made-up tokens"
    expect("model", source, np.isfinite(loss), expected)


def _strategy(
    opened: OpenRun,
    engine: Engine,
    params: Any,
    settings: PrivacyConfig,
    method: ELS | ULS | None,
) -> tuple[Strategy, str]:
    """The clipping strategy, and the reason for it; a resumed run keeps its own.

    Args: method: None: ELS, whose group size is still to be drawn, and whose units are examples.
    """
    if opened.stored:
        return Strategy.parse(opened.stored.strategy["name"]), "as the run was started"
    group = settings.batch_size // method.sampler.expected_count if method else 1
    exact = math.isfinite(settings.epsilon)
    clip = Clip(settings.clip_norm, settings.clipping == "normalised", in_float32=not exact)
    with opened.console.phase("compiling"):
        return choose_strategy(engine, params, group, clip, opened.run.engine)


def _expect_plan_whatever_is_drawn(
    opened: OpenRun,
    settings: PrivacyConfig,
    public: PrivacyConfig,
    facts: Sequence[Stated],
    params: Any,
    applicant: BudgetRequest,
) -> None:
    """Raise ConfigError if no plan, or none within the limits, is possible with the smallest group
    size that can be drawn.

    Where users are added or removed, no public group size has a pool of the right size.
    """
    if settings.adjacency != ZERO_OUT:
        return
    method = _method(opened, public)
    with opened.console.phase("checking the settings"):
        _, plan = _plan(opened, public, facts, method, params, applicant)
    booking = _booking(opened, plan, method, applicant)
    if opened.purpose.is_counted:
        booking.expect_room()


def _pay(opened: OpenRun, settings: PrivacyConfig, delta: float) -> None:
    """Count the draw of a group size before anything that follows from it is seen.

    When the whole run is counted later, its entry replaces this one.
    Raises: ConfigError: a limit would be broken.
    """
    users, adjacency = opened.data.train, settings.adjacency
    applicant = BudgetRequest.of(opened.run, users, delta, GROUP_SIZE, adjacency)
    label = "" if opened.key.seed is None else Fact.KNOWN_SEED
    drawn: list[tuple[Event, int]] = [*events_before(settings.group_size_epsilon)]
    count_at_once(applicant, applicant.entry(opened.key.seal("ledger"), drawn, (0.0, 0.0), label))


def _plan(
    opened: OpenRun,
    completed: PrivacyConfig,
    facts: Sequence[Stated],
    method: ELS | ULS,
    params: Any,
    applicant: BudgetRequest,
) -> tuple[PrivacyConfig, Plan]:
    """Settings and plan of a new run; with --fit-limit, with the steps that fit the limit.

    Raises: ConfigError: there is none; or the run is strict, and the plan has a footnote.
    """

    def plan_of(settings: PrivacyConfig) -> Plan:
        return make_plan(
            opened.algorithm,
            settings,
            opened.data.train,
            method,
            num_coordinates(params),
            facts,
            opened.identity.data_seal,
            trial=opened.purpose == Purpose.TRIAL,
            evaluations=_evaluations(opened, settings),
        )

    plan = plan_of(completed)
    if opened.run.fit_limit:
        seal, before = opened.key.seal("ledger"), events_before(completed.group_size_epsilon)
        fewer = shortened(applicant, seal, method, completed, plan, before)
        if fewer is not completed:
            completed, plan = fewer, plan_of(fewer)
    if opened.run.strict:
        expect_nothing_outside(plan)
    return completed, plan


def _booking(opened: OpenRun, plan: Plan, method: ELS | ULS, applicant: BudgetRequest) -> Booking:
    """The run's entries in the ledger of the data. Raises: ConfigError: its steps cost more than
    planned."""
    phases = planned_phases(plan, method)
    expect_affordable(plan, phases)
    entry = applicant.entry(opened.key.seal("ledger"), phases, plan.slack, plan.reasons)
    return Booking.of(applicant, entry, plan, opened.data, opened.key)


def _plan_again(stored: StoredRun, opened: OpenRun, method: ELS | ULS) -> Plan:
    """The plan of a resumed run.

    Raises: ConfigError: it would draw from other texts, users might take part again too soon, or
      the held-out users are others.
    """
    assert stored.plan is not None, "a run of train has one"
    if opened.run.strict:
        expect_nothing_outside(stored.plan)
    same = sharing(opened.data.train, method, opened.key) == stored.plan.shared
    again = "the pool or the groups that the run started with: resume with its package versions"
    expect("data", "other texts of the same ones", same, again)
    told = {*facts_of_loggers(opened.run)} <= {*stored.plan.facts}
    again = "false, as at the start of the run, whose plan says what its loggers get"
    expect("log_non_private", opened.run.log_non_private, told, again)
    changed = directory.other_bits(stored, versions(), stored.host) or "as they were"
    same = drawn_once(method, stored.plan.num_steps, opened.key) == stored.plan.drawn_once
    again = "versions that draw the pool and users' turns as when the run started"
    expect("packages", changed, same, again)
    if (how := stored.plan.evaluations) is not None:
        again = "the held-out users that the run started with"
        expect("data", opened.run.data.source, how.seal == _held_out_seal(opened), again)
    return stored.plan


def _evaluations(opened: OpenRun, privacy: PrivacyConfig) -> Evaluations | None:
    """Evaluations with noise, sealed to the present held-out users."""
    evaluations = evaluations_of(privacy, opened.run, opened.data.eval_users)
    return evaluations and dataclasses.replace(evaluations, seal=_held_out_seal(opened))


def _held_out_seal(opened: OpenRun) -> str:
    held_out = opened.data.eval_users
    return "" if held_out is None else opened.key.seal(held_out.fingerprint)


def expect_strict(opened: OpenRun, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError if the run is strict and needs a footnote, before anything is drawn."""
    settings, run = opened.settings, opened.run
    if not run.strict:
        return
    given = {**vars(settings), **vars(run), **vars(run.data), "data": run.data.source}
    given["task"] = type(opened.custom).__name__
    facts = voiding(settings.epsilon, seeded=opened.key.seed is not None)
    facts += [*facts_of(settings, opened.data), *facts_of_run(opened, callbacks)]
    for fact in facts:
        if fact.fact not in GIVEN:
            value = given.get(fact.fact.setting, fact.of)
            expected = f"{fact.fact.instead}, with strict ({fact})"
            raise ConfigError.of(fact.fact.setting, value, expected)


def expect_nothing_outside(plan: Plan) -> None:
    """Raise ConfigError if a strict run's plan has something outside the guarantee."""
    if plan.facts:
        expected = f"{ALL_COVERED}, and the plan has: {plan.outside}"
        raise ConfigError.of("strict", True, expected)


def facts_of_run(opened: OpenRun, callbacks: Sequence[Callback]) -> list[Stated]:
    """Facts that the guarantee does not cover, beside those of `fill_defaults`."""
    run, own_task = opened.run, opened.custom is not None
    return [
        *facts_of_start(run, fresh_model=opened.model is None),
        *([Stated(Fact.OWN_TASK)] if own_task else []),
        *facts_of_loggers(run),
        *facts_of_callbacks(callbacks),
    ]


def facts_of_start(run: RunConfig, *, fresh_model: bool) -> list[Stated]:
    """Facts on what the training starts from."""
    model = None if fresh_model else run.model.source
    given = {Fact.MODEL: model, Fact.ADAPTER: run.model.adapter}
    return [Stated(fact, model_name(name)) for fact, name in given.items() if name is not None]


def with_plan(plan: Plan, stored: StoredRun | None, run: RunConfig, *, fresh: bool) -> RunConfig:
    """The run with its optimizer settings as it was started, or by the recipe."""
    if stored is not None:
        return dataclasses.replace(run, **{name: getattr(stored.run, name) for name in UPDATE})
    bound = plan.clip.sensitivity
    stddev = bound * plan.gradient_noise_multiplier / plan.expected_count
    if isinstance(plan.noise, CorrelatedNoise) and plan.strategy:
        # What steps add up to has noise of as much as independent noise of less.
        stddev *= plan.noise.predicted_error / predicted_error(
            plan.noise_multiplier, plan.num_steps, 1
        )
    return with_defaults(run, Noise(stddev, bound, plan.num_steps), fresh=fresh)
