"""Poisson against shuffled sampling at equal noise: the loss, and the epsilon each may claim.

Beyond the paper, which shuffles and accounts as if it had drawn Poisson samples (Section 5). With
the same noise multiplier the loss should not tell the two apart; the claims do. Poisson sampling
has the accountant's epsilon. For shuffled batches of fixed size no amplification is assumed here:
an epoch touches each unit once, so a user is in one Gaussian release per epoch, of sensitivity 1
for ULS, and of up to G_ELS for ELS, whose examples may all fall into one batch; epochs compose.
That holds where a user is replaced by nothing, not removed (the batches of the others stay as they
are), and bounds batches in any fixed order (Chua et al. 2024, who show that the truth for shuffling
may be far above Poisson's epsilon). ULS and ELS on Stack Overflow, G as the heuristics have it.

    python -m experiments.sampling --scale small      (--dry-run: its cost)
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common, finetuning, heuristics
from experiments.harness.arguments import STACK_OVERFLOW
from experiments.harness.claims import alike, both, cell_error
from experiments.harness.comparison import shuffled
from experiments.harness.finetuning import SMALL_TRAINING, SMOKE_TRAINING, Training
from experiments.harness.outcomes import REPORTED
from experiments.harness.rows import Row, by, over_seeds
from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.config import ADD_OR_REMOVE, Algorithm, PrivacyConfig, changed_run
from fedsim.els import ELS
from fedsim.evaluate import SPLITS, evaluate, headline
from fedsim.keys import SecretKey
from fedsim.plan import Plan
from fedsim.run import find_model, make_task
from fedsim.uls import ULS


@dataclasses.dataclass(frozen=True)
class Settings:
    training: Training
    budget: int


SETTINGS = {
    "smoke": Settings(SMOKE_TRAINING.on(STACK_OVERFLOW), 16),
    "small": Settings(
        SMALL_TRAINING.on(STACK_OVERFLOW, epsilons=(1.0, 16.0), seeds=(0, 1, 2)), 128
    ),
    "paper": Settings(finetuning.PAPER_TRAINING.on(STACK_OVERFLOW), 2048),
}
SAMPLINGS = ("poisson", "shuffle")
SHUFFLED = {"els": shuffled(ELS), "uls": shuffled(ULS)}  # accounted as if they were Poisson samples


def run(settings: Settings, arguments: finetuning.Arguments) -> list[dict[str, Any]]:
    """A row for each epsilon, algorithm and way of sampling, with the best learning rate of the
    first seed."""
    training = settings.training
    base = heuristics.cells_of([settings.budget], training, arguments)
    cells = [{**cell, "sampling": sampling} for cell in base for sampling in SAMPLINGS]
    rates, seeds = training.learning_rates, training.seeds
    if arguments.dry_run:
        count = len(cells) * (len(rates) + len(seeds) - 1)
        steps = next(iter(training.num_steps.values()))
        what = [{"batch_size": settings.budget, "num_steps": steps}] * count
        print(finetuning.plan_of(cells), finetuning.cost(what, arguments.scale), sep="\n")
        arguments.tally.planned += what
        return []
    rows = []
    for cell in cells:
        first = {rate: trained(cell, rate, seeds[0], training, arguments) for rate in rates}
        best = min(rates, key=lambda rate, of=first: of[rate]["validation_loss"])
        rest = [trained(cell, best, seed, training, arguments) for seed in seeds[1:]]
        every = [first[best], *rest]
        for name in ("loss_before", "validation_loss"):
            cell[name] = float(np.mean([each[name] for each in every]))
        facts = {n: every[0][n] for n in ("noise_multiplier", "delta", "claimed_epsilon")}
        over = over_seeds([each["loss"] for each in every])
        rows.append({**cell, "learning_rate": best, **over, **facts})
    return rows


def trained(
    cell: Row, rate: float, seed: int, training: Training, arguments: finetuning.Arguments
) -> Row:
    """What comes of one training, without a run around it: its epsilon must not look like one that
    fedsim states."""
    name = cell["dataset"]
    run = finetuning.run_of(name, arguments, training, seed)
    run = changed_run(run, optimizer=training.optimizer, learning_rate=rate, engine="local")
    model, data = find_model(run.model.source), finetuning.open_data(name, arguments, training)
    key = SecretKey.create(seed)
    task, params = make_task(run, model, data, key.jax_key("init"))
    privacy = PrivacyConfig(
        cell["epsilon"],
        training.num_steps[name],
        cell["budget"],
        group_size=cell["group_size"],
        delta=finetuning.delta_of(name, training, arguments),
        adjacency=ADD_OR_REMOVE,  # the paper's
    )
    algorithm, options = cell["algorithm"], (run, model, data, task, params, key)
    kind = SHUFFLED[algorithm] if cell["sampling"] == "shuffle" else None
    at = common.prepared(algorithm, privacy, *options, kind=kind)
    last = at.trained()[1]
    split = next(split for split in REPORTED if getattr(data, split) is not None)
    losses = {
        of: evaluate(at.engine, each, data, training.test_examples, {split: SPLITS[split]})
        for of, each in (("loss_before", params), ("loss", last))
    }
    return {
        **{of: found[SPLITS[split]] for of, found in losses.items()},
        "validation_loss": headline(evaluate(at.engine, last, data, training.eval_examples)),
        "noise_multiplier": at.plan.noise_multiplier,
        "delta": at.plan.delta,
        "claimed_epsilon": claimed_epsilon(at.plan, cell["sampling"]),
    }


def claimed_epsilon(plan: Plan, sampling: str) -> float:
    """Epsilon that this way of sampling has; see above."""
    cap = plan.group_size if plan.algorithm == Algorithm.ELS else 1
    event, times = StepEvent(plan.noise_multiplier, plan.sampling.prob, cap), plan.num_steps
    if sampling == "shuffle":
        steps_per_epoch = plan.num_units // plan.expected_count
        event, times = (
            StepEvent(plan.noise_multiplier / cap, 1.0),
            math.ceil(plan.num_steps / steps_per_epoch),
        )
    return accounting.epsilon([(event, times)], plan.delta)


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Losses, with deviations over seeds, and the epsilons that may be claimed."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.2), layout="constrained")
    kinds = by(rows, lambda row: (row["algorithm"].upper(), row["sampling"]))
    for number, ((algorithm, sampling), own) in enumerate(kinds.items()):
        look = {"color": common.COLOURS[algorithm], "label": f"{algorithm}, {sampling}"}
        style = "-o" if sampling == "poisson" else "--s"
        x = np.array([row["epsilon"] for row in own]) * 1.04 ** (number - len(kinds) / 2)
        losses, spread, claimed = (
            [row[key] for row in own] for key in ("loss", "loss_std", "claimed_epsilon")
        )
        left.errorbar(x, losses, spread, fmt=style, capsize=2, **look)
        right.plot(x, claimed, style, **look)
    for axis in (left, right):
        common.log2_axis(axis, [row["epsilon"] for row in rows])
        axis.set(xlabel=r"$\varepsilon$ of Poisson sampling")
        axis.grid(alpha=0.3)
    left.set(ylabel="loss (nats per token)")
    right.set(ylabel=r"$\varepsilon$ that may be claimed", yscale="log")
    common.legend_below(figure)
    return figure


def check(rows: Sequence[dict[str, Any]]) -> common.Claims:
    """Equal noise, equal loss, other epsilons."""
    cells = by(rows, lambda row: (row["epsilon"], row["algorithm"])).values()
    pairs = [{row["sampling"]: row for row in own} for own in cells]
    gaps, error = [], math.sqrt(2) * cell_error(rows)
    for pair in pairs:
        poisson, shuffled = (pair[name] for name in SAMPLINGS)
        same = math.isclose(poisson["noise_multiplier"], shuffled["noise_multiplier"])
        assert same, "the noise is not equal"
        gaps.append(shuffled["loss"] - poisson["loss"])
    each = [alike(gap, error) for gap in gaps]
    numbers = f"in {each.count(True)} of {len(pairs)}; they differ by up to "
    numbers += f"{max(map(abs, gaps)):.4f}, standard error {error:.4f}"
    losses = ("equal noise gives equal losses", both(*each), numbers)
    ratios = [
        pair["shuffle"]["claimed_epsilon"] / pair["poisson"]["claimed_epsilon"] for pair in pairs
    ]
    numbers = f"{min(ratios):.3g} to {max(ratios):.3g} times Poisson's"
    return [losses, ("shuffling may only claim a larger epsilon", min(ratios) > 1, numbers)]


if __name__ == "__main__":
    finetuning.main(globals())
