"""What real_model.py tests and draws. The tests were committed before any of its runs.

A claim is judged when all of its cells have two seeds, and says until then how many are there.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from experiments.harness import common
from experiments.harness.rows import Row, Rows, by, over_seeds
from experiments.harness.verdicts import (
    AREA,
    GAIN_SHARE,
    NOT_SHOWN,
    Verdict,
    ahead,
    cell_error,
    mean_error,
    no_worse,
)
from fedsim import accounting

MODEL = "SmolLM2-135M-Instruct"
CLEAR = 0.1
"""Nats by which the held-out loss has to fall for the rest to mean anything."""
CONFIDENCE = 0.95
SOURCES, EPSILONS, GROUPS, RANK, SEEDS = ("scotus", "reddit_links"), (math.inf, 8.0, 1.0), 5, 8, 2
KEY = ("source", "rank", "algorithm", "epsilon", "group")
BLOCK = ("source", "rank", "epsilon")
"""Columns; cells that are alike in these have the same seeds."""
Claim = tuple[str, Verdict, str]


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


def check(rows: Sequence[Row]) -> list[Claim]:
    """All claims, of adapters of the first rank."""
    planned = rows[0]["planned"]
    claims: list[Claim] = [
        ("ours: all trainings were run", len(rows) == planned, f"{len(rows)} of {planned}")
    ]
    found = [row for row in averaged(rows) if row["rank"] == RANK and row["seeds"] >= SEEDS]
    for source in SOURCES:
        own = [row for row in found if row["source"] == source]
        whole = len(own) == GROUPS * len(EPSILONS)
        for what, test in TESTS.items():
            held, numbers = None, f"{len(own)} of {GROUPS * len(EPSILONS)} cells are run"
            if whole:
                held, numbers = test(own)
            claims.append((f"{source}: {what}", held, numbers))
        for what, report in REPORTS.items():
            if whole and (numbers := report([row for row in rows if row["source"] == source])):
                claims.append((f"{source}, added after the runs: {what}", None, numbers))
    return claims


def falls(rows: Rows, epsilon: float) -> dict[str, float]:
    """By how much the held-out loss fell with the best group of each algorithm."""
    own = by([row for row in rows if row["epsilon"] == epsilon], lambda row: row["algorithm"])
    return {name: max(r["loss_before"] - r["loss"] for r in each) for name, each in own.items()}


def said(values: dict[str, float]) -> str:
    return ", ".join(f"{name.upper()} by {value:.4f}" for name, value in values.items())


def falls_without_noise(rows: Rows) -> tuple[bool, str]:
    """That the training is one at all."""
    found = falls(rows, math.inf)
    return min(found.values()) >= CLEAR, said(found)


def falls_at(rows: Rows, epsilon: float) -> tuple[Verdict, str]:
    """That something is left of it."""
    found, error = falls(rows, epsilon), mean_error(with_noise(rows))
    return ahead([*found.values()], error), f"{said(found)}; standard error {error:.4f}"


def with_noise(rows: Rows) -> Rows:
    """Rows of private trainings that came to a number."""
    return [row for row in rows if math.isfinite(row["epsilon"]) and math.isfinite(row["loss"])]


def uls_is_as_good(rows: Rows) -> tuple[Verdict, str]:
    """Both with their best group, at each finite epsilon."""
    error = math.sqrt(2) * cell_error(with_noise(rows), BLOCK)
    found = {epsilon: falls(rows, epsilon) for epsilon in EPSILONS[1:]}
    leads = {epsilon: own["uls"] - own["els"] for epsilon, own in found.items()}
    each = ", ".join(f"ahead by {lead:.4f} at {epsilon:g}" for epsilon, lead in leads.items())
    held = no_worse([*leads.values()], error, [GAIN_SHARE * own["els"] for own in found.values()])
    return held, f"{each}; standard error {error:.4f}"


def attack_sees(rows: Rows, epsilon: float) -> dict[str, Row]:
    """The model of each algorithm that the attack sees the most of."""
    own = by([row for row in rows if row["epsilon"] == epsilon], lambda row: row["algorithm"])
    return {name: max(each, key=lambda row: row["auc"]) for name, each in own.items()}


def attacked(rows: Rows, epsilon: float) -> str:
    return ", ".join(
        f"{name.upper()} {row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f})"
        for name, row in attack_sees(rows, epsilon).items()
    )


def seen_without_noise(rows: Rows) -> tuple[Verdict, str]:
    """Of either algorithm: else the attack says nothing of what noise is good for."""
    found = attack_sees(rows, math.inf).values()
    seen = any(row["auc_low"] > 0.5 for row in found)
    unseen = all(row["auc_high"] < 0.5 + AREA for row in found)
    return True if seen else False if unseen else NOT_SHOWN, attacked(rows, math.inf)


def unseen_at_one(rows: Rows) -> tuple[Verdict, str]:
    """Of no model: all of their intervals end below a half and the margin. With five of them, up to
    one no in eight errs, by each interval's one in 40 upwards."""
    own = [row for row in rows if row["epsilon"] == min(EPSILONS)]
    seen = any(row["auc_low"] > 0.5 for row in own)
    unseen = all(row["auc_high"] < 0.5 + AREA for row in own)
    return False if seen else True if unseen else NOT_SHOWN, attacked(rows, min(EPSILONS))


def changes(rows: Rows, value: str, name: str, one: Any, other: Any) -> np.ndarray:
    """Of trainings of which one has `one` and one has `other` for `name`, and that are alike in all
    else: by how much `value` of the first is above that of the second, a number for each pair."""
    alike = [each for each in (*KEY, "seed") if each != name]

    def found(which: Any) -> dict[tuple, float]:
        own = [row for row in rows if row[name] == which]
        return {tuple(row[each] for each in alike): row[value] for row in own}

    first, second = found(one), found(other)
    return np.array([first[at] - second[at] for at in first if at in second])


def spread(values: np.ndarray) -> str:
    return f"{values.mean():.4f} on average ({values.min():.4f} to {values.max():.4f})"


def what_noise_hides(rows: Rows) -> str:
    """Pairs share users, so that who happens to be in, which moves all areas together, is not in
    their differences."""
    rows = [row for row in rows if row["rank"] == RANK and row["group"] != LARGEST]
    found = changes(rows, "auc", "epsilon", math.inf, min(EPSILONS))
    return f"{spread(found)} in {len(found)} pairs without G = {LARGEST}"


def what_noise_allows(rows: Rows) -> str:
    """Of ULS, whose groups are drawn from all users."""
    own = [row for row in averaged(rows) if (row["rank"], row["algorithm"]) == (RANK, "uls")]
    own = [row for row in own if not math.isinf(row["epsilon"])]
    each = sorted((row["epsilon"], row["group"], area_allowed(row)) for row in own)
    return ", ".join(f"{area:.3f} at {epsilon:g} with G = {group}" for epsilon, group, area in each)


def what_rank_gains(rows: Rows) -> str:
    """Nothing where one rank alone was trained."""
    gains = {
        epsilon: changes([r for r in rows if r["epsilon"] == epsilon], "loss", "rank", RANK, 32)
        for epsilon in EPSILONS
    }
    each = [
        f"by {spread(gain)} in {len(gain)} pairs {at_epsilon(epsilon)}"
        for epsilon, gain in gains.items()
        if len(gain)
    ]
    return "; ".join(each)


def against_the_median(rows: Rows) -> str:
    """With G = 1 the two algorithms are all but one: the same noise, each user one text a step."""
    found = [row for row in averaged(rows) if row["rank"] == RANK]
    leads = []
    for epsilon in EPSILONS[1:]:
        own = {
            (row["algorithm"], row["group"]): row["loss"]
            for row in found
            if row["epsilon"] == epsilon
        }
        lead = own["els", -1] - min(loss for (name, _), loss in own.items() if name == "uls")
        leads.append(f"{lead:.4f} at {epsilon:g}")
    return f"ahead by {', '.join(leads)}"


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


REPORTS = {
    "the attack's area without noise less that at epsilon 1": what_noise_hides,
    "the largest area of any attack on all noisy gradients of ULS": what_noise_allows,
    "ULS with its best group, against ELS with the median's": against_the_median,
    "adapters of rank 32 end lower than of rank 8": what_rank_gains,
}
"""Said of the rows beside the tests, and judged by none."""

TESTS = {
    f"without noise the held-out loss falls by {CLEAR:g} nats with both": falls_without_noise,
    "at epsilon 8 it falls with both": lambda rows: falls_at(rows, 8.0),
    "at epsilon 1 it falls with both": lambda rows: falls_at(rows, 1.0),
    "ULS is at least as good as ELS, each with its best group": uls_is_as_good,
    "without noise the attack tells users who are in": seen_without_noise,
    "at epsilon 1 the attack is no better than chance": unseen_at_one,
}


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
