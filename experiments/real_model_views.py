"""What is seen in the trainings of real_model.py: the quantities of its claims, and its figure."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from experiments.harness import common
from experiments.harness.claims import Claims, Quantity, cell_error, judged, mean_error
from experiments.harness.rows import Row, Rows, by, over_seeds
from fedsim import accounting

MODEL = "SmolLM2-135M-Instruct"
CONFIDENCE = 0.95
EPSILONS, GROUPS, RANK, SEEDS = (math.inf, 8.0, 1.0), 5, 8, 2
KEY = ("source", "rank", "algorithm", "epsilon", "group")
BLOCK = ("source", "rank", "epsilon")
"""Columns; cells that are alike in these have the same seeds."""


def interval(inside: np.ndarray, outside: np.ndarray) -> tuple[float, float, float]:
    """(Area under the ROC curve, and its 95 % interval) of scores of users who are in, and out.

    Source: DeLong et al. 1988: the variance of the area from each user's share of it. Of scores
    that are apart altogether that is 0; then the interval is of n pairs, each of one user who is in
    and another one who is out, that are all in this order.
    """
    above = np.sign(inside[:, None] - outside[None, :]) / 2 + 0.5
    area = above.mean()
    variance = above.mean(axis=1).var(ddof=1) / len(inside)
    variance += above.mean(axis=0).var(ddof=1) / len(outside)
    off = float(stats.norm.ppf((1 + CONFIDENCE) / 2) * np.sqrt(variance))
    if area in (0, 1):
        off = 1 - ((1 - CONFIDENCE) / 2) ** (1 / min(len(inside), len(outside)))
    return float(area), max(0.0, float(area) - off), min(1.0, float(area) + off)


def averaged(rows: Sequence[Row]) -> Rows:
    """A row for each cell, over its seeds; the attack's area, too."""
    found = by(rows, lambda row: tuple(row[name] for name in KEY)).values()
    return [
        {
            **own[-1],
            **over_seeds([row["loss"] for row in sorted(own, key=lambda row: row["seed"])]),
            **{name: float(np.mean([row[name] for row in own])) for name in ATTACK},
        }
        for own in found
    ]


ATTACK = ("auc", "auc_low", "auc_high")
LARGEST = 16
"""Of the groups: of them a step has two users, and without noise one training diverged."""
MARKERS = {1: "s", 4: "v", LARGEST: "d"}
"""By group; the median user's is a circle."""


def check(rows: Sequence[Row]) -> Claims:
    """All claims."""
    return judged("real_model", quantities(rows))


def quantities(rows: Sequence[Row]) -> dict[str, Quantity]:
    """Of adapters of the first rank, of each source all of whose cells are there."""
    found = {"missing": Quantity({"": rows[0]["planned"] - len(rows)})}
    cells = [row for row in averaged(rows) if row["rank"] == RANK and row["seeds"] >= SEEDS]
    for source, own in by(cells, lambda row: row["source"]).items():
        if len(own) == GROUPS * len(EPSILONS):
            every = [row for row in rows if row["source"] == source]
            each = {**of_cells(own), **of_trainings(every)}
            found |= {f"{source}: {name}": quantity for name, quantity in each.items()}
    return found


def of_cells(cells: Rows) -> dict[str, Quantity]:
    """By epsilon: falls of the loss with the best group of each algorithm, and what the attack sees
    of the model that it sees the most of."""
    noisy = [row for row in cells if math.isfinite(row["epsilon"]) and math.isfinite(row["loss"])]
    one, two = mean_error(noisy), math.sqrt(2) * cell_error(noisy, BLOCK)
    found, leads, median, els_falls = {}, {}, {}, []
    for epsilon in EPSILONS:
        own = [row for row in cells if row["epsilon"] == epsilon]
        by_name = sorted(by(own, lambda row: row["algorithm"]).items())
        falls = {n.upper(): max(r["loss_before"] - r["loss"] for r in e) for n, e in by_name}
        where = at_epsilon(epsilon)
        found[f"falls {where}"] = Quantity(falls, one if math.isfinite(epsilon) else 0.0)
        seen = {n.upper(): max(each, key=lambda row: row["auc"]) for n, each in by_name}
        areas = {name: row["auc"] for name, row in seen.items()}
        ends = [(row["auc_low"], row["auc_high"]) for row in seen.values()]
        found[f"area {where}"] = Quantity(areas, ends=ends)
        every = {f"{r['algorithm'].upper()}, {in_words(r['group'])}": r["auc"] for r in own}
        ends = [(row["auc_low"], row["auc_high"]) for row in own]
        found[f"areas {where}"] = Quantity(every, ends=ends)
        if math.isfinite(epsilon):
            leads[where] = (falls["ULS"] - falls["ELS"]) / falls["ELS"]
            els_falls.append(falls["ELS"])
            losses = {(row["algorithm"], row["group"]): row["loss"] for row in own}
            least = min(loss for (name, _), loss in losses.items() if name == "uls")
            median[where] = losses["els", -1] - least
    found["lead, as a share"] = Quantity(leads, [two / fall for fall in els_falls])
    found["lead of ULS over the median's ELS"] = Quantity(median)
    uls = [row for row in cells if row["algorithm"] == "uls" and math.isfinite(row["epsilon"])]
    uls = sorted(uls, key=lambda row: (row["epsilon"], row["group"]))
    found["largest area of any attack"] = Quantity(
        {f"{at_epsilon(row['epsilon'])}, G = {row['group']}": area_allowed(row) for row in uls}
    )
    return found


def of_trainings(rows: Rows) -> dict[str, Quantity]:
    """Means of pairs of trainings that differ in one thing, and the least and the largest. Pairs
    share users, so that who happens to be in is not in their differences."""
    few = [row for row in rows if row["rank"] == RANK and row["group"] != LARGEST]
    hidden = changes(few, "auc", "epsilon", math.inf, min(EPSILONS))
    ranks = {
        at_epsilon(epsilon): changes(own, "loss", "rank", RANK, 32)
        for epsilon, own in by(rows, lambda row: row["epsilon"]).items()
    }
    named = {
        "what noise hides": {f"{len(hidden)} pairs without G = {LARGEST}": hidden},
        "what rank 32 gains": {
            f"{where}, {len(own)} pairs": own for where, own in ranks.items() if len(own)
        },
    }
    return {
        name: Quantity(
            {what: float(own.mean()) for what, own in each.items()},
            ends=[(own.min(), own.max()) for own in each.values()],
        )
        for name, each in named.items()
    }


def changes(rows: Rows, value: str, name: str, one: Any, other: Any) -> np.ndarray:
    """Of trainings of which one has `one` and one has `other` for `name`, and that are alike in all
    else: by how much `value` of the first is above that of the second, a number for each pair."""
    alike = [each for each in (*KEY, "seed") if each != name]

    def found(which: Any) -> dict[tuple, float]:
        own = [row for row in rows if row[name] == which]
        return {tuple(row[each] for each in alike): row[value] for row in own}

    first, second = found(one), found(other)
    return np.array([first[at] - second[at] for at in first if at in second])


def in_words(group: int) -> str:
    """A group's size."""
    return f"G = {group}" if group > 0 else "the median's G"


def at_epsilon(epsilon: float) -> str:
    return "without noise" if math.isinf(epsilon) else f"at {epsilon:g}"


@functools.cache
def largest_area(noise_multiplier: float, prob: float, num_steps: int) -> float:
    """Under the ROC curve of any attack on one user that sees every noisy gradient of ULS.

    The curve of the mechanism: at every epsilon its delta bounds both kinds of errors, each way.
    Source: Kairouz et al. 2015, Theorem 2.1.
    """
    steps = [(accounting.StepEvent(noise_multiplier, prob), num_steps)]
    epsilons = np.linspace(0.0, 25.0, 400)
    false = np.linspace(0.0, 1.0, 4_001)
    missed = np.zeros_like(false)
    for epsilon, delta in zip(epsilons, accounting.privacy_curve(steps, epsilons), strict=True):
        left = 1 - delta - math.exp(epsilon) * false
        right = math.exp(-epsilon) * (1 - delta - false)
        missed = np.maximum(missed, np.maximum(left, right))
    return float(1 - np.trapezoid(missed, false))


def area_allowed(row: Row) -> float:
    """What the noise of a training by ULS allows an attack."""
    prob = row["expected_count"] / row["num_users"]
    return largest_area(row["noise_multiplier"], prob, row["num_steps"])


def plot(rows: Sequence[Row]) -> Figure:
    """A column for each source: held-out loss, and what the attack finds, against epsilon."""
    found = averaged(rows)
    names = list(dict.fromkeys(row["source"] for row in found))
    epsilons = sorted({row["epsilon"] for row in found})
    figure, axes = common.panels(2, len(names), 5.0, 3.4)
    for (above, below), name in zip(axes.T, names, strict=True):
        own = [row for row in found if row["source"] == name]
        before, least = own[0]["loss_before"], min(row["loss"] for row in own)
        most = before + abs(before - least) / 5  # a cell that diverged is drawn there
        lines = by(own, lambda row: (row["rank"], row["algorithm"], row["group"]))
        for number, ((rank, algorithm, group), series) in enumerate(sorted(lines.items())):
            series = sorted(series, key=lambda row: row["epsilon"])
            off = 0.06 * (number - (len(lines) - 1) / 2)  # so that none hides another
            x = np.array([epsilons.index(row["epsilon"]) for row in series]) + off
            look = {"color": common.COLOURS[algorithm.upper()], "capsize": 2, "alpha": 0.9}
            look |= {"marker": MARKERS.get(group, "o"), "markersize": 5}
            if rank != min(row["rank"] for row in found):
                look |= {"markerfacecolor": "white"}
            groups = f"G = {group}" if group > 0 else "G of the median user"
            label = f"{algorithm.upper()}, {groups}" + f", rank {rank}" * (rank > 0)
            style = ":" if rank > RANK else "-"
            above.errorbar([], [], [], linestyle=style, label=label, **look)
            draw_losses(above, x, series, rows, most, {**look, "linestyle": style})
            area, low, high = np.array([[row[key] for key in ATTACK] for row in series]).T
            below.errorbar(x, area, [area - low, high - area], linestyle="", **look)
            if algorithm == "uls":
                own_noise = [
                    (at, row)
                    for at, row in zip(x, series, strict=True)
                    if row["epsilon"] < math.inf
                ]
                for at, row in own_noise:
                    bound, ends = area_allowed(row), (at - 0.03, at + 0.03)
                    below.hlines(
                        bound, *ends, color="tab:red", label="the most that ULS's noise allows"
                    )
        above.axhline(before, color="black", linestyle=":", label="before training")
        above.set_ylim(top=most + abs(before - least) / 20)
        above.set(title=rf"{name}, $\delta$ = {own[0]['delta']:.1e}")
        below.axhline(0.5, color="black", linestyle="-.", label="guessing")
        below.set(xlabel=r"$\varepsilon$")
        for axis in (above, below):
            axis.set_xticks(range(len(epsilons)), [shown(each) for each in epsilons])
            axis.set_xlim(-0.4, len(epsilons) - 0.6)
            axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="held-out loss\n(nats per token)")
    axes[1, 0].set(ylabel="area under the\nattack's ROC curve")
    common.legend_below(figure)
    seeds, planned = {row["seeds"] for row in found}, rows[0]["planned"]
    what = f"{MODEL} with adapters" if rows[0]["rank"] else "micro"
    what += f"; {' or '.join(map(str, sorted(seeds)))} seeds"
    what += (
        f"\nbars above: standard deviation over seeds, below: {CONFIDENCE:.0%} interval over users"
    )
    what += f"\n{len(rows)} of {planned} trainings" * (len(rows) < planned)
    figure.suptitle(what, fontsize="small", color="dimgray")
    return figure


def draw_losses(
    axis: Axes, x: np.ndarray, series: Rows, rows: Sequence[Row], most: float, look: dict[str, Any]
) -> None:
    """Those without noise are not joined with the others. Where bars would go beyond `most`, each
    seed is drawn by itself, and what is beyond is said."""
    noisy = np.array([not math.isinf(row["epsilon"]) for row in series])
    loss, std = np.array([[row["loss"], row["loss_std"]] for row in series]).T
    wide = loss + std > most
    for part, style in ((noisy, look["linestyle"]), (~noisy, "")):
        inside = np.where(wide[part], np.nan, loss[part])
        axis.errorbar(x[part], inside, std[part], **{**look, "linestyle": style})
    points = {name: value for name, value in look.items() if name != "capsize"}
    for place, cell in zip(x[wide], np.array(series)[wide], strict=True):
        each = [row["loss"] for row in rows if all(row[name] == cell[name] for name in KEY)]
        axis.plot([place] * len(each), np.minimum(each, most), **{**points, "linestyle": ""})
        for value in each:
            if not value <= most:
                said = f"{value:.3g}, off the axis\n(each seed by itself)"
                off = {"xytext": (-8, -14), "textcoords": "offset points", "ha": "right"}
                axis.annotate(said, (place, most), size=8, **off)


def shown(epsilon: float) -> str:
    """For an axis."""
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


FIGURES = {"real_model": plot}
