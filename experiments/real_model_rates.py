"""What a tuned rate buys on the real model: real_model.py with rates beside those of the rule.

real_model.py takes the rate that `fedsim train` takes where nothing is said of it. Here it is tuned
for both algorithms alike, with adapters of the first rank, at each epsilon of each source: each
with G = 1, the best group of both at epsilon 1 and 8 there, and without noise also with the best
group that each has then, ELS the median's and ULS G = 4. By the first seed: the rule's rate times 3
to the power of -1, 0 and 1, and further while the best is at an end. The best is trained with the
other seed, too. Rows with the rule's own rate are those of real_model.py, where it has them. Each
test was committed before the runs that it is about.

Rows are appended to real_model_rates.jsonl beside the results as they come; the same command goes
on with what is missing.

    python -m experiments.real_model_rates --scale small [--minutes 60]    (--dry-run: its cost)
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments import real_model
from experiments.harness import common
from experiments.harness.claims import (
    GAIN_SHARE,
    Verdict,
    ahead,
    cell_error,
    mean_error,
    no_worse,
)
from experiments.harness.processes import compute
from experiments.harness.records import as_written
from experiments.harness.rows import (
    Row,
    Rows,
    by,
    kept,
    losses_by_power,
    over_seeds,
    powers_to_try,
)
from experiments.real_model import MEDIAN, SETTINGS, Settings
from experiments.real_model_views import at_epsilon, in_words

NAME = "real_model_rates"
ALGORITHMS = ("els", "uls")
WITH_NOISE, WITHOUT_NOISE = {"els": 1, "uls": 1}, {"els": MEDIAN, "uls": 4}
"""Groups that are compared: the best ones of real_model.py."""
MOST = 3  # powers
BLOCK = ("source", "epsilon")
"""Columns; settings that are alike in these have the same seeds."""
NEAR = 0.1
"""Nats that the rule's rate may cost."""
SETTING = ("source", "epsilon", "algorithm", "group")
STYLES = ("-o", "--s", ":^")
SIZES = {"els": {"linewidth": 3, "markersize": 9}, "uls": {"markersize": 4.5}}
"""ULS is drawn on ELS, on which it lies."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    source: str
    epsilon: float
    algorithm: str
    group: int
    seed: int
    power: int
    """The rate is the rule's times 3 to the power."""


def train(cell: Cell, settings: Settings) -> Row:
    """What comes of a cell."""
    own = dataclasses.asdict(cell)
    power, (rank, _) = own.pop("power"), settings.ranks[0]
    return {**real_model.train(real_model.Cell(**own, rank=rank), settings, power), "power": power}


def contests(epsilon: float) -> list[dict[str, int]]:
    """The groups that are compared at an epsilon."""
    return [WITH_NOISE, *([WITHOUT_NOISE] if math.isinf(epsilon) else [])]


def planned(settings: Settings) -> list[tuple[str, float, str, int]]:
    """All settings whose rates are tuned, those of the second contest last."""
    epsilons = sorted(settings.epsilons, key=lambda each: (math.isinf(each), -each))
    return [
        (source, epsilon, algorithm, groups[algorithm])
        for groups in (WITH_NOISE, WITHOUT_NOISE)
        for epsilon in epsilons
        if groups in contests(epsilon)
        for source, _ in settings.sources
        for algorithm in ALGORITHMS
    ]


def known(out: Path, settings: Settings) -> Rows:
    """The rows that were kept, and those of the rule's rate from real_model.py."""
    (rank, _), asked = settings.ranks[0], planned(settings)
    rule = [
        {**row, "power": 0}
        for row in kept(out / f"{real_model.NAME}.jsonl")
        if row["rank"] == rank and setting_of(row) in asked
    ]
    return rule + kept(out / f"{NAME}.jsonl")


def todo(settings: Settings, rows: Rows) -> list[Cell]:
    """The trainings that are known to be needed, and not there."""
    first, *others = settings.seeds
    cells = []
    for setting in planned(settings):
        losses = of_powers(rows, setting, first)
        seeds = {power: [first] for power in powers_to_try(losses, MOST) if power not in losses}
        if not seeds:
            seeds = dict.fromkeys((0, min(losses, key=losses.__getitem__)), others)
        cells += [Cell(*setting, seed, power) for power, each in seeds.items() for seed in each]
    there = {(*setting_of(row), row["seed"], row["power"]) for row in rows}
    return [cell for cell in cells if dataclasses.astuple(cell) not in there]


def setting_of(row: Row) -> tuple:
    """Of which setting a row is."""
    return tuple(row[name] for name in SETTING)


def of_powers(rows: Sequence[Row], setting: tuple, seed: int) -> dict[int, float]:
    """The losses by how far the rate is from the rule's."""
    own = (row for row in rows if setting_of(row) == setting)
    return losses_by_power(row for row in own if row["seed"] == seed)


def tuned(rows: Sequence[Row]) -> Rows:
    """A row for each setting, of the best rate and of the rule's, where both have all seeds.
    `inside`: the best is at no end of those that were tried."""
    seeds, found = {row["seed"] for row in rows}, []
    for setting, own in by(rows, setting_of).items():
        losses = of_powers(own, setting, min(seeds))
        if not {-1, 0, 1} <= set(losses):
            continue
        best = min(losses, key=losses.__getitem__)
        own = sorted(own, key=lambda row: row["seed"])
        each = [[row["loss"] for row in own if row["power"] == power] for power in (0, best)]
        if all(len(values) == len(seeds) for values in each):
            inside = min(losses) < best < max(losses)
            row = {**dict(zip(SETTING, setting, strict=True)), "power": best, "inside": inside}
            row |= {"loss_before": own[0]["loss_before"], "rule": over_seeds(each[0])["loss"]}
            found.append({**row, **over_seeds(each[1])})
    return found


def check(rows: Sequence[Row]) -> list[tuple[str, Verdict, str]]:
    """By the means over seeds of the best rates. A claim is judged when its cells are there."""
    found, planned = tuned(rows), rows[0]["planned"]
    claims: list[tuple[str, Verdict, str]] = [
        ("ours: all settings were tuned", len(found) == planned, f"{len(found)} of {planned}")
    ]
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in found if row["source"] == source]
        tried = sorted({row["epsilon"] for row in own})
        for epsilon, groups in ((each, groups) for each in tried for groups in contests(each)):
            pair = [row for row in own if row["epsilon"] == epsilon]
            pair = [row for row in pair if row["group"] == groups[row["algorithm"]]]
            if len(pair) < len(ALGORITHMS):
                continue
            pool = pooled(found, source, epsilon)
            one, two = mean_error(pool), math.sqrt(2) * cell_error(pool, BLOCK)
            where = f"{source}, {at_epsilon(epsilon)}, {compared(groups)}"
            fell = {row["algorithm"]: row["loss_before"] - row["loss"] for row in pair}
            said = ", ".join(f"{name.upper()} by {value:.4f}" for name, value in fell.items())
            claims.append(
                (
                    f"{where}: with tuned rates the held-out loss falls with both",
                    ahead([*fell.values()], one),
                    f"{said}; standard error {one:.4f}",
                )
            )
            lead = fell["uls"] - fell["els"]
            claims.append(
                (
                    f"{where}: ULS is at least as good as ELS, both tuned",
                    no_worse(lead, two, GAIN_SHARE * fell["els"]),
                    f"ahead by {lead:.4f}; standard error {two:.4f}",
                )
            )
    if found:
        costs = [row["rule"] - row["loss"] for row in found]
        errors = [
            math.sqrt(2)
            * cell_error(pooled(found, row["source"], row["epsilon"]), BLOCK)
            * (row["power"] != 0)  # it is the rule's own
            for row in found
        ]
        powers = ", ".join(f"{row['power']:+d}" for row in found)
        numbers = f"by {min(costs):.4f} to {max(costs):.4f}"
        what = f"ours: the rule's rate costs at most {NEAR:g} nats"
        held = no_worse([-cost for cost in costs], errors, NEAR)
        claims.append((what, held, f"{numbers}, standard error up to {max(errors):.4f}"))
        what = "ours: no learning rate is at the edge of those that were tried"
        claims.append((what, all(row["inside"] for row in found), f"powers of 3: {powers}"))
    return claims


def pooled(found: Rows, source: str, epsilon: float) -> Rows:
    """The settings of a source whose seeds' variance is pooled: with noise, or without."""
    return [
        row
        for row in found
        if row["source"] == source and math.isinf(row["epsilon"]) == math.isinf(epsilon)
    ]


def compared(groups: dict[str, int]) -> str:
    """The groups of a contest, in words."""
    if len(set(groups.values())) == 1:
        return in_words(groups["els"])
    return ", ".join(f"{name.upper()} with {in_words(group)}" for name, group in groups.items())


def plot(rows: Sequence[Row]) -> Figure:
    """A panel for each source: held-out loss of the first seed against the rate."""
    names = list(dict.fromkeys(row["source"] for row in rows))
    epsilons = sorted({row["epsilon"] for row in rows})
    figure, axes = common.panels(1, len(names), 4.6, 3.6)
    first = min(row["seed"] for row in rows)
    for axis, name in zip(axes[0], names, strict=True):
        own = [row for row in rows if (row["source"], row["seed"]) == (name, first)]
        for (_, epsilon, algorithm, group), series in sorted(by(own, setting_of).items()):
            series = sorted(series, key=lambda row: row["power"])
            values = [[row[key] for row in series] for key in ("learning_rate", "loss")]
            label = f"{algorithm.upper()}, {in_words(group)}, "
            label += at_epsilon(epsilon).replace("at", "ε =")
            look = {"color": common.COLOURS[algorithm.upper()], "label": label, **SIZES[algorithm]}
            look |= {} if group == WITH_NOISE[algorithm] else {"markerfacecolor": "white"}
            axis.plot(*values, STYLES[epsilons.index(epsilon) % len(STYLES)], **look)
        axis.axhline(own[0]["loss_before"], color="black", linestyle=":", label="before training")
        axis.set_xscale("log")
        least = min(loss for row in own if math.isfinite(loss := row["loss"]))
        axis.set_ylim(least - 0.1, own[0]["loss_before"] + 0.3)  # what diverged is beyond
        axis.set(title=name, xlabel="learning rate")
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
    out = common.out_of(given)
    count_of_all = len(planned(settings))
    if given.dry_run:
        done, left = len(kept(out / f"{NAME}.jsonl")), todo(settings, known(out, settings))
        trainings = done + len(left)
        hours = real_model.hours(trainings, settings)
        print(
            f"{count_of_all} settings: {trainings} trainings, {done} of them done, and more where"
        )
        print(f"the best rate is at an end or not the rule's: about {hours:.1f} hours on two cores")
        return
    file, ends = out / f"{NAME}.jsonl", time.monotonic() + 60 * given.minutes
    for source in dict.fromkeys(cell.source for cell in todo(settings, known(out, settings))):
        real_model.opened(source, settings)
    while left := todo(settings, known(out, settings)):
        minutes = max(0.0, ends - time.monotonic()) / 60
        compute(train, left, settings, file, minutes, given.processes)
        if minutes == 0:
            break
    rows, trainings = known(out, settings), kept(file)
    if not trainings:
        return
    table = as_written([{**row, "planned": count_of_all} for row in rows])
    common.finish(
        NAME,
        given.scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        data={
            row["source"]: common.origin(row["source"], row["fingerprint"])
            for row in {row["source"]: row for row in rows}.values()
        },
        model={
            **real_model.described(settings),
            "parameters_by_rank": {settings.ranks[0][0]: rows[0]["num_parameters"]},
        },
        trainings=trainings,
    )


if __name__ == "__main__":
    main()
