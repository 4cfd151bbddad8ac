"""Conjecture 3.1 (Section 3), tested over a grid.

With G_ULS = G_ELS = K and p = q, sigma_ELS <= K sigma_ULS. This is false as stated: at T = 1 and
q <= delta < 1 - (1 - q)^K every sigma_ULS > 0 is enough, since total variation is at most q, while
a small sigma_ELS has total variation near 1 - (1 - q)^K. `edge` marks the cells with T q <= 2 delta
where this can happen, and which no sensible delta enters; elsewhere the conjecture must hold, and
every exception is listed.

    python -m experiments.conjecture --scale paper      (1 minute; smoke: 5 seconds)
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments import common
from fedsim import accounting


@dataclasses.dataclass(frozen=True)
class Settings:
    group_sizes: tuple[int, ...] = (2, 8, 32)
    probs: tuple[float, ...] = (1e-3, 1e-2, 0.1, 0.5)
    num_steps: tuple[int, ...] = (1, 100, 1000)
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0)
    deltas: tuple[float, ...] = (1e-6, 1e-3)


SETTINGS = {
    "smoke": Settings((2, 8), (1e-2, 0.5), (100,), (2.0,), (1e-6,)),
    "small": Settings(epsilons=(2.0,), deltas=(1e-6,)),
    "paper": Settings(),
}


def run(settings: Settings) -> list[dict]:
    rows = []
    for prob, steps, epsilon, delta in itertools.product(
        settings.probs, settings.num_steps, settings.epsilons, settings.deltas
    ):
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
                }
            )
    return rows


def plot(rows: Sequence[dict]) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 4))
    for index, group in enumerate(sorted({row["group_size"] for row in rows})):
        here = [row for row in rows if row["group_size"] == group]
        for edge, marker in ((0, "o"), (1, "x")):
            cells = [row for row in here if row["edge"] == edge]
            sigmas = [row["uls_noise_multiplier"] for row in cells]
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


def check(rows: Sequence[dict]) -> common.Claims:
    """Exceptions are allowed where no noise suffices for ULS, and counted."""
    exceptions = [row for row in rows if row["ratio"] > 1]
    for row in exceptions:
        print("exception:", row)
    what = "sigma_ELS <= K sigma_ULS (Conjecture 3.1), but for T q <= 2 delta"
    numbers = f"in {len(rows) - len(exceptions)} of {len(rows)} cells"
    return [(what, all(row["edge"] for row in exceptions), numbers)]


if __name__ == "__main__":
    common.main("conjecture", __doc__, SETTINGS, run, check, {"conjecture": plot})
