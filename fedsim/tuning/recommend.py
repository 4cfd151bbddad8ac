"""Which algorithm to use on some data, and how to set it: the paper's two questions.

Group sizes come from the heuristics of Section 6 (the median user for ELS, Estimate-and-Double for
ULS), clip norms from gradient norms at the starting model, noise from the accountant, and the
recommendation from the noise per step (Section 3). Beyond the paper, users are sampled, and noise
is correlated, such that sums of steps get the least noise (`cells`). All of it looks at the data
without protection, as the paper does, and says so.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import accounting, engine
from fedsim.clipping import Clip
from fedsim.clipping.clip import num_coordinates
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, PrivacyConfig, RunConfig
from fedsim.config.cells import CORRELATED
from fedsim.data.dataset import Dataset
from fedsim.els import ELS
from fedsim.engine import Engine
from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.noise.bands import predicted_error
from fedsim.plan import calibrate, complete, method_for
from fedsim.run.console import Console
from fedsim.run.model_source import FirstState, find_model, load_data, make_task
from fedsim.run.setup import wait_for
from fedsim.sampling import Users, examples_per_user, graph_of, groups_of, pool_of
from fedsim.sampling.shared import Groups
from fedsim.shared_uls import SharedULS
from fedsim.tuning import doubling
from fedsim.tuning.advice import Advice, choose, command, draw
from fedsim.tuning.cells import compare, least
from fedsim.tuning.fitting import bytes_of, fits
from fedsim.tuning.norms import NUM_USERS, GradientNorms
from fedsim.tuning.timing import UnitTimes
from fedsim.tuning.variance import noise_stddev

NORMS_S = 8.0  # of an estimate of gradient norms: fewer users are looked at where all take longer
LEAST_COHORT = 8  # of the curve that is drawn: below, its noise is of no interest


def recommend(
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    num_users: int = NUM_USERS,
    plot: Path | None = None,
    plan_only: bool = False,
    device_memory: str | None = None,
) -> dict[str, Any]:
    """Advice for both algorithms on a run's data at its starting model, and which to choose.

    Args:
      privacy: epsilon, delta, num_steps, budget, clipping and sampling; the rest is found.
      run: data, model and workers; `run_dir` is where the runs of the commands will be.
      num_users: how many users' gradients are looked at.
      plot: a PNG to draw: noise per step against group size.
      plan_only: compute no gradient: what follows from the sizes of the data alone.
      device_memory: say, too, on how many devices of this memory (`80GiB`) models fit.
    Raises: ConfigError (a user's mistake), EngineError (workers).
    """
    expect(
        "epsilon", privacy.epsilon, privacy.epsilon < math.inf, "a finite one: noise is compared"
    )
    expect("users", num_users, num_users >= 1, ">= 1")
    expect("plot", plot, plot is None or plot.suffix == ".png", "a file ending in .png")
    drawn = plot is None or importlib.util.find_spec("matplotlib") is not None
    expect("plot", plot, drawn, "matplotlib, as in pip install 'fedsim[experiments]'")
    expect("plot", plot, not (plan_only and plot), "none with plan_only: it shows gradient norms")
    asked = num_users, plot, None if device_memory is None else bytes_of(device_memory)
    if plan_only:
        task, params = _start(run, console)
        key = SecretKey.create(run.seed, "recommend")
        return _recommend(privacy, run, console, task, None, params, key, *asked)
    with _starting_point(run, console) as (task, workers, params, key):
        return _recommend(privacy, run, console, task, workers, params, key, *asked)


def user_grad_norms(
    run: RunConfig, group_sizes: Sequence[int], console: Console, *, num_users: int = NUM_USERS
) -> dict[int, float]:
    """L_ULS(G) at a run's starting model for each of the group sizes, not private."""
    with _starting_point(run, console) as (task, workers, params, key):
        offsets, most = task.dataset.train.offsets, max(group_sizes)
        norms = GradientNorms(workers, params, offsets, key, num_users=num_users, most=most)
        return {group: norms.user_norm(group) for group in group_sizes}


@contextmanager
def _starting_point(run: RunConfig, console: Console) -> Iterator[tuple[Any, Engine, Any, Any]]:
    """A run's task, its workers, its parameters before training, and a key for samples."""
    task, params = _start(run, console)
    workers = engine.create(run.engine, task, note=console.note)
    try:
        wait_for(workers, console)
        yield task, workers, params, SecretKey.create(run.seed, "recommend")
    finally:
        workers.close()


def _start(run: RunConfig, console: Console) -> FirstState:
    """A run's task, which has its data, and its parameters before training."""
    model = find_model(run.model.source, console)
    data = load_data(run.data, model, console.note)
    engine.remember_programs()
    fresh = SecretKey.create(run.seed or 0).jax_key("init")  # as train does
    return make_task(run, model, data, fresh)


def _recommend(privacy, run, console, task, workers, params, key, num_users, plot, room):
    data = task.dataset
    budget, groups = privacy.budget, units_of(privacy, data.train, key)
    most = max(1, budget // (LEAST_COHORT if plot else doubling.START.cohort_size // 2))
    norms = times = None
    if workers is not None:
        examples = groups.examples if isinstance(groups, Groups) else None
        limits = {"num_users": num_users, "most": most, "seconds": NORMS_S}
        norms = GradientNorms(workers, params, groups.offsets, key, examples=examples, **limits)
        times = UnitTimes(run.engine, workers, params)
    found = Tuning(privacy, data, norms, key)
    els, els_non_private = found.els()
    assert els.group_size is not None
    clip_els = clip_uls = privacy.clip_norm
    if norms is None:
        uls, turns, uls_non_private = found.single()
    else:
        assert times is not None
        with _telling(console, workers, "time of a gradient"):
            strategy, _ = times.of(method_for(Algorithm.ELS, els, data.train, key))
        norms.compute_single(strategy)
        pool = pool_of(data.train, els.group_size, key, ADD_OR_REMOVE)
        with _telling(console, workers, f"gradient norms of {num_users} users at most"):
            clip_els = norms.example_norm(pool)
            uls, turns, uls_non_private = found.uls()
            assert uls.group_size is not None
            clip_uls = norms.user_norm(uls.group_size)
    advice = []
    for algorithm, settings, norm in (
        (Algorithm.ELS, els, clip_els),
        (Algorithm.ULS, uls, clip_uls),
    ):
        interval = None if norms is None else norms.intervals[norm]
        cells = compare(algorithm, settings, run, data.train, num_coordinates(params))
        cell = least(cells).changes if cells else {}
        settings = dataclasses.replace(settings, clip_norm=_clip_norm(norm), **cell)
        with _telling(console, workers, f"noise and time of a step of {algorithm.upper()}"):
            one = _advice(algorithm, settings, privacy, run, data, times, key)
        advice.append(dataclasses.replace(one, clip_norm_interval=interval, cells=cells))
    best, reason = choose(*advice)
    result = {
        "data": run.data.source,
        "num_users": data.train.num_users,
        "num_examples": data.train.num_examples,
        "median_examples": int(np.median(examples_per_user(data.train))),
        "epsilon": privacy.epsilon,
        "delta": els.delta,
        "num_steps": privacy.num_steps,
        "budget": budget,
        "model": run.model.source,
        "num_parameters": num_coordinates(params),
        "workers": None if workers is None else f"{workers.num_workers} x {workers.describe()}",
        "looked_at": None if norms is None else norms.looked_at,
        **{str(each.algorithm): dataclasses.asdict(each) for each in advice},
        "turns": [dataclasses.asdict(turn) for turn in turns],
        "recommended": str(best.algorithm),
        "reason": reason,
        "non_private": list(dict.fromkeys([*els_non_private, *uls_non_private])),
    }
    if room is not None:
        ways = fits(run, task, best, privacy.num_steps, room)
        result |= {"device_memory": room, "fits": [dataclasses.asdict(way) for way in ways]}
    if plot is not None:
        draw(found.curve(clip_els), plot, data.train.num_users)
    return result


def units_of(privacy: PrivacyConfig, users: Users, key: SecretKey | None) -> Users:
    """The sampling units of ULS with their examples: the users, or, where texts have several
    owners, those who have a group. Args: key: what groups are drawn with."""
    if graph_of(users) is None:
        return users
    assert key is not None, "groups need a key"
    return groups_of(users, privacy.max_changed, key)


@contextmanager
def _telling(console: Console, workers: Engine | None, what: str) -> Iterator[None]:
    with console.phase(what) as phase, ExitStack() as stack:
        if workers is not None:
            stack.enter_context(workers.telling(phase.at))
        yield


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The heuristics of the paper (Section 5) on one data set."""

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
        settings = dataclasses.replace(settings, budget=min(settings.budget, most))
        looked = ["clip_norm (median gradient norms of a sample)"] if self.norms else []
        return settings, [*non_private, *looked]

    def single(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS with one example of each user: nothing of gradients need be known."""
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        budget = min(settings.budget, len(self.sizes))
        return dataclasses.replace(settings, group_size=1, budget=budget), [], non_private

    def uls(self) -> tuple[PrivacyConfig, list[doubling.Doubling], list[str]]:
        """Settings of ULS by Estimate-and-Double, its turns; what of them was read off the data.

        The paper's budgets are powers of two. For any other, M is what the budget allows at the
        group size that was found.
        """
        assert self.norms is not None
        settings, non_private = complete(Algorithm.ULS, self.privacy, self.data)
        budget, users = settings.budget, len(self.sizes)
        start = doubling.Configuration(1, min(doubling.START.cohort_size, users))
        limits = doubling.Limits(max(1, int(self.sizes.max())), users)
        chosen, turns = doubling.estimate_and_double(
            budget, self.norms.user_norm, self._noise(), start, limits
        )
        cohort = max(1, min(budget // chosen.group_size, users))
        settings = dataclasses.replace(
            settings, group_size=chosen.group_size, budget=chosen.group_size * cohort
        )
        group = f"group_size={chosen.group_size} of ULS (gradient norms of a sample of users)"
        return settings, turns, [*non_private, group]

    def curve(self, example_norm: float) -> list[dict[str, Any]]:
        """Noise per step of both algorithms at group sizes that are powers of two."""
        assert self.norms is not None
        rows, sizes, uls_noise = [], self.sizes, self._noise()
        budget, users = self.privacy.budget, len(self.sizes)
        for group in (2**n for n in range(int(sizes.max()).bit_length())):
            if budget <= (pool := self._places(group)):
                real = budget * filled(self.privacy, self.data.train, group)
                noise = noise_stddev(example_norm, self._els_sigma(budget / pool, group), real)
                rows.append({"algorithm": "ELS", "group_size": group, "noise_per_step": noise})
            cohort = budget // group
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

    def _noise(self):
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


def filled(privacy: PrivacyConfig, users: Users, group_size: int) -> float:
    """The share of the places in the pool of ELS that has an example."""
    if privacy.adjacency != ZERO_OUT or graph_of(users) is not None:
        return 1.0
    return float(np.minimum(np.diff(users.offsets), group_size).mean() / group_size)


def share_used(
    algorithm: Algorithm, sizes: np.ndarray, group_size: int, sampling_prob: float, num_steps: int
) -> float:
    """Expected share of the training examples that takes part in at least one step.

    ELS: an example is in the pool with probability min(1, G / n_u), and then in each step with p.
    ULS: it is in a step with q min(1, G / n_u), a fresh draw each time.
    """
    sizes = sizes[sizes > 0]
    kept = np.minimum(1, group_size / sizes)
    if algorithm == Algorithm.ELS:
        seen = kept * -np.expm1(num_steps * np.log1p(-min(sampling_prob, 1 - 1e-12)))
    else:
        seen = -np.expm1(num_steps * np.log1p(-np.minimum(sampling_prob * kept, 1 - 1e-12)))
    return float((sizes * seen).sum() / sizes.sum())


def _advice(algorithm, settings, privacy, run, data, times, key) -> Advice:
    """Everything about one algorithm with these settings; noise by the code that trains.

    Args: times: what tells how long units take; None: nothing is computed.
    """
    method = method_for(algorithm, settings, data.train, key)
    sigma, count = calibrate(method, settings), method.sampler.expected_count
    clip = Clip(settings.clip_norm, normalised=settings.clipping == "normalised")
    units, steps = (
        method.groups if isinstance(method, SharedULS) else data.train,
        settings.num_steps,
    )
    sizes = np.diff(units.offsets)
    rows_per_unit = real = 1.0  # of a unit that is drawn; of units, those that are no empty place
    if algorithm == Algorithm.ULS:
        rows_per_unit = float(np.minimum(sizes, settings.group_size).mean())
    else:
        real = filled(settings, data.train, method.group_size)
    prob = method.sampler.sampling_prob
    if graph_of(data.train) is not None and isinstance(method, ELS):
        used = len(method.pool) / data.train.num_examples * -np.expm1(steps * np.log1p(-prob))
    else:
        used = share_used(algorithm, sizes, method.group_size, prob, steps)
        used *= units.num_examples / data.train.num_examples
    bands = (settings.bands or 1) if settings.noise == CORRELATED else 1
    error = predicted_error(sigma, steps, bands)
    strategy = seconds = None
    if times is not None:
        strategy, of_unit = times.of(method)
        seconds = steps * count * real * of_unit
    return Advice(
        algorithm=algorithm,
        group_size=method.group_size,
        budget=settings.budget,
        expected_count=count,
        sampling_prob=prob,
        clip_norm=clip.norm,
        clip_norm_interval=None,
        noise_multiplier=sigma,
        noise_per_step=noise_stddev(clip.norm, sigma, count * real),
        added_stddev=noise_stddev(clip.sensitivity, sigma, count),
        sampling=method.sampler.name,
        noise=settings.noise,
        bands=settings.bands,
        participations=settings.participations,
        noise_on_sums=noise_stddev(clip.norm, error, count * real),
        cells=[],
        data_used=float(used),
        gradients=steps * count * real * rows_per_unit,
        strategy=strategy and str(strategy),
        seconds=seconds,
        command=command(algorithm, settings, privacy, run),
    )


def _clip_norm(norm: float) -> float:
    """Four digits, so that the command that is printed has the very number."""
    return min(max(float(f"{norm:.4g}"), 1e-6), 1e6)
