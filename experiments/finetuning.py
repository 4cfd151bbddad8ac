"""What the fine-tuning experiments share: their command line, data sets, the model, cells of many
runs with tuned learning rates, and the grid of ULS.

`small` and `long`, which has ten times the steps and fewer cells, start from the model that
starting_model.py makes, `paper` from a model of pretraining.py; `--model`
names another one. `--data` takes one's own data set, which `fedsim data build` built, in the place
of the experiment's: nothing is assumed of it, and the model is fresh where none is named.

Runs are kept in one place under the user's cache by their settings, so an experiment that is run
again, or that shares runs with another, computes only what is new (harness/run_many.py).
"""

import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments import starting_model
from experiments.assumed_users import epsilon_that_holds
from experiments.data.stand_ins import CC_NEWS, SHOWN, STACK_OVERFLOW, files_of, stands_for
from experiments.harness import experiment
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import CAME, Row, Rows, over_seeds
from experiments.harness.run_many import Runs, run_many
from fedsim import files
from fedsim.config import ADD_OR_REMOVE, Algorithm, PrivacyConfig, RunConfig, run_config
from fedsim.data import Dataset, corpora
from fedsim.errors import ConfigError, DataError
from fedsim.tuning import jobs_of
from fedsim.tuning.doubling import Configuration

SMALL: dict[str, str] = dict(zip((STACK_OVERFLOW, CC_NEWS), starting_model.USERS, strict=True))
PAPER = {STACK_OVERFLOW: "stack-overflow", CC_NEWS: "cc-news"}  # built by these recipes
PAPER_STEPS = {STACK_OVERFLOW: 10_000, CC_NEWS: 2_000}
PAPER_MODEL = "models/c4"
FRESH_MODEL = "tiny"  # for one's own data
OF_STAND_INS = ("small", "long")
"""Scales whose data and starting model are made on the way."""

# For estimates. Gradients of the model `tiny` with texts up to 64 tokens on one core, and what a
# run takes beside them; of the paper's model, operations of a gradient, and of an accelerator.
GRADIENTS_PER_CORE_SECOND, SECONDS_PER_RUN = 500.0, 5.0
OPERATIONS, SPEED = {"paper": 6 * 350e6 * 128}, 1e14


EPSILONS = (1.0, 4.0, 16.0, 64.0)


@dataclasses.dataclass(frozen=True)
class Training:
    """What all runs of an experiment have in common."""

    num_steps: dict[str, int]
    """By data set; its keys are the data sets of the experiment."""
    epsilons: tuple[float, ...] = EPSILONS
    seeds: tuple[int, ...] = (0, 1)
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03)
    further_learning_rates: tuple[float, ...] = ()
    """Tried outwards, one by one, where the best of the others is at their end, until it is not."""
    clip_norms: tuple[float, ...] = (1.0,)
    """Of normalised clipping. Learning rate and clip norm are tuned, by the first seed (the paper
    tunes them throughout, on what is not said)."""
    optimizer: str = "adafactor"
    eval_examples: int = 512
    """Of validation data: what learning rates are tuned on, and Figures 4, 5 and 14 show."""
    test_examples: int | None = None
    """Evenly spaced; None: all."""
    max_length: int | None = None
    """Of data that are built on the way."""
    assumed_times: tuple[tuple[str, int], ...] = ((CC_NEWS, 10),)
    """Data sets that are accounted for as if they had so many times the users, as in the paper."""
    deltas: tuple[tuple[str, float], ...] = ()
    """By data set, where it is not n^-1.1 of the n training examples."""

    def on(self, name: str, **changed: Any) -> "Training":
        """On one data set alone."""
        return dataclasses.replace(self, num_steps={name: self.num_steps[name]}, **changed)


@dataclasses.dataclass(frozen=True)
class UlsGrid:
    """Equation 12: group sizes, cohort sizes."""

    training: Training
    group_sizes: tuple[int, ...]
    cohort_sizes: tuple[int, ...]

    @property
    def configurations(self) -> list[Configuration]:
        """Every pair."""
        pairs = itertools.product(self.group_sizes, self.cohort_sizes)
        return [Configuration(*pair) for pair in pairs]


SMOKE_TRAINING = Training(
    {STACK_OVERFLOW: 2}, (4.0,), (0,), (0.1,), eval_examples=16, test_examples=16, max_length=24
)
SMALL_TRAINING = Training(
    {STACK_OVERFLOW: 30, CC_NEWS: 30},
    further_learning_rates=(0.0003, 0.001, 0.1, 0.3),
    test_examples=4096,
)
LONG_TRAINING = dataclasses.replace(
    SMALL_TRAINING, num_steps={STACK_OVERFLOW: 300, CC_NEWS: 300}, epsilons=(1.0, 4.0, 16.0)
)
PAPER_TRAINING = Training(
    PAPER_STEPS,
    learning_rates=(0.01, 0.03, 0.1, 0.3),
    clip_norms=(0.1, 1.0),
    deltas=((CC_NEWS, 2.92e-8),),  # the paper's: of all examples, reserved ones among them
)
ULS_GRIDS = {
    "smoke": UlsGrid(SMOKE_TRAINING, (1, 2), (8, 16)),
    "small": UlsGrid(
        dataclasses.replace(SMALL_TRAINING, epsilons=(1.0, 4.0, 16.0)),
        (1, 2, 4, 8),
        (16, 32, 64, 128),
    ),
    "paper": UlsGrid(
        PAPER_TRAINING, tuple(2**n for n in range(9)), tuple(2**n for n in range(5, 13))
    ),
}
"""Of Figures 5, 13, 14 and 15, which are views of the same runs. Groups and cohorts are doubled, as
Estimate-and-Double does."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both algorithms, set by the heuristics, at every epsilon and budget."""

    training: Training
    budgets: tuple[int, ...]
    els_groups: tuple[int, ...] = (1, 8)
    """Of ELS beside the median user's, beyond the paper."""


COMPARISONS = {
    "smoke": Comparison(SMOKE_TRAINING, (8, 16)),
    "small": Comparison(SMALL_TRAINING, (32, 128, 512)),
    "long": Comparison(LONG_TRAINING, (128, 512), els_groups=(1,)),
    "paper": Comparison(PAPER_TRAINING, (512, 2048, 8192)),
}
"""Of Figures 6, 7 and 16 to 18, which share runs."""


@dataclasses.dataclass(frozen=True)
class Arguments(experiment.Arguments):
    """Of the command line: with the starting model, and one's own data set."""

    given_model: str | None = None
    data: str | None = None
    """One's own, instead of the experiment's."""
    planned: list[dict[str, Any]] = dataclasses.field(default_factory=list, compare=False)
    """The runs that there would be, in a dry run."""

    @classmethod
    def parse(cls, description: str | None, argv: Sequence[str] | None = None) -> Self:
        """What all experiments have, --model and --data."""
        parser = experiment.parser_of(description, ("smoke", "small", "long", "paper"))
        parser.add_argument("--model", help="a size, or a model to start from")
        what = "your own data set, built by `fedsim data build`, or pydocs; results go to "
        parser.add_argument("--data", metavar="NAME", help=f"{what}results/NAME")
        given = parser.parse_args(argv)
        came_from()  # what is committed while it trains is not what trains
        if given.data and given.scale == "smoke":
            expected = "small or more, with --data: smoke is on made-up text"
            raise ConfigError.of("scale", "smoke", expected)
        if given.data and given.out is None:
            given.out = Path("results") / Path(given.data).name
        out = experiment.out_of(given)
        return cls(given.scale, out, given.dry_run, given.model, given.data)

    @functools.cached_property
    def runs(self) -> Runs:
        """Kept for good, but at the scale that tests use."""
        directory = files.cache_dir() / "experiments" / self.scale
        if self.scale == "smoke":
            return Runs(self.out / "runs", here=True)
        file = self.out / "runs.jsonl" if self.scale == "long" and not self.data else None
        return Runs(directory, file, in_turn=self.scale in OPERATIONS)

    @property
    def model(self) -> str:
        """What is started from; at `small` it is made if need be."""
        if self.given_model or self.data:
            return self.given_model or FRESH_MODEL
        if self.scale in OF_STAND_INS and not self.dry_run:
            return str(starting_model.model())
        made = {"smoke": FRESH_MODEL, "paper": PAPER_MODEL}
        return made.get(self.scale, "")

    def shown(self) -> Mapping[str, str]:
        """What rows, figures and records call the data, by what these stand for."""
        if not self.data:
            return SHOWN[self.scale]
        name = Path(self.data).name
        taken = {*PAPER}.union(*(own.values() for own in SHOWN.values()))
        return {STACK_OVERFLOW: f"{name} (own)" if name in taken else name}

    def chosen(self, settings: Mapping[str, Any]) -> Any:
        """The settings of the scale; of one's own data on these alone."""
        return on_one(super().chosen(settings)) if self.data else super().chosen(settings)

    def rows(self, module: Mapping[str, Any], settings: Any) -> Rows:
        """What the experiment finds; in a dry run nothing, and the cost is printed."""
        rows = module["run"](settings, self)
        if self.dry_run:
            print("in all " + cost(self.planned, self.scale))
            return []
        rows = as_written(named(rows, self.shown()))
        if rows and all(r.get("loss", 0.0) >= r.get("loss_before", math.inf) for r in rows):
            print("no training ends better than it began: more steps, or a model that has learnt")
        return rows

    def titled(self, figure: Figure, rows: Rows) -> Figure:
        """With the scale and what stands for what."""
        return titled(figure, rows, self.scale)

    def about(self, module: Mapping[str, Any], settings: Any, rows: Rows) -> dict[str, Any]:
        """The data, the model, and of runs that were kept each."""
        data, model = origins(rows, self)
        runs = self.runs
        each = [runs.known[name] for name in sorted(runs.asked)] if runs.file else []
        return {"run_minutes": runs.minutes, "data": data, "model": model, "trainings": each}


def main(module: Mapping[str, Any], argv: Sequence[str] | None = None) -> None:
    """`experiment.main` with these arguments, which the experiment's `run` is given, too."""
    experiment.main(module, argv, Arguments)


def on_one(settings: Any) -> Any:
    """Settings, however nested, for one data set of one's own in the place of Stack Overflow."""
    if isinstance(settings, Training):
        return dataclasses.replace(
            settings, num_steps={STACK_OVERFLOW: next(iter(settings.num_steps.values()))}
        )
    inner = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
    nested = {name: on_one(own) for name, own in inner.items() if dataclasses.is_dataclass(own)}
    return dataclasses.replace(settings, **nested)


def named(rows: Rows, shown: Mapping[str, str]) -> Rows:
    """The rows with the names of the data that were used."""
    return [
        {**row, "dataset": shown.get(row["dataset"], row["dataset"])} if "dataset" in row else row
        for row in rows
    ]


def assumption(name: str) -> str:
    """What the epsilon of a data set of rows assumes, for the title of its panel; else nothing."""
    times = dict(Training.assumed_times).get(stands_for(name))
    return rf"($\varepsilon$ as if {times} x the users)" if times else ""


def titled(figure: Figure, rows: Rows, scale: str) -> Figure:
    """The figure with its scale, and what stands for what, as its title."""
    names = dict.fromkeys(str(row["dataset"]) for row in rows if "dataset" in row)
    shown = [name for name in names if name in SHOWN["small"].values()]
    what = [f"{name} in the place of {stands_for(name)}" for name in shown]
    if what:
        title = f"scale {scale}: {'; '.join(what)}"
        figure.suptitle(title, fontsize="small", color="dimgray")
    return figure


def origins(rows: Rows, arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """The data sets of rows with their fingerprints, and the model that the runs started from."""
    data, runs = {}, arguments.runs
    for name in dict.fromkeys(row["dataset"] for row in rows if "dataset" in row):
        where = data_of(stands_for(name), arguments)
        if corpora.is_built(where):
            data[name] = {"fingerprint": Dataset.open(where).train.fingerprint}
            stand_ins = arguments.scale in OF_STAND_INS and not arguments.data
            data[name] |= files_of([name] if stand_ins else []).get(name, {})
    model: dict[str, Any] = {"name": arguments.given_model or f"of the scale {arguments.scale}"}
    for row in [runs.known[name] for name in sorted(runs.asked)[:1]]:
        model |= {"sha256": row["model"], "num_parameters": row["num_parameters"]}
    return data, model


def data_of(name: str, arguments: Arguments) -> str:
    """Where a data set is, built first if need be: what `--data` of train is given.

    Raises: DataError: it is not there, at the scales whose data are built by hand.
    """
    if arguments.data:
        return arguments.data
    if arguments.scale == "smoke":
        return str(made_up(arguments.out / "texts.parquet"))
    if arguments.scale in OF_STAND_INS:
        return str(starting_model.users(SMALL[name]))
    place, how = Path("data") / PAPER[name], f"python -m experiments.data {PAPER[name]}"
    if not corpora.is_built(place):
        raise DataError(f"data={place}: it is not there: {how} --out {place} builds it")
    return str(place)


def open_data(name: str, arguments: Arguments, training: Training) -> Dataset:
    """The data set itself, for its users' sizes."""
    options: dict[str, Any] = {}
    if training.max_length is not None:
        options["max_length"] = training.max_length
    return corpora.load(data_of(name, arguments), **options)


def run_of(name: str, arguments: Arguments, training: Training, seed: int) -> RunConfig:
    """Data and model as the runs have them, for what looks at the starting model."""
    data = data_of(name, arguments)
    given = {"model": arguments.model, "seed": seed, "max_length": training.max_length}
    engine = "local" if arguments.scale == "smoke" else "ray"
    return run_config(data=data, run_dir=Path(), engine=engine, **given)


def losses(cells: Iterable[Row], training: Training, arguments: Arguments) -> Rows:
    """Train every cell, and say what came out: one row per cell.

    A cell has `dataset`, `epsilon` and settings of train. Its row has these, `loss` and `loss_std`
    over seeds, `loss_before` (of the model that was started from) and `seeds`. At --dry-run the
    cost is printed, and there are no rows.
    """
    cells = list(cells)
    settings = [
        settings_of(cell, training, arguments, seed) for cell in cells for seed in training.seeds
    ]
    if arguments.dry_run:
        what = plan_of(named(cells, arguments.shown()))
        print(what, cost(settings, arguments.scale), sep="\n")
        arguments.planned.extend(settings)
        return []
    found = run_many(settings, training.test_examples, arguments.runs)
    return [
        {
            **cell,
            **over_seeds([row["after"] for row in own]),
            "loss_before": mean_known([row["before"] for row in own]),
        }
        for cell, own in zip(cells, in_turns(found, training), strict=True)
    ]


def mean_known(losses: Sequence[float]) -> float:
    """The mean of those that are known: a run may diverge before it is evaluated."""
    known = [loss for loss in losses if not math.isnan(loss)]
    return float(np.mean(known)) if known else math.nan


def in_turns(rows: Rows, training: Training) -> list[Rows]:
    """Rows of runs, for each cell those of its seeds."""
    count = len(training.seeds)
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def tuned_losses(cells: Iterable[Row], training: Training, arguments: Arguments) -> Rows:
    """Like `losses`, with learning rate and clip norm tuned in every cell, by the first seed. A
    row's `inside_grid`: the learning rate is not at an end of those that were tried for it."""
    cells, tried = list(cells), [set(training.learning_rates) for _ in cells]
    best = [{"learning_rate": training.learning_rates[0], "clip_norm": training.clip_norms[0]}]
    best *= len(cells)
    if len(training.learning_rates) * len(training.clip_norms) > 1:
        best = tuned(cells, tried, training, arguments)
        if arguments.dry_run:
            more = "further rates where the best is at an end, and "
            more *= bool(training.further_learning_rates)
            print(f"then, {more}with the best of these for each cell:")
            return losses(cells, training, arguments)
    given = [{**at, **cell} for at, cell in zip(best, cells, strict=True)]
    rows = losses(given, training, arguments)
    return [
        {**row, "inside_grid": min(rates) < row["learning_rate"] < max(rates) or len(rates) == 1}
        for row, rates in zip(rows, tried, strict=not arguments.dry_run)
    ]


def tuned(
    cells: Sequence[Row], tried: Sequence[set[float]], training: Training, arguments: Arguments
) -> Rows:
    """The best learning rate and clip norm of each cell, of the rates that are tried for it, to
    which further ones are added while the best is at their end."""
    first = dataclasses.replace(training, seeds=training.seeds[:1])
    best: list[tuple[float, Row]] = [(math.inf, {})] * len(cells)
    ask = [(number, rate) for number, rates in enumerate(tried) for rate in sorted(rates)]
    while ask:
        looks = [
            (number, {"learning_rate": rate, "clip_norm": clip})
            for number, rate in ask
            for clip in training.clip_norms
        ]
        found = losses([{**look, **cells[number]} for number, look in looks], first, arguments)
        if arguments.dry_run:
            break
        for (number, look), row in zip(looks, found, strict=True):
            loss = row["loss"] if math.isfinite(row["loss"]) else math.inf
            if loss < best[number][0] or not best[number][1]:
                best[number] = loss, look
        asked, ask = dict.fromkeys(number for number, _ in ask), []
        for number in asked:
            of, further = best[number][1]["learning_rate"], training.further_learning_rates
            if (rate := beyond(of, tried[number], further)) is not None:
                tried[number].add(rate)
                ask.append((number, rate))
    return [look for _, look in best]


def beyond(rate: float, tried: Collection[float], further: Iterable[float]) -> float | None:
    """The next of `further` outwards, where `rate` is at an end of those that were tried."""
    least, most = min(tried), max(tried)
    if rate == least and (smaller := [each for each in further if each < least]):
        return max(smaller)
    if rate == most and (larger := [each for each in further if each > most]):
        return min(larger)
    return None


def plan_of(cells: Rows) -> str:
    """The values that each setting takes."""
    names = dict.fromkeys(name for cell in cells for name in cell)
    values = {name: dict.fromkeys(cell[name] for cell in cells if name in cell) for name in names}
    return "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in values.items())


def cost(settings: Sequence[dict[str, Any]], scale: str) -> str:
    """What would be run, and about how long it takes."""
    gradients = sum(each["batch_size"] * each["num_steps"] for each in settings)
    what = f"{len(settings)} runs, {gradients:,} gradients: "
    if scale in OPERATIONS:
        per_gradient = OPERATIONS[scale] / SPEED / 3600
        most = max(each["batch_size"] * each["num_steps"] for each in settings) * per_gradient
        what += f"about {gradients * per_gradient:,.0f} accelerator hours at "
        return what + f"{SPEED / 1e12:g} TFLOP/s, {most:,.0f} of them the longest run alone"
    seconds = gradients / GRADIENTS_PER_CORE_SECOND + len(settings) * SECONDS_PER_RUN
    return what + f"about {seconds / 2 / 60:.0f} min on two cores, less those run before"


def assumed(name: str, training: Training, arguments: Arguments) -> int:
    """How many users a data set is accounted for as having."""
    users = open_data(name, arguments, training).train
    return users.num_users * dict(training.assumed_times).get(name, 1)


def delta_of(name: str, training: Training, arguments: Arguments) -> float:
    """What runs are accounted with; by default the paper's, of the number of examples."""
    if name in dict(training.deltas):
        return dict(training.deltas)[name]
    users = open_data(name, arguments, training).train
    times = dict(training.assumed_times).get(name, 1)
    return (users.num_examples * times) ** -1.1


def uls_grid_losses(
    grid: UlsGrid, arguments: Arguments, datasets: Sequence[str] | None = None
) -> Rows:
    """Loss of ULS for every configuration, epsilon and data set."""
    names = [name for name in grid.training.num_steps if datasets is None or name in datasets]
    cells = [
        {
            "dataset": name,
            "epsilon": epsilon,
            "algorithm": "uls",
            "budget": at.batch_size,
            "group_size": at.group_size,
            "cohort_size": at.cohort_size,
        }
        for name in names
        for epsilon in grid.training.epsilons
        for at in grid.configurations
    ]
    return tuned_losses(cells, grid.training, arguments)


def settings_of(cell: Row, training: Training, arguments: Arguments, seed: int) -> dict[str, Any]:
    """What a run of a cell is told; what the cell says itself comes first."""
    name = cell["dataset"]
    given = {n: v for n, v in cell.items() if n not in ("dataset", "cohort_size")}
    common_ = {
        "data": data_of(name, arguments) if not arguments.dry_run else name,
        "num_steps": training.num_steps[name],
        "eval_every": training.num_steps[name],
        "model": arguments.model,
        "seed": seed,
        "optimizer": training.optimizer,
        "eval_examples": training.eval_examples,
        "strategy": "scan",
        "rows_per_pass": 4,
    }
    if arguments.scale not in OPERATIONS:
        common_["num_lanes"] = 1  # a run computes in one process: no more pieces than need be
    if training.max_length is not None:
        common_["max_length"] = training.max_length
    common_["adjacency"] = ADD_OR_REMOVE  # the paper's
    if not arguments.dry_run or name in dict(training.deltas):
        common_["delta"] = delta_of(name, training, arguments)
    times = given.pop("times", dict(training.assumed_times).get(name, 1))
    told = {**common_, **given}
    told["batch_size"] = told.pop("budget")  # its name in rows, as in the paper
    if times > 1 and not arguments.dry_run:
        told["epsilon"] = as_if(name, times, told, training, arguments)
    return told


def as_if(
    name: str, times: int, told: Mapping[str, Any], training: Training, arguments: Arguments
) -> float:
    """What a run is asked for that gets the noise of its cell's epsilon and `times` the users."""
    privacy = PrivacyConfig(
        told["epsilon"],
        told["num_steps"],
        told["batch_size"],
        group_size=told.get("group_size"),
        delta=told["delta"],
        adjacency=told["adjacency"],
    )
    data = open_data(name, arguments, training)
    return epsilon_that_holds(Algorithm(told["algorithm"]), privacy, data, times)


def with_test_losses(rows: Rows, training: Training, arguments: Arguments) -> Rows:
    """The rows of `tuned_losses` with test losses in the place of validation losses, which become
    `validation_loss`."""
    settings = [
        settings_of(cell_of(row), training, arguments, seed)
        for row in rows  # none at a dry run
        for seed in training.seeds
    ]
    runs = run_many(settings, training.test_examples, arguments.runs, tested=True)
    found = []
    for row, own in zip(rows, in_turns(runs, training), strict=True):
        after = over_seeds([run["test"] for run in own])
        started = mean_known([run["test_before"] for run in own])
        before = {"loss_before": started, "validation_loss": row["loss"]}
        found.append({**row, **after, **before})
    return found


def cell_of(row: Row) -> Row:
    """A row of `losses` without what came of it."""
    return {name: value for name, value in row.items() if name not in CAME}


def run_dir_of(row: Row, training: Training, arguments: Arguments, seed: int) -> Path:
    """The run directory of a row of `losses`, for one of its seeds."""
    settings = settings_of(cell_of(row), training, arguments, seed)
    return jobs_of([settings], arguments.runs.directory)[0].run.run_dir


def made_up(file: Path) -> Path:
    """Texts of users whose numbers of texts spread over an order of magnitude."""
    if not file.exists():
        rng = np.random.default_rng(0)
        words = "the cat sat on a mat and saw that dog run far away from his old house".split()
        sizes = np.clip(rng.lognormal(1.0, 0.8, 80).astype(int), 1, 30)
        users = np.repeat([f"user{n}" for n in range(len(sizes))], sizes)
        texts = [" ".join(rng.choice(words, 6)) for _ in users]
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            pq.write_table(pa.table({"user_id": users, "text": texts}), temporary.name)
        Path(temporary.name).replace(file)
    return file
