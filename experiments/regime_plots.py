"""Figures of regime.py: what there is of its trainings, with how many of them that is."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import ERRORS, Row, Rows, by
from experiments.harness.verdicts import cell_error
from experiments.regime_claims import BLOCK, averaged, heuristic_of, that_count, whole_seeds

STYLES = ("-o", "--s", ":^")
BESIDE = 1.05  # the two algorithms, so that neither hides the other
DASHES = {"els": (0, (4, 4)), "uls": (4, (4, 4))}
"""Of lines that may lie on each other: the dashes of one are where the other has none."""


def plot_groups(rows: Sequence[Row]) -> Figure:
    """Figures 4 and 5: loss against the group size, a panel for each set of users and algorithm."""
    found = with_budget(rows)
    names = list(dict.fromkeys(row["data"] for row in found))
    size = (8.4, 3.0 * len(names) + 0.6)
    figure, axes = plt.subplots(
        len(names), 2, figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    epsilons = sorted({row["epsilon"] for row in found})
    for line, name in zip(axes, names, strict=True):
        for axis, algorithm in zip(line, ("els", "uls"), strict=True):
            own = [row for row in found if (row["data"], row["algorithm"]) == (name, algorithm)]
            for epsilon, series in sorted(by(own, lambda row: row["epsilon"]).items()):
                series = sorted(series, key=lambda row: row["group_size"])
                values = [
                    [row[key] for row in series] for key in ("group_size", "loss", "loss_std")
                ]
                shade = plt.get_cmap("viridis")(epsilons.index(epsilon) / len(epsilons))
                label = "without noise" if math.isinf(epsilon) else rf"$\varepsilon$ = {epsilon:g}"
                style = STYLES[epsilons.index(epsilon) % len(STYLES)]
                axis.errorbar(*values, fmt=style, color=shade, capsize=2, label=label)
                mark_one_seed(axis, series, "group_size", shade)
                if algorithm == "uls" and not math.isinf(epsilon):
                    for row in series:
                        if row["group_size"] == heuristic_of(row):
                            label = "Estimate-and-Double"
                            look = {"facecolors": "none", "edgecolors": "tab:red", "s": 110}
                            axis.scatter(row["group_size"], row["loss"], label=label, **look)
            if algorithm == "els" and own:
                median = own[0]["median_examples"]
                axis.axvline(median, color="tab:red", linestyle="--", label="median user")
            if own:
                before = own[0]["loss_before"]
                axis.axhline(before, color="black", linestyle=":", label="pre-trained")
            common.log2_axis(axis, [row["group_size"] for row in own] or [1])
            axis.set_title(f"{name}: {algorithm.upper()}", fontsize="medium")
            axis.set(xlabel=f"$G_{{{algorithm.upper()}}}$")
            axis.grid(alpha=0.3)
        line[0].set(ylabel="held-out loss (nats per token)")
    return finished(figure, rows)


def plot_comparison(rows: Sequence[Row]) -> Figure:
    """Figure 6: loss of both algorithms, set by the heuristics, against epsilon; ELS with its best
    group beside; lines are the starting model and training without noise."""
    found = with_budget(rows)
    names = list(dict.fromkeys(row["data"] for row in found))
    figure, axes = common.panels(1, len(names), 4.2, 3.4)
    for axis, name in zip(axes[0], names, strict=True):
        own = [row for row in found if row["data"] == name]
        for algorithm, series in by(own, lambda row: row["algorithm"]).items():
            colour, label = common.COLOURS[algorithm.upper()], algorithm.upper()
            private = [row for row in series if not math.isinf(row["epsilon"])]
            curve = sorted(
                (row for row in private if row["group_size"] == heuristic_of(row)),
                key=lambda row: row["epsilon"],
            )
            apart = BESIDE if algorithm == "els" else 1 / BESIDE
            x = np.array([row["epsilon"] for row in curve]) * apart
            values = [[row[key] for row in curve] for key in ("loss", "loss_std")]
            axis.errorbar(x, *values, fmt="-o", color=colour, capsize=2, label=label)
            best = [min(each, key=_loss) for each in by(private, lambda r: r["epsilon"]).values()]
            look = {"marker": "D", "edgecolors": colour, "facecolors": "none", "s": 70}
            where = [row["epsilon"] * apart for row in best], [row["loss"] for row in best]
            axis.scatter(*where, label=f"{label}, best group", zorder=3, **look)
            named = {(row["epsilon"], row["group_size"]): row for row in (*curve, *best)}
            for (epsilon, group), row in named.items():
                right, high = algorithm == "els", group == heuristic_of(row)
                off: dict[str, Any] = {"textcoords": "offset points"}
                off["ha"] = "left" if right else "right"
                off["xytext"] = (9 if right else -9, 4 if right and high else -10)
                off["bbox"] = {"color": "white", "pad": 0.5}  # no line through it
                near = (epsilon * apart, row["loss"])
                axis.annotate(f"G = {group}", near, fontsize="x-small", color=colour, **off)
            for row in series:
                if math.isinf(row["epsilon"]):
                    label = f"{algorithm.upper()} without noise"
                    label += ", one seed" * (row["seeds"] == 1)
                    axis.axhline(
                        row["loss"], color=colour, linestyle=DASHES[algorithm], label=label
                    )
        axis.axhline(own[0]["loss_before"], color="black", linestyle=":", label="pre-trained")
        finite = [row["epsilon"] for row in own if not math.isinf(row["epsilon"])]
        common.log2_axis(axis, finite or [1])
        axis.margins(x=0.25)
        axis.set(xlabel=r"$\varepsilon$", title=name + delta_of(own))
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="held-out loss (nats per token)")
    return finished(figure, rows)


def plot_users(rows: Sequence[Row]) -> Figure:
    """Figure 8: loss against the budget, a panel for each number of users in the accounting."""
    found = [
        row
        for row in averaged(rows)
        if row["epsilon"] == max(_finite(rows), default=0)
        and row["group_size"] == heuristic_of(row)
    ]
    panels = by(found, lambda row: (row["data"], row["times"]))
    panels = {where: own for where, own in panels.items() if where[0] == rows[0]["data"]}
    figure, axes = common.panels(1, max(1, len(panels)), 3.2, 3.2, sharey=True)
    for axis, ((_, times), own) in zip(axes[0], panels.items(), strict=False):
        for algorithm, series in by(own, lambda row: row["algorithm"].upper()).items():
            series = sorted(series, key=lambda row: row["budget"])
            values = [[row[key] for row in series] for key in ("budget", "loss", "loss_std")]
            colour = common.COLOURS[algorithm]
            axis.errorbar(*values, fmt="-o", color=colour, capsize=2, label=algorithm)
            mark_one_seed(axis, series, "budget", colour)
        whose = f"as if {times} x the users, no guarantee" if times > 1 else "the users there are"
        title = rf"{whose}" + "\n" + rf"$\varepsilon$ = {own[0]['epsilon']:g}{delta_of(own)}"
        axis.set_title(title, fontsize="medium")
        common.log2_axis(axis, [row["budget"] for row in own])
        axis.set(xlabel="compute budget $B$")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="held-out loss (nats per token)")
    return finished(figure, rows)


def plot_heuristics(rows: Sequence[Row]) -> Figure:
    """Figure 14: by how much each group size is above the best of its algorithm; those that the
    heuristics say are ringed."""
    found = with_budget(rows)
    found = [row for row in found if not math.isinf(row["epsilon"])]
    settings = by(found, lambda row: (row["data"], row["algorithm"], row["epsilon"]))
    size = (7.5, 1.4 + 0.45 * len(settings))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    for (data, algorithm, epsilon), own in sorted(settings.items(), reverse=True):
        own = sorted(own, key=_loss)
        place = rf"{data}, {algorithm.upper()}, $\varepsilon$ = {epsilon:g}"
        same = [row for row in found if row["data"] == data]
        noise = (math.sqrt(2) * cell_error(same, BLOCK)).times(ERRORS)
        look = {"color": "0.85", "lw": 9, "solid_capstyle": "butt", "zorder": 0}
        axis.plot([0, noise], [place] * 2, label="what the seeds explain", **look)
        for number, row in enumerate(own):
            above, colour = row["loss"] - own[0]["loss"], common.COLOURS[algorithm.upper()]
            axis.scatter(above, place, color=colour, s=22, zorder=3)
            off = (0, -14 if number % 2 else 7)  # neighbours apart, so that both can be read
            at = {"textcoords": "offset points", "xytext": off, "ha": "center"}
            axis.annotate(f"{row['group_size']}", (above, place), fontsize="x-small", **at)
            if row["group_size"] == heuristic_of(row):
                look = {"facecolors": "none", "edgecolors": "tab:red", "s": 110}
                axis.scatter(above, place, label="what the heuristic says", **look)
    axis.set(xlabel="held-out nats per token above the best group size (numbers: G)")
    axis.margins(y=0.15)
    axis.grid(alpha=0.3)
    return finished(figure, rows, "means over seeds")


def delta_of(rows: Sequence[Row]) -> str:
    """For a title, where rows say it."""
    return rf", $\delta$ = {rows[0]['delta']:.1e}" if "delta" in rows[0] else ""


def with_budget(rows: Sequence[Row]) -> Rows:
    """Cells with the largest budget and the users there are, over their seeds."""
    most = max(row["budget"] for row in rows)
    found = averaged(whole_seeds(that_count(rows)))
    return [row for row in found if row["times"] == 1 and row["budget"] == most]


def mark_one_seed(axis: Axes, series: Rows, name: str, colour: Any) -> None:
    """White what has one seed, and so no bars. Args: name: of what is on the horizontal axis."""
    for row in series:
        if row["seeds"] == 1:
            look = {"facecolors": "white", "edgecolors": colour, "s": 30, "zorder": 3}
            axis.scatter(row[name], row["loss"], label="white: one seed", **look)


def finished(
    figure: Figure, rows: Sequence[Row], what: str = "bars: standard deviation over seeds"
) -> Figure:
    """With a legend, what was trained on what, what the figure shows, and what is missing."""
    common.legend_below(figure)
    parameters, source = rows[0]["num_parameters"], rows[0]["data"]
    what = f"{source} in the place of Stack Overflow; {parameters:,} parameters; {what}"
    if (number := len(that_count(rows))) < (planned := rows[0]["planned"]):
        what += f"; {number} of {planned} trainings"
    figure.suptitle(what, fontsize="small", color="dimgray")
    return figure


def _loss(row: Row) -> float:
    return row["loss"]


def _finite(rows: Sequence[Row]) -> list[float]:
    return [row["epsilon"] for row in rows if not math.isinf(row["epsilon"])]


FIGURES = {
    "regime": plot_groups,
    "regime_comparison": plot_comparison,
    "regime_users": plot_users,
    "regime_heuristics": plot_heuristics,
}
