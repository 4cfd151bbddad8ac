"""Conjecture 3.1 (Section 3), tested over a grid.

With G_ULS = G_ELS = K and p = q, sigma_ELS <= K sigma_ULS. As stated this is false in three places.

At T = 1 and q <= delta < 1 - (1 - q)^K every sigma_ULS > 0 is enough, since total variation is at
most q, while a small sigma_ELS has total variation near 1 - (1 - q)^K. `edge` marks the cells with
T q <= 2 delta where this can happen, and which no sensible delta enters.

At epsilon = 0 and T = 1 it is false for K = 2 and every q, and for every K and q >= 1/2
(docs/lab/conjecture.md has the proof), by a few per cent; at small epsilons, too. The rows of one
step are exact: hockey-stick divergences at the root of the likelihood ratio, without the
accountant. Over ten steps it is false at such epsilons, too (by the accountant).

At a delta near 1, which promises next to nothing, it is false at every epsilon that was tried.
Where anyone works, epsilon >= 0.5, delta <= 0.05 and T q > 2 delta, no exception was found.

    python -m experiments.conjecture --scale paper      (7 minutes, busy machine; smoke: 5 seconds)
"""

import dataclasses
import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import optimize, special, stats

from experiments.harness import experiment
from experiments.harness.rows import Rows
from fedsim import accounting


@dataclasses.dataclass(frozen=True)
class Settings:
    group_sizes: tuple[int, ...] = (2, 8, 32)
    probs: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.5)
    num_steps: tuple[int, ...] = (1, 10, 100, 1000)
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0)
    deltas: tuple[float, ...] = (1e-6, 1e-3, 0.05)
    one_step: tuple[tuple[float, float], ...] = (
        *((0.01, 0.003), (0.1, 0.01), (0.5, 0.05)),
        *((1.0001e-3, 1e-3), (1.1e-3, 1e-3), (2.1e-3, 1e-3), (0.8, 0.56), (0.95, 0.665)),
    )
    """(q, delta) of the exact rows of one step; the last ones are near the edge q = delta."""
    small_epsilons: tuple[float, ...] = (0.0, 1e-3, 1e-2, 0.1, 0.5, 1.0)
    """Of these rows."""
    ten_steps: tuple[tuple[float, float], ...] = (
        *((1e-6, 0.4558), (0.01, 0.4533), (0.5, 0.85), (1.0, 0.9734), (2.0, 0.9653)),
    )
    """(epsilon, delta) of rows of ten steps with q = 1/2, at deltas that nobody would take."""


SETTINGS = {
    "smoke": Settings(
        *((2, 8), (1e-2, 0.5), (100,), (2.0,), (1e-6,), ((0.5, 0.05),), (0.0, 1e-3)),
        ten_steps=((1.0, 0.9734),),
    ),
    "small": Settings(epsilons=(2.0,), deltas=(1e-6,)),
    "paper": Settings(),
}


def divergence(noise: float, group: int, prob: float, epsilon: float) -> float:
    """The delta of one step at an epsilon, exact: of N(Binomial(group, prob), noise^2) against
    N(0, noise^2), the larger of both directions.

    The likelihood ratio increases, so the best event is what lies above the point where it is
    e^epsilon, or below the one where it is e^-epsilon.
    """
    counts = np.arange(group + 1)
    probs = stats.binom.pmf(counts, group, prob)
    low, high = -40 * noise, 40 * noise + group  # nothing lies further out

    def excess(y: float, level: float) -> float:
        exponents = (2 * counts * y - counts**2) / (2 * noise**2)
        return special.logsumexp(exponents, b=probs) - level  # pyright: ignore

    def point(level: float) -> float:
        if excess(low, level) >= 0:
            return -math.inf
        if excess(high, level) <= 0:
            return math.inf
        bracket = (low, high)
        return optimize.root_scalar(excess, args=(level,), bracket=bracket, xtol=1e-14).root

    factor = math.exp(epsilon)
    above, below = point(epsilon) / noise, point(-epsilon) / noise
    remove = probs @ special.ndtr(counts / noise - above) - factor * special.ndtr(-above)
    add = special.ndtr(below) - factor * (probs @ special.ndtr(below - counts / noise))
    return float(max(remove, add))


def least_noise(group: int, prob: float, epsilon: float, delta: float) -> float:
    """The least noise of one step for (epsilon, delta); 0 where any is enough."""

    def excess(log_noise: float) -> float:
        return divergence(math.exp(log_noise), group, prob, epsilon) - delta

    low, high = math.log(1e-3), math.log(1e4)
    if excess(low) <= 0:
        return 0.0
    return math.exp(optimize.root_scalar(excess, bracket=(low, high), xtol=1e-12).root)


def one_step(settings: Settings) -> Rows:
    """Rows of one step, exact."""
    rows = []
    for (prob, delta), epsilon in itertools.product(settings.one_step, settings.small_epsilons):
        uls = least_noise(1, prob, epsilon, delta)
        for group in settings.group_sizes:
            els = least_noise(group, prob, epsilon, delta)
            ratio = els / (group * uls) if uls else (math.inf if els else 1.0)
            rows.append(
                {
                    "group_size": group,
                    "epsilon": epsilon,
                    "delta": delta,
                    "num_steps": 1,
                    "sampling_prob": prob,
                    "els_noise_multiplier": els,
                    "uls_noise_multiplier": uls,
                    "ratio": ratio,
                    "edge": int(prob <= 2 * delta),
                    "exact": 1,
                }
            )
    return rows


def run(settings: Settings) -> Rows:
    rows = one_step(settings)
    grid = settings.probs, settings.num_steps, settings.epsilons, settings.deltas
    others = [(0.5, 10, *target) for target in settings.ten_steps]
    for prob, steps, epsilon, delta in (*itertools.product(*grid), *others):
        target: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "num_steps": steps,
            "sampling_prob": prob,
        }
        uls = accounting.noise_multiplier(**target)
        for group in settings.group_sizes:
            els = accounting.noise_multiplier(**target, max_contributions=group)
            rows.append(
                {
                    "group_size": group,
                    **target,
                    "els_noise_multiplier": els,
                    "uls_noise_multiplier": uls,
                    "ratio": els / (group * uls),
                    "edge": int(steps * prob <= 2 * delta),
                    "exact": 0,
                }
            )
    return rows


def plot(rows: Rows) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 4))
    for index, group in enumerate(sorted({row["group_size"] for row in rows})):
        here = [row for row in rows if row["group_size"] == group]
        for edge, marker in ((0, "o"), (1, "x")):
            cells = [row for row in here if row["edge"] == edge]
            sigmas = [row["uls_noise_multiplier"] or math.nan for row in cells]
            label = None if edge else f"K = {group}"
            ratios = [row["ratio"] for row in cells]
            axes.plot(sigmas, ratios, marker, color=f"C{index}", label=label, alpha=0.7)
    axes.plot([], [], "x", color="grey", label=r"$T q \leq 2 \delta$: hardly any noise needed")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel=r"$\sigma_{ULS}$")
    axes.set_ylabel(r"$\sigma_{ELS} / (K \sigma_{ULS})$")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    experiment.main(globals())
