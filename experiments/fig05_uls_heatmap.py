"""Figures 5 and 13 (Section 6, Appendix F): loss of DP-SGD-ULS over group and cohort sizes.

On Stack Overflow. Losses are of validation data. Figure 5 is epsilon = 4, with the diagonals of the
heat map as curves, Figure 13 every epsilon. The runs are Figure 14's. `small` has 16 of the paper's
72 configurations, which span budgets of 16 to 1024, and leaves out epsilon = 64, where noise plays
the least part in the choice; 30 steps, two seeds; the learning rate is tuned in every cell.

    python -m experiments.fig05_uls_heatmap --scale small      (--dry-run: its cost)
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import finetuning
from experiments.finetuning import STACK_OVERFLOW, ULS_GRIDS
from experiments.harness import plots
from experiments.harness.rows import Rows, by

SETTINGS = ULS_GRIDS
SHOWN = 4.0  # the epsilon whose diagonals are drawn


def run(settings: finetuning.UlsGrid, arguments: finetuning.Arguments) -> Rows:
    return finetuning.uls_grid_losses(settings, arguments, [STACK_OVERFLOW])


def plot(rows: Rows) -> Figure:
    """A heat map for each epsilon, the best of each budget framed; and the diagonals of one."""
    panels = by(rows, lambda row: row["epsilon"])
    figure, axes = plots.panels(1, len(panels) + 1, 4, 3.4)
    groups = sorted({row["group_size"] for row in rows})
    cohorts = sorted({row["cohort_size"] for row in rows})
    limits = [pick(row["loss"] for row in rows) for pick in (min, max)]
    for axis, (epsilon, own) in zip(axes[0], panels.items(), strict=False):
        table = np.full((len(groups), len(cohorts)), np.nan)
        for row in own:
            table[groups.index(row["group_size"]), cohorts.index(row["cohort_size"])] = row["loss"]
        look = {"cmap": "viridis_r", "vmin": limits[0], "vmax": limits[1]}
        image = axis.imshow(table, origin="lower", **look)
        if axis is axes[0, -2]:
            figure.colorbar(image, ax=axis, label="validation loss\n(nats per token)", shrink=0.8)
        for (i, j), loss in np.ndenumerate(table):
            dark = loss > (limits[0] + limits[1]) / 2
            colour = "white" if dark else "black"
            axis.text(j, i, f"{loss:.3f}", ha="center", va="center", color=colour, fontsize=7)
        for best in best_of(own):
            corner = (
                cohorts.index(best["cohort_size"]) - 0.46,
                groups.index(best["group_size"]) - 0.46,
            )
            axis.add_patch(Rectangle(corner, 0.92, 0.92, fill=False, linewidth=2, zorder=3))
        axis.set_xticks(range(len(cohorts)), cohorts)
        axis.set_yticks(range(len(groups)), groups)
        axis.set(xlabel="cohort size $M$", ylabel="group size $G_{ULS}$")
        axis.set_title(rf"$\varepsilon$ = {epsilon:g}" + "\nframed: best of each $B = GM$")
    shown = panels.get(SHOWN) or next(iter(panels.values()))
    budgets = sorted(by(shown, lambda row: row["budget"]).items())
    shades = plt.get_cmap("Oranges")(np.linspace(0.25, 1.0, len(budgets)))
    for (budget, series), colour in zip(budgets, shades, strict=True):
        values = [[row[key] for row in series] for key in ("group_size", "loss", "loss_std")]
        look = {"color": colour, "label": f"$B$ = {budget}"}
        axes[0, -1].errorbar(*values, fmt="-o", capsize=2, **look)
    plots.log2_axis(axes[0, -1], groups)
    axes[0, -1].set(xlabel="group size $G_{ULS}$", ylabel="validation loss (nats per token)")
    axes[0, -1].set_title(rf"by budget, $\varepsilon$ = {shown[0]['epsilon']:g}")
    axes[0, -1].grid(alpha=0.3)
    axes[0, -1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def best_of(rows: Rows) -> Rows:
    """The row with the least loss of each budget that leaves a choice."""
    budgets = by(rows, lambda row: row["budget"]).values()
    return [min(series, key=lambda row: row["loss"]) for series in budgets if len(series) > 1]


if __name__ == "__main__":
    finetuning.main(globals())
