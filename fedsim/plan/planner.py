"""Make the algorithm and its plan from completed settings; the noise is calibrated here."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    CYCLIC,
    EVAL_EXAMPLES,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    SamplingName,
    default_delta,
)
from fedsim.els import ELS
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.noise import CELL_ERRORS
from fedsim.plan.facts import Caveat
from fedsim.plan.plan import Evaluations, NoisePlan, Plan, SamplingPlan, SharedTexts, events_before
from fedsim.sampling import Sampling, Users, graph_of
from fedsim.shared_uls import SharedULS
from fedsim.uls import ULS

MAX_PARAMETERS = 10**9
"""Largest number of parameters in a private selection, whose slack of noise is paid for before any
model is made."""
MAX_ROWS = 16
"""Largest number of texts per user in an evaluation with noise, evenly spaced."""
METHODS = {Algorithm.ELS: ELS, Algorithm.ULS: ULS}


def method_for(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    key: SecretKey,
    kind: type | None = None,
) -> ELS | ULS:
    """The algorithm, ready to draw its first step.

    Args:
      privacy: from `fill_defaults`.
      key: key of the run.
      kind: a subclass in the place of the algorithm's own class.
    Raises: ConfigError: batch_size does not fit, or `kind` gets texts with several owners.
    """
    shared = graph_of(users) is not None
    expect("algorithm", kind, not (shared and kind), f"{algorithm}, for texts with several owners")
    kind, options = kind or METHODS[algorithm], {}
    if shared and kind is ULS:
        kind, options = SharedULS, {"max_changed": privacy.max_shared_groups}
    return kind(
        users,
        batch_size=privacy.batch_size,
        group_size=privacy.group_size,
        sampling=Sampling(
            privacy.sampling_run,
            privacy.bands or 1,
            privacy.adjacency == ZERO_OUT,
            privacy.num_steps // (privacy.participations or 1),
        ),
        key=key,
        adjacency=privacy.adjacency,
        **options,
    )


def as_planned(privacy: PrivacyConfig, plan: Plan) -> PrivacyConfig:
    """The settings of a run with the defaults that its plan has."""
    return dataclasses.replace(
        privacy,
        delta=plan.delta,
        group_size=plan.group_size,
        group_size_epsilon=plan.group_size_epsilon,
        batch_size=plan.batch_size,
        bands=plan.sampling.bands if plan.sampling.bands > 1 else None,
        participations=plan.sampling.participations,
    )


def calibrate(method: ELS | ULS, privacy: PrivacyConfig) -> float:
    """The smallest noise multiplier for the target epsilon; 0 if epsilon is infinite."""
    assert privacy.delta is not None, "fill_defaults() comes first"
    if math.isinf(privacy.epsilon):
        return 0.0
    return accounting.calibrate_noise(
        method.event,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=privacy.num_steps,
        before=events_before(privacy.group_size_epsilon),
    )


def planned_phases(plan: Plan, method: ELS | ULS) -> list[tuple[Event, int]] | None:
    """All events that a run of this plan will release; None without noise."""
    if not plan.noise_multiplier:
        return None
    return [*plan.before, (method.event(plan.noise_multiplier), plan.num_steps)]


def expect_affordable(plan: Plan, events: list[tuple[Event, int]] | None) -> None:
    """Check once more that the steps of a plan cost at most its target epsilon.

    Calibration ensures that; this check holds wherever plan and noise come from.
    Args: events: from `planned_phases`.
    Raises: ConfigError: they cost more.
    """
    if events is None:
        return
    spent, sigma = accounting.epsilon(events, plan.delta), plan.noise_multiplier
    most = plan.target_epsilon * (1 + accounting.RELATIVE_ACCURACY)
    wanted = f"more: all steps cost epsilon = {spent:.6g} of {plan.target_epsilon:g}"
    expect("noise_multiplier", sigma, spent <= most, wanted)


def make_plan(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    method: ELS | ULS,
    num_parameters: int,
    non_private: Sequence[Caveat],
    data_seal: str,
    *,
    trial: bool = False,
    evaluations: Evaluations | None = None,
) -> Plan:
    """Calibrate the noise and write down every public constant of a run.

    Args:
      privacy: from `fill_defaults`.
      num_parameters: coordinates that get noise in each step.
      non_private: facts that the guarantee does not cover.
      data_seal: keyed digest of the data's fingerprint.
      trial: the run is one trial of a private selection.
    Raises: ConfigError: epsilon is so large that the slack of the noise takes all of delta, or a
      trial trains more than MAX_PARAMETERS.
    """
    assert privacy.delta is not None, "fill_defaults() comes first"
    fits = not trial or num_parameters <= MAX_PARAMETERS
    most = f"at most {MAX_PARAMETERS:,} in a private selection"
    expect("num_parameters", num_parameters, fits, most)
    sigma, sampler = calibrate(method, privacy), method.sampler
    bands, planted = privacy.bands or 1, getattr(users, "canaries", None)
    plan = Plan(
        algorithm=algorithm,
        num_users=users.num_users,
        num_examples=public_examples(privacy, users),
        num_units=sampler.num_units,
        num_steps=privacy.num_steps,
        batch_size=privacy.batch_size,
        group_size=method.group_size,
        expected_count=sampler.expected_count,
        sampling=SamplingPlan(
            cast(SamplingName, sampler.name),
            sampler.sampling_prob,
            bands if sampler.name == CYCLIC else 1,
            privacy.participations if sampler.name == ALLOCATION else None,
        ),
        clip_norm=privacy.clip_norm,
        clipping=privacy.clipping,
        target_epsilon=privacy.epsilon,
        delta=privacy.delta,
        noise_multiplier=sigma,
        num_parameters=num_parameters,
        data_seal=data_seal,
        non_private=tuple(non_private),
        noise=NoisePlan(privacy.noise, bands if privacy.noise == CORRELATED else 1),
        purpose="trial" if trial else "release" if planted is None else "audit",
        planted=planted,
        group_size_epsilon=privacy.group_size_epsilon,
        clip_quantile=privacy.clip_quantile,
        loss_bound=privacy.loss_bound,
        adjacency=privacy.adjacency,
        seeded=method.key.seed is not None,
        shared=sharing(users, method),
        evaluations=evaluations,
        drawn_once=drawn_once(method, privacy.num_steps, method.key),
    )
    part = plan.slack.delta
    wanted = f"a smaller one, or inf: the slack of its noise, {part:.1g}, is all of delta"
    expect("epsilon", plan.target_epsilon, part < plan.delta, wanted)
    return plan


def public_examples(privacy: PrivacyConfig, users: Users) -> int | None:
    """The number of texts if the guarantee takes it as public; else None."""
    hidden = privacy.adjacency == ZERO_OUT and graph_of(users) is None
    return None if hidden else users.num_examples


def drawn_once(method: ELS | ULS, num_steps: int, key: SecretKey) -> str:
    """Seal what is drawn once for several steps: a pool or groups, users' turns or windows.

    With it a resumed run can tell whether other package versions draw the same. Returns "" if
    nothing is drawn once.
    Args: key: the run's own.
    """
    arrays = [method.pool] if isinstance(method, ELS) else []
    if isinstance(method, SharedULS):
        arrays = [method.groups.rows, method.groups.offsets]
    digest, drawn = hashlib.sha256(), False
    for array in itertools.chain(arrays, method.sampler.drawn_once(method.key, num_steps)):
        digest.update(np.ascontiguousarray(array).data)
        drawn = True
    return key.seal(f"drawn once {digest.hexdigest()}") if drawn else ""


def sharing(users: Users, method: ELS | ULS) -> SharedTexts | None:
    """The plan's entry for texts with several owners; None if each text has one."""
    if graph_of(users) is None:
        return None
    if isinstance(method, ELS):
        return SharedTexts(len(method.pool), 0)
    assert isinstance(method, SharedULS), "of texts with several owners"
    return SharedTexts(len(method.groups.rows), method.groups.max_changed)


def evaluations_of(
    privacy: PrivacyConfig, run: RunConfig, held_out: Users | None
) -> Evaluations | None:
    """The evaluations with noise that the settings request; None if they request none.

    Raises: ConfigError: there are too few held-out users, texts have several owners, or the loss
      has no bound.
    """
    if privacy.eval_epsilon is None:
        return None
    total = held_out.num_users if held_out is not None else 0
    two = "data with two held-out users at least"
    expect("eval_epsilon", privacy.eval_epsilon, total > 1, two)
    assert held_out is not None
    one_owner = graph_of(held_out) is None
    expect("eval_epsilon", privacy.eval_epsilon, one_owner, "texts with one owner each")
    bound = privacy.eval_loss_bound or math.log(getattr(held_out, "vocab_size", 1))
    expect("eval_loss_bound", privacy.eval_loss_bound, bound > 0, "a bound on the loss of the task")
    every = run.evaluated_every(privacy.num_steps, privacy.batch_size)
    count = 1 + -(-privacy.num_steps // every)
    examples = run.eval_examples or max(EVAL_EXAMPLES)
    users = min(total, examples)
    delta = min(default_delta(total), privacy.delta or 1.0)
    sigma = noise_of(privacy.eval_epsilon, delta, count)
    rows = min(MAX_ROWS, max(1, examples // users))
    return Evaluations(privacy.eval_epsilon, delta, sigma, every, count, users, rows, bound)


def noise_of(epsilon: float, delta: float, count: int) -> float:
    """Noise multiplier of `count` evaluations that together cost epsilon, less its slack.

    Raises: ConfigError: the slack leaves nothing of epsilon or of delta.
    """
    part = accounting.slack(count, epsilon, delta, CELL_ERRORS)
    fits = part.epsilon < epsilon and part.delta < delta
    slack = f"({part.epsilon:.1g}, {part.delta:.1g})"
    expect("eval_epsilon", epsilon, fits, f"another one: the slack of its noise is {slack}")
    return accounting.noise_multiplier(
        epsilon=epsilon - part.epsilon,
        delta=delta - part.delta,
        num_steps=count,
        sampling_prob=1.0,
    )
