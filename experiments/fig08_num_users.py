"""Figure 8 (Section 6): what more users would be worth, on CC-News at epsilon = 4.

The number of users is varied in the accounting alone (`assumed_users.py`): the users there are, ten
and a hundred times as many; delta is that of ten times, as in the paper's other experiments. Both
algorithms are set by the heuristics. An epsilon of a population that is assumed is no guarantee for
the users there are: each run states the larger one that holds for its noise. Losses and learning
rates are as in Figure 7, whose runs are those of ten times.

    python -m experiments.fig08_num_users --scale small      (--dry-run: its cost)
"""

import dataclasses

from matplotlib.figure import Figure

from experiments import finetuning, heuristics
from experiments.finetuning import CC_NEWS, STACK_OVERFLOW, Comparison
from experiments.harness import plots
from experiments.harness.rows import Rows, by

EPSILON = 4.0


@dataclasses.dataclass(frozen=True)
class Settings:
    models: Comparison
    times: tuple[int, ...] = (1, 10, 100)


def _at_one_epsilon(comparison: Comparison) -> Comparison:
    """On CC-News, or the data that there are at the smallest scale."""
    name = CC_NEWS if CC_NEWS in comparison.training.num_steps else STACK_OVERFLOW
    training = comparison.training.on(name, epsilons=(EPSILON,))
    return dataclasses.replace(comparison, training=training)


MODELS = {scale: _at_one_epsilon(own) for scale, own in finetuning.COMPARISONS.items()}
SETTINGS = {
    "smoke": Settings(dataclasses.replace(MODELS["smoke"], budgets=(16,)), times=(1, 100)),
    "small": Settings(MODELS["small"]),
    "paper": Settings(MODELS["paper"]),
}


def run(settings: Settings, arguments: finetuning.Arguments) -> Rows:
    """A row for each assumed population, budget and algorithm."""
    training, budgets = settings.models.training, settings.models.budgets
    (name,) = training.num_steps
    delta = None if arguments.dry_run else finetuning.delta_of(name, training, arguments)
    rows = []
    for times in settings.times:
        extra = {"times": times, "delta": delta}
        if times == dict(training.assumed_times).get(name):
            extra = {}  # as Figure 7 has it
        cells = heuristics.cells_of(budgets, training, arguments, extra)
        found = finetuning.tuned_losses(cells, training, arguments)
        found = finetuning.with_test_losses(found, training, arguments)
        rows += [{"times": times, **row, **extra} for row in found]
    return [{name: value for name, value in row.items() if name != "delta"} for row in rows]


def plot(rows: Rows) -> Figure:
    """A panel for each population; bars are deviations over seeds."""
    panels = by(rows, lambda row: row["times"])
    figure, axes = plots.panels(1, len(panels), 3.2, 2.9, sharey=True)
    for axis, (times, own) in zip(axes[0], panels.items(), strict=True):
        for algorithm, series in by(own, lambda row: row["algorithm"].upper()).items():
            values = [[row[key] for row in series] for key in ("budget", "loss", "loss_std")]
            colour = plots.COLOURS[algorithm]
            axis.errorbar(*values, fmt="-o", color=colour, capsize=2, label=algorithm)
        axis.axhline(own[0]["loss_before"], color="black", linestyle=":", label="pre-trained")
        plots.log2_axis(axis, [row["budget"] for row in own])
        axis.set(xlabel="compute budget $B$")
        whose = f"as if {times} x the users" if times > 1 else "the users there are"
        axis.set_title(rf"{whose}, $\varepsilon$ = {own[0]['epsilon']:g}", fontsize="medium")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="test loss (nats per token)")
    plots.legend_below(figure)
    return figure


if __name__ == "__main__":
    finetuning.main(globals())
