"""Recommend an algorithm for some data, and its settings: the paper's two questions.

Group sizes come from the heuristics of Section 6 (the median user for ELS, Estimate-and-Double for
ULS), clip norms from gradient norms at the starting model, noise from the accountant, and the
choice from the noise per step (Section 3).

It looks at the data without noise, as the paper does, and the result says so.
"""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from fedsim import engine
from fedsim.config import ADD_OR_REMOVE, CORRELATED, ZERO_OUT, Algorithm, PrivacyConfig, RunConfig
from fedsim.data import Dataset
from fedsim.engine import Engine
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.models import PRESETS
from fedsim.noise import predicted_error
from fedsim.plan import ADJACENCY, Caveat, Fact, calibrate, fill_defaults, method_for
from fedsim.run import Console, find_model, load_data, make_task
from fedsim.sampling import examples_per_user, graph_of, pool_of
from fedsim.tuning import doubling
from fedsim.tuning.advice import Advice, choose, command, to_train
from fedsim.tuning.estimates import FEW_USERS, NUM_USERS, GradientNorms, noise_stddev


@dataclasses.dataclass(frozen=True)
class Start:
    """A run before its first step, which recommendations look at."""

    run: RunConfig
    data: Dataset
    params: Any
    key: SecretKey
    """Key of the samples."""
    workers: Engine


def recommend(
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    num_users: int | None = None,
) -> dict[str, Any]:
    """Advice for both algorithms on a run's data at its starting model, and the better one.

    Args:
      privacy: epsilon, delta, num_steps, batch_size, clipping and sampling; the rest is computed.
      run: data, model and workers; `run_dir` is the parent of the runs of the printed commands.
      num_users: number of users in the sample of gradients; None: by the model.
    Returns: facts of the data and the model; advice for `els` and `uls` (fields of `Advice`);
      `recommended`, `reason` and `non_private`.
    Raises:
      ConfigError: the settings do not fit the data or each other.
      EngineError: workers failed.
    """
    expect("epsilon", privacy.epsilon, privacy.epsilon < math.inf, "finite: noise is compared")
    if num_users is None:
        num_users = NUM_USERS if run.model.source in PRESETS else FEW_USERS
    expect("users", num_users, num_users >= 1, ">= 1")
    with started(run, console) as start:
        users = start.data.train
        largest = max(1, privacy.batch_size // (doubling.START.cohort_size // 2))
        of = start.workers, start.params, users.offsets, start.key
        options = {"num_users": num_users, "max_group_size": largest, "phase": console.phase}
        norms = GradientNorms(*of, **options)
        els, els_norm, of_els = _els(start, privacy, norms)
        uls, uls_norm, of_uls = _uls(start, privacy, norms)
        non_private = list(dict.fromkeys([*of_els, *of_uls]))
        advice = [
            _advice(Algorithm.ELS, els, els_norm, privacy, start),
            _advice(Algorithm.ULS, uls, uls_norm, privacy, start),
        ]
        best, reason = choose(*advice)
        return {
            "num_users": users.num_users,
            "num_examples": users.num_examples,
            "median_examples": int(np.median(examples_per_user(users))),
            "epsilon": privacy.epsilon,
            "epsilon_holds": ADJACENCY[privacy.adjacency],
            "delta": els.delta,
            **{str(entry.algorithm): dataclasses.asdict(entry) for entry in advice},
            "recommended": str(best.algorithm),
            "reason": reason,
            "non_private": [fact.line for fact in non_private],
        }


def _els(
    start: Start, privacy: PrivacyConfig, norms: GradientNorms
) -> tuple[PrivacyConfig, float, list[Caveat]]:
    """Settings of ELS by the median heuristic, L_ELS, and the facts read off the data."""
    settings, non_private = fill_defaults(Algorithm.ELS, privacy, start.data)
    users, group_size = start.data.train, settings.group_size
    assert group_size is not None
    places = users.num_users * group_size
    if privacy.adjacency != ZERO_OUT:
        places = int(np.minimum(np.diff(users.offsets), group_size).sum())
    settings = dataclasses.replace(settings, batch_size=min(settings.batch_size, places))
    pool = pool_of(users, group_size, start.key, ADD_OR_REMOVE)
    fact = Caveat(Fact.SAMPLED_NORMS, "clip_norm")
    return settings, norms.example_norm(pool), [*non_private, fact]


def _uls(
    start: Start, privacy: PrivacyConfig, norms: GradientNorms
) -> tuple[PrivacyConfig, float, list[Caveat]]:
    """Settings of ULS by Estimate-and-Double, L_ULS, and the facts read off the data."""
    settings, non_private = fill_defaults(Algorithm.ULS, privacy, start.data)
    sizes = np.diff(start.data.train.offsets)
    batch_size, users = settings.batch_size, len(sizes)
    assert settings.delta is not None
    noise = doubling.uls_noise(
        settings.epsilon, settings.delta, settings.num_steps, num_users=users
    )
    first = doubling.Configuration(1, min(doubling.START.cohort_size, users))
    limits = doubling.Limits(max(1, int(sizes.max())), users)
    chosen = doubling.estimate_and_double(batch_size, norms.user_norm, noise, first, limits)
    group = chosen.group_size
    # The paper's batch sizes are powers of two; for any other, as many users as it allows.
    cohort = max(1, min(batch_size // group, users))
    settings = dataclasses.replace(settings, group_size=group, batch_size=group * cohort)
    fact = Caveat(Fact.SAMPLED_NORMS, "group_size of ULS")
    return settings, norms.user_norm(group), [*non_private, fact]


@contextmanager
def started(run: RunConfig, console: Console) -> Iterator[Start]:
    """Start a run, with its workers, up to its first step."""
    model = find_model(run.model.source, console, as_stored=run.model.lora_rank > 0)
    data = load_data(run.data, model, console.note)
    one_owner = graph_of(data.train) is None
    expect("data", run.data.source, one_owner, "texts with one owner each")
    for warning in data.lost():
        console.warn(warning)
    engine.keep_compiled()
    fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
    with ExitStack() as stack:
        task, params = make_task(run, model, data, fresh)
        workers = engine.create(run.engine, task, warn=console.warn)
        stack.callback(workers.close)
        with console.phase("starting the workers"):
            workers.ready()
        key = SecretKey.create(run.seed, "recommend")
        yield Start(run, task.dataset, params, key, workers)


def _advice(
    algorithm: Algorithm,
    settings: PrivacyConfig,
    norm: float,
    given: PrivacyConfig,
    start: Start,
) -> Advice:
    """Advice for one algorithm, with the noise that training computes."""
    users, run = start.data.train, start.run
    rounded = min(max(float(f"{norm:.4g}"), 1e-6), 1e6)  # to the number in the printed command
    settings = dataclasses.replace(settings, clip_norm=rounded)
    method = method_for(algorithm, settings, users, start.key)
    sigma = calibrate(method, settings)
    count, prob = method.sampler.expected_count, method.sampler.sampling_prob
    real_count = float(count)
    if algorithm == Algorithm.ELS and settings.adjacency == ZERO_OUT:  # its pool has empty places
        held = np.minimum(np.diff(users.offsets), method.group_size)
        real_count *= float(held.mean() / method.group_size)
    bands = (settings.bands or 1) if settings.noise == CORRELATED else 1
    error = predicted_error(sigma, settings.num_steps, bands)
    flags = to_train(algorithm, settings, given, run)
    return Advice(
        algorithm=algorithm,
        group_size=method.group_size,
        batch_size=settings.batch_size,
        expected_count=count,
        sampling_prob=prob,
        clip_norm=settings.clip_norm,
        noise_multiplier=sigma,
        noise_per_step=noise_stddev(settings.clip_norm, sigma, real_count),
        noise_on_sums=noise_stddev(settings.clip_norm, error, real_count),
        settings=flags,
        command=command(algorithm, flags),
    )
