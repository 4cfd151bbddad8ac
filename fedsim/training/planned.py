"""Plan an open run: complete its settings, calibrate its noise, count its cost, choose a strategy.

Nothing is written here. A private group size, which must not be seen before it is paid for, is
drawn in `_complete` and nowhere else.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedsim.accounting import Event
from fedsim.budget import GROUP_SIZE, Applicant, count_at_once, shortened
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import (
    UPDATE,
    ZERO_OUT,
    Algorithm,
    EngineConfig,
    PrivacyConfig,
    RunConfig,
    default_delta,
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
    complete,
    doubt,
    drawn_once,
    evaluations_of,
    events_before,
    expect_affordable,
    expect_enough_users,
    facts_of,
    in_words,
    make_plan,
    method_for,
    noise_ratio,
    places_needed,
    planned_phases,
    sharing,
    voiding,
    with_group_size,
)
from fedsim.run import (
    Console,
    StoredRun,
    directory,
    facts_of_loggers,
    model_name,
    receivers,
    speaking,
)
from fedsim.training.callbacks import Callback, expect_known, facts_of_callbacks
from fedsim.training.open import OpenRun, wait_for
from fedsim.training.optimizers import Noise, settled
from fedsim.training.private_evaluation import Counted
from fedsim.uls import ULS

NOTHING_PROMISED = (
    "{}, so no privacy guarantee. The privacy budget of these users, in {}, will be infinite for "
    "ever, and no limit can be kept. For trials use a ledger of their own: --budget-ledger "
    "trial-ledger"
)

SHORT_ROW = 3  # of `LanguageModelTask.made_up`: a quarter of max_length

FITTED = ("num_steps", "participations", "epsilon")
"""Settings that --spend-rest changes."""


class PlannedRun(NamedTuple):
    """Everything that `launch` needs for the first step."""

    plan: Plan
    method: ELS | ULS
    privacy: PrivacyConfig
    """From `complete`: nothing is left to defaults."""
    counted: Counted | None
    """The run's entries in the budget ledger; None: it is not counted there."""
    engine: Engine
    task: Task
    params: Any
    strategy: Strategy
    why: str
    """The reason for this strategy, for display."""


def plan_run(
    opened: OpenRun,
    *,
    counted: bool = True,
    trial: bool = False,
    dry_run: bool = False,
    callbacks: Sequence[Callback] = (),
) -> PlannedRun:
    """Make the plan of a new run, or read that of a resumed one; workers are ready on return.

    Args:
      counted: count the run in the budget ledger; False for a replay and a trial.
      trial: the run is a trial of a private selection, which is counted in its place.
      dry_run: nothing will be released, so nothing is paid for.
      callbacks: what they see may be a fact that the guarantee does not cover.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    algorithm, users, console = opened.algorithm, opened.data.train, opened.console
    pays = counted and not dry_run
    expect_strict(opened, callbacks)
    if pays and opened.stored is None:
        if opened.plant is None and opened.source is None:
            for store in opened.data.splits().values():
                store.check()  # before epsilon is spent on what a disk has damaged
        _rehearse(opened, callbacks)
    privacy, non_private = _complete(opened, opened.settings, pays=pays, dry_run=dry_run)
    non_private += facts_of_run(opened, callbacks)
    method = method_for(algorithm, privacy, users, opened.key)
    kind = "train" if opened.plant is None else "audit"
    applicant = Applicant.of(opened.run, users, privacy.delta, kind, privacy.adjacency)
    if pays:
        applicant.expect_place()
    engine, task, params = opened.start_engine()
    if opened.stored:
        plan = _plan_again(opened.stored, opened, method)
        expect_known(callbacks, plan)
    else:
        with console.phase("calibrating the noise"):
            privacy, plan = _new_plan(
                opened,
                method,
                applicant,
                privacy,
                num_parameters=num_coordinates(params),
                non_private=non_private,
                trial=trial,
            )
        _warn(opened, plan, applicant if counted else None)
    if opened.run.strict:
        expect_nothing_outside(plan)
    phases = planned_phases(plan, method)
    expect_affordable(plan, phases)
    entry = applicant.entry(opened.key.seal("ledger"), phases, plan.slack, plan.label)
    in_ledger = Counted.of(applicant, entry, plan, opened.data, opened.key)
    if counted:
        in_ledger.expect_room()
    wait_for(engine, console)
    fresh = opened.model is None
    opened.run = run = settled_by(plan, opened.stored, opened.run, fresh=fresh)
    console.plan(plan, engine, run)
    console.rows(logger_rows(run))
    if opened.stored is None and opened.source is None:
        expect_finite_loss(engine, params, run.model.source)
    first = None if dry_run or opened.stored else method.draw(0)
    strategy, why = _strategy(opened, engine, params, plan, first)
    in_ledger = in_ledger if counted else None
    return PlannedRun(plan, method, privacy, in_ledger, engine, task, params, strategy, why)


class Unheard(Console):
    """Keeps back what the run itself shows later."""

    def plan(self, plan: Plan, workers: Any, run: RunConfig) -> None:
        """Show no plan: its group size is not the run's."""

    def warn(self, text: str) -> None:
        """Show no warning twice."""


def _rehearse(opened: OpenRun, callbacks: Sequence[Callback]) -> None:
    """Plan a run that draws its group size with a public one in its place, unseen.

    What refuses the run whatever is drawn refuses it here, before the draw is paid for. Where users
    are added or removed, no public group size has a pool of the right size, so nothing is tried.
    Raises: ConfigError, EngineError, LedgerError: as `plan_run`.
    """
    if opened.settings.adjacency != ZERO_OUT:
        return
    privacy = with_group_size(opened.algorithm, opened.settings, opened.data.train)
    if privacy.group_size_epsilon is None or privacy.group_size is not None:
        return
    group_size = places_needed(privacy, opened.data.train)
    public = dataclasses.replace(privacy, group_size=group_size, group_size_epsilon=None)
    opened.start_engine()
    with speaking("quiet"):
        rehearsed = dataclasses.replace(opened, settings=public, console=Unheard())
    plan_run(rehearsed, dry_run=True, callbacks=callbacks)


def _complete(
    opened: OpenRun, privacy: PrivacyConfig, *, pays: bool, dry_run: bool
) -> tuple[PrivacyConfig, list[Stated]]:
    """The completed settings, and the facts about them that the guarantee does not cover.

    A private group size is paid for before it is drawn.
    A resumed run draws nothing again: it has the delta, group size and bands of its plan.
    Args:
      pays: the draw is counted in the budget ledger.
      dry_run: nothing may be drawn.
    """
    algorithm, stored, pay = opened.algorithm, opened.stored, None
    plan = stored.plan if stored else None
    if plan is not None:
        kept = {"delta": plan.delta, "group_size": plan.group_size, "group_size_epsilon": None}
        privacy = dataclasses.replace(privacy, **kept)
    else:
        expect_enough_users(opened.data.train.num_users, privacy.epsilon)
        privacy = with_group_size(algorithm, privacy, opened.data.train)
    if privacy.group_size_epsilon is not None:
        counts = "a value in a dry run, which pays for no draw; a run draws one privately"
        expect("group_size", None, not dry_run, counts)
        opened.start_engine()
        pay = functools.partial(_pay, opened, privacy) if pays else None
    completed, non_private = complete(algorithm, privacy, opened.data, key=opened.key, pay=pay)
    if plan is not None:
        share, bands = plan.group_size_epsilon, plan.sampling.bands_given
        completed = dataclasses.replace(completed, group_size_epsilon=share, bands=bands)
    return completed, non_private


def _pay(opened: OpenRun, privacy: PrivacyConfig, delta: float) -> None:
    """Count the draw of a group size before anything that follows from it is seen, even a refusal.

    When the whole run is counted later, its entry replaces this one.
    Raises: ConfigError: a limit would be broken.
    """
    applicant = Applicant.of(opened.run, opened.data.train, delta, GROUP_SIZE, privacy.adjacency)
    applicant.expect_place()
    label = "" if opened.key.seed is None else Fact.KNOWN_SEED
    run = opened.key.seal("ledger")
    drawn: list[tuple[Event, int]] = [*events_before(privacy.group_size_epsilon)]
    count_at_once(applicant, applicant.entry(run, drawn, (0.0, 0.0), label))


def _new_plan(
    opened: OpenRun,
    method: ELS | ULS,
    applicant: Applicant,
    completed: PrivacyConfig,
    *,
    num_parameters: int,
    non_private: Sequence[Stated],
    trial: bool,
) -> tuple[PrivacyConfig, Plan]:
    """Settings and plan of a new run; with --spend-rest, with the steps that fit the limit.

    Args: num_parameters, non_private, trial: as for `make_plan`.
    """

    def plan_of(settings: PrivacyConfig) -> Plan:
        return make_plan(
            opened.algorithm,
            settings,
            opened.data.train,
            method,
            num_parameters,
            non_private,
            opened.identity.data_seal,
            trial=trial,
            evaluations=_evaluations(opened, settings),
        )

    plan = plan_of(completed)
    if opened.run.spend_rest:
        seal, before = opened.key.seal("ledger"), events_before(completed.group_size_epsilon)
        fewer = shortened(applicant, seal, method, completed, plan, before)
        if fewer is not completed:
            completed, plan = fewer, plan_of(fewer)
        fitting = {name: getattr(completed, name) for name in FITTED}
        opened.settings = dataclasses.replace(opened.settings, **fitting)
    return completed, plan


def _warn(opened: OpenRun, plan: Plan, applicant: Applicant | None) -> None:
    """Show warnings before the first step. Args: applicant: None: the run is not counted."""
    warnings = warnings_of(plan)
    if opened.data.eval_users is None and not opened.run.strict:
        warnings.append("no users are held out, so there will be no held-out loss")
    if applicant and not plan.guarantee:
        warnings.append(NOTHING_PROMISED.format(in_words(plan.reasons), applicant.place))
    if applicant and (alike := applicant.told_alike()):
        warnings.append(alike)
    for warning in warnings:
        opened.console.warn(warning)
    if cut := opened.data.cut_off():
        opened.console.note(cut)


def _plan_again(stored: StoredRun, opened: OpenRun, method: ELS | ULS) -> Plan:
    """The plan of a resumed run.

    Raises: ConfigError: it would draw from other texts, users might take part again too soon, or
      the held-out users are others.
    """
    assert stored.plan is not None, "a run of train has one"
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


def _strategy(
    opened: OpenRun, engine: Engine, params: Any, plan: Plan, first: np.ndarray | None
) -> tuple[Strategy, str]:
    """The clipping strategy and the reason for it, with progress on the console.

    Args: first: units of the first step, or of one like it.
    """
    group = plan.budget // plan.expected_count
    with opened.console.phase("compiling"):
        return strategy_for(
            opened.run.engine, opened.stored, engine, params, group, plan.clip, first=first
        )


def warnings_of(plan: Plan) -> list[str]:
    """Warnings about plans that are valid but probably not intended."""
    warnings = []
    users, noise = plan.num_users, plan.gradient_noise_multiplier
    if noise and plan.delta > 1 / users:
        warnings.append(
            f"delta={plan.delta:g} is above 1/{users}: it allows publishing all texts of one of "
            f"{users:,} users; the default is {default_delta(users):.2g}"
        )
    if noise > plan.expected_count:
        unit = "examples" if plan.algorithm == Algorithm.ELS else "users"
        warnings.append(
            "in every direction, the noise of a step is "
            f"{noise / plan.expected_count:.1f} times as large as the gradient of "
            f"{plan.expected_count} {unit} can be: the model will hardly learn without a larger "
            "--batch-size or --epsilon"
        )
    elif noise and (error := plan.noise.predicted_error) is not None:
        on_sums = error / plan.expected_count
        warnings += doubt(noise_ratio(on_sums, plan.num_parameters, plan.num_steps), users)
    return warnings


def expect_strict(opened: OpenRun, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError if the run is strict and needs a footnote, before anything is drawn."""
    settings, run = opened.settings, opened.run
    if not run.strict:
        return
    given = {**vars(settings), **vars(run), **vars(run.data), "data": run.data.source}
    given["task"] = type(opened.source).__name__
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
    """Facts that the guarantee does not cover, beside those of settings and data of `complete`."""
    run, own_task = opened.run, opened.source is not None
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


def logger_rows(run: RunConfig) -> list[tuple[str, str]]:
    """The row of the plan on metrics that can leave the machine; empty if none can."""
    if not (names := receivers(run)):
        return []
    sent = "all metrics" if run.log_non_private else "the plan, epsilon, and metrics with noise"
    rest = "" if run.log_non_private else f"; the others stay in {run.run_dir}"
    return [("loggers", f"{', '.join(names)}: {sent}{rest}")]


def expect_finite_loss(engine: Engine, params: Any, source: str) -> None:
    """Raise ConfigError if a language model's loss is not finite before the first step.

    The loss of users would tell of them by whether the run starts, so made-up tokens are tried.
    """
    (loss,) = engine.begin_group_losses(params, MADE_UP, [np.array([SHORT_ROW])])()
    expected = f"a model with a finite loss before the first step, got {loss:g} on made-up tokens"
    expect("model", source, np.isfinite(loss), expected)


def settled_by(plan: Plan, stored: StoredRun | None, run: RunConfig, *, fresh: bool) -> RunConfig:
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
    return settled(run, Noise(stddev, bound, plan.num_steps), fresh=fresh)


def strategy_for(
    config: EngineConfig,
    stored: StoredRun | None,
    workers: Engine,
    params: Any,
    group: int,
    clip: Clip,
    *,
    first: np.ndarray | None = None,
) -> tuple[Strategy, str]:
    """The clipping strategy, and the reason for it; a resumed run keeps its own.

    Args:
      stored: the run as it was started; None if it is new.
      group: rows of a unit.
      first: units of a step whose programs are compiled ahead.
    """
    if stored:
        return Strategy.parse(stored.strategy["name"]), "as the run was started"
    return choose_strategy(workers, params, group, clip, config, first=first)
