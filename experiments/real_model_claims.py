"""What real_model.py tests and draws. The tests were committed before any of its runs.

A claim is judged when all of its cells have two seeds, and says until then how many are there.
"""

import math
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments import common
from experiments.rows import Row, Rows, by, margin, over_seeds
from fedsim.trust import lower_bound

MODEL = "SmolLM2-135M"
CLEAR = 0.1
"""Nats by which the held-out loss has to fall for the rest to mean anything."""
CONFIDENCE = 0.95
SOURCES, EPSILONS, GROUPS, RANK, SEEDS = ("scotus", "reddit_links"), (math.inf, 8.0, 1.0), 5, 8, 2
KEY = ("source", "rank", "algorithm", "epsilon", "group")
Claim = tuple[str, bool | None, str]


def interval(inside: np.ndarray, outside: np.ndarray) -> tuple[float, float, float]:
    """(Area under the ROC curve, and its 95 % interval) of scores of users who are in, and out.

    Source: DeLong et al. 1988: the variance of the area from each user's share of it.
    """
    above = np.sign(inside[:, None] - outside[None, :]) / 2 + 0.5
    area = lower_bound.area(inside, outside)
    variance = above.mean(axis=1).var(ddof=1) / len(inside)
    variance += above.mean(axis=0).var(ddof=1) / len(outside)
    off = float(stats.norm.ppf((1 + CONFIDENCE) / 2) * np.sqrt(variance))
    return float(area), max(0.0, float(area) - off), min(1.0, float(area) + off)


def averaged(rows: Sequence[Row]) -> Rows:
    """A row for each cell, over its seeds; the attack's area, too."""
    found = by(rows, lambda row: tuple(row[name] for name in KEY)).values()
    return [
        {
            **own[-1],
            **over_seeds([row["loss"] for row in own]),
            **{name: float(np.mean([row[name] for row in own])) for name in ATTACK},
        }
        for own in found
    ]


ATTACK = ("auc", "auc_low", "auc_high")


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


def falls_at(rows: Rows, epsilon: float) -> tuple[bool, str]:
    """That something is left of it."""
    found, noise = falls(rows, epsilon), margin(rows, cells=1)
    return min(found.values()) > noise, f"{said(found)}; {explained(rows, noise, cells=1)}"


def explained(rows: Rows, noise: float, cells: int) -> str:
    """What a verdict allows for the seeds; and what it would if training without noise, of which a
    cell may diverge with one seed, were left out. It decides nothing: it was added after runs."""
    private = margin([row for row in rows if not math.isinf(row["epsilon"])], cells)
    return f"seeds explain {noise:.4f} (those of cells with noise alone {private:.4f})"


def uls_is_as_good(rows: Rows) -> tuple[bool, str]:
    """Both with their best group, at each finite epsilon."""
    noise = margin(rows)
    leads = {}
    for epsilon in EPSILONS[1:]:
        found = falls(rows, epsilon)
        leads[epsilon] = found["uls"] - found["els"]
    each = ", ".join(f"ahead by {lead:.4f} at {epsilon:g}" for epsilon, lead in leads.items())
    return min(leads.values()) >= -noise, f"{each}; {explained(rows, noise, cells=2)}"


def attack_sees(rows: Rows, epsilon: float) -> dict[str, Row]:
    """The model of each algorithm that the attack sees the most of."""
    own = by([row for row in rows if row["epsilon"] == epsilon], lambda row: row["algorithm"])
    return {name: max(each, key=lambda row: row["auc"]) for name, each in own.items()}


def attacked(rows: Rows, epsilon: float) -> str:
    return ", ".join(
        f"{name.upper()} {row['auc']:.3f} ({row['auc_low']:.3f} to {row['auc_high']:.3f})"
        for name, row in attack_sees(rows, epsilon).items()
    )


def seen_without_noise(rows: Rows) -> tuple[bool, str]:
    """Of either algorithm: else the attack says nothing of what noise is good for."""
    found = attack_sees(rows, math.inf).values()
    return any(row["auc_low"] > 0.5 for row in found), attacked(rows, math.inf)


def unseen_at_one(rows: Rows) -> tuple[bool, str]:
    """Of no model: all of their intervals hold a half. With ten of them, one in 40 errs upwards."""
    own = [row for row in rows if row["epsilon"] == min(EPSILONS)]
    return all(row["auc_low"] <= 0.5 for row in own), attacked(rows, min(EPSILONS))


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
    found = [row for row in averaged(rows) if row["rank"] == rows[0]["rank"]]
    names = list(dict.fromkeys(row["source"] for row in found))
    epsilons = sorted({row["epsilon"] for row in found})
    size = (4.4 * len(names), 6.2)
    figure, axes = plt.subplots(2, len(names), figsize=size, squeeze=False, layout="constrained")
    for (above, below), name in zip(axes.T, names, strict=True):
        own = [row for row in found if row["source"] == name]
        before, least = own[0]["loss_before"], min(row["loss"] for row in own)
        most = before + abs(before - least) / 5  # a cell that diverged is drawn there
        lines = by(
            sorted(own, key=lambda row: row["group_size"]), lambda r: (r["algorithm"], r["group"])
        )
        for number, ((algorithm, _), series) in enumerate(sorted(lines.items())):
            series = sorted(series, key=lambda row: row["epsilon"])
            x = np.array([epsilons.index(row["epsilon"]) for row in series]) + 0.06 * number
            look = {"color": common.COLOURS[algorithm.upper()], "capsize": 2, "alpha": 0.9}
            look |= {"fmt": ("-o", "--s", ":^", "-.v", "-d")[number % 5]}
            group = series[0]["group"]
            label = f"{algorithm.upper()}, G = {group if group > 0 else 'the median user'}"
            loss, std = ([row[key] for row in series] for key in ("loss", "loss_std"))
            bars = np.where(np.array(loss) > most, np.nan, std)  # they would squeeze the others
            above.errorbar(x, np.minimum(loss, most), bars, label=label, **look)
            for place, value in zip(x, loss, strict=True):
                if value > most:
                    offset = {"xytext": (-8, -2), "textcoords": "offset points", "ha": "right"}
                    above.annotate(f"{value:.3g}, off the axis", (place, most), size=8, **offset)
            auc = np.array([[row[key] for key in ATTACK] for row in series]).T
            below.errorbar(x, auc[0], np.abs(auc[1:] - auc[0]), **look)
        above.axhline(before, color="black", linestyle=":", label="before")
        above.set(title=name)
        below.axhline(0.5, color="black", linestyle=":")
        below.set(xlabel=r"$\varepsilon$")
        for axis in (above, below):
            axis.set_xticks(range(len(epsilons)), [shown(each) for each in epsilons])
            axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="held-out loss\n(nats per token)")
    axes[1, 0].set(ylabel="area under the\nattack's ROC curve")
    common.legend_below(figure)
    rank, planned = rows[0]["rank"], rows[0]["planned"]
    what = f"{MODEL}, adapters of rank {rank}" if rank else "micro"
    what += (
        f"\nbars above: standard deviation over seeds, below: {CONFIDENCE:.0%} interval over users"
    )
    what += f"\n{len(rows)} of {planned} trainings" * (len(rows) < planned)
    figure.suptitle(what, fontsize="small", color="dimgray")
    return figure


def shown(epsilon: float) -> str:
    """For an axis."""
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


FIGURES = {"real_model": plot}
