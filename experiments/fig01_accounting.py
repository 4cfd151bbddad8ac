"""Figure 1 (Section 2): user-level epsilon of DP-SGD-ELS against its group size.

By the Mixture-of-Gaussians accountant and by black-box group privacy. Ours: the noise that a fixed
epsilon takes, by either: that is where they differ for whoever trains.

    python -m experiments.fig01_accounting --scale paper      (2 minutes; smoke: 15 seconds)
"""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import optimize

from experiments.benchmarks.accounting import dp_event_of
from experiments.claims import EXPLODED, NOISE_ACCURACY
from experiments.harness import experiment
from experiments.harness.rows import Row, Rows
from experiments.quantities import curves
from fedsim import accounting
from fedsim.accounting import StepEvent, accountant, composition, log_group_growth
from fedsim.errors import expect, expect_count


@dataclasses.dataclass(frozen=True)
class Settings:
    num_steps: int = 2000
    sampling_prob: float = 0.01
    delta: float = 1e-6
    noise_multipliers: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    epsilon: float = 4.0
    """At which the noise is compared."""


SETTINGS = {
    "smoke": Settings(num_steps=200, noise_multipliers=(1.0, 4.0), group_sizes=(1, 4, 16)),
    "small": Settings(group_sizes=(1, 4, 16, 64)),
    "paper": Settings(),
}


def black_box_epsilon(event: StepEvent, num_steps: int, delta: float) -> float:
    """The user-level epsilon that group privacy alone gives from an example-level guarantee.

    (epsilon_0, delta_0) for one contribution gives G epsilon_0 and
    delta_0 (e^(G epsilon_0) - 1) / (e^epsilon_0 - 1) for G; the smallest epsilon_0 that meets
    delta is used. delta_0 may have to be astronomically small: below what the composed loss
    resolves it comes from Renyi divergences.
    Returns: inf where no epsilon_0 meets delta.
    Source: Vadhan 2017, Lemma 2.2; the baseline of Figure 1.
    """
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    expect_count("num_steps", num_steps, 1)
    group = event.max_contributions
    example = dataclasses.replace(event, max_contributions=1)
    if group == 1:
        return accountant.epsilon([(example, num_steps)], delta)
    example_log_delta = _example_log_delta(example, num_steps, delta)

    def excess(levels: np.ndarray) -> np.ndarray:
        """log of delta's group version over delta."""
        return example_log_delta(levels) + log_group_growth(levels, group) - math.log(delta)

    levels = np.geomspace(1e-6, 1e9, 1000)
    enough = np.flatnonzero(excess(levels) <= 0)
    if enough.size == 0:
        return math.inf
    if enough[0] == 0:  # the least that is looked at will do
        return group * levels[0]
    bracket = (levels[enough[0] - 1], levels[enough[0]])
    root = optimize.root_scalar(
        lambda level: excess(np.array([level]))[0], bracket=bracket, rtol=1e-9
    )
    return group * root.root * (1 + 1e-6)


def _example_log_delta(
    event: StepEvent, num_steps: int, delta: float
) -> Callable[[np.ndarray], np.ndarray]:
    """log delta as a function of epsilon, from the composed loss or, far out, from Renyi orders."""
    composed = accountant.composed_loss([(event, num_steps)], delta)
    floor = 10 * composition.COMPOSED_TAIL_MASS
    resolved = max(
        composition.pmf_epsilon_at(pmf, floor) for pmf in composition.directions(composed)
    )
    orders = np.unique(np.geomspace(2, 4096, 100).astype(int))
    renyi = dp_accounting.rdp.RdpAccountant(orders.tolist())
    renyi.compose(dp_accounting.SelfComposedDpEvent(dp_event_of(event), num_steps))
    divergences = np.asarray(renyi._rdp)

    def log_delta(levels: np.ndarray) -> np.ndarray:
        # Canonne, Kamath and Steinke 2020, Proposition 12.
        ratios = np.multiply.outer(orders - 1, levels) - ((orders - 1) * divergences)[:, None]
        constants = (orders - 1) * np.log1p(-1 / orders) - np.log(orders)
        values = np.minimum(math.log(floor), (constants[:, None] - ratios).min(axis=0))
        near = levels < resolved
        if near.any():
            values[near] = np.log(composed.get_delta_for_epsilon(levels[near].tolist()))
        return values

    return log_delta


def run(settings: Settings) -> Rows:
    """A row for each noise multiplier and group size, then one for each group size at epsilon."""
    rows = []
    for sigma in settings.noise_multipliers:
        for group in settings.group_sizes:
            event = StepEvent(sigma, settings.sampling_prob, group)
            steps, delta = settings.num_steps, settings.delta
            rows.append(
                {
                    "noise_multiplier": sigma,
                    "group_size": group,
                    "epsilon": accounting.epsilon([(event, steps)], delta),
                    "black_box_epsilon": black_box_epsilon(event, steps, delta),
                    "black_box_noise_multiplier": None,
                }
            )
    return rows + [noise_at(settings, group) for group in settings.group_sizes]


def noise_at(settings: Settings, group: int) -> Row:
    """The noise multiplier for the fixed epsilon, and that by black-box group privacy."""
    target = {"num_steps": settings.num_steps, "delta": settings.delta}
    sigma = accounting.noise_multiplier(
        epsilon=settings.epsilon,
        sampling_prob=settings.sampling_prob,
        max_contributions=group,
        **target,
    )

    def excess(log_sigma: float) -> float:
        event = StepEvent(math.exp(log_sigma), settings.sampling_prob, group)
        return math.log(black_box_epsilon(event, **target) / settings.epsilon)

    low = math.log(sigma)
    high = low
    while excess(high) > NOISE_ACCURACY:
        low, high = high, high + 0.2
    found = high
    if low < high:
        found = optimize.root_scalar(excess, bracket=(low, high), xtol=NOISE_ACCURACY / 2).root
    return {
        "noise_multiplier": sigma,
        "group_size": group,
        "epsilon": settings.epsilon,
        "black_box_epsilon": None,
        "black_box_noise_multiplier": math.exp(found),
    }


def plot(rows: Rows) -> Figure:
    """Epsilon against the group size, and the noise for one epsilon."""
    figure, (axes, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, series in enumerate(curves(rows)):
        sigma = series[0]["noise_multiplier"]
        groups = [row["group_size"] for row in series]
        for key, style, label in (
            ("epsilon", "-o", rf"$\sigma$ = {sigma:g}"),
            ("black_box_epsilon", "--x", None),
        ):
            axes.plot(groups, [row[key] for row in series], style, color=f"C{index}", label=label)
    axes.plot([], [], "--x", color="grey", label="black-box group privacy")
    axes.axhline(EXPLODED, color="grey", linewidth=0.5, linestyle=":")
    axes.text(3.2, 1.15 * EXPLODED, r"$e^\varepsilon$ overflows", color="grey", fontsize="small")
    axes.set(ylim=(0.2, 2e4), ylabel=r"user-level $\varepsilon$")
    fixed = [row for row in rows if row["black_box_epsilon"] is None]
    groups = [row["group_size"] for row in fixed]
    for key, style, label in (
        ("noise_multiplier", "-o", "the accountant"),
        ("black_box_noise_multiplier", "--x", "black-box group privacy"),
    ):
        right.plot(groups, [row[key] for row in fixed], style, color="C0", label=label)
    epsilon = fixed[0]["epsilon"]
    right.set(ylabel=rf"noise multiplier $\sigma$ for $\varepsilon$ = {epsilon:g}")
    for axis in (axes, right):
        axis.set(xscale="log", yscale="log", xlabel="$G_{ELS}$")
        axis.set_xticks(groups)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    experiment.main(globals())
