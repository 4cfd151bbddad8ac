"""Figure 3 (Section 4): mean estimation with ELS and ULS, varying epsilon, budget and sigma_2.

The loss is |theta - mu|^2 / 2, that of a fresh user's example less a constant. Constants and
defaults are the paper's; the values that are swept are not in its text and are ours, as are those
of the learning rate and the clip norm. Draws, clipped sum, noise and accounting are those of
training; an engine of this file computes all trials and all settings that are tuned side by side.
Trials have data and noise of their own; 8 each share their draws, which only say which of the
users, alike in law, take part.

    python -m experiments.fig03_mean_estimation --scale paper      (22 minutes; smoke: 10 seconds)
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import experiment, plots
from experiments.harness.rows import Rows
from experiments.mean_task import MeanTask
from fedsim.clipping import Clip, Strategy
from fedsim.clipping.contribution import contribution
from fedsim.config import Algorithm, PrivacyConfig
from fedsim.keys import SecretKey
from fedsim.plan import calibrate, method_for

ELS, ULS = Algorithm.ELS, Algorithm.ULS
Method = tuple[Algorithm, int]  # and its group size
Where = tuple[float, int, float]  # epsilon, budget, sigma_2


@dataclasses.dataclass(frozen=True)
class Settings:
    num_users: int = 256
    examples_per_user: int = 16
    dimension: int = 32
    num_steps: int = 256
    delta: float = 1e-6
    user_std: float = 1.0  # sigma_1
    trials: int = 128
    draws: int = 16
    epsilon: float = 1.0
    budget: int = 64
    example_std: float = 1.0  # sigma_2
    epsilons: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    budgets: tuple[int, ...] = (16, 32, 64, 128, 256)
    example_stds: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    els_groups: tuple[int, ...] = (1, 2, 4, 8, 16)
    uls_groups: tuple[int, ...] = (1, 2, 4, 8, 16)
    learning_rates: tuple[float, ...] = tuple(2.0 ** (n / 2) for n in range(-12, -1))
    clip_norms: tuple[float, ...] = (4.0, 8.0, 16.0, 32.0)
    """Practically every gradient is longer than 4: with smaller C nothing changes."""
    seed: int = 0

    @property
    def methods(self) -> list[Method]:
        groups = {ELS: self.els_groups, ULS: self.uls_groups}
        return [(algorithm, group) for algorithm, own in groups.items() for group in own]


JUDGED_AT_SMOKE = False
SETTINGS = {
    "smoke": Settings(
        num_users=32,
        examples_per_user=4,
        dimension=4,
        num_steps=16,
        trials=16,
        draws=2,
        epsilons=(1.0, 8.0),
        budget=8,
        budgets=(8, 16),
        example_stds=(1.0, 4.0),
        els_groups=(1, 4),
        uls_groups=(1, 4),
        learning_rates=(0.125, 0.5),
        clip_norms=(1.0, 4.0),
    ),
    "small": Settings(trials=32, draws=8, els_groups=(4, 16), uls_groups=(1, 4, 16)),
    "paper": Settings(),
}
PANELS = {
    "epsilon": r"$\varepsilon$",
    "budget": "compute budget $B$",
    "example_std": r"within-user deviation $\sigma_2$",
}


@dataclasses.dataclass(frozen=True)
class Users:
    """As samplers see them: all alike."""

    num_users: int
    examples_each: int

    @property
    def offsets(self) -> np.ndarray:
        return self.examples_each * np.arange(self.num_users + 1)


class Trials:
    """An engine for many trials at once, each with parameters for every tuned setting.

    Parameters are [clip norms, learning rates, trials, d], rows [trials, units, group].
    """

    def __init__(self, points: np.ndarray, clip_norms: Sequence[float]):
        """Args: points: [trials, examples, d]."""
        self.task = MeanTask(points.reshape(-1, points.shape[-1]))
        self.first_rows = points.shape[1] * np.arange(len(points))[:, None, None]
        self.norms = jnp.array(clip_norms)

    def clipped_sum(self, params: jax.Array, rows: np.ndarray, clip: Clip, strategy: Strategy):
        """The sum of every trial and setting, one by one whatever the strategy; the clip's norm is
        replaced by each of the tuned."""
        assert clip.normalised, "one sensitivity for all clip norms"
        mask = rows >= 0
        batch = self.task.read("train", np.where(mask, rows + self.first_rows, rows).ravel())
        batch = batch.reshape(*rows.shape, -1)
        return _sums(self.task.losses, self.norms, params, batch, mask), None


@functools.partial(jax.jit, static_argnums=0)
def _sums(losses, norms, params, batch, mask):
    def of_setting(norm, params, batch, mask):
        def of_unit(rows, real):
            def loss(params):
                return jnp.where(real, losses(params, rows), 0).sum() / jnp.maximum(real.sum(), 1)

            clip = Clip(norm, normalised=True)
            return contribution(jax.grad(loss)(params), real.any(), clip)[0]

        return jax.vmap(of_unit)(batch, mask).sum(axis=0)

    def of_trial(inputs):
        over_rates = jax.vmap(of_setting, (None, 0, None, None))
        return jax.vmap(over_rates, (0, 0, None, None))(norms, *inputs)

    # Trial by trial: what one needs fits into a cache, which is six times as fast.
    sums = jax.lax.map(of_trial, (jnp.moveaxis(params, 2, 0), batch, mask))
    return jnp.moveaxis(sums, 0, 2)


def run(settings: Settings) -> Rows:
    """A row for each panel, value that is varied, and method."""
    wheres = list(dict.fromkeys(_wheres(settings)))
    cells = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for method, budget in itertools.product(settings.methods, {where[1] for where in wheres}):
            drawn = draws(settings, method, budget)
            own = [where for where in wheres if where[1] == budget]
            found = threads.map(functools.partial(tune, settings, method, drawn), own)
            cells |= {(method, where): each for where, each in zip(own, found, strict=True)}
    rows = []
    for panel, method in itertools.product(PANELS, settings.methods):
        for where in _wheres(settings, panel):
            rivals = [cells[rival, where]["losses"] for rival in _rivals(settings)]
            rows.append(_row(panel, method, where, cells[method, where], rivals))
    return rows


def _wheres(settings: Settings, only: str | None = None) -> list[Where]:
    """Along each panel, or one."""
    at = (settings.epsilon, settings.budget, settings.example_std)
    along = {
        "epsilon": [(epsilon, *at[1:]) for epsilon in settings.epsilons],
        "budget": [(at[0], budget, at[2]) for budget in settings.budgets],
        "example_std": [(*at[:2], std) for std in settings.example_stds],
    }
    return [where for panel in along if only in (None, panel) for where in along[panel]]


def _rivals(settings: Settings) -> list[Method]:
    """What rows are compared with: ELS with G = K, and ULS with G = 1."""
    return [(ELS, settings.examples_per_user), (ULS, 1)]


def _row(panel, method, where, found, rivals) -> dict[str, Any]:
    losses, trials = found["losses"], len(found["losses"])
    row = {"panel": panel, **dict(zip(PANELS, where, strict=True))}
    row |= {"algorithm": method[0].upper(), "group_size": method[1]}
    row |= {name: value for name, value in found.items() if name != "losses"}
    row |= {"loss": float(losses.mean()), "loss_std": float(losses.std(ddof=1)), "trials": trials}
    for name, other in zip(("minus_els", "minus_uls_1"), rivals, strict=True):
        less = losses - other
        error = float(less.std(ddof=1) / np.sqrt(trials))
        row |= {name: float(less.mean()), f"{name}_error": error}
    return row


def draws(settings: Settings, method: Method, budget: int) -> np.ndarray:
    """Who takes part: [draws, steps, units, group], -1 = padding, for all epsilon and sigma_2."""
    drawn = [
        [_method(settings, method, budget, number).draw(step) for step in range(settings.num_steps)]
        for number in range(settings.draws)
    ]
    most = max(len(rows) for own in drawn for rows in own)
    steps = [
        [np.pad(rows, ((0, most - len(rows)), (0, 0)), constant_values=-1) for rows in own]
        for own in drawn
    ]
    return np.array(steps, np.int32)


def _method(settings: Settings, method: Method, budget: int, number: int):
    algorithm, group = method
    key = SecretKey.create(settings.seed, f"{algorithm} {group} {budget} {number}")
    users = Users(settings.num_users, settings.examples_per_user)
    privacy = _privacy(settings, method, settings.epsilon, budget)
    return method_for(algorithm, privacy, users, key)  # pyright: ignore


def _privacy(settings: Settings, method: Method, epsilon: float, budget: int) -> PrivacyConfig:
    steps, delta = settings.num_steps, settings.delta
    return PrivacyConfig(epsilon, steps, budget, delta=delta, group_size=method[1])


@functools.lru_cache(maxsize=8)
def problem(settings: Settings, example_std: float) -> tuple[np.ndarray, np.ndarray]:
    """mu [trials, d] and the users' points [trials, examples, d], of the same normal numbers for
    every sigma_2."""
    rng = np.random.default_rng(settings.seed)
    trials, d = settings.trials, settings.dimension
    users, each = settings.num_users, settings.examples_per_user
    mean = rng.normal(size=(trials, d))
    of_users = mean[:, None] + settings.user_std * rng.normal(size=(trials, users, d))
    noise = rng.normal(size=(trials, users, each, d))
    points = of_users[:, :, None] + example_std * noise
    return mean, points.reshape(trials, -1, d).astype(np.float32)


def tune(settings: Settings, method: Method, drawn: np.ndarray, where: Where) -> dict[str, Any]:
    """Losses [trials] at the best learning rate and clip norm, and what those are."""
    epsilon, budget, example_std = where
    algorithm = _method(settings, method, budget, 0)
    sigma = calibrate(algorithm, _privacy(settings, method, epsilon, budget))
    mean, points = problem(settings, example_std)
    engine = Trials(points, settings.clip_norms)
    rates = jnp.array(settings.learning_rates)[None, :, None, None]
    tuned = (len(settings.clip_norms), len(settings.learning_rates))
    params = jnp.zeros((*tuned, *mean.shape))
    clip = Clip(1.0, normalised=True)
    for step in range(settings.num_steps):
        rows = np.repeat(drawn[:, step], settings.trials // settings.draws, axis=0)
        how = {"clip": clip, "noise_multiplier": sigma, "rows": rows}
        grad, _ = algorithm.gradient(params, step, engine, **how)  # pyright: ignore
        params = params - rates * grad.values()
    losses = 0.5 * np.square(np.asarray(params, np.float64) - mean).sum(axis=-1)
    clip_at, rate_at = np.unravel_index(losses.mean(axis=-1).argmin(), tuned)
    inside = clip_at < tuned[0] - 1 and 0 < rate_at < tuned[1] - 1
    return {
        "noise_multiplier": sigma,
        "clip_norm": settings.clip_norms[clip_at],
        "learning_rate": settings.learning_rates[rate_at],
        "inside_grid": bool(inside),
        "losses": losses[clip_at, rate_at],
    }


def plot(rows: Rows) -> Figure:
    """A panel for each value that is varied; bars are standard errors over trials, so that curves
    are not hidden by how much one trial differs from another."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharey=True)
    whole = max(row["group_size"] for row in rows)  # G_ELS = K
    groups = sorted({row["group_size"] for row in rows if row["algorithm"] == "ULS"})
    shades = plt.get_cmap("Oranges")(np.linspace(0.4, 0.95, len(groups)))
    methods = [("ELS", whole), *(("ULS", group) for group in groups)]
    for axis, (panel, label) in zip(axes, PANELS.items(), strict=True):
        for number, (name, group) in enumerate(methods):
            own = [row for row in _panel(rows, panel) if _is(row, name, group)]
            x = np.array([row[panel] for row in own]) * 1.03 ** (number - len(methods) / 2)
            loss, spread = np.array([[row["loss"], row["loss_std"]] for row in own]).T
            error = spread / np.sqrt([row["trials"] for row in own])
            colour = plots.COLOURS["ELS"] if name == "ELS" else shades[groups.index(group)]
            style = "-s" if name == "ELS" else "-o"
            text = f"{name}, $G$ = {group}"
            axis.errorbar(
                x, loss, error, fmt=style, color=colour, label=text, capsize=2, markersize=4, lw=1.2
            )
        plots.log2_axis(axis, [row[panel] for row in _panel(rows, panel)])
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(r"loss $\frac{1}{2}|\theta - \mu|^2$")
    title = f"bars: standard errors over {rows[0]['trials']} trials"
    figure.suptitle(title, fontsize="small", color="dimgray")
    plots.legend_below(figure)
    return figure


def _panel(rows, panel):
    return [row for row in rows if row["panel"] == panel]


def _is(row, algorithm, group):
    return (row["algorithm"], row["group_size"]) == (algorithm, group)


if __name__ == "__main__":
    experiment.main(globals())
