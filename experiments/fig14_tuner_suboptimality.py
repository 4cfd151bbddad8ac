"""Figures 14 and 15 (Appendix F): how far strategies to set DP-SGD-ULS are from the best setting.

Suboptimality is the loss above that of the best G and M of the same budget, by exhaustive search.
Estimate-and-Double is Algorithm 3. Averaged over epsilon, as in the paper; `random` is the mean
over all choices of a budget; budgets that leave no choice are left out. The runs are Figure 5's,
and CC-News's; as in the paper CC-News is accounted for as if it had ten times the users. What
`small` leaves out is in Figure 5's.

    python -m experiments.fig14_tuner_suboptimality --scale small      (--dry-run: its cost)
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import finetuning
from experiments.finetuning import ULS_GRIDS
from experiments.harness import plots
from experiments.harness.rows import Rows, by
from experiments.heuristics import user_grad_norms
from experiments.quantities import averaged, cell_error
from fedsim.errors import expect
from fedsim.tuning import doubling
from fedsim.tuning.doubling import Configuration, Limits, twice

SETTINGS = ULS_GRIDS
STRATEGIES = {  # wide ones first: strategies that choose alike lie on each other
    "max cohort": {"color": "tab:green", "linewidth": 6, "alpha": 0.5},
    "estimate-and-double": {"color": "tab:orange", "linewidth": 3, "marker": "o"},
    "greedy local oracle": {"color": "black", "linestyle": "--"},
    "random": {"color": "tab:grey", "marker": "o"},
    "max group size": {"color": "tab:purple", "marker": "o"},
}


def greedy_local_oracle(
    batch_size: int,
    loss: Callable[[Configuration], float],
    at: Configuration,
    limits: Limits,
) -> Configuration:
    """Double whichever of G_ULS and M gives the lower loss after training.

    No local strategy does better; it costs a training for each configuration (Appendix F).
    """

    while at.batch_size < batch_size and any(next_ in limits for next_ in twice(at)):
        at = min(reversed(twice(at)), key=lambda each: loss(each) if each in limits else math.inf)
    return at


def with_batch_size(grid: Sequence[Configuration], batch_size: int) -> list[Configuration]:
    """Configurations of a grid that use exactly `batch_size` gradients, by group size.

    Raises: ConfigError: there is none.
    """
    matching = sorted(at for at in grid if at.batch_size == batch_size)
    expect("batch_size", batch_size, bool(matching), "a product G M of the grid")
    return matching


def max_cohort(grid: Sequence[Configuration], batch_size: int) -> Configuration:
    """The configuration with the most users and so the fewest examples of each (Appendix F)."""
    return with_batch_size(grid, batch_size)[0]


def max_group_size(grid: Sequence[Configuration], batch_size: int) -> Configuration:
    """The configuration with the most examples of a user and so the fewest users (Appendix F)."""
    return with_batch_size(grid, batch_size)[-1]


def run(settings: finetuning.UlsGrid, arguments: finetuning.Arguments) -> Rows:
    """A row for each data set, epsilon, budget and strategy; `seed_error` is of a loss."""
    rows = []
    found = finetuning.uls_grid_losses(settings, arguments)
    for name, own in by(found, lambda row: row["dataset"]).items():
        training = settings.training
        users = finetuning.assumed(name, training, arguments)
        delta = finetuning.delta_of(name, training, arguments)
        run_config = finetuning.run_of(name, arguments, training, training.seeds[0])
        norms = user_grad_norms(run_config, tuple(settings.group_sizes))
        error = float(cell_error(own))
        for epsilon, cells in by(own, lambda row: row["epsilon"]).items():
            losses = {Configuration(r["group_size"], r["cohort_size"]): r["loss"] for r in cells}
            noise = doubling.uls_noise(epsilon, delta, training.num_steps[name], users)
            for budget in sorted({at.batch_size for at in losses}):
                choices = with_batch_size(list(losses), budget)
                if len(choices) == 1:
                    continue
                best = min(losses[at] for at in choices)
                for strategy, loss in strategies(losses, budget, norms, noise).items():
                    where = {"dataset": name, "epsilon": epsilon, "budget": budget}
                    came = {"suboptimality": loss - best, "seed_error": error}
                    rows.append({**where, "strategy": strategy, **came})
    return rows


def strategies(losses: dict[Configuration, float], budget: int, norms, noise) -> dict[str, float]:
    """Loss with the configuration that each strategy chooses."""
    grid = list(losses)
    start = Configuration(min(at.group_size for at in grid), min(at.cohort_size for at in grid))
    limits = doubling.Limits(max(at.group_size for at in grid), max(at.cohort_size for at in grid))
    chosen = doubling.estimate_and_double(budget, norms.__getitem__, noise, start, limits)
    oracle = greedy_local_oracle(budget, losses.__getitem__, start, limits)
    return {
        "estimate-and-double": losses[chosen],
        "greedy local oracle": losses[oracle],
        "random": float(np.mean([losses[at] for at in with_batch_size(grid, budget)])),
        "max cohort": losses[max_cohort(grid, budget)],
        "max group size": losses[max_group_size(grid, budget)],
    }


def plot(rows: Rows) -> Figure:
    panels = by(averaged(rows), lambda row: row["dataset"])
    figure, axes = plots.panels(1, len(panels), 4.5, 3.4)
    for axis, (name, own) in zip(axes[0], panels.items(), strict=True):
        by_strategy = by(own, lambda row: row["strategy"])
        for strategy, look in STRATEGIES.items():
            series = by_strategy[strategy]
            budgets, means, stds = (
                np.array([row[key] for row in series]) for key in ("budget", "mean", "std")
            )
            axis.plot(budgets, means, label=strategy, markersize=5, **look)
            axis.fill_between(budgets, means - stds, means + stds, color=look["color"], alpha=0.12)
        plots.log2_axis(axis, [row["budget"] for row in own])
        axis.set(xlabel="compute budget $B$", ylabel="suboptimality (nats per token)")
        axis.set_title(f"{name} {finetuning.assumption(name)}", fontsize="medium")
        axis.grid(alpha=0.3)
    plots.legend_below(figure)
    return figure


if __name__ == "__main__":
    finetuning.main(globals())
