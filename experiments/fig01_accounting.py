"""Figure 1 (Section 2): user-level epsilon of DP-SGD-ELS against its group size.

Claim: the Mixture-of-Gaussians accountant grows nearly linearly in G_ELS where epsilon is useful,
and slower than the square of G_ELS beyond. Black-box group privacy grows exponentially, and for
small sigma it explodes at once.

    python -m experiments.fig01_accounting --scale paper      (20 seconds; smoke: 5 seconds)
"""

import dataclasses
import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.harness import common, group_privacy
from fedsim import accounting
from fedsim.accounting import StepEvent


@dataclasses.dataclass(frozen=True)
class Settings:
    num_steps: int = 2000
    sampling_prob: float = 0.01
    delta: float = 1e-6
    noise_multipliers: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    group_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)


SETTINGS = {
    "smoke": Settings(num_steps=200, noise_multipliers=(1.0, 4.0), group_sizes=(1, 4, 16)),
    "small": Settings(group_sizes=(1, 4, 16, 64)),
    "paper": Settings(),
}

EXPLODED = 700.0
"""e^epsilon leaves double precision: the guarantee is void."""


def run(settings: Settings) -> list[dict]:
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
                    "black_box_epsilon": group_privacy.black_box_epsilon(event, steps, delta),
                }
            )
    return rows


def plot(rows: Sequence[dict]) -> Figure:
    figure, axes = plt.subplots(figsize=(6, 4))
    for index, (sigma, series) in enumerate(_by_noise(rows).items()):
        groups = [row["group_size"] for row in series]
        for key, style, label in (
            ("epsilon", "-o", rf"$\sigma$ = {sigma:g}"),
            ("black_box_epsilon", "--x", None),
        ):
            axes.plot(groups, [row[key] for row in series], style, color=f"C{index}", label=label)
    axes.plot([], [], "--x", color="grey", label="black-box group privacy")
    axes.axhline(EXPLODED, color="grey", linewidth=0.5, linestyle=":")
    axes.text(3.2, 1.15 * EXPLODED, r"$e^\varepsilon$ overflows", color="grey", fontsize="small")
    axes.set(xscale="log", yscale="log", ylim=(0.2, 2e4), xlabel="$G_{ELS}$")
    axes.set_ylabel(r"user-level $\varepsilon$")
    axes.set_xticks([row["group_size"] for row in next(iter(_by_noise(rows).values()))])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def check(rows: Sequence[dict]) -> common.Claims:
    """How epsilon grows with G, for ELS and for black-box group privacy."""
    powers, below, behind, exploded = [], [], [], []
    for sigma, series in _by_noise(rows).items():
        ours = [row["epsilon"] for row in series]
        black_box = [row["black_box_epsilon"] for row in series]
        assert math.isclose(ours[0], black_box[0]), "both are example-level at G = 1"
        below += [a <= b for a, b in zip(ours, black_box, strict=True)]
        for before, after in zip(series, series[1:], strict=False):
            powers.append((after["epsilon"] < 10, _growth(before, after, "epsilon")))
        ratio = [b / a for a, b in zip(ours, black_box, strict=True)]
        behind.append(ratio == sorted(ratio))
        if sigma <= 1:
            exploded.append(black_box[-1])
    small = max(power for is_small, power in powers if is_small)
    most = max(power for _, power in powers)
    numbers = f"locally at most G^{small:.2f} while epsilon < 10, G^{most:.2f} beyond"
    return [
        ("epsilon of ELS grows almost linearly in G", small < 1.25 and most < 2, numbers),
        ("black-box group privacy is never better", all(below), f"in {sum(below)} of {len(below)}"),
        (
            "and falls behind ever further",
            all(behind),
            f"at {sum(behind)} of {len(behind)} noise multipliers",
        ),
        (
            "it blows up where sigma is small",
            min(exploded) > EXPLODED,
            f"epsilon {min(exploded):.3g} at least at the largest G",
        ),
    ]


def _growth(before: dict, after: dict, key: str) -> float:
    """The local power of G: 1 is linear."""
    return math.log(after[key] / before[key]) / math.log(after["group_size"] / before["group_size"])


def _by_noise(rows: Sequence[dict]) -> dict[float, list[dict]]:
    series: dict[float, list[dict]] = {}
    for row in rows:
        series.setdefault(row["noise_multiplier"], []).append(row)
    return series


if __name__ == "__main__":
    common.main("fig01_accounting", __doc__, SETTINGS, run, check, {"fig01_accounting": plot})
