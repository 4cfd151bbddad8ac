"""One law for both algorithms: what a training gains follows from x = M / (sigma L(G)).

Beyond the paper. L(G) is the norm of a user's gradient of G texts, of ELS L(1), measured at the
starting model before any training. The law was found in the trainings of regime.py: a curve of
log x, frozen in law_claims.py. Here it predicts 20 cells, of which 18 are settings of the curve's
own cells, with another starting model, tuned rates and new seeds. Then each is trained:
at three learning rates with one seed, of which validation users choose one, and at that rate with
two fresh seeds, whose gains on test users are held against the predictions.

Validation and test users are halves of regime.py's held-out users, by their place. What was
measured and predicted is in law_predictions (.jsonl, .csv), which come before the first training;
rows of trainings are appended to law.jsonl beside the results, and the same command goes on.

    python -m experiments.law --scale small [--minutes 60] [--processes 1]     (--dry-run: cost)
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import regime
from experiments.harness import common
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from, read_rows
from experiments.harness.rows import Row, Rows, kept, missing
from experiments.law_claims import check, plot, predicted
from experiments.regime_claims import ALL, FEW

NAME, PREDICTIONS = "law", "law_predictions"
PLACE = ("data", "epsilon", "algorithm", "group_size")
"""What trainings of a cell have in common."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    regime: regime.Settings
    """The trainings; its group sizes are those of which norms are measured."""
    few_groups: tuple[int, ...] = (1, 4, 16, 64)
    """Of ULS, where users are few; ELS has 1 and the median user's number of texts."""
    all_els: int = 8
    """Of ELS beside the median's, for all users; ULS has 1 and what Estimate-and-Double says."""
    powers: tuple[int, ...] = (0, -1, 1)
    """Of two, by which the rule's rate is multiplied."""
    seed: int = 10
    fresh_seeds: tuple[int, ...] = (11, 12)
    test_examples: int = 2048


SETTINGS = {
    "smoke": Settings(
        dataclasses.replace(regime.SETTINGS["smoke"], data=(FEW,), uls_groups=(1, 2)),
        few_groups=(1,),
        powers=(0,),
        fresh_seeds=(11,),
        test_examples=16,
    ),
    "small": Settings(
        dataclasses.replace(regime.SETTINGS["small"], uls_groups=(1, 4, 16, 64)),
    ),
    "paper": Settings(
        dataclasses.replace(regime.SETTINGS["paper"], uls_groups=(1, 4, 16, 64)),
    ),
}
"""The curve is of trainings as long as those of `small`: at `paper` the order alone can hold."""


@dataclasses.dataclass(frozen=True)
class Place:
    """One of the cells: what is trained, at any rate and with any seed."""

    data: str
    epsilon: float
    algorithm: str
    group_size: int

    def trained(self, seed: int, power: int, fresh: bool = False) -> "Cell":
        """A training of it."""
        return Cell(self.data, self.epsilon, self.algorithm, self.group_size, seed, power, fresh)


@dataclasses.dataclass(frozen=True)
class Cell(Place):
    """A training."""

    seed: int
    power: int
    fresh: bool = False
    """Whether it is of the trainings that the law is judged by."""

    def of_regime(self, settings: Settings) -> regime.Cell:
        """As regime.py has it."""
        where = self.data, self.seed, self.algorithm, self.epsilon, self.group_size
        return regime.Cell(*where, settings.regime.budget)


def places(settings: Settings, looks: Mapping[str, Row]) -> Iterator[Place]:
    """All cells, few users first. Args: looks: a row of `regime.look` for each set of users."""
    shape = settings.regime
    for data, epsilon in itertools.product(reversed(shape.data), shape.epsilons):
        median = looks[data]["median_examples"]
        chosen = regime.heuristic(limited(settings), looks[data], epsilon, shape.budget)
        uls, els = {FEW: (settings.few_groups, 1), ALL: ((1, chosen), settings.all_els)}[data]
        yield from (Place(data, epsilon, "uls", group) for group in uls)
        yield from (Place(data, epsilon, "els", group) for group in (els, median))


def limited(settings: Settings) -> regime.Settings:
    """Estimate-and-Double chooses among the groups that it did in regime.py."""
    return dataclasses.replace(settings.regime, uls_groups=regime.Settings.uls_groups)


def tuning(settings: Settings, looks: Mapping[str, Row]) -> Iterator[Cell]:
    """The trainings that rates are chosen by."""
    for place, power in itertools.product(places(settings, looks), settings.powers):
        yield place.trained(settings.seed, power)


def fresh(settings: Settings, looks: Mapping[str, Row], rows: Rows) -> Iterator[Cell]:
    """Those that the law is judged by, of the cells whose rate is chosen."""
    for seed, place in itertools.product(settings.fresh_seeds, places(settings, looks)):
        if (power := best_power(place, rows, settings)) is not None:
            yield place.trained(seed, power, True)


def best_power(place: Place, rows: Rows, settings: Settings) -> int | None:
    """That with the largest gain on validation users; None before all were tried."""
    own = [row for row in rows if dataclasses.asdict(place).items() <= row.items()]
    gains = {row["power"]: row["gain_validation"] for row in own if not row["fresh"]}
    if set(gains) != set(settings.powers):
        return None
    return max(gains, key=lambda power: gains[power] if math.isfinite(gains[power]) else -math.inf)


def predictions(settings: Settings, looks: Mapping[str, Row]) -> Rows:
    """A row for each cell, of what is known before it is trained."""
    found = []
    for place in places(settings, looks):
        cell = place.trained(settings.seed, 0)
        facts = regime.facts_of(regime.prepared(cell.of_regime(settings), settings.regime))
        norms = looks[place.data]["norms"]
        norm = norms[str(place.group_size if place.algorithm == "uls" else 1)][0]
        facts = {name: facts[name] for name in ("expected_count", "noise_multiplier", "model")}
        row = {**dataclasses.asdict(place), **facts, "norm": norm}
        found.append({**row, **predicted(row)})
    return found


def halves(users: Any, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (validation, test) users: every second user is of either, evenly spaced rows."""
    owner = np.repeat(np.arange(users.num_users), np.diff(users.offsets))
    each = (np.flatnonzero(owner % 2 == half) for half in range(2))
    validation, test = (
        rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)] for rows in each
    )
    return validation, test


def train(cell: Cell, settings: Settings) -> Row:
    """What comes of a training."""
    began, used = time.monotonic(), time.process_time()
    at = regime.prepared(cell.of_regime(settings), settings.regime)
    rows = halves(at.data.eval_users, settings.test_examples)
    average, last = at.trained(2.0**cell.power, regime.ROWS)
    before, after, ended = (
        [at.engine.begin_mean_nats(params, "eval_users", half)() for half in rows]
        for params in (at.params, average, last)
    )
    facts = regime.facts_of(at)
    return {
        **dataclasses.asdict(cell),
        **facts,
        "learning_rate": facts["learning_rate"] * 2.0**cell.power,
        "loss_before_test": before[1],
        "gain_validation": before[0] - after[0],
        "gain_test": before[1] - after[1],
        "gain_test_last": before[1] - ended[1],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        **came_from(),
    }


@common.mistakes()
def main() -> None:
    """Predict, train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    out = common.out_of(given)
    file, norms = out / f"{NAME}.jsonl", out / f"{PREDICTIONS}.jsonl"
    shape = settings.regime
    if given.dry_run:
        trainings = len(settings.powers) + len(settings.fresh_seeds)
        print(*(f"{data}, epsilon {e:g}" for data in shape.data for e in shape.epsilons), sep="; ")
        gradients = 20 * trainings * shape.num_steps * shape.budget
        hours = gradients * shape.seconds_per_gradient / 3600 / 2
        print(f"20 cells, {20 * trainings} trainings, {gradients:,} gradients, ", end="")
        print(f"{len(kept(file))} trainings done: about {hours:.1f} hours on two cores for all")
        return
    looks = regime.looked(shape, norms, given.processes)
    about = regime.described(shape, looks)
    if not (out / f"{PREDICTIONS}.csv").exists():
        said = predictions(settings, looks)
        norms_of = list(looks.values())
        common.finish(
            PREDICTIONS, given.scale, out, settings, said, {}, [], **about, trainings=norms_of
        )
    if given.minutes:
        ends = time.monotonic() + 60 * given.minutes
        cells = missing(tuning(settings, looks), file)
        compute(train, cells, settings, file, given.minutes, given.processes)
        cells = missing(fresh(settings, looks, kept(file)), file)
        left = max(0.0, (ends - time.monotonic()) / 60)
        compute(train, cells, settings, file, left, given.processes)
    write(settings, out, given.scale, about)


def write(settings: Settings, out: Path, scale: str, about: Mapping[str, Any]) -> None:
    """The record of the trainings that there are, beside what was predicted of them."""
    rows: Sequence[Row] = kept(out / f"{NAME}.jsonl")
    if not rows:
        return
    said = {tuple(r[n] for n in PLACE): r for r in read_rows(out / f"{PREDICTIONS}.csv")}
    names = ("norm", "x", "predicted", "predicted_plain")
    of = [said[tuple(row[name] for name in PLACE)] for row in rows]
    both = zip(rows, of, strict=True)
    table = as_written([{**row, **{name: one[name] for name in names}} for row, one in both])
    common.finish(
        NAME,
        scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        trainings=rows,
        **about,
    )


if __name__ == "__main__":
    main()
