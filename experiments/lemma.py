"""Lemma 3.2 (Section 3), tested over a grid.

For integer alpha, R_alpha(N(Bin(K, p), (K s)^2), N(0, (K s)^2)) <= R_alpha(N(Bern(p), s^2),
N(0, s^2)): in Renyi divergence, Conjecture 3.1 holds. Divergences are integrated numerically.

    python -m experiments.lemma --scale paper      (10 seconds)
"""

import dataclasses
import itertools

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import special, stats

from experiments.harness import experiment
from experiments.harness.rows import Rows


@dataclasses.dataclass(frozen=True)
class Settings:
    group_sizes: tuple[int, ...] = (2, 8, 32)
    probs: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.5)
    noise_multipliers: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    orders: tuple[int, ...] = (2, 3, 4, 8, 16, 32)


SETTINGS = {
    "smoke": Settings((2, 8), (1e-2, 0.5), (1.0,), (2, 8)),
    "small": Settings((2, 8)),
    "paper": Settings(),
}


def run(settings: Settings) -> Rows:
    rows = []
    for group, prob, sigma, order in itertools.product(
        settings.group_sizes, settings.probs, settings.noise_multipliers, settings.orders
    ):
        rows.append(
            {
                "group_size": group,
                "sampling_prob": prob,
                "noise_multiplier": sigma,
                "order": order,
                "els_divergence": renyi_divergence(group, prob, group * sigma, order),
                "uls_divergence": renyi_divergence(1, prob, sigma, order),
            }
        )
    return rows


def renyi_divergence(group: int, prob: float, sigma: float, order: int) -> float:
    """R_order(N(Bin(group, prob), sigma^2), N(0, sigma^2)) by the trapezoid rule, in logarithms."""
    counts = np.arange(group + 1)
    # The integrand peaks at most at order * group, and is as narrow as Q.
    y = np.linspace(-12 * sigma, order * group + 12 * sigma, 20_001)
    log_probs = stats.binom.logpmf(counts, group, prob)
    ratio = special.logsumexp(
        log_probs + (np.multiply.outer(y, counts) - counts**2 / 2) / sigma**2, axis=1
    )
    log_integrand = order * ratio + stats.norm.logpdf(y, 0, sigma)
    return float(special.logsumexp(log_integrand) + np.log(y[1] - y[0])) / (order - 1)


def plot(rows: Rows) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for index, group in enumerate(sorted({row["group_size"] for row in rows})):
        own = [row for row in rows if row["group_size"] == group]
        values = [[row[key] for row in own] for key in ("uls_divergence", "els_divergence")]
        axes.plot(*values, "o", color=f"C{index}", label=f"K = {group}", alpha=0.7)
    ends = [edge([row["uls_divergence"] for row in rows]) for edge in (min, max)]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel(r"$R_\alpha(N(Bern(p), s^2), N(0, s^2))$")
    axes.set_ylabel(r"$R_\alpha(N(Bin(K, p), (K s)^2), N(0, (K s)^2))$")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    experiment.main(globals())
