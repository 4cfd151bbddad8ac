"""What is seen in the trainings of regime.py: the quantities of its claims, and its figures.

Seeds are compared in pairs. A claim is judged when all of its cells have two seeds at least.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.claims import Claims, Quantity, cell_error, judged
from experiments.harness.rows import ERRORS, Row, Rows, StandardError, by, over_seeds

ALL, FEW = "scotus", "scotus, few users"
EPSILONS = (4.0, 1.0)
ELS_GROUPS = {ALL: (1, 8), FEW: (1,)}
"""Beside the median user's number of texts, and for all users twice that."""
ULS_GROUPS = (1, 4, 16)
"""Beside Estimate-and-Double's."""
KEY = ("data", "algorithm", "epsilon", "group_size", "budget", "times")
SEEDS = 2
"""Of a cell, before it is judged."""
USERS_CELLS, USERS_SEEDS = 8, 6
"""Of Figure 8: two budgets, two numbers of users, two algorithms."""
BLOCK = ("data", "epsilon", "budget", "times")
"""Columns; cells that are alike in these have the same seeds."""
STYLES = ("-o", "--s", ":^")
BESIDE = 1.05  # the two algorithms, so that neither hides the other
DASHES = {"els": (0, (4, 4)), "uls": (4, (4, 4))}
"""Of lines that may lie on each other: the dashes of one are where the other has none."""


def that_count(rows: Sequence[Row]) -> Rows:
    """Rows but for those of cells that were begun again from another starting model."""
    return [row for row in rows if row["counts"]]


def whole_seeds(rows: Sequence[Row]) -> Rows:
    """Rows of seeds with which all cells that are compared with each other were trained: a seed
    moves all cells alike, and Figure 8 has seeds that the other cells have not."""
    blocks = by(rows, lambda row: tuple(row[name] for name in BLOCK))
    found = []
    for block in blocks.values():
        cells = {(row["algorithm"], row["group_size"]) for row in block}
        for own in by(block, lambda row: row["seed"]).values():
            if {(row["algorithm"], row["group_size"]) for row in own} == cells:
                found += own
    return found


def averaged(rows: Sequence[Row]) -> Rows:
    """A row for each cell, over its seeds, which may start from different models."""
    cells = by(that_count(rows), lambda row: tuple(row[name] for name in KEY)).values()
    return [
        {
            **own[-1],
            **over_seeds([row["loss"] for row in sorted(own, key=lambda row: row["seed"])]),
            "loss_before": float(np.mean([row["loss_before"] for row in own])),
        }
        for own in cells
    ]


def compared(found: Rows, data: str, epsilon: float, seeds: int = SEEDS) -> dict[str, Rows] | None:
    """Cells that differ in the group size alone, by algorithm; None before all are there."""
    own = [
        row for row in found if (row["data"], row["epsilon"], row["times"]) == (data, epsilon, 1)
    ]
    own = [row for row in own if row["budget"] == max(each["budget"] for each in own)]
    if not own:
        return None
    median, chosen = own[0]["median_examples"], own[0]["heuristic_group_size"]
    twice = {2 * median} if data == ALL else set()
    wanted = {"els": {*ELS_GROUPS[data], median} | twice, "uls": {*ULS_GROUPS, chosen}}
    there = {
        name: [row for row in own if row["algorithm"] == name and row["seeds"] >= seeds]
        for name in wanted
    }
    whole = all(
        {row["group_size"] for row in there[name]} >= groups for name, groups in wanted.items()
    )
    return there if whole else None


def check(rows: Sequence[Row]) -> Claims:
    """All claims."""
    return judged("regime", quantities(that_count(rows)))


def quantities(rows: Rows) -> dict[str, Quantity]:
    """Of each set of users all of whose cells are there."""
    found = averaged(whole_seeds(rows))
    private = [row for row in rows if row["times"] == 1 and not math.isinf(row["epsilon"])]
    worse = sum(row["loss"] >= row["loss_before"] for row in private)
    every = {
        "missing": Quantity({"": rows[0]["planned"] - len(rows)}),
        "worse": Quantity({f"of {len(private)}": worse}),
    }
    for data in (ALL, FEW):
        there = {epsilon: compared(found, data, epsilon) for epsilon in EPSILONS}
        if None not in there.values():
            cells = {f"at epsilon {epsilon:g}": own for epsilon, own in there.items()}
            each = of_groups(cells)  # pyright: ignore
            every |= {f"{data}: {name}": quantity for name, quantity in each.items()}
    return every | of_users(rows)


def at(rows: Rows, group_size: int) -> Row:
    """The cell of a group size."""
    return next(row for row in rows if row["group_size"] == group_size)


def loss_of(row: Row) -> float:
    """Of a cell."""
    return row["loss"]


def of_groups(there: dict[str, dict[str, Rows]]) -> dict[str, Quantity]:
    """What differs between group sizes and algorithms, by epsilon. Args: there: cells that differ
    in the group size alone, by epsilon and algorithm."""
    pool = [row for own in there.values() for rows in own.values() for row in rows]
    two, four = (math.sqrt(cells) * cell_error(pool, BLOCK) for cells in (2, 4))
    lost, large, several, leads, tuned, behind, chance = {}, {}, {}, {}, {}, {}, []
    gains = []
    for where, own in there.items():
        els, uls = own["els"], own["uls"]
        median, best = at(els, els[0]["median_examples"]), min(els, key=loss_of)
        gains.append(median["loss_before"] - best["loss"])
        lost[f"{where}, best G {best['group_size']}"] = (median["loss"] - best["loss"]) / gains[-1]
        small = [row for row in uls if 10 * row["group_size"] <= row["expected_count"]]
        rest = [row["loss"] for row in uls if row not in small]
        if small and rest:
            group = min(small, key=loss_of)
            large[f"{where}, best G {group['group_size']}"] = min(rest) - group["loss"]
        one = at(uls, 1)["loss"]
        several[where] = one - min(row["loss"] for row in uls if row["group_size"] > 1)
        chosen = at(uls, uls[0]["heuristic_group_size"])
        leads[where] = median["loss"] - chosen["loss"]
        tuned[where] = best["loss"] - chosen["loss"]
        others = min(row["loss"] for row in uls if row is not chosen)
        behind[f"{where}, G {chosen['group_size']}"] = chosen["loss"] - others
        chance.append(float(np.mean([row["loss"] for row in uls])) - chosen["loss"])
    largest, *_, smallest = leads.values()
    found = {
        "lost with the median": Quantity(lost, [two / gain for gain in gains]),
        "ahead of larger groups": Quantity(large, two),
        "larger groups": Quantity(several, two),
        "lead": Quantity(leads, two),
        "lead of the best ELS": Quantity(tuned, two),
        "more at small epsilon": Quantity({"": smallest - largest}, four),
        "behind the best other group": Quantity(behind, two),
        "ahead of chance": Quantity({"": float(np.mean(chance))}, two / math.sqrt(len(there))),
    }
    return {name: quantity for name, quantity in found.items() if quantity.values}


def of_users(rows: Rows) -> dict[str, Quantity]:
    """Figure 8, with six seeds: gains from compute, and from more users in the accounting."""
    own = [row for row in averaged(rows) if (row["data"], row["epsilon"]) == (ALL, EPSILONS[0])]
    own = [row for row in own if row["seeds"] >= USERS_SEEDS]
    own = [row for row in own if row["group_size"] == heuristic_of(row)]
    loss = {(row["times"], row["budget"], row["algorithm"]): row["loss"] for row in own}
    if len(loss) < USERS_CELLS:
        return {}
    times, budgets = (sorted({row[name] for row in own}) for name in ("times", "budget"))
    compute = {f"with {t} times the users": ((t, budgets[0]), (t, budgets[-1])) for t in times}
    users = {f"with B = {b}": ((times[0], b), (times[-1], b)) for b in budgets}
    error, seeds = 2 * cell_error(own, BLOCK), losses_by_seed(rows, own)
    found, paired, ends_of = {}, {}, []
    for name, who, ends in (
        ("compute", ("uls", "els"), compute),
        ("users", ("els", "uls"), users),
    ):
        more = {where: gains_more(loss, *each, *who) for where, each in ends.items()}
        found[name] = Quantity(more, error)
        for where, each in ends.items():
            pairs = [gains_more(losses, *each, *who) for losses in seeds]
            spread = float(np.std(pairs, ddof=1)) / math.sqrt(len(pairs))
            room = StandardError(spread, len(pairs) - 1).times(ERRORS)
            mean = paired[f"{who[0].upper()} {where}"] = float(np.mean(pairs))
            ends_of.append((mean - room, mean + room))
    return {**found, "pairs": Quantity(paired, ends=ends_of)}


def gains_more(
    loss: dict[tuple, float], first: tuple, last: tuple, winner: str, loser: str
) -> float:
    """By how much more the loss of one algorithm falls from one (times, budget) to another."""
    return (loss[*first, winner] - loss[*last, winner]) - (loss[*first, loser] - loss[*last, loser])


def losses_by_seed(rows: Rows, cells: Rows) -> list[dict[tuple, float]]:
    """The losses of each seed that all the cells have, by (times, budget, algorithm)."""
    wanted = {tuple(row[name] for name in KEY) for row in cells}
    rows = [row for row in rows if tuple(row[name] for name in KEY) in wanted]
    found = (
        {(row["times"], row["budget"], row["algorithm"]): row["loss"] for row in own}
        for own in by(rows, lambda row: row["seed"]).values()
    )
    return [losses for losses in found if len(losses) == len(wanted)]


def heuristic_of(row: Row) -> int:
    """The group size that the heuristic of a row's algorithm says."""
    return row["median_examples" if row["algorithm"] == "els" else "heuristic_group_size"]


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
            best = [min(each, key=loss_of) for each in by(private, lambda r: r["epsilon"]).values()]
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
        own = sorted(own, key=loss_of)
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


def _finite(rows: Sequence[Row]) -> list[float]:
    return [row["epsilon"] for row in rows if not math.isinf(row["epsilon"])]


FIGURES = {
    "regime": plot_groups,
    "regime_comparison": plot_comparison,
    "regime_users": plot_users,
    "regime_heuristics": plot_heuristics,
}
