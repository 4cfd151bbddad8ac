"""From completed settings to the algorithm and its plan: the noise is calibrated here."""

import hashlib
import itertools
import math
from typing import Protocol

import numpy as np

from fedsim import accounting
from fedsim.accounting import Event
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    CYCLIC,
    POISSON,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
    RunConfig,
)
from fedsim.els import ELS
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.noise import predicted_error, slack
from fedsim.plan.options import (
    AllocatedSampling,
    AnySampling,
    Audit,
    CorrelatedNoise,
    CyclicSampling,
    Evaluations,
    IndependentNoise,
    PoissonSampling,
    Release,
    SharedTexts,
    ShuffledSampling,
    Trial,
    assumed_share,
)
from fedsim.plan.plan import Plan, events_before
from fedsim.sampling import Sampling, Users, graph_of
from fedsim.shared_uls import SharedULS
from fedsim.uls import ULS

MOST_PARAMETERS = 10**9
"""Of a trial of a private selection, whose slack of noise is paid for before models are made."""
TWO_HELD_OUT = "data with two held-out users at least"
MOST_ROWS = 16
"""Texts of a user that are looked at, evenly spaced."""
METHODS = {Algorithm.ELS: ELS, Algorithm.ULS: ULS}


def method_for(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    key: SecretKey,
    drawing: SecretKey | None = None,
) -> ELS | ULS:
    """The algorithm, ready to draw its first step.

    Args: drawing: what steps are drawn with, where it is not the run's own key. Where texts have
      several owners, how many units there are depends on the draw of pool or groups, and the plan,
      made earlier, says how many: these are drawn with the run's own.
    """
    shared = graph_of(users) is not None
    kind, own = METHODS[algorithm], {}
    if shared and algorithm == Algorithm.ULS:
        kind, own = SharedULS, {"max_changed": privacy.max_changed}
    return kind(
        users,
        batch_size=privacy.batch_size,
        group_size=privacy.group_size,
        sampling=Sampling(
            privacy.sampling_run,
            privacy.bands or 1,
            privacy.adjacency == ZERO_OUT,
            privacy.num_steps // (privacy.participations or 1),
            assumed_share(privacy.assumed_population, users.num_users),
        ),
        key=key if shared else drawing or key,
        drawing=drawing,
        adjacency=privacy.adjacency,
        **own,
    )


def calibrate(method: ELS | ULS, privacy: PrivacyConfig) -> float:
    """The smallest noise multiplier for the target epsilon; 0 if that is infinite."""
    assert privacy.delta is not None, "complete() comes first"
    if math.isinf(privacy.epsilon):
        return 0.0
    return accounting.calibrate_noise(
        method.event,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=privacy.num_steps,
        before=before_of(privacy),
    )


def before_of(privacy: PrivacyConfig) -> list[tuple[Event, int]]:
    """What a run with these settings releases before its first step, to the accountant."""
    return [*events_before(privacy.group_size_epsilon)]


def planned_phases(plan: Plan, method: ELS | ULS) -> list[tuple[Event, int]] | None:
    """All that a run of this plan will release, to the accountant; None without noise."""
    if not plan.noise_multiplier:
        return None
    return [*plan.before, (method.event(plan.noise_multiplier), plan.num_steps)]


def expect_affordable(plan: Plan, phases: list[tuple[Event, int]] | None) -> None:
    """Raises ConfigError: with its noise the steps of a plan cost more than was asked for.

    Calibration sees to it that they do not. This looks once more before the first step, wherever
    plan and noise come from.
    Args: phases: of `planned_phases`.
    """
    if phases is None:
        return
    spent, sigma = accounting.epsilon(phases, plan.delta), plan.noise_multiplier
    most = plan.target_epsilon * (1 + accounting.RELATIVE_ACCURACY)
    wanted = f"more: all steps cost epsilon = {spent:.6g} of {plan.target_epsilon:g}"
    expect("noise_multiplier", sigma, spent <= most, wanted)


def sampling_for(name: str, prob: float, privacy: PrivacyConfig) -> AnySampling:
    """What the plan says of how units are drawn.

    Args:
      name: of the sampler.
      prob: the share of all units that is expected in a step.
      privacy: complete.
    """
    if name == ALLOCATION:
        assert privacy.participations is not None, "complete() comes first"
        return AllocatedSampling(prob=prob, participations=privacy.participations)
    assumed = privacy.assumed_population
    if name == POISSON:
        return PoissonSampling(prob=prob, assumed_population=assumed)
    kind = CyclicSampling if name == CYCLIC else ShuffledSampling
    return kind(prob=prob, assumed_population=assumed, bands=privacy.bands or 1)


def make_plan(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    users: Users,
    method: ELS | ULS,
    num_parameters: int,
    non_private: list[str],
    data_seal: str,
    *,
    trial: bool = False,
    evaluations: Evaluations | None = None,
) -> Plan:
    """Calibrate the noise and write down every constant.

    Raises: ConfigError: epsilon is so large that the slack of the noise takes all of delta, or a
      trial trains more parameters than were paid for.
    """
    assert privacy.delta is not None, "complete() comes first"
    fits = not trial or num_parameters <= MOST_PARAMETERS
    most = f"at most {MOST_PARAMETERS:,} in a private selection"
    expect("num_parameters", num_parameters, fits, most)
    sigma = calibrate(method, privacy)
    bands = (privacy.bands or 1) if privacy.noise == CORRELATED else 1
    error = predicted_error(sigma, privacy.num_steps, bands)
    noise = IndependentNoise(predicted_error=error)
    if privacy.noise == CORRELATED:
        noise = CorrelatedNoise(predicted_error=error, bands=bands)
    planted = getattr(users, "canaries", None)
    plan = Plan(
        algorithm=algorithm,
        num_users=users.num_users,
        num_examples=users.num_examples,
        num_units=method.sampler.num_units,
        num_steps=privacy.num_steps,
        budget=privacy.batch_size,
        group_size=method.group_size,
        expected_count=method.sampler.expected_count,
        sampling=sampling_for(method.sampler.name, method.sampler.sampling_prob, privacy),
        clip_norm=privacy.clip_norm,
        clipping=privacy.clipping,
        target_epsilon=privacy.epsilon,
        delta=privacy.delta,
        noise_multiplier=sigma,
        num_parameters=num_parameters,
        data_seal=data_seal,
        non_private=tuple(non_private),
        noise=noise,
        purpose=Trial(True) if trial else Release() if planted is None else Audit(planted),
        group_size_epsilon=privacy.group_size_epsilon,
        clip_quantile=privacy.clip_quantile,
        loss_bound=privacy.loss_bound,
        adjacency=privacy.adjacency,
        seeded=method.key.seed is not None,
        shared=sharing(users, method, method.key),
        evaluations=evaluations,
        drawn_once=drawn_once(method, privacy.num_steps, method.key),
    )
    part = plan.slack.delta
    wanted = f"a smaller one, or inf: the slack of its noise, {part:.1g}, is all of delta"
    expect("epsilon", plan.target_epsilon, part < plan.delta, wanted)
    return plan


def drawn_once(method: ELS | ULS, num_steps: int, key: SecretKey) -> str:
    """A seal of the pool of ELS, and of who takes part in which turn or window; "" if none of these
    is drawn. By it a run that goes on with other packages knows whether they draw the same.

    Args: key: the run's own.
    """
    arrays = [*([method.pool] if isinstance(method, ELS) else [])]
    digest, count = hashlib.sha256(), 0
    for array in itertools.chain(arrays, method.sampler.drawn_once(method.key, num_steps)):
        digest.update(np.ascontiguousarray(array).data)
        count += 1
    return key.seal(f"drawn once {digest.hexdigest()}") if count else ""


def sharing(users: Users, method: ELS | ULS, key: SecretKey) -> SharedTexts | None:
    """What the plan says of texts with several owners; None where each has one.

    Args: key: the run's own.
    The seal tells whether a run that goes on has the pool or the groups that it began with.
    """
    if (owners := graph_of(users)) is None:
        return None
    if isinstance(method, ELS):
        used, changed, kept = method.pool, 0, [method.pool]
    else:
        assert isinstance(method, SharedULS), "of texts with several owners"
        groups = method.groups
        used, changed, kept = groups.rows, groups.max_changed, [groups.rows, groups.offsets]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in kept))
    return SharedTexts(
        owner_sets=owners.num_sets,
        with_several_owners=int(np.diff(users.offsets)[owners.sizes > 1].sum()),
        kept=len(used),
        left_out=users.num_examples - len(used),
        max_changed=changed,
        seal=key.seal(digest.hexdigest()),
    )


class HeldOut(Protocol):
    """A store of held-out users, as far as the plan sees it."""

    num_users: int
    offsets: np.ndarray


def evaluations_of(
    privacy: PrivacyConfig, run: RunConfig, held_out: HeldOut | None
) -> Evaluations | None:
    """The evaluations that the settings ask for; None: they ask for none with noise.

    Raises: ConfigError: there are no users for them, or their loss has no bound.
    """
    if privacy.eval_epsilon is None:
        return None
    total = held_out.num_users if held_out is not None else 0
    expect("eval_epsilon", privacy.eval_epsilon, total > 1, TWO_HELD_OUT)
    assert held_out is not None
    one_owner = getattr(held_out, "owners", None) is None
    expect("eval_epsilon", privacy.eval_epsilon, one_owner, "texts with one owner each")
    bound = privacy.eval_loss_bound or math.log(getattr(held_out, "vocab_size", 1))
    expect("eval_loss_bound", privacy.eval_loss_bound, bound > 0, "a bound on the loss of the task")
    every = run.eval_every or max(1, privacy.num_steps // 10)
    count = 1 + -(-privacy.num_steps // every)
    users, delta = min(total, run.eval_examples), delta_of(total, privacy.delta)
    sigma, _ = noise_of(privacy.eval_epsilon, delta, count)
    rows = min(MOST_ROWS, max(1, run.eval_examples // users))
    return Evaluations(privacy.eval_epsilon, delta, sigma, every, count, users, rows, bound)


def delta_of(num_users: int, delta: float | None) -> float:
    """At which evaluations of so many held-out users cost what they may: N^-1.1, or that of the run
    where it is smaller."""
    return min(num_users**-1.1, delta or 1.0)


def noise_of(epsilon: float, delta: float, count: int = 1) -> tuple[float, tuple[float, float]]:
    """(sigma, slack) of evaluations that cost epsilon together, with noise that is not ideal."""
    part = slack(count, epsilon, delta)
    sigma = accounting.noise_multiplier(
        epsilon=epsilon - part.epsilon,
        delta=delta - part.delta,
        num_steps=count,
        sampling_prob=1.0,
    )
    return sigma, (part.epsilon, part.delta)
