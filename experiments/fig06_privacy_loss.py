"""Figures 6, 7, 16 and 17 (Section 6, Appendix G): loss of both algorithms against epsilon.

Both are set by the paper's heuristics (the median user, Estimate-and-Double) at three compute
budgets; the untouched pre-trained model is a line. Figure 6 is on Stack Overflow, 7 on CC-News; 16
and 17 are the same numbers against the budget. A line in every panel of 6 and 7 is training without
noise. As in the paper CC-News is accounted for as if it had ten times the users. Losses are test
losses (Stack Overflow's later examples, CC-News's reserved ones); the learning rate is tuned in
every cell by the first seed, on held-out users where there are any. Two seeds; at `small` 30 steps,
at `long` 300.

Beyond the paper: ELS with other group sizes than the median user's, of which the best is a line of
its own. The record of `small` also has ULS with four local steps (DP-FedAvg) on Stack Overflow,
each over a quarter of a user's examples of a step, in cohorts of a quarter of the budget; commit
bd8366bf is the last that computes those rows.

    python -m experiments.fig06_privacy_loss --scale small      (--dry-run: its cost)
"""

import functools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments import finetuning, heuristics
from experiments.harness import plots
from experiments.harness.rows import Rows, by
from experiments.quantities import best_els, by_heuristics, has_local_steps

SETTINGS = finetuning.COMPARISONS
LOCAL = "ULS, local steps"
BEST = "ELS, best group"
COLOURS = {**plots.COLOURS, LOCAL: "tab:green", BEST: "tab:cyan"}


def run(settings: finetuning.Comparison, arguments: finetuning.Arguments) -> Rows:
    """A row for each data set, epsilon, budget and algorithm."""
    found = heuristics.cells_of(settings.budgets, settings.training, arguments)
    cells = [*found, *without_noise(found)]
    first = len(cells)
    cells += with_other_groups(cells, settings.els_groups)
    rows = finetuning.tuned_losses(cells, settings.training, arguments)
    rows = finetuning.with_test_losses(rows, settings.training, arguments)
    return [{**row, "other_group": number >= first} for number, row in enumerate(rows)]


def with_other_groups(cells: Rows, groups: Sequence[int]) -> Rows:
    """ELS with these group sizes in the place of the median user's."""
    return [
        {**cell, "group_size": group}
        for cell in cells
        for group in groups
        if (cell["algorithm"], cell["epsilon"] < math.inf) == ("els", True)
        and group != cell.get("group_size")
    ]


def without_noise(cells: Rows) -> Rows:
    """The cells of the largest epsilon at an infinite one, with the groups that they have there."""
    most = max(cell["epsilon"] for cell in cells)
    return [{**cell, "epsilon": math.inf} for cell in cells if cell["epsilon"] == most]


def plot(rows: Rows, along: str = "epsilon", across: str = "budget") -> Figure:
    """Rows of panels: data sets; columns: budgets (or epsilons); bars: deviations over seeds."""
    bounds = [row for row in rows if math.isinf(row["epsilon"])]
    rows = [row for row in rows if not math.isinf(row["epsilon"])]
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    columns = sorted({row[across] for row in rows})
    figure, axes = plots.panels(len(names), len(columns), 3.2, 2.6, sharey="row")
    label = {"epsilon": r"$\varepsilon$", "budget": "$B$"}
    for (name, column), own in by(rows, lambda r: (r["dataset"], r[across])).items():
        axis = axes[names.index(name), columns.index(column)]
        curves = by(by_heuristics(own), _curve)
        for label_of, series in (*curves.items(), (BEST, best_els(own))):
            if not series:
                continue
            series = sorted(series, key=lambda row: row[along])
            values = [[row[key] for row in series] for key in (along, "loss", "loss_std")]
            look = {"color": COLOURS[label_of], "label": label_of}
            style = "--d" if label_of == BEST else "-o"
            axis.errorbar(*values, fmt=style, capsize=2, **look)
        axis.axhline(own[0]["loss_before"], color="black", linestyle=":", label="pre-trained")
        for row in bounds if along == "epsilon" else ():
            if (row["dataset"], row["budget"]) == (name, column):
                label_of = f"{_curve(row)} without noise"
                axis.axhline(row["loss"], color=COLOURS[_curve(row)], ls="--", label=label_of)
        plots.log2_axis(axis, [row[along] for row in own])
        title = f"{name}, {label[across]} = {column:g}\n{finetuning.assumption(name)}"
        axis.set_title(title.strip(), fontsize="medium")
        axis.set(xlabel=label[along])
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set(ylabel="test loss (nats per token)")
    plots.legend_below(figure)
    return figure


def _curve(row):
    return LOCAL if has_local_steps(row) else row["algorithm"].upper()


FIGURES = {
    "fig06_privacy_loss": plot,
    "fig16_compute_loss": functools.partial(plot, along="budget", across="epsilon"),
}


if __name__ == "__main__":
    finetuning.main(globals())
