"""Figures 4, 11 and 12 (Section 6, Appendix E): loss of DP-SGD-ELS against its group size.

Figure 4 is epsilon = 4, Figure 11 Stack Overflow and Figure 12 CC-News at every epsilon; losses are
of validation data. At `small` real text stands in for both, and the paper's budgets are not in its
text: they are our choice at every scale. `small` has four group sizes, a factor of eight apart, and
the median; two budgets, 30 steps, two seeds; the learning rate is tuned in every cell; epsilon =
64, where noise hardly depends on the group size, is left out. `long` has 300 steps and one budget.

    python -m experiments.fig04_els_group_size --scale small      (--dry-run: its cost)
"""

import dataclasses
import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments import finetuning
from experiments.finetuning import (
    LONG_TRAINING,
    PAPER_TRAINING,
    SMALL_TRAINING,
    SMOKE_TRAINING,
    Training,
)
from experiments.harness import plots
from experiments.harness.rows import Rows, by
from fedsim.errors import DataError
from fedsim.sampling import median_group_size


@dataclasses.dataclass(frozen=True)
class Settings:
    training: Training
    group_sizes: tuple[int, ...]
    """Beside the median user's number of examples."""
    budgets: tuple[int, ...]


SETTINGS = {
    "smoke": Settings(SMOKE_TRAINING, (1, 4), (16,)),
    "small": Settings(
        dataclasses.replace(SMALL_TRAINING, epsilons=(1.0, 4.0, 16.0)),
        (1, 8, 64, 512),
        (64, 256),
    ),
    "long": Settings(LONG_TRAINING, (1, 8, 64, 512), (256,)),
    "paper": Settings(PAPER_TRAINING, tuple(2**n for n in range(11)), (512, 2048, 8192)),
}


def run(settings: Settings, arguments: finetuning.Arguments) -> Rows:
    """A row for each data set, epsilon, budget and group size whose pool holds the budget; none
    where the median user's does not."""
    training, cells, medians = settings.training, [], {}
    for name in training.num_steps:
        groups = {budget: settings.group_sizes for budget in settings.budgets}
        if not arguments.dry_run:
            sizes = np.diff(finetuning.open_data(name, arguments, training).train.offsets)
            medians[name] = median_group_size(sizes)
            tried = sorted({*settings.group_sizes, medians[name]})
            groups = {budget: useful(tried, budget, sizes) for budget in groups}
            if left_out := [b for b, each in groups.items() if medians[name] not in each]:
                print(f"{name}: no runs with B = {left_out}: more than the median user's pool has")
                groups |= dict.fromkeys(left_out, [])
        for epsilon, budget in itertools.product(training.epsilons, settings.budgets):
            cell = {"dataset": name, "epsilon": epsilon, "algorithm": "els", "budget": budget}
            cells += [{**cell, "group_size": group} for group in groups[budget]]

    if not cells:
        least = f"a pool of {min(settings.budgets)} examples at least"
        raise DataError(
            f"data={arguments.data}: with the median user's group size expected {least}"
        )
    rows = finetuning.tuned_losses(cells, training, arguments)
    return [{**row, "median_examples": medians[row["dataset"]]} for row in rows]


def useful(group_sizes: Sequence[int], budget: int, sizes: np.ndarray) -> list[int]:
    """Those whose pool holds the budget, and of those beyond the largest user the smallest."""
    fit = [group for group in group_sizes if budget <= np.minimum(sizes, group).sum()]
    return [group for group in fit if not any(sizes.max() <= other < group for other in fit)]


def plot(rows: Rows) -> Figure:
    """A panel for each data set (rows) and epsilon (columns); the median user in red."""
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    epsilons = sorted({row["epsilon"] for row in rows})
    figure, axes = plots.panels(len(names), len(epsilons), 3, 2.6, sharey="row")
    budgets = sorted({row["budget"] for row in rows})
    for (name, epsilon), own in by(rows, lambda r: (r["dataset"], r["epsilon"])).items():
        axis = axes[names.index(name), epsilons.index(epsilon)]
        for budget, series in by(own, lambda r: r["budget"]).items():
            values = [[row[key] for row in series] for key in ("group_size", "loss", "loss_std")]
            shade = 0.35 + 0.65 * (budgets.index(budget) + 1) / len(budgets)
            colour = plt.get_cmap("Blues")(shade)
            axis.errorbar(*values, fmt="-o", color=colour, capsize=2, label=f"B = {budget}")
        median = own[0]["median_examples"]
        axis.axvline(median, color="tab:red", linestyle="--", label="median user")
        plots.log2_axis(axis, [row["group_size"] for row in own])
        title = rf"{name}, $\varepsilon$ = {epsilon:g}" + "\n" + finetuning.assumption(name)
        axis.set_title(title.strip(), fontsize="medium")
        axis.set(xlabel="$G_{ELS}$")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set(ylabel="validation loss\n(nats per token)")
    plots.legend_below(figure)
    return figure


if __name__ == "__main__":
    finetuning.main(globals())
