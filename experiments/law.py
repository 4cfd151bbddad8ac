"""One law for both algorithms: what a training gains follows from x = M / (sigma L(G)).

Beyond the paper. L(G) is the norm of a user's gradient of G texts, of ELS L(1), measured at the
starting model before any training. The law was found in the trainings of regime.py: a curve of
log x, frozen here before any run. It predicts 20 cells, of which 18 are settings of the curve's
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

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from experiments import regime, regime_views
from experiments.harness import common
from experiments.harness.claims import Claims, Quantity, cell_error, judged, mean_error
from experiments.harness.processes import compute
from experiments.harness.records import RESULTS, as_written, came_from, read_rows
from experiments.harness.rows import Row, Rows, by, kept, missing
from experiments.regime_views import ALL, FEW

NAME, PREDICTIONS = "law", "law_predictions"
PLACE = ("data", "epsilon", "algorithm", "group_size")
"""What trainings of a cell have in common."""
CURVE = (-0.00156381, 0.12410020, 0.04361727)
"""The gain in nats, as a polynomial of log x, the highest power first. In sample: R^2 0.991."""
RESIDUAL = 0.01339
"""Standard deviation of the 31 gains around the curve (28 degrees of freedom), in nats."""
WITHOUT_NORMS = (-0.00223214, 0.12267278, -0.21659876)
"""The same for M / sigma: the norms left out. In sample: R^2 0.870."""
FREEDOM, CELLS, SEEDS = 28, 20, 2


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


def signal(expected_count: float, noise_multiplier: float, norm: float = 1.0) -> float:
    """x = M / (sigma L(G)): of a step, the length of the sum of clipped gradients if all had one
    direction, over the noise of a coordinate, in units of an unclipped gradient's norm."""
    return expected_count / (noise_multiplier * norm)


def gain(x: float, curve: Sequence[float] = CURVE) -> float:
    """What a training is predicted to gain, in nats."""
    return float(np.polyval(curve, math.log(x)))


def half_width() -> float:
    """Of the 95 % interval around a prediction, in nats: how far the 31 cells are from the curve.
    That the curve itself was fitted is left out: it makes it longer by up to 13 %, where x is
    small."""
    return float(stats.t.ppf(0.975, FREEDOM)) * RESIDUAL


def predicted(row: Row) -> Row:
    """What is said of a cell before it is trained. Args: row: its count, noise multiplier, norm."""
    x = signal(row["expected_count"], row["noise_multiplier"], row["norm"])
    plain = signal(row["expected_count"], row["noise_multiplier"])
    return {"x": x, "predicted": gain(x), "predicted_plain": gain(plain, WITHOUT_NORMS)}


def whole(rows: Rows) -> Rows:
    """A row for each cell with all of its fresh seeds: its gain, over the seeds, and its `loss`,
    which is minus the gain, for the tests of verdicts.py."""
    found = []
    for own in by([row for row in rows if row["fresh"]], cell_of).values():
        own = sorted(own, key=lambda row: row["seed"])
        gains = [row["gain_test"] for row in own]
        if len(gains) >= SEEDS:
            each = {"by_seed": " ".join(f"{-gain:.6g}" for gain in gains), "seeds": len(gains)}
            mean, std = float(np.mean(gains)), float(np.std(gains, ddof=1))
            found.append({**own[0], **each, "gain": mean, "loss": -mean, "loss_std": std})
    return found


def cell_of(row: Row) -> tuple:
    """Which of the 20 cells it is of."""
    return tuple(row[name] for name in ("data", "epsilon", "algorithm", "group_size"))


def quantities(rows: Rows) -> dict[str, Quantity]:
    """Of all cells together, and of the settings that claims are made of; nothing before all cells
    have their seeds."""
    cells = whole(rows)
    if len(cells) < CELLS:
        return {}
    # A gain's own error: seeds move all cells alike, so that many cells do not average it away.
    error = mean_error(cells)
    away, plain = off(cells), off(cells, "predicted_plain")
    gains = [cell["gain"] for cell in cells]
    rank, rank_plain = (
        float(np.asarray(stats.spearmanr([cell[name] for cell in cells], gains))[0])
        for name in ("x", "predicted_plain")
    )
    lead = float(np.abs(plain).mean() - 2 * np.abs(away).mean())
    own = [row for row in rows if not row["fresh"] and row["power"] == 0]  # the curve's own rate
    at_rule = np.array([row["gain_test"] - row["predicted"] for row in own])
    found = {
        "off": Quantity(
            {f"on average {away.mean():+.4f}, without sign": np.abs(away).mean()}, error
        ),
        "inside": Quantity({f"within {half_width():.4f}": (np.abs(away) <= half_width()).sum()}),
        "rank": Quantity({f"by M / sigma {rank_plain:.3f}, by x": rank}),
        "without norms": Quantity({"beyond twice": lead}, math.sqrt(5) * error),
        "off at the rule": Quantity(
            {f"on average {at_rule.mean():+.4f}, without sign": np.abs(at_rule).mean()},
            error * math.sqrt(SEEDS),
        ),
        "shift": shift(cells),
    }
    for (data, epsilon), each in by(cells, lambda cell: (cell["data"], cell["epsilon"])).items():
        error = math.sqrt(2) * cell_error(each, ("data", "epsilon"))
        chosen = best(each, "uls", "predicted")
        others = [cell for cell in each if cell["algorithm"] == "uls" and cell is not chosen]
        rival = best(others, "uls")
        groups = f"G = {chosen['group_size']} ahead of G = {rival['group_size']}"
        came, said = (
            best(each, "uls", name)[name] - best(each, "els", name)[name]
            for name in ("gain", "predicted")
        )
        where = f"{data}, epsilon {epsilon:g}:"
        found |= {
            f"{where} group": Quantity({groups: chosen["gain"] - rival["gain"]}, error),
            f"{where} lead": Quantity({f"predicted {said:.4f}, found": came}, error),
            f"{where} off": Quantity({f"{came:.4f}, beyond {said:.4f}": came - said}, error),
        }
    return found


def off(cells: Rows, name: str = "predicted") -> np.ndarray:
    """How far each gain is above its prediction, in nats."""
    return np.array([cell["gain"] - cell[name] for cell in cells])


def shift(cells: Rows) -> Quantity:
    """How far the gains of settings that the curve was fitted to are above what the same settings
    gained there, from another starting model, untuned."""
    first = regime_views.averaged(read_rows(RESULTS / "small" / f"{regime.NAME}.csv"))
    most = max(row["budget"] for row in first)  # as here
    first = [row for row in first if (row["budget"], row["times"]) == (most, 1)]
    before = {cell_of(row): row["loss_before"] - row["loss"] for row in first}
    again = [cell["gain"] - before[cell_of(cell)] for cell in cells if cell_of(cell) in before]
    values = {f"mean of {len(again)} settings": float(np.mean(again))}
    return Quantity(values | {"the least": min(again), "the largest": max(again)})


def best(cells: Rows, algorithm: str, name: str = "gain") -> Row:
    """The cell of an algorithm with the largest gain, or prediction."""
    return max((c for c in cells if c["algorithm"] == algorithm), key=lambda cell: cell[name])


def check(rows: Rows) -> Claims:
    """Whether the gains came as they were predicted."""
    return judged(NAME, quantities(rows))


def plot(rows: Rows) -> Figure:
    """The law with its interval, and what came of the cells that it predicted."""
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    reach = np.geomspace(0.7, 100, 200)
    middle = np.array([gain(x) for x in reach])
    axis.plot(reach, middle, color="black", lw=1, label="the law, frozen before")
    axis.fill_between(reach, middle - half_width(), middle + half_width(), color="0.88")
    for (data, algorithm), own in by(whole(rows), lambda r: (r["data"], r["algorithm"])).items():
        name = f"{algorithm.upper()}, {'few users' if data == FEW else 'all users'}"
        marker = "o" if algorithm == "uls" else "s"
        axis.plot([c["x"] for c in own], [c["gain"] for c in own], marker, ms=5, label=name)
    axis.set(xscale="log", xlabel="x = M / (σ L(G))", ylabel="gain of held-out loss (nats)")
    axis.grid(alpha=0.3)
    common.legend_below(figure)
    return figure


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
