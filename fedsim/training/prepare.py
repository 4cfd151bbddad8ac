"""Prepare an open run: whatever can refuse it, then its private draws, its plan and its price.

The order of `prepare_run` is the safety of a private draw: nobody pays for a run that is refused.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedsim.budget import GROUP_SIZE, BudgetRequest, count_at_once
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import EVAL_EXAMPLES, PLANNED, ZERO_OUT, PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.engine import DUMMY, Engine, Task, choose_strategy
from fedsim.errors import ConfigError, expect
from fedsim.noise import predicted_error
from fedsim.plan import (
    ASSUMPTIONS,
    Caveat,
    Fact,
    Plan,
    as_planned,
    drawn_once,
    evaluations_of,
    events_before,
    expect_affordable,
    fill_defaults,
    make_plan,
    method_for,
    planned_phases,
    private_group_size,
    smallest_group_size,
    voiding,
    with_group_size,
)
from fedsim.run import StoredRun, model_name
from fedsim.sampling import graph_of
from fedsim.training.callbacks import Callback, facts_of_callbacks
from fedsim.training.open import OpenRun, Purpose, class_name
from fedsim.training.optimizers import Noise, with_defaults
from fedsim.training.private_evaluation import Booking
from fedsim.uls import ULS

SHORT_ROW = 3  # of `LanguageModelTask.dummy_batch`: a quarter of max_length


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """Everything that a `Trainer` needs for the first step."""

    opened: OpenRun
    """With nothing left to defaults of the optimizer."""
    plan: Plan
    method: ELS | ULS
    booking: Booking | None
    """The run's entries in the budget ledger; None: it is not counted there."""
    engine: Engine
    task: Task
    params: Any
    strategy: Strategy
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
    users, is_new, console = opened.data.train, opened.stored_plan is None, opened.console
    pays = opened.purpose.is_counted and not dry_run

    # 1. Settings: what they alone refuse is refused in a moment, before any worker starts.
    settings = _settings(opened, dry_run=dry_run)
    is_drawn = is_new and settings.group_size_epsilon is not None
    completed, facts = _completed(opened, settings, callbacks)
    method = None
    if not is_drawn or settings.adjacency == ZERO_OUT:  # else the pool's size follows from the draw
        method = method_for(opened.algorithm, completed, users, opened.key, opened.kind)
    evaluations = evaluations_of(completed, opened.run, opened.data.eval_users) if is_new else None
    if evaluations is not None:
        evaluations = dataclasses.replace(evaluations, seal=_held_out_seal(opened))
    kind = "audit" if opened.purpose == Purpose.AUDIT else "train"
    request = BudgetRequest.of(opened.run, users.user_ids(), completed.delta, kind)

    # 2. The engine: starting workers is what fails most, so it comes before anything is paid.
    engine, task, params = opened.start_engine()
    with console.phase("starting the workers"):
        engine.ready()

    # 3. Refusals, all of them here: after a draw even a refusal would tell of it, and would have
    #    been paid for in vain.
    if pays:
        request.expect_place()
    if is_new and opened.custom is None and not dry_run:
        _expect_finite_loss(engine, params, opened.run.model.source)
    strategy = _strategy(opened, engine, params, completed, method, check=not dry_run)

    def plan_of(settings: PrivacyConfig, method: ELS | ULS) -> Plan:
        return make_plan(
            opened.algorithm,
            settings,
            users,
            method,
            num_coordinates(params),
            facts,
            opened.identity.data_seal,
            trial=opened.purpose == Purpose.TRIAL,
            evaluations=evaluations,
        )

    if is_drawn and method is not None:  # a limit refuses by a plan, so it takes one to ask
        with console.phase("checking the settings"):
            _booking(opened, plan_of(completed, method), method, request)

    # 4. Private draws: each is in the ledger of the data before it is made.
    if is_drawn:
        if pays:
            _pay(opened, completed, request)
        drawn = private_group_size(settings, users, opened.key)
        settings = dataclasses.replace(settings, group_size=drawn)
        completed, _ = fill_defaults(opened.algorithm, settings, opened.data)
        method = method_for(opened.algorithm, completed, users, opened.key, opened.kind)

    # 5. The plan: it has the draws, and from here on everything that it states is public.
    assert method is not None, "made in stage 1 or 4"
    if is_new:
        with console.phase("calibrating the noise"):
            plan = plan_of(completed, method)
    else:
        plan = _plan_as_stored(opened, method, callbacks)
    run = with_plan(plan, opened.stored, opened.run, fresh=opened.model is None)
    opened = dataclasses.replace(opened, run=run)

    # 6. The entry in the ledger of the data, for the whole run: the Trainer writes it under the
    #    ledger's lock, before the first step, in the place of the entry of a draw.
    booking = _booking(opened, plan, method, request)
    return PreparedRun(opened, plan, method, booking, engine, task, params, strategy, callbacks)


def _settings(opened: OpenRun, *, dry_run: bool) -> PrivacyConfig:
    """The settings, with a default for the group size; those of a resumed run as planned."""
    if opened.stored_plan is not None:
        return as_planned(opened.settings, opened.stored_plan)
    settings = with_group_size(opened.algorithm, opened.settings, opened.data.train)
    if settings.group_size_epsilon is not None:
        counts = "a value in a dry run, which pays for no draw; a run draws one privately"
        expect("group_size", None, not dry_run, counts)
    return settings


def _completed(
    opened: OpenRun, settings: PrivacyConfig, callbacks: Sequence[Callback]
) -> tuple[PrivacyConfig, list[Caveat]]:
    """The settings with nothing left to defaults, and what the guarantee does not cover."""
    if opened.stored_plan is not None:
        completed, facts = settings, [*opened.stored_plan.caveats]
    else:
        if settings.group_size_epsilon is not None:
            # It stands in for the one that is not drawn yet.
            smallest = smallest_group_size(settings, opened.data.train)
            settings = dataclasses.replace(settings, group_size=smallest)
        completed, facts = fill_defaults(opened.algorithm, settings, opened.data)
        facts += facts_of_start(opened.run, fresh_model=opened.model is None)
        facts += [Caveat(Fact.OWN_TASK)] if opened.custom is not None else []
        facts += [Caveat(Fact.OWN_ALGORITHM, class_name(opened.kind))] if opened.kind else []
        facts += facts_of_callbacks(callbacks)
    if opened.run.strict:
        expect_covered(opened, facts)
    return completed, facts


def expect_covered(opened: OpenRun, facts: Sequence[Caveat]) -> None:
    """Raise ConfigError if the guarantee of a strict run does not cover one of the facts."""
    void = voiding(opened.settings.epsilon, seeded=opened.key.seed is not None)
    for fact in [*void, *facts]:
        if fact.fact not in ASSUMPTIONS:
            name, expected = fact.fact.setting, "expected another value, with strict"
            text = f"{name}: {expected}: the guarantee does not cover {fact}"
            raise ConfigError(text, field=name)


def _expect_finite_loss(engine: Engine, params: Any, source: str) -> None:
    """Raise ConfigError if a language model's loss is not finite before the first step.

    The loss of users would tell of them by whether the run starts, so made-up tokens are tried.
    """
    (loss,) = engine.group_losses(params, DUMMY, [np.array([SHORT_ROW])])
    expected = f"a model with a finite loss before the first step, got {loss:g} on made-up tokens"
    expect("model", source, np.isfinite(loss), expected)


def _strategy(
    opened: OpenRun,
    engine: Engine,
    params: Any,
    settings: PrivacyConfig,
    method: ELS | ULS | None,
    *,
    check: bool,
) -> Strategy:
    """The clipping strategy; a resumed run keeps its own. Without a `method` ELS has still to draw
    its group size, and units are examples."""
    if opened.stored:
        return Strategy.parse(opened.stored.strategy)
    group = settings.batch_size // method.sampler.expected_count if method else 1
    exact = math.isfinite(settings.epsilon)
    clip = Clip(settings.clip_norm, settings.clipping == "normalised", in_float32=not exact)
    # With several owners, the assignment of texts decides who is in a step.
    public = settings.adjacency == ZERO_OUT and graph_of(opened.data.train) is None
    how: dict[str, Any] = {"public_places": public, "check": check, "note": opened.console.note}
    with opened.console.phase("compiling"):
        return choose_strategy(engine, params, group, clip, opened.run.engine, **how)


def _booking(
    opened: OpenRun, plan: Plan, method: ELS | ULS, request: BudgetRequest
) -> Booking | None:
    """The run's entries in the ledger of the data; None if it is not counted there."""
    planned = planned_phases(plan, method)
    expect_affordable(plan, planned)
    if not opened.purpose.is_counted:
        return None
    entry = request.entry(opened.key.seal("ledger"), planned, plan.slack, plan.reasons)
    booking = Booking.of(request, entry, plan, opened.data, opened.key)
    for each, entry in booking.requests:
        each.expect_room(entry)
    return booking


def _pay(opened: OpenRun, settings: PrivacyConfig, request: BudgetRequest) -> None:
    """Count the draw of a group size before it; the whole run's entry replaces this one."""
    draw = dataclasses.replace(request, kind=GROUP_SIZE)
    label = "" if opened.key.seed is None else Fact.KNOWN_SEED
    events = events_before(settings.group_size_epsilon)
    count_at_once(draw, draw.entry(opened.key.seal("ledger"), [*events], (0.0, 0.0), label))


def _plan_as_stored(opened: OpenRun, method: ELS | ULS, callbacks: Sequence[Callback]) -> Plan:
    """The plan of a resumed run, unless it would draw or show others than at its start."""
    stored, plan = opened.stored, opened.stored_plan
    assert stored is not None and plan is not None, "of a resumed run"
    again = "those at the start of the run alone to see metrics without noise"
    for fact in facts_of_callbacks(callbacks):
        expect(fact.fact.setting, fact.of, fact in plan.caveats, again)
    same = drawn_once(method, plan.num_steps, opened.key) == plan.drawn_once
    again = "versions that draw the pool and users' turns as when the run started"
    expect("packages", "others than at the start", same, again)
    if plan.evaluations is not None:
        same = plan.evaluations.seal == _held_out_seal(opened)
        again = "the held-out users that the run started with"
        expect("data", opened.run.data.source, same, again)
    return plan


def _held_out_seal(opened: OpenRun) -> str:
    held_out = opened.data.eval_users
    return "" if held_out is None else opened.key.seal(held_out.fingerprint)


def facts_of_start(run: RunConfig, *, fresh_model: bool) -> list[Caveat]:
    """Facts on what the training starts from."""
    return [] if fresh_model else [Caveat(Fact.MODEL, model_name(run.model.source))]


def with_plan(plan: Plan, stored: StoredRun | None, run: RunConfig, *, fresh: bool) -> RunConfig:
    """The run with nothing of PLANNED left to defaults: as it was started, or by the rules."""
    if stored is not None:
        return dataclasses.replace(run, **{name: getattr(stored.run, name) for name in PLANNED})
    since = plan.batch_size * run.evaluated_every(plan.num_steps, plan.batch_size)
    examples = run.eval_examples or int(np.clip(since // 2, *EVAL_EXAMPLES))
    run = dataclasses.replace(run, eval_examples=examples)
    bound = plan.clip.sensitivity
    stddev = bound * plan.gradient_noise_multiplier / plan.expected_count
    if plan.strategy:
        # What steps add up to has noise of as much as independent noise of less.
        sigma, steps = plan.noise_multiplier, plan.num_steps
        stddev *= predicted_error(sigma, steps, plan.noise.bands) / predicted_error(sigma, steps, 1)
    return with_defaults(run, Noise(stddev, bound, plan.num_steps), fresh=fresh)
