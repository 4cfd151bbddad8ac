"""Figures 6, 7, 16 and 17 (Section 6, Appendix G): loss of both algorithms against epsilon.

Both are set by the paper's heuristics (the median user, Estimate-and-Double) at three compute
budgets; the untouched pre-trained model is a line. Claims: on Stack Overflow (Figure 6) ULS is at
least as good as ELS everywhere; on CC-News (7) it is better in many settings; on both it is ahead
the most where epsilon is small, and gains more from a larger budget at every epsilon (16, 17: the
same numbers against the budget); and fine-tuning improves on the pre-trained model everywhere. A
line in every panel of 6 and 7 is training without noise. As in the paper CC-News is accounted for
as if it had ten times the users. Losses are test losses (Stack Overflow's later examples, CC-News's
reserved ones); the learning rate is tuned in every cell by the first seed, on held-out users where
there are any. At `small`, 30 steps and two seeds.

Beyond the paper: ELS with other group sizes than the median user's, of which the best is a line of
its own. On Stack Overflow: ULS with four local steps (DP-FedAvg), each over a quarter of a
user's examples of a step, so with at least four of these, and a cohort of a quarter of the budget
where ULS itself takes one example of each user; the same gradients, hence the same budget and the
same epsilon. The rate of the local steps is tuned, at the middle epsilon and budget.

    python -m experiments.fig06_privacy_loss --scale small      (--dry-run: its cost)
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments import common, finetuning, heuristics
from experiments.finetuning import STACK_OVERFLOW, stands_for
from experiments.rows import by, margin, middle, paired, rates_inside
from experiments.testing import with_test_losses

SETTINGS = finetuning.COMPARISONS
LOCAL_STEPS, LOCAL = 4, "ULS, local steps"
BEST = "ELS, best group"
COLOURS = {**common.COLOURS, LOCAL: "tab:green", BEST: "tab:cyan"}


def run(settings: finetuning.Comparison, arguments: finetuning.Arguments) -> list[dict[str, Any]]:
    """A row for each data set, epsilon, budget and algorithm."""
    found = heuristics.cells_of(settings.budgets, settings.training, arguments)
    cells = [{**cell, "local_steps": 1, "local_learning_rate": None} for cell in found]
    cells += without_noise(cells)
    cells += with_local_steps(found, settings, arguments)
    first = len(cells)
    cells += with_other_groups(cells, settings.els_groups)
    rows = finetuning.tuned_losses(cells, settings.training, arguments)
    rows = with_test_losses(rows, settings.training, arguments)
    return [{**row, "other_group": number >= first} for number, row in enumerate(rows)]


def with_other_groups(
    cells: Sequence[dict[str, Any]], groups: Sequence[int]
) -> list[dict[str, Any]]:
    """ELS with these group sizes in the place of the median user's."""
    return [
        {**cell, "group_size": group}
        for cell in cells
        for group in groups
        if (cell["algorithm"], cell["epsilon"] < math.inf) == ("els", True)
        and group != cell.get("group_size")
    ]


def without_noise(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of the largest epsilon at an infinite one, with the groups that they have there."""
    most = max(cell["epsilon"] for cell in cells)
    return [{**cell, "epsilon": math.inf} for cell in cells if cell["epsilon"] == most]


def by_heuristics(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the group sizes that the paper's heuristics say. Rows that do not say are."""
    return [row for row in rows if not row.get("other_group")]


def best_els(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ELS with the best group size of each cell; nothing where one alone was trained."""
    own = [row for row in rows if row["algorithm"] == "els" and not math.isinf(row["epsilon"])]
    cells = by(own, lambda row: (row["dataset"], row["epsilon"], row["budget"])).values()
    return [min(each, key=lambda row: row["loss"]) for each in cells if len(each) > 1]


def with_local_steps(
    cells: Sequence[dict[str, Any]],
    settings: finetuning.Comparison,
    arguments: finetuning.Arguments,
) -> list[dict[str, Any]]:
    """DP-FedAvg in the place of ULS on Stack Overflow; the rate of the local steps is tuned at the
    middle epsilon and budget, by the first seed."""
    local = [
        {**cell, "group_size": max(LOCAL_STEPS, cell.get("group_size", 1))}
        | {"local_steps": LOCAL_STEPS}
        for cell in cells
        if (cell["dataset"], cell["algorithm"]) == (STACK_OVERFLOW, "uls")
    ]
    rates = settings.local_learning_rates
    tried = [{**middle(local), "local_learning_rate": rate} for rate in rates]
    first = dataclasses.replace(settings.training, seeds=settings.training.seeds[:1])
    found = finetuning.tuned_losses(tried, first, arguments) if len(tried) > 1 else []
    best = min(found or tried, key=lambda row: row.get("loss", 0.0))["local_learning_rate"]
    return [{**cell, "local_learning_rate": best} for cell in local]


def plot(rows: Sequence[dict[str, Any]], along: str = "epsilon", across: str = "budget") -> Figure:
    """Rows of panels: data sets; columns: budgets (or epsilons); bars: deviations over seeds."""
    bounds = [row for row in rows if math.isinf(row["epsilon"])]
    rows = [row for row in rows if not math.isinf(row["epsilon"])]
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    columns = sorted({row[across] for row in rows})
    shape = (len(names), len(columns))
    size = (3.2 * shape[1], 2.6 * shape[0])
    figure, axes = plt.subplots(
        *shape, figsize=size, squeeze=False, layout="constrained", sharey="row"
    )
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
        common.log2_axis(axis, [row[along] for row in own])
        title = f"{name}, {label[across]} = {column:g}\n{finetuning.assumption(name)}"
        axis.set_title(title.strip(), fontsize="medium")
        axis.set(xlabel=label[along])
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set(ylabel="test loss (nats per token)")
    common.legend_below(figure)
    return figure


def _curve(row):
    return LOCAL if row["local_steps"] > 1 else row["algorithm"].upper()


def check(rows: Sequence[dict[str, Any]]) -> common.Claims:
    """The paper's claims, by data set; a difference counts beyond what the seeds explain."""
    assert all(np.isfinite(row["loss"]) for row in rows)
    rows = [row for row in rows if not math.isinf(row["epsilon"])]
    best, rows = best_els(rows), by_heuristics(rows)
    claims = []
    plain = [row for row in rows if row["local_steps"] == 1]
    for name, own in by(plain, lambda row: row["dataset"]).items():
        pairs, noise = paired(own), margin(own)
        ahead = [els["loss"] - uls["loss"] for els, uls in pairs]
        good, better = ([gain > least for gain in ahead] for least in (-noise, noise))
        counted = f"as good in {sum(good)} of {len(good)} settings, better in {sum(better)}; ahead "
        counted += f"by {min(ahead):.4f} to {max(ahead):.4f}, seeds explain {noise:.4f}"
        groups = sorted({uls["group_size"] for _, uls in pairs})
        counted += f"; G_ULS {', '.join(map(str, groups))}"
        if stands_for(name) == STACK_OVERFLOW:
            claims.append((f"{name}: ULS is at least as good as ELS", all(good), counted))
        else:
            many = 2 * sum(better) >= len(better)
            claims.append((f"{name}: ULS is better than ELS in many settings", many, counted))
        difference = margin(own, cells=4)
        claims.append(_most(name, pairs, difference))
        claims.append(_compute(name, pairs, difference))
        gains = [row["loss_before"] - row["loss"] for row in own]
        better = [gain > margin(own, cells=1) for gain in gains]
        what = f"{name}: fine-tuning improves on the pre-trained model"
        numbers = f"in {sum(better)} of {len(own)} settings, by {np.mean(gains):.4f} on average"
        claims.append((what, all(better), numbers))
        if tuned := [row for row in best if row["dataset"] == name]:
            claims.append(_against_best(name, pairs, tuned, noise))
    claims.append(_local([row for row in rows if stands_for(row["dataset"]) == STACK_OVERFLOW]))
    return [*claims, *rates_inside(rows)]


def _against_best(name, pairs, best, noise):
    """ULS by its heuristic against ELS with the best group of each cell, chosen by these losses."""
    at = {(row["epsilon"], row["budget"]): row for row in best}
    leads = [at[uls["epsilon"], uls["budget"]]["loss"] - uls["loss"] for _, uls in pairs]
    good = sum(lead >= -noise for lead in leads)
    groups = ", ".join(map(str, sorted({row["group_size"] for row in best})))
    numbers = f"in {good} of {len(leads)} settings, better in {sum(x > noise for x in leads)}; "
    numbers += f"ahead by {min(leads):.4f} to {max(leads):.4f}, seeds explain {noise:.4f}; "
    numbers += f"G_ELS {groups}"
    what = f"{name}, beyond the paper: ULS is at least as good as ELS with its best group"
    return what, good == len(leads), numbers


def _local(rows):
    """Local steps against none, at equal epsilon and budget."""
    cells = by(rows, lambda row: (row["epsilon"], row["budget"])).values()
    curves = [{_curve(row): row["loss"] for row in own} for own in cells]
    gains = [own["ULS"] - own[LOCAL] for own in curves]
    good, noise = [gain >= -margin(rows) for gain in gains], margin(rows)
    what = "beyond the paper: local steps are at least as good as none"
    numbers = f"in {sum(good)} of {len(good)} settings; better by {np.mean(gains):.4f} on average, "
    return what, all(good), numbers + f"seeds explain {noise:.4f}"


def _most(name, pairs, noise):
    """ULS is ahead by more at the smallest epsilon; noise: of a difference of two."""
    values = sorted({els["epsilon"] for els, _ in pairs})
    leads = [
        [els["loss"] - uls["loss"] for els, uls in pairs if els["epsilon"] == end]
        for end in (values[0], values[-1])
    ]
    most, least = (float(np.mean(lead)) for lead in leads)
    error = noise / np.sqrt(len(leads[0]))
    numbers = f"{most:.4f} against {least:.4f} at epsilon {values[-1]:g}, seeds explain {error:.4f}"
    return f"{name}: ULS is ahead the most where epsilon is small", most - least > error, numbers


def _compute(name, pairs, noise):
    """What the largest budget gains over the smallest, for each algorithm. That ULS is ahead by
    more with the largest budget is the same difference, and no claim of its own."""
    gains = []
    for epsilon in sorted({els["epsilon"] for els, _ in pairs}):
        own = [pair for pair in pairs if pair[0]["epsilon"] == epsilon]
        least, *_, most = sorted(own, key=lambda pair: pair[0]["budget"])
        gains.append([least[i]["loss"] - most[i]["loss"] for i in range(2)])
    els, uls = np.transpose(gains)
    error = noise / np.sqrt(len(els))
    numbers = f"{uls.mean():.4f} against {els.mean():.4f} on average over epsilon, seeds explain "
    numbers += f"{error:.4f}; more at {int((uls > els).sum())} of {len(els)} epsilons"
    what = f"{name}: ULS gains more from compute than ELS"
    nowhere_less = bool((uls - els > -noise).all())
    return what, nowhere_less and uls.mean() - els.mean() > error, numbers


FIGURES = {
    "fig06_privacy_loss": plot,
    "fig16_compute_loss": functools.partial(plot, along="budget", across="epsilon"),
}


def main(argv: Sequence[str] | None = None) -> None:
    finetuning.main("fig06_privacy_loss", __doc__, argv, SETTINGS, run, FIGURES, check)


if __name__ == "__main__":
    main()
