"""Which algorithm to use on some data, and how to set it: the paper's two questions.

Group sizes come from the heuristics of Section 6 (the median user for ELS, Estimate-and-Double for
ULS), clip norms from gradient norms at the starting model, noise from the accountant, and the
recommendation from the noise per step (Section 3). Beyond the paper, users are sampled, and noise
is correlated, such that sums of steps get the least noise (`cells`). All of it looks at the data
without protection, as the paper does, and says so.
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
from fedsim.keys import SecretKey
from fedsim.noise import predicted_error
from fedsim.plan import calibrate, complete, holds, method_for, sampling_for
from fedsim.run import Console, find_model, load_data, make_task
from fedsim.sampling import Groups, Users, examples_per_user, graph_of, pool_of
from fedsim.shared_uls import SharedULS
from fedsim.training import wait_for
from fedsim.tuning import doubling
from fedsim.tuning.advice import Advice, choose, command, compare, draw, least
from fedsim.tuning.estimates import (
    NUM_USERS,
    GradientNorms,
    UnitTimes,
    filled,
    noise_stddev,
    share_used,
    units_of,
)

LEAST_COHORT = 8  # of the curve that is drawn: below, its noise is of no interest
NORMS_S = 8.0  # of an estimate of gradient norms: fewer users are looked at where all take longer


@dataclasses.dataclass(frozen=True)
class Start:
    """A run before its first step, which is what recommendations look at."""

    run: RunConfig
    data: Dataset
    params: Any
    key: SecretKey
    """Of samples."""
    workers: Engine | None
    """None: no gradient is computed."""
    console: Console

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell what is done, and how far the workers are."""
        with self.console.phase(what) as phase, ExitStack() as stack:
            if self.workers is not None:
                stack.enter_context(self.workers.telling(phase.at))
            yield


class HeuristicSettings(NamedTuple):
    """What the heuristics say of both algorithms."""

    settings: dict[Algorithm, PrivacyConfig]
    """But for the clip norm."""
    clip_norms: dict[Algorithm, float]
    turns: list[doubling.Doubling]
    """Of Estimate-and-Double."""
    non_private: list[str]


@dataclasses.dataclass(frozen=True)
class Heuristics:
    """What they say of one data set."""

    privacy: PrivacyConfig
    data: Dataset
    norms: GradientNorms | None
    """None: no gradient is looked at."""
    key: SecretKey | None = None
    """What groups and pools are drawn with, where texts have several owners."""

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Examples of each sampling unit of ULS: of each user."""
        return np.diff(units_of(self.privacy, self.data.train, self.key).offsets)

    def els(self) -> tuple[PrivacyConfig, list[str]]:
        """Settings of ELS by the median heuristic; what of them was read off the data."""
        settings, non_private = complete(Algorithm.ELS, self.privacy, self.data)
        assert settings.group_size is not None
        most = self._places(settings.group_size)
        settings = dataclasses.replace(settings, batch_size=min(settings.batch_size, most))
        looked = ["clip_norm (median gradient norms of a sample)"] if self.norms else []
        return settings, [*non_private, *looked]

    def single(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS with one example of each user: nothing of gradients need be known."""
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        batch_size = min(settings.batch_size, len(self.sizes))
        return dataclasses.replace(settings, group_size=1, batch_size=batch_size), [], non_private

    def uls(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS by Estimate-and-Double, its turns; what of them was read off the data.

        The paper's batch sizes are powers of two. For any other, M is what the size allows at the
        group size that was found.
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
            if batch_size <= (pool := self._places(group)):
                real = batch_size * filled(self.privacy, self.data.train, group)
                noise = noise_stddev(example_norm, self._els_sigma(batch_size / pool, group), real)
                rows.append({"algorithm": "ELS", "group_size": group, "noise_per_step": noise})
            cohort = batch_size // group
            if LEAST_COHORT <= cohort <= users:
                noise = self.norms.user_norm(group) * uls_noise(cohort)
                rows.append({"algorithm": "ULS", "group_size": group, "noise_per_step": noise})
        return rows

    def _places(self, group_size: int) -> int:
        """Places of the pool of ELS."""
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
    """Advice for both algorithms on a run's data at its starting model, and which to choose.

    Args:
      privacy: epsilon, delta, num_steps, batch_size, clipping and sampling; the rest is found.
      run: data, model and workers; `run_dir` is where the runs of the commands will be.
      num_users: how many users' gradients are looked at.
      plot: a PNG to draw: noise per step against group size.
      plan_only: compute no gradient: what follows from the sizes of the data alone.
    Raises: ConfigError (a user's mistake), EngineError (workers).
    """
    expect(
        "epsilon", privacy.epsilon, privacy.epsilon < math.inf, "a finite one: noise is compared"
    )
    expect("users", num_users, num_users >= 1, ">= 1")
    expect("plot", plot, plot is None or plot.suffix == ".png", "a file ending in .png")
    expect("plot", plot, not (plan_only and plot), "none with plan_only: it shows gradient norms")
    with _started(run, console, working=not plan_only) as start:
        least = LEAST_COHORT if plot else doubling.START.cohort_size // 2
        most = max(1, privacy.batch_size // least)
        norms = None if plan_only else _norms(start, privacy, num_users, most)
        heuristics = Heuristics(privacy, start.data, norms, start.key)
        times = start.workers and UnitTimes(run.engine, start.workers, start.params)
        found = _ask(heuristics, start, times)
        advice = {each: _advice(each, found, privacy, start, times, norms) for each in Algorithm}
        best, reason = choose(*advice.values())
        result = _about(start, privacy, found, norms) | {
            **{str(algorithm): dataclasses.asdict(each) for algorithm, each in advice.items()},
            "turns": [dataclasses.asdict(turn) for turn in found.turns],
            "recommended": str(best.algorithm),
            "reason": reason,
            "non_private": found.non_private,
        }
        if plot is not None:
            curve = heuristics.curve(found.clip_norms[Algorithm.ELS])
            draw(curve, plot, start.data.train.num_users)
        return result


def user_grad_norms(
    run: RunConfig, group_sizes: Sequence[int], console: Console, *, num_users: int = NUM_USERS
) -> dict[int, float]:
    """L_ULS(G) at a run's starting model for each of the group sizes, not private."""
    with _started(run, console) as start:
        assert start.workers is not None
        users, most = start.data.train.offsets, max(group_sizes)
        asked = start.workers, start.params, users, start.key
        norms = GradientNorms(*asked, num_users=num_users, most=most)
        return {group: norms.user_norm(group) for group in group_sizes}


@contextmanager
def _started(run: RunConfig, console: Console, *, working: bool = True) -> Iterator[Start]:
    """A run before its first step. Args: working: with workers."""
    model = find_model(run.model.source, console)
    data = load_data(run.data, model, console.note)
    if cut_off := data.cut_off():
        console.note(f"warning: {cut_off}")
    engine.remember_programs()
    fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
    task, params = make_task(run, model, data, fresh)
    with ExitStack() as stack:
        workers = None
        if working:
            workers = engine.create(run.engine, task, note=console.note)
            stack.callback(workers.close)
            wait_for(workers, console)
        yield Start(
            run, task.dataset, params, SecretKey.create(run.seed, "recommend"), workers, console
        )


def _norms(start: Start, privacy: PrivacyConfig, num_users: int, most: int) -> GradientNorms:
    """Args: most: the largest group size that will be asked for."""
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


def _ask(heuristics: Heuristics, start: Start, times: UnitTimes | None) -> HeuristicSettings:
    """Ask them for both algorithms; where no gradient is computed, ULS has G = 1 and C is given."""
    els, of_els = heuristics.els()
    norms = heuristics.norms
    if norms is None or times is None:
        uls, turns, of_uls = heuristics.single()
        clip_norms = dict.fromkeys(Algorithm, heuristics.privacy.clip_norm)
    else:
        users = start.data.train
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
    start: Start, privacy: PrivacyConfig, found: HeuristicSettings, norms: GradientNorms | None
) -> dict[str, Any]:
    """What was asked, of which data and which model, and what was looked at."""
    users, workers = start.data.train, start.workers
    return {
        "data": start.run.data.source,
        "num_users": users.num_users,
        "num_examples": users.num_examples,
        "median_examples": int(np.median(examples_per_user(users))),
        "epsilon": privacy.epsilon,
        "delta": found.settings[Algorithm.ELS].delta,
        "epsilon_holds": _holds(privacy, users),
        "num_steps": privacy.num_steps,
        "batch_size": privacy.batch_size,
        "model": start.run.model.source,
        "num_parameters": num_coordinates(start.params),
        "workers": workers and f"{workers.num_workers} x {workers.describe()}",
        "looked_at": norms and norms.looked_at,
    }


def _holds(privacy: PrivacyConfig, users: Users) -> str:
    """What epsilon of a training would hold under, with the key that it draws itself."""
    sampling = sampling_for(privacy.sampling_run, 1.0, privacy)
    return holds(sampling.labels, privacy.adjacency, shared=graph_of(users) is not None)


def _advice(
    algorithm: Algorithm,
    found: HeuristicSettings,
    privacy: PrivacyConfig,
    start: Start,
    times: UnitTimes | None,
    norms: GradientNorms | None,
) -> Advice:
    """Everything about one algorithm; the noise is computed by the code that trains.

    Args:
      privacy: what was asked.
      times: what tells how long units take; None: nothing is computed.
    """
    settings, norm = found.settings[algorithm], found.clip_norms[algorithm]
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
    rows_per_unit = real = 1.0  # of a unit that is drawn; of units, those that are no empty place
    if algorithm == Algorithm.ULS:
        rows_per_unit = float(np.minimum(sizes, method.group_size).mean())
    else:
        real = filled(settings, users, method.group_size)
    if graph_of(users) is not None and isinstance(method, ELS):
        used = len(method.pool) / users.num_examples * -np.expm1(steps * np.log1p(-prob))
    else:
        used = share_used(algorithm, sizes, method.group_size, prob, steps)
        used *= units.num_examples / users.num_examples
    bands = (settings.bands or 1) if settings.noise == CORRELATED else 1
    error = predicted_error(sigma, steps, bands)
    return Advice(
        algorithm=algorithm,
        group_size=method.group_size,
        batch_size=settings.batch_size,
        expected_count=count,
        sampling_prob=prob,
        clip_norm=clip.norm,
        clip_norm_interval=norms and norms.intervals[norm],
        noise_multiplier=sigma,
        noise_per_step=noise_stddev(clip.norm, sigma, count * real),
        added_stddev=noise_stddev(clip.sensitivity, sigma, count),
        sampling=method.sampler.name,
        noise=settings.noise,
        bands=settings.bands,
        participations=settings.participations,
        noise_on_sums=noise_stddev(clip.norm, error, count * real),
        cells=cells,
        data_used=float(used),
        gradients=steps * count * real * rows_per_unit,
        strategy=strategy and str(strategy),
        seconds=of_unit and steps * count * real * of_unit,
        command=command(algorithm, settings, privacy, run),
    )


def _clip_norm(norm: float) -> float:
    """Four digits, so that the command that is printed has the very number."""
    return min(max(float(f"{norm:.4g}"), 1e-6), 1e6)
