"""Recommend an algorithm for some data, and its settings: the paper's two questions.

Group sizes come from the heuristics of Section 6 (the median user for ELS, Estimate-and-Double for
ULS), clip norms from gradient norms at the starting model, noise from the accountant, and the
choice from the noise per step (Section 3). Beyond the paper, the way of sampling and the kind of
noise are chosen such that sums of steps get the least noise (`advice.compare`).

It looks at the data without noise, as the paper does, and the result says so; or at none of the
texts (`plan_only`): all but the number of users is then computed from users that are made up, of
`ASSUMED_EXAMPLES` each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedsim import accounting, engine
from fedsim.clipping import Clip, num_coordinates
from fedsim.config import (
    ADD_OR_REMOVE,
    CORRELATED,
    ZERO_OUT,
    Algorithm,
    PrivacyConfig,
    RunConfig,
)
from fedsim.data import Dataset
from fedsim.els import ELS
from fedsim.engine import Engine
from fedsim.errors import expect
from fedsim.files import make_place
from fedsim.keys import SecretKey
from fedsim.noise import predicted_error
from fedsim.plan import (
    PUBLIC,
    adjacency_in_words,
    calibrate,
    complete,
    expect_enough_users,
    method_for,
    noise_ratio,
    outlook,
)
from fedsim.run import Console, find_model, load_data, make_task
from fedsim.sampling import Groups, Users, examples_per_user, graph_of, pool_of
from fedsim.shared_uls import SharedULS
from fedsim.training import wait_for
from fedsim.tuning import doubling
from fedsim.tuning.advice import Advice, choose, command, compare, draw, least, to_train
from fedsim.tuning.estimates import (
    NUM_USERS,
    GradientNorms,
    MadeUpUsers,
    UnitTimes,
    filled,
    noise_stddev,
    share_used,
    units_of,
)
from fedsim.uls import ULS

LEAST_COHORT = 8  # of the curve that is drawn: below, its noise is of no interest
ASSUMED_EXAMPLES = 8
"""Examples of a user that `plan_only` assumes."""
NORMS_S = 8.0  # of an estimate of gradient norms: fewer users are looked at where all take longer


@dataclasses.dataclass(frozen=True)
class Start:
    """A run before its first step, which recommendations look at."""

    run: RunConfig
    data: Dataset
    params: Any
    key: SecretKey
    """Key of the samples."""
    workers: Engine | None
    """None: no gradient is computed."""
    console: Console

    def seeing(self, users: Users) -> "Start":
        """The same start on other users."""
        stand_in: Any = users
        return dataclasses.replace(self, data=dataclasses.replace(self.data, train=stand_in))

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Show a phase and the workers' progress in it."""
        with self.console.phase(what) as phase, ExitStack() as stack:
            if self.workers is not None:
                stack.enter_context(self.workers.telling(phase.at))
            yield


class HeuristicSettings(NamedTuple):
    """Settings by the heuristics for both algorithms."""

    settings: dict[Algorithm, PrivacyConfig]
    """Settings without the clip norm."""
    clip_norms: dict[Algorithm, float]
    turns: list[doubling.Doubling]
    """Turns of Estimate-and-Double."""
    non_private: list[str]


@dataclasses.dataclass(frozen=True)
class Heuristics:
    """The paper's heuristics (Section 6 and Appendix F) on one data set."""

    privacy: PrivacyConfig
    data: Dataset
    norms: GradientNorms | None
    """None: no gradient is computed."""
    key: SecretKey | None = None
    """Key with which groups and pools are drawn where texts have several owners."""

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Number of examples of each sampling unit of ULS."""
        return np.diff(units_of(self.privacy, self.data.train, self.key).offsets)

    def els(self) -> tuple[PrivacyConfig, list[str]]:
        """Settings of ELS by the median heuristic, and a line for each fact read off the data."""
        settings, non_private = complete(Algorithm.ELS, self.privacy, self.data)
        assert settings.group_size is not None
        most = self.places(settings.group_size)
        settings = dataclasses.replace(settings, batch_size=min(settings.batch_size, most))
        looked = ["clip_norm (median gradient norms of a sample)"] if self.norms else []
        return settings, [*non_private, *looked]

    def single(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS with one example of each user, which need no gradients; as `uls`."""
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        batch_size = min(settings.batch_size, len(self.sizes))
        return dataclasses.replace(settings, group_size=1, batch_size=batch_size), [], non_private

    def uls(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS by Estimate-and-Double, its turns, and the facts read off the data.

        The paper's batch sizes are powers of two. For any other, M is the largest number of users
        that the batch size allows at the chosen group size.
        """
        assert self.norms is not None
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        batch_size, users = settings.batch_size, len(self.sizes)
        start = doubling.Configuration(1, min(doubling.START.cohort_size, users))
        limits = doubling.Limits(max(1, int(self.sizes.max())), users)
        chosen, turns = doubling.estimate_and_double(
            batch_size, self.norms.user_norm, self._noise(), start, limits
        )
        cohort = max(1, min(batch_size // chosen.group_size, users))
        settings = dataclasses.replace(
            settings, group_size=chosen.group_size, batch_size=chosen.group_size * cohort
        )
        group = f"group_size={chosen.group_size} of ULS (gradient norms of a sample of users)"
        return settings, turns, [*non_private, group]

    def curve(self, example_norm: float) -> list[dict[str, Any]]:
        """Noise per step of both algorithms at group sizes that are powers of two."""
        assert self.norms is not None
        rows, sizes, uls_noise = [], self.sizes, self._noise()
        batch_size, users = self.privacy.batch_size, len(self.sizes)
        for group in (2**n for n in range(int(sizes.max()).bit_length())):
            if batch_size <= (pool := self.places(group)):
                real = batch_size * filled(self.privacy, self.data.train, group)
                noise = noise_stddev(example_norm, self._els_sigma(batch_size / pool, group), real)
                rows.append({"algorithm": "ELS", "group_size": group, "noise_per_step": noise})
            cohort = batch_size // group
            if LEAST_COHORT <= cohort <= users:
                noise = self.norms.user_norm(group) * uls_noise(cohort)
                rows.append({"algorithm": "ULS", "group_size": group, "noise_per_step": noise})
        return rows

    def places(self, group_size: int) -> int:
        """Return the number of places in the pool of ELS."""
        if graph_of(self.data.train) is not None:
            assert self.key is not None, "a pool needs a key"
            return len(pool_of(self.data.train, group_size, self.key, ZERO_OUT))
        if self.privacy.adjacency == ZERO_OUT:
            return len(self.sizes) * group_size
        return int(np.minimum(self.sizes, group_size).sum())

    def _noise(self) -> Callable[[int], float]:
        completed, _ = complete(Algorithm.ULS, self.privacy, self.data)
        assert completed.delta is not None
        shared = graph_of(self.data.train) is not None
        return doubling.uls_noise(
            completed.epsilon,
            completed.delta,
            completed.num_steps,
            len(self.sizes),
            completed.max_changed if shared else 0,
        )

    def _els_sigma(self, sampling_prob: float, group_size: int) -> float:
        completed, _ = complete(Algorithm.ELS, self.privacy, self.data)
        assert completed.delta is not None
        return accounting.noise_multiplier(
            epsilon=completed.epsilon,
            delta=completed.delta,
            num_steps=completed.num_steps,
            sampling_prob=sampling_prob,
            max_contributions=group_size,
        )


def recommend(
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    num_users: int = NUM_USERS,
    plot: Path | None = None,
    plan_only: bool = False,
) -> dict[str, Any]:
    """Advice for both algorithms on a run's data at its starting model, and the better one.

    Args:
      privacy: epsilon, delta, num_steps, batch_size, clipping and sampling; the rest is computed.
      run: data, model and workers; `run_dir` is the parent of the runs of the printed commands.
      num_users: number of users in the sample of gradients.
      plot: PNG file for a plot of noise per step against group size.
      plan_only: read no text: compute no gradients, and assume the number of a user's examples.
    Returns: facts of the data and the model; advice for `els` and `uls` (fields of `Advice`); turns
      of Estimate-and-Double; `recommended`, `reason`, `outlook` and `non_private`.
    Raises:
      ConfigError: the settings do not fit the data or each other.
      EngineError: workers failed.
    """
    expect(
        "epsilon", privacy.epsilon, privacy.epsilon < math.inf, "a finite one: noise is compared"
    )
    expect("users", num_users, num_users >= 1, ">= 1")
    expect("plot", plot, plot is None or plot.suffix == ".png", "a file ending in .png")
    expect("plot", plot, not (plan_only and plot), "none with plan_only: it shows gradient norms")
    if plot is not None:
        make_place(plot.parent)
    with _started(run, console, working=not plan_only, quiet=plan_only) as start:
        expect_enough_users(start.data.train.num_users, privacy.epsilon)
        norms = times = None
        if plan_only:
            start = _seeing_nothing(start)
        else:
            least = LEAST_COHORT if plot else doubling.START.cohort_size // 2
            most = max(1, privacy.batch_size // least)
            norms = _norms(start, privacy, num_users, most)
            times = start.workers and UnitTimes(run.engine, start.workers, start.params)
        heuristics = Heuristics(privacy, start.data, norms, start.key)
        by_heuristics = _ask(heuristics, start, times)
        if plan_only:
            facts = _not_read(by_heuristics.non_private, start.data.train)
            by_heuristics = by_heuristics._replace(non_private=facts)
        advice = {
            algorithm: _advice(
                algorithm, by_heuristics, privacy, start, times, norms, from_data=not plan_only
            )
            for algorithm in Algorithm
        }
        best, reason = choose(*advice.values())
        result = _about(start, privacy, by_heuristics, norms) | {
            **{str(name): dataclasses.asdict(entry) for name, entry in advice.items()},
            "turns": [dataclasses.asdict(turn) for turn in by_heuristics.turns],
            "recommended": str(best.algorithm),
            "reason": reason,
            "outlook": _outlook(best, privacy.num_steps, start),
            "non_private": by_heuristics.non_private,
        }
        if plot is not None:
            curve = heuristics.curve(by_heuristics.clip_norms[Algorithm.ELS])
            draw(curve, plot, start.data.train.num_users)
        return result


def user_grad_norms(
    run: RunConfig, group_sizes: Sequence[int], console: Console, *, num_users: int = NUM_USERS
) -> dict[int, float]:
    """L_ULS(G) at a run's starting model for each of the group sizes, without noise."""
    with _started(run, console) as start:
        assert start.workers is not None
        users, most = start.data.train.offsets, max(group_sizes)
        norms = GradientNorms(
            start.workers, start.params, users, start.key, num_users=num_users, most=most
        )
        return {group: norms.user_norm(group) for group in group_sizes}


@contextmanager
def _started(
    run: RunConfig, console: Console, *, working: bool = True, quiet: bool = False
) -> Iterator[Start]:
    """Start a run up to its first step.

    Args:
      working: start its workers.
      quiet: do not warn of what the texts are like.
    """
    model = find_model(run.model.source, console, as_stored=run.model.lora_rank > 0)
    data = load_data(run.data, model, console.note)
    if not quiet and (cut_off := data.cut_off()):
        console.warn(cut_off)
    engine.remember_programs()
    fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
    with ExitStack() as stack:
        create = stack.enter_context(engine.starting(run.engine)) if working else None
        task, params = make_task(run, model, data, fresh)
        workers = None
        if create is not None:
            workers = create(task, warn=console.warn)
            stack.callback(workers.close)
            wait_for(workers, console)
        key = SecretKey.create(run.seed, "recommend")
        yield Start(run, task.dataset, params, key, workers, console)


def _norms(start: Start, privacy: PrivacyConfig, num_users: int, most: int) -> GradientNorms:
    """The estimator of gradient norms. Args: most: the largest group size that will be needed."""
    assert start.workers is not None
    groups = units_of(privacy, start.data.train, start.key)
    return GradientNorms(
        start.workers,
        start.params,
        groups.offsets,
        start.key,
        examples=groups.examples if isinstance(groups, Groups) else None,
        num_users=num_users,
        most=most,
        seconds=NORMS_S,
    )


def _seeing_nothing(start: Start) -> Start:
    """The start on users with an assumed number of texts; where several own a text, who owns which
    is public."""
    if graph_of(users := start.data.train) is not None:
        return start
    return start.seeing(MadeUpUsers.of([ASSUMED_EXAMPLES] * users.num_users))


def _not_read(facts: list[str], users: Users) -> list[str]:
    """Facts that the guarantee does not cover, without those of users who are made up.

    Only the number of these is that of the data; where texts have several owners, none is made up.
    """
    if graph_of(users) is None:
        known = f"{PUBLIC}how many users there are ({users.num_users:,} users)"
        facts = list(dict.fromkeys(known if fact.startswith(PUBLIC) else fact for fact in facts))
    return [fact for fact in facts if not fact.startswith(("group_size", "clip_norm"))]


def _ask(heuristics: Heuristics, start: Start, times: UnitTimes | None) -> HeuristicSettings:
    """Settings for both algorithms; without gradients, ULS has G = 1 and C is as given."""
    els, of_els = heuristics.els()
    norms = heuristics.norms
    if norms is None:
        uls, turns, of_uls = heuristics.single()
        clip_norms = dict.fromkeys(Algorithm, heuristics.privacy.clip_norm)
    else:
        users = start.data.train
        if times is not None:
            with start.telling("time of a gradient"):
                strategy, _ = times.of(method_for(Algorithm.ELS, els, users, start.key))
            norms.compute_single(strategy)
        assert els.group_size is not None
        pool = pool_of(users, els.group_size, start.key, ADD_OR_REMOVE)
        with start.telling(f"gradient norms of {norms.looked_at} users at most"):
            of_example = norms.example_norm(pool)
            uls, turns, of_uls = heuristics.uls()
            assert uls.group_size is not None
            of_user = norms.user_norm(uls.group_size)
        clip_norms = {Algorithm.ELS: of_example, Algorithm.ULS: of_user}
    settings = {Algorithm.ELS: els, Algorithm.ULS: uls}
    return HeuristicSettings(settings, clip_norms, turns, list(dict.fromkeys([*of_els, *of_uls])))


def _about(
    start: Start,
    privacy: PrivacyConfig,
    by_heuristics: HeuristicSettings,
    norms: GradientNorms | None,
) -> dict[str, Any]:
    """Facts of the data, the model and the request for the result."""
    users, workers = start.data.train, start.workers
    return {
        "data": start.run.data.source,
        "num_users": users.num_users,
        "num_examples": users.num_examples,
        "median_examples": int(np.median(examples_per_user(users))),
        "epsilon": privacy.epsilon,
        "delta": by_heuristics.settings[Algorithm.ELS].delta,
        "epsilon_holds": _holds(privacy, users),
        "num_steps": privacy.num_steps,
        "batch_size": privacy.batch_size,
        "model": start.run.model.source,
        "num_parameters": num_coordinates(start.params),
        "workers": workers and workers.describe(),
        "looked_at": norms and norms.looked_at,
    }


def _holds(privacy: PrivacyConfig, users: Users) -> str:
    """Condition under which epsilon of a training with a secret key would hold."""
    return adjacency_in_words(privacy.adjacency, shared=graph_of(users) is not None)


def _outlook(best: Advice, num_steps: int, start: Start) -> str:
    """A sentence on how much a training with this advice can learn."""
    on_sums = best.noise_on_sums / best.clip_norm
    ratio = noise_ratio(on_sums, num_coordinates(start.params), num_steps)
    return outlook(ratio, start.data.train.num_users)


def _advice(
    algorithm: Algorithm,
    by_heuristics: HeuristicSettings,
    privacy: PrivacyConfig,
    start: Start,
    times: UnitTimes | None,
    norms: GradientNorms | None,
    *,
    from_data: bool,
) -> Advice:
    """Advice for one algorithm; the noise is computed by the code that trains.

    Args:
      privacy: the settings as requested.
      times: measures the time of a unit; None: no time is measured.
      from_data: settings were chosen by looking at the data without noise.
    """
    settings, norm = by_heuristics.settings[algorithm], by_heuristics.clip_norms[algorithm]
    users, run = start.data.train, start.run
    cells = compare(algorithm, settings, run, users, num_coordinates(start.params))
    changes = least(cells).changes if cells else {}
    settings = dataclasses.replace(settings, clip_norm=_clip_norm(norm), **changes)
    with start.telling(f"noise and time of a step of {algorithm.upper()}"):
        method = method_for(algorithm, settings, users, start.key)
        sigma = calibrate(method, settings)
        strategy, of_unit = times.of(method) if times is not None else (None, None)
    count, prob = method.sampler.expected_count, method.sampler.sampling_prob
    clip = Clip(settings.clip_norm, normalised=settings.clipping == "normalised")
    units = method.groups if isinstance(method, SharedULS) else users
    steps, sizes = settings.num_steps, np.diff(units.offsets)
    rows_per_unit = filled_places = 1.0
    if algorithm == Algorithm.ULS:
        rows_per_unit = float(np.minimum(sizes, method.group_size).mean())
    else:
        filled_places = filled(settings, users, method.group_size)
    real_count = count * filled_places  # without the empty places of the pool
    bands = (settings.bands or 1) if settings.noise == CORRELATED else 1
    error = predicted_error(sigma, steps, bands)
    flags = to_train(algorithm, settings, privacy, run, from_data=from_data)
    return Advice(
        algorithm=algorithm,
        group_size=method.group_size,
        batch_size=settings.batch_size,
        expected_count=count,
        sampling_prob=prob,
        clip_norm=clip.norm,
        clip_norm_interval=norms and norms.intervals[norm],
        noise_multiplier=sigma,
        noise_per_step=noise_stddev(clip.norm, sigma, real_count),
        added_stddev=noise_stddev(clip.sensitivity, sigma, count),
        sampling=method.sampler.name,
        noise=settings.noise,
        bands=settings.bands,
        participations=settings.participations,
        noise_on_sums=noise_stddev(clip.norm, error, real_count),
        cells=cells,
        data_used=_data_used(method, users, steps),
        gradients=steps * count * filled_places * rows_per_unit,
        strategy=strategy and str(strategy),
        seconds=of_unit and steps * count * filled_places * of_unit,
        settings=flags,
        command=command(algorithm, flags),
    )


def _data_used(method: ELS | ULS, users: Users, num_steps: int) -> float:
    """Expected fraction of the examples that some step uses."""
    prob = method.sampler.sampling_prob
    if isinstance(method, ELS) and graph_of(users) is not None:
        kept = len(method.pool) / users.num_examples
        return float(kept * -np.expm1(num_steps * np.log1p(-prob)))
    algorithm = Algorithm.ELS if isinstance(method, ELS) else Algorithm.ULS
    units = method.groups if isinstance(method, SharedULS) else users
    sizes = np.diff(units.offsets)
    used = share_used(algorithm, sizes, method.group_size, prob, num_steps)
    return float(used * (units.num_examples / users.num_examples))


def _clip_norm(norm: float) -> float:
    """A clip norm rounded to four digits, so that the printed command has the very same number."""
    return min(max(float(f"{norm:.4g}"), 1e-6), 1e6)
