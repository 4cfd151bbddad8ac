"""Figures 5 and 13 (Section 6, Appendix F): loss of DP-SGD-ULS over group and cohort sizes.

Claims, on Stack Overflow: at every budget G M the best G is at least ten times smaller than the
best M; and the cohort is to be enlarged, up to a limit, before the group. Figure 5 is epsilon = 4,
with the diagonals of the heat map as curves, Figure 13 every epsilon. The runs are Figure 14's.
`small` has 16 of the paper's 72 configurations, which span budgets of 16 to 1024, and leaves out
epsilon = 64, where noise plays the least part in the choice; 30 steps, two seeds, and one learning
rate for all: with Adafactor a step's size hardly depends on the noise.

    python -m experiments.fig05_uls_heatmap --scale small      (--dry-run: its cost; smoke: 15 s)
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import common, finetuning
from experiments.finetuning import STACK_OVERFLOW, ULS_GRIDS

SETTINGS = ULS_GRIDS
SHOWN = 4.0  # the epsilon whose diagonals are drawn


def run(settings: finetuning.UlsGrid, arguments: finetuning.Arguments) -> list[dict[str, Any]]:
    return finetuning.uls_grid_losses(settings, arguments, [STACK_OVERFLOW])


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """A heat map for each epsilon, the best of each budget framed; and the diagonals of one."""
    panels = finetuning.by(rows, lambda row: row["epsilon"])
    figure, axes = plt.subplots(
        1,
        len(panels) + 1,
        figsize=(4 * (len(panels) + 1), 3.4),
        squeeze=False,
        layout="constrained",
    )
    groups = sorted({row["group_size"] for row in rows})
    cohorts = sorted({row["cohort_size"] for row in rows})
    limits = [np.quantile([row["loss"] for row in rows], share) for share in (0, 1)]
    for axis, (epsilon, own) in zip(axes[0], panels.items(), strict=False):
        table = np.full((len(groups), len(cohorts)), np.nan)
        for row in own:
            table[groups.index(row["group_size"]), cohorts.index(row["cohort_size"])] = row["loss"]
        axis.imshow(table, origin="lower", cmap="viridis_r", vmin=limits[0], vmax=limits[1])
        for (i, j), loss in np.ndenumerate(table):
            dark = loss > (limits[0] + limits[1]) / 2
            colour = "white" if dark else "black"
            axis.text(j, i, f"{loss:.3f}", ha="center", va="center", color=colour, fontsize=7)
        for best in best_of(own):
            corner = (
                cohorts.index(best["cohort_size"]) - 0.5,
                groups.index(best["group_size"]) - 0.5,
            )
            axis.add_patch(Rectangle(corner, 1, 1, fill=False, linewidth=2, zorder=3))
        axis.set_xticks(range(len(cohorts)), cohorts)
        axis.set_yticks(range(len(groups)), groups)
        axis.set(xlabel="cohort size $M$", ylabel="group size $G_{ULS}$")
        axis.set_title(rf"$\varepsilon$ = {epsilon:g}")
    shown = panels.get(SHOWN) or next(iter(panels.values()))
    for budget, series in sorted(finetuning.by(shown, lambda row: row["budget"]).items()):
        values = [[row[key] for row in series] for key in ("group_size", "loss", "loss_std")]
        axes[0, -1].errorbar(*values, fmt="-o", capsize=2, label=f"$B$ = {budget}")
    axes[0, -1].set_xscale("log", base=2)
    axes[0, -1].set(xlabel="group size $G_{ULS}$", ylabel="loss (nats per token)")
    axes[0, -1].set_title(rf"$\varepsilon$ = {shown[0]['epsilon']:g}")
    axes[0, -1].grid(alpha=0.3)
    axes[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def best_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row with the least loss of each budget that leaves a choice."""
    budgets = finetuning.by(rows, lambda row: row["budget"]).values()
    return [min(series, key=lambda row: row["loss"]) for series in budgets if len(series) > 1]


def check(rows: Sequence[dict[str, Any]]) -> common.Claims:
    """Where the best of each budget is; budgets with one configuration have no choice."""
    assert all(np.isfinite(row["loss"]) for row in rows)
    small, first, total = 0, 0, 0
    for own in finetuning.by(rows, lambda row: row["epsilon"]).values():
        for series in finetuning.by(own, lambda row: row["budget"]).values():
            if len(series) == 1:
                continue
            best = min(series, key=lambda row: row["loss"])
            widest = max(series, key=lambda row: row["cohort_size"])
            total += 1
            small += 10 * best["group_size"] <= best["cohort_size"]
            noise = 2 * np.hypot(best["loss_std"], widest["loss_std"])
            first += bool(widest["loss"] - best["loss"] <= noise)
    counted = f"in {{}} of {total} budgets with a choice"
    return [
        (
            "the best G is at least ten times below the best M",
            small == total,
            counted.format(small),
        ),
        ("the largest cohort is as good as the best", first == total, counted.format(first)),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    finetuning.main(
        "fig05_uls_heatmap", __doc__, argv, SETTINGS, run, {"fig05_uls_heatmap": plot}, check
    )


if __name__ == "__main__":
    main()
