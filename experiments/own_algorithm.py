"""Your own algorithm in the regime of regime.py, beside both of the paper's, at one epsilon.

An algorithm is a class, MODULE:CLASS, that is a subclass of `fedsim.els.ELS` or `fedsim.uls.ULS`
with an `event`, `draw` or `gradient` of its own. It gets the group size, the noise for its event
and the learning rate that its base gets: the median user's number of texts, or what
Estimate-and-Double says. Draws and noise of a seed are those of its base. What its event claims is
its author's to prove. Without one it is ULS itself, which comes to the same losses.

Rows are appended to own_algorithm.jsonl beside the results; the same command goes on. Without
--out they are in the folder of the class's name.

    python -m experiments.own_algorithm --algorithm MODULE:CLASS [--minutes 60] [--dry-run]
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import regime
from experiments.harness import common
from experiments.harness.claims import ahead, cell_error
from experiments.harness.processes import compute
from experiments.harness.records import as_written
from experiments.harness.rows import Row, Rows, by, kept, over_seeds
from fedsim.config import Algorithm

NAME, NORMS = "own_algorithm", "own_algorithm_norms"
SEEDS = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    regime: regime.Settings
    algorithm: str = "fedsim.uls:ULS"


SETTINGS = {
    "smoke": Settings(regime.SETTINGS["smoke"]),
    "small": Settings(dataclasses.replace(regime.SETTINGS["small"], seeds=(0, 1))),
    "paper": Settings(dataclasses.replace(regime.SETTINGS["paper"], seeds=(0, 1))),
}


def cells(settings: Settings, looks: Mapping[str, Row]) -> Iterator[regime.Cell]:
    """All trainings. Args: looks: a row of `regime.look` for each set of users."""
    shape = settings.regime
    base, _ = common.algorithm_of(settings.algorithm)
    for seed, epsilon, data in itertools.product(shape.seeds, shape.epsilons, shape.data):
        look = looks[data]
        groups = {
            "els": look["median_examples"],
            "uls": regime.heuristic(shape, look, epsilon, shape.budget),
        }
        groups[settings.algorithm] = groups[base]
        for algorithm, group in groups.items():
            yield regime.Cell(data, seed, algorithm, epsilon, group, shape.budget)


def averaged(rows: Rows) -> dict[tuple[str, float], dict[str, Row]]:
    """By users and epsilon, and by algorithm: a row over the seeds that all algorithms have."""
    found = {}
    for place, own in by(rows, lambda row: (row["data"], row["epsilon"])).items():
        own = sorted(own, key=lambda row: row["seed"])  # they end in any order
        each = by(own, lambda row: row["algorithm"])
        seeds = set.intersection(*({row["seed"] for row in same} for same in each.values()))
        found[place] = {
            name: {
                **same[0],
                **over_seeds([row["loss"] for row in same if row["seed"] in seeds]),
            }
            for name, same in each.items()
        }
    return found


def check(rows: Rows) -> common.Claims:
    """Whether it is ahead of each of the paper's algorithms, wherever it was trained."""
    found = averaged(rows)
    others = [row["algorithm"] for row in rows if row["algorithm"] not in set(Algorithm)]
    own = next(iter(others), "")
    claims = []
    for rival in map(str, Algorithm):
        what = f"{own} is ahead of {rival.upper()} everywhere"
        pairs = [each for each in found.values() if own in each and rival in each]
        if not pairs or min(row["seeds"] for each in pairs for row in each.values()) < SEEDS:
            claims.append((what, None, f"needs {SEEDS} seeds of all"))
            continue
        leads = [each[rival]["loss"] - each[own]["loss"] for each in pairs]
        every = [row for each in pairs for row in each.values()]
        error = math.sqrt(2) * cell_error(every, ("data", "epsilon"))
        numbers = f"by {min(leads):.4f} to {max(leads):.4f}, standard error {error:.4f}"
        claims.append((what, ahead(leads, error), numbers))
    return claims


def plot(rows: Sequence[Row]) -> Figure:
    """Loss of each algorithm against epsilon, a panel for each set of users."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = common.panels(1, len(names), 4, 3.4)
    found = averaged(list(rows))
    for axis, name in zip(axes[0], names, strict=True):
        lines: dict[str, list[tuple]] = {}
        for (data, epsilon), each in sorted(found.items()):
            for algorithm, row in each.items() if data == name else ():
                lines.setdefault(algorithm, []).append((epsilon, row["loss"], row["loss_std"]))
        for algorithm, points in lines.items():
            axis.errorbar(*np.transpose(points), fmt="-o", capsize=2, label=short(algorithm))
        axis.set(title=name, xlabel="ε", xscale="log")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out loss (nats per token)")
    common.legend_below(figure)
    return figure


def short(algorithm: str) -> str:
    """Its name in a figure."""
    return algorithm.partition(":")[2] or algorithm.upper()


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    about: dict[str, Any] = {"default": Settings.algorithm, "metavar": "MODULE:CLASS"}
    given = common.resumable(__doc__, "training", processes=True, algorithm=about)
    settings = dataclasses.replace(SETTINGS[given.scale], algorithm=given.algorithm)
    shape, (base, _) = settings.regime, common.algorithm_of(given.algorithm)
    given.out = given.out or common.place_of(given) / short(given.algorithm)
    if given.dry_run:
        trainings = 3 * len(shape.seeds) * len(shape.epsilons) * len(shape.data)
        print(f"{given.algorithm}, as {base.upper()}; " + "; ".join(shape.data))
        gradients = trainings * shape.num_steps * shape.budget
        hours = gradients * shape.seconds_per_gradient / 7200
        print(
            f"{trainings} trainings, {gradients:,} gradients: about {hours:.1f} hours on two cores"
        )
        return
    out = common.out_of(given)
    file, norms = out / f"{NAME}.jsonl", out / f"{NORMS}.jsonl"
    looks = regime.looked(shape, norms, given.processes)
    todo = list(cells(settings, looks))
    if given.minutes:
        left = regime.to_train(todo, kept(file), regime.model_of(shape))
        compute(regime.train, left, shape, file, given.minutes, given.processes)
    rows = kept(file)
    rows = list(itertools.compress(rows, regime.that_count(rows, todo)))
    if not rows:
        return
    table = as_written(rows)
    common.finish(
        NAME,
        given.scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        trainings=rows,
        **regime.described(shape, looks),
    )


if __name__ == "__main__":
    main()
