"""Figures 6, 7, 16 and 17 (Section 6, Appendix G): loss of both algorithms against epsilon.

Both are set by the paper's heuristics (the median user, Estimate-and-Double) at three compute
budgets; the untouched pre-trained model is a line. Claims: on Stack Overflow (Figure 6) ULS is at
least as good as ELS everywhere; on CC-News (7) it is better in many settings; on both it is ahead
the most where epsilon is small, and gains more from a larger budget at every epsilon (16, 17: the
same numbers against the budget); and fine-tuning improves on the pre-trained model everywhere. A
line in every panel of 6 and 7 is training without noise. As in the paper CC-News is accounted for
as if it had ten times the users. Losses are test losses (Stack Overflow's later examples, CC-News's
reserved ones); the learning rate is tuned in every cell by the first seed, on held-out users where
there are any. Two seeds; at `small` 30 steps, at `long` 300.

Beyond the paper: ELS with other group sizes than the median user's, of which the best is a line of
its own. The record of `small` also has ULS with four local steps (DP-FedAvg) on Stack Overflow,
each over a quarter of a user's examples of a step, in cohorts of a quarter of the budget; commit
bd8366bf is the last that computes those rows.

    python -m experiments.fig06_privacy_loss --scale small      (--dry-run: its cost)
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import finetuning, heuristics
from experiments.finetuning import STACK_OVERFLOW, stands_for
from experiments.harness import plots
from experiments.harness.claims import Claims, ahead, both, cell_error, mean_error, most, no_worse
from experiments.harness.rows import by, paired, rates_inside

SETTINGS = finetuning.COMPARISONS
LOCAL = "ULS, local steps"
BEST = "ELS, best group"
COLOURS = {**plots.COLOURS, LOCAL: "tab:green", BEST: "tab:cyan"}


def run(settings: finetuning.Comparison, arguments: finetuning.Arguments) -> list[dict[str, Any]]:
    """A row for each data set, epsilon, budget and algorithm."""
    found = heuristics.cells_of(settings.budgets, settings.training, arguments)
    cells = [*found, *without_noise(found)]
    first = len(cells)
    cells += with_other_groups(cells, settings.els_groups)
    rows = finetuning.tuned_losses(cells, settings.training, arguments)
    rows = finetuning.with_test_losses(rows, settings.training, arguments)
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
    """ELS with the best group size of each cell, of as many as `tried` says; nothing where one
    alone was trained."""
    own = [row for row in rows if row["algorithm"] == "els" and not math.isinf(row["epsilon"])]
    cells = by(own, lambda row: (row["dataset"], row["epsilon"], row["budget"])).values()
    return [
        {**min(each, key=lambda row: row["loss"]), "tried": len(each)}
        for each in cells
        if len(each) > 1
    ]


def plot(rows: Sequence[dict[str, Any]], along: str = "epsilon", across: str = "budget") -> Figure:
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
    return LOCAL if _has_local_steps(row) else row["algorithm"].upper()


def _has_local_steps(row):
    """True of rows of the record that were computed when users could take steps of their own."""
    return row.get("local_steps", 1) > 1


def check(rows: Sequence[dict[str, Any]]) -> Claims:
    """The paper's claims, by data set."""
    assert not any(np.isnan(row["loss"]) for row in rows)  # of one that diverged it is infinite
    rows = [row for row in rows if not math.isinf(row["epsilon"])]
    best, rows = best_els(rows), by_heuristics(rows)
    claims = []
    plain = [row for row in rows if not _has_local_steps(row)]
    for name, own in by(plain, lambda row: row["dataset"]).items():
        pairs, error = paired(own), cell_error(own)
        leads = [els["loss"] - uls["loss"] for els, uls in pairs]
        good, better, counted = _judged(leads, np.sqrt(2) * error)
        groups = sorted({uls["group_size"] for _, uls in pairs})
        counted += f"; G_ULS {', '.join(map(str, groups))}"
        if stands_for(name) == STACK_OVERFLOW:
            claims.append((f"{name}: ULS is at least as good as ELS", both(*good), counted))
        else:
            what = f"{name}: ULS is better than ELS in many settings"
            claims.append((what, most(better), counted))
        claims.append(_most(name, pairs, 2 * error))
        claims.append(_compute(name, pairs, 2 * error))
        gains = [row["loss_before"] - row["loss"] for row in own]
        better = [ahead(gain, mean_error(own)) for gain in gains]
        what = f"{name}: fine-tuning improves on the pre-trained model"
        numbers = f"in {better.count(True)} of {len(own)} settings, by {np.mean(gains):.4f} on "
        claims.append((what, both(*better), numbers + "average"))
        if tuned := [row for row in best if row["dataset"] == name]:
            claims.append(_against_best(name, pairs, tuned, np.sqrt(2) * error))
    local = [row for row in rows if stands_for(row["dataset"]) == STACK_OVERFLOW]
    if any(map(_has_local_steps, local)):
        claims.append(_local(local))
    return [*claims, *rates_inside(rows)]


def _judged(leads, error):
    """Of settings: whether ULS is as good in each, whether it is better, and the numbers."""
    good = [no_worse(lead, error) for lead in leads]
    better = [ahead(lead, error) for lead in leads]
    numbers = f"as good in {good.count(True)} of {len(good)} settings, better in "
    numbers += f"{better.count(True)}; ahead by {min(leads):.4f} to {max(leads):.4f}, "
    return good, better, numbers + f"standard error {error:.4f}"


def _against_best(name, pairs, best, error):
    """ULS by its heuristic against ELS with the best group of each cell, chosen by these losses."""
    at = {(row["epsilon"], row["budget"]): row for row in best}
    leads = [at[uls["epsilon"], uls["budget"]]["loss"] - uls["loss"] for _, uls in pairs]
    good, _, numbers = _judged(leads, error)
    groups = ", ".join(map(str, sorted({row["group_size"] for row in best})))
    tried = min(row["tried"] for row in best)
    what = (
        f"{name}, beyond the paper: ULS is at least as good as ELS with the best of {tried} groups"
    )
    return what, both(*good), f"{numbers}; G_ELS {groups}"


def _local(rows):
    """Local steps against none, at equal epsilon and budget."""
    cells = by(rows, lambda row: (row["epsilon"], row["budget"])).values()
    curves = [{_curve(row): row["loss"] for row in own} for own in cells]
    gains = [own["ULS"] - own[LOCAL] for own in curves]
    error = np.sqrt(2) * cell_error(rows)
    good = [no_worse(gain, error) for gain in gains]
    what = "beyond the paper: local steps are at least as good as none"
    numbers = f"in {good.count(True)} of {len(good)} settings; better by {np.mean(gains):.4f} on "
    return what, both(*good), numbers + f"average, standard error {error:.4f}"


def _most(name, pairs, error):
    """ULS is ahead by more at the smallest epsilon than at the largest, with every budget; error:
    of a difference of two leads."""
    values = sorted({els["epsilon"] for els, _ in pairs})
    lead = {(els["epsilon"], els["budget"]): els["loss"] - uls["loss"] for els, uls in pairs}
    budgets = sorted({budget for _, budget in lead})
    more = [lead[values[0], budget] - lead[values[-1], budget] for budget in budgets]
    numbers = f"by {min(more):.4f} to {max(more):.4f} more at epsilon {values[0]:g} than at "
    numbers += f"{values[-1]:g}, standard error {error:.4f}"
    return f"{name}: ULS is ahead the most where epsilon is small", ahead(more, error), numbers


def _compute(name, pairs, error):
    """What the largest budget gains over the smallest, for each algorithm. That ULS is ahead by
    more with the largest budget is the same difference, and no claim of its own."""
    gains = []
    for epsilon in sorted({els["epsilon"] for els, _ in pairs}):
        own = [pair for pair in pairs if pair[0]["epsilon"] == epsilon]
        least, *_, largest = sorted(own, key=lambda pair: pair[0]["budget"])
        gains.append([least[i]["loss"] - largest[i]["loss"] for i in range(2)])
    els, uls = np.transpose(gains)
    numbers = f"{uls.mean():.4f} against {els.mean():.4f} on average over epsilon; more at "
    numbers += f"{int((uls > els).sum())} of {len(els)} epsilons, by {min(uls - els):.4f} to "
    numbers += f"{max(uls - els):.4f}, standard error {error:.4f}"
    return f"{name}: ULS gains more from compute than ELS", ahead(uls - els, error), numbers


FIGURES = {
    "fig06_privacy_loss": plot,
    "fig16_compute_loss": functools.partial(plot, along="budget", across="epsilon"),
}


if __name__ == "__main__":
    finetuning.main(globals())
