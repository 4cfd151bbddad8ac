"""What a tuned rate buys on the real model: real_model.py with rates beside those of the rule.

real_model.py takes the rate that `fedsim train` takes where nothing is said of it. Here it is tuned
for both algorithms alike: each with G = 1, the best group of both at epsilon 1 and 8 there, and
with adapters of the first rank, at each epsilon of each source, by the first seed: the rule's rate
times 3 to the power of -1, 0 and 1, and further while the best is at an end. The best is trained
with the other seed, too. Rows with the rule's own rate are those of real_model.py, where it has
them. The tests were committed before any of these runs.

Rows are appended to real_model_rates.jsonl beside the results as they come; the same command goes
on with what is missing.

    python -m experiments.real_model_rates --scale small [--minutes 60]    (--dry-run: its cost)
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments import common, real_model
from experiments.processes import compute
from experiments.real_model import SETTINGS, Settings
from experiments.real_model_claims import at_epsilon
from experiments.records import as_written
from experiments.rows import Row, Rows, by, kept, margin, over_seeds

NAME = "real_model_rates"
ALGORITHMS, GROUP = ("els", "uls"), 1
MOST = 3  # powers
NEAR = 0.1
"""Nats that the rule's rate may cost."""
SETTING = ("source", "epsilon", "algorithm")
STYLES = ("-o", "--s", ":^")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    source: str
    epsilon: float
    algorithm: str
    seed: int
    power: int
    """The rate is the rule's times 3 to the power."""


def train(cell: Cell, settings: Settings) -> Row:
    """What comes of a cell."""
    own = dataclasses.asdict(cell)
    power, (rank, _) = own.pop("power"), settings.ranks[0]
    trained = real_model.Cell(**own, rank=rank, group=GROUP)
    return {**real_model.train(trained, settings, power), "power": power}


def known(out: Path, settings: Settings) -> Rows:
    """The rows that were kept, and those of the rule's rate from real_model.py."""
    rank, _ = settings.ranks[0]
    rule = [
        {**row, "power": 0}
        for row in kept(out / f"{real_model.NAME}.jsonl")
        if (row["rank"], row["group"]) == (rank, GROUP)
    ]
    return rule + kept(out / f"{NAME}.jsonl")


def todo(settings: Settings, rows: Rows) -> list[Cell]:
    """The trainings that are known to be needed, and not there."""
    first, *others = settings.seeds
    finite = sorted((each for each in settings.epsilons if each < math.inf), reverse=True)
    epsilons = [*finite, *(each for each in settings.epsilons if math.isinf(each))]
    cells = []
    for epsilon in epsilons:
        for source, _ in settings.sources:
            for algorithm in ALGORITHMS:
                losses = of_powers(rows, (source, epsilon, algorithm), first)
                seeds = dict.fromkeys(sorted({-1, 0, 1} - set(losses)), (first,))
                if not seeds:
                    best = min(losses, key=losses.__getitem__)
                    beyond = {best - 1, best + 1} - set(losses)
                    seeds = {power: (first,) for power in beyond if abs(power) <= MOST}
                    seeds = seeds or dict.fromkeys((0, best), others)
                cells += [
                    Cell(source, epsilon, algorithm, seed, power)
                    for power, each in seeds.items()
                    for seed in each
                ]
    there = {(*(row[name] for name in SETTING), row["seed"], row["power"]) for row in rows}
    return [cell for cell in cells if dataclasses.astuple(cell) not in there]


def of_powers(rows: Sequence[Row], setting: tuple, seed: int) -> dict[int, float]:
    """The losses by how far the rate is from the rule's; what diverged is infinite."""
    own = [row for row in rows if tuple(row[name] for name in SETTING) == setting]
    found = {row["power"]: row["loss"] for row in own if row["seed"] == seed}
    return {at: loss if math.isfinite(loss) else math.inf for at, loss in found.items()}


def tuned(rows: Sequence[Row]) -> Rows:
    """A row for each source, epsilon and algorithm, of the best rate and of the rule's, where both
    have all seeds. `inside`: the best is at no end of those that were tried."""
    seeds, found = {row["seed"] for row in rows}, []
    for setting, own in by(rows, lambda row: tuple(row[name] for name in SETTING)).items():
        losses = of_powers(own, setting, min(seeds))
        if not {-1, 0, 1} <= set(losses):
            continue
        best = min(losses, key=losses.__getitem__)
        each = [[row["loss"] for row in own if row["power"] == power] for power in (0, best)]
        if all(len(values) == len(seeds) for values in each):
            inside = min(losses) < best < max(losses)
            row = {**dict(zip(SETTING, setting, strict=True)), "power": best, "inside": inside}
            row |= {"loss_before": own[0]["loss_before"], "rule": over_seeds(each[0])["loss"]}
            found.append({**row, **over_seeds(each[1])})
    return found


def check(rows: Sequence[Row]) -> list[tuple[str, bool | None, str]]:
    """By the means over seeds of the best rates. A claim is judged when its cells are there."""
    found, planned = tuned(rows), rows[0]["planned"]
    claims: list[tuple[str, bool | None, str]] = [
        ("ours: all settings were tuned", len(found) == planned, f"{len(found)} of {planned}")
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in found if row["source"] == source]
        for epsilon, pair in sorted(by(own, lambda row: row["epsilon"]).items()):
            if len(pair) < len(ALGORITHMS):
                continue
            one, two = (margin(own, cells=count) for count in (1, 2))
            where = f"{source}, {at_epsilon(epsilon)}"
            fell = {row["algorithm"]: row["loss_before"] - row["loss"] for row in pair}
            said = ", ".join(f"{name.upper()} by {value:.4f}" for name, value in fell.items())
            claims.append(
                (
                    f"{where}: with tuned rates the held-out loss falls with both",
                    min(fell.values()) > one,
                    f"{said}; seeds explain {one:.4f}",
                )
            )
            lead = fell["uls"] - fell["els"]
            claims.append(
                (
                    f"{where}: ULS is at least as good as ELS, both tuned, with G = {GROUP}",
                    lead >= -two,
                    f"ahead by {lead:.4f}; seeds explain {two:.4f}",
                )
            )
    if found:
        costs = [row["rule"] - row["loss"] for row in found]
        powers = ", ".join(f"{row['power']:+d}" for row in found)
        numbers = f"by {min(costs):.4f} to {max(costs):.4f}"
        what = f"ours: the rule's rate costs at most {NEAR:g} nats"
        claims.append((what, max(costs) <= NEAR, numbers))
        what = "ours: no learning rate is at the edge of those that were tried"
        claims.append((what, all(row["inside"] for row in found), f"powers of 3: {powers}"))
    return claims


def plot(rows: Sequence[Row]) -> Figure:
    """A panel for each source: held-out loss of the first seed against the rate."""
    names = list(dict.fromkeys(row["source"] for row in rows))
    epsilons = sorted({row["epsilon"] for row in rows})
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.6 * len(names), 3.6), squeeze=False, layout="constrained"
    )
    first = min(row["seed"] for row in rows)
    for axis, name in zip(axes[0], names, strict=True):
        own = [row for row in rows if (row["source"], row["seed"]) == (name, first)]
        for (epsilon, algorithm), series in sorted(
            by(own, lambda row: (row["epsilon"], row["algorithm"])).items()
        ):
            series = sorted(series, key=lambda row: row["power"])
            values = [[row[key] for row in series] for key in ("learning_rate", "loss")]
            label = f"{algorithm.upper()}, {at_epsilon(epsilon).replace('at', 'ε =')}"
            style = STYLES[epsilons.index(epsilon) % len(STYLES)]
            axis.plot(*values, style, color=common.COLOURS[algorithm.upper()], label=label)
        axis.axhline(own[0]["loss_before"], color="black", linestyle=":", label="before training")
        axis.set_xscale("log")
        axis.set_ylim(top=own[0]["loss_before"] + 0.3)  # what diverged is beyond
        axis.set(title=f"{name}, G = {GROUP}", xlabel="learning rate")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="held-out loss (nats per token)")
    common.legend_below(figure)
    return figure


FIGURES = {NAME: plot}


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    out = common.place_of(given) if given.dry_run else common.out_of(given)
    planned = len(settings.sources) * len(settings.epsilons) * len(ALGORITHMS)
    if given.dry_run:
        done, left = len(kept(out / f"{NAME}.jsonl")), todo(settings, known(out, settings))
        count = done + len(left)
        gradients = count * settings.num_steps * settings.budget
        hours = gradients * settings.max_length * settings.seconds_per_token / 7200
        print(f"{planned} settings: {count} trainings and more where the best rate is at an end or")
        print(f"not the rule's, {done} of them done: about {hours:.1f} hours on two cores for all")
        return
    file, ends = out / f"{NAME}.jsonl", time.monotonic() + 60 * given.minutes
    for source in dict.fromkeys(cell.source for cell in todo(settings, known(out, settings))):
        real_model.opened(source, settings)
    while left := todo(settings, known(out, settings)):
        minutes = max(0.0, ends - time.monotonic()) / 60
        compute(train, left, settings, file, minutes, given.processes)
        if minutes == 0:
            break
    rows = known(out, settings)
    if not kept(file):
        return
    table = as_written([{**row, "planned": planned} for row in rows])
    common.finish(
        NAME,
        given.scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        run_minutes=round(sum(row["cpu_seconds"] for row in kept(file)) / 60, 1),
        data={
            row["source"]: common.origin(row["source"], row["fingerprint"])
            for row in {row["source"]: row for row in rows}.values()
        },
        model={
            **real_model.described(settings),
            "parameters_by_rank": {settings.ranks[0][0]: rows[0]["num_parameters"]},
        },
        trainings=kept(file),
    )


if __name__ == "__main__":
    main()
