"""Which optimizer, rate, schedule and average learn most from noisy gradients: a screen, by grid.

What follows the privatised gradient costs no privacy, so on public text it may be tuned at will.
The texts are public: Python's own documentation, and what the other experiments train on. Runs of a
group (case, algorithm, epsilon, T, seed) share draws and noise, so that their differences are those
of the update. Averages of the iterates are taken on the way, in each run.

Rows are appended to optimizers.jsonl beside the results as they come; the same command goes on with
what is missing. There is no claim to be tested.

    python -m experiments.optimizers --scale small [--minutes 60]     (90 minutes; smoke: 15 s)
"""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments import common
from experiments.processes import compute
from experiments.records import as_written
from experiments.rows import Rows, by, kept, missing
from fedsim import files
from fedsim.recipe import PAPER

AVERAGES = (0.8, 0.9, 0.95, 0.98)
WAYS = ("last", *(f"ema {ema}" for ema in AVERAGES))
Grid = tuple[tuple[str, tuple[float, ...]], ...]
ADAM = "adam:b1=0.9,b2=0.95"
GRID: Grid = (  # (optimizer, rates in ascending order)
    ("adafactor", (0.01, 0.03, 0.1, 0.3)),
    ("adam", (0.001, 0.003, 0.01, 0.03)),
    (ADAM, (0.001, 0.003, 0.01, 0.03)),
    ("momentum", (0.03, 0.1, 0.3, 1.0)),
    ("sgd", (0.3, 1.0, 3.0, 10.0)),
)
FALLING: Grid = (("momentum", (0.1, 0.3, 1.0)), (ADAM, (0.01, 0.03)))
MOMENTUM: Grid = (("momentum", (0.03, 0.1, 0.3, 1.0)),)
SMALLER: Grid = (("momentum", (0.003, 0.01, 0.03, 0.1)),)
LIKELY: Grid = (
    *SMALLER,
    (ADAM, (0.0001, 0.0003, 0.001, 0.003)),
    ("adafactor", (0.001, 0.003, 0.01, 0.03)),
)
NEAR = 0.02
RELEASED = "ema 0.9"  # what a run of 100 steps releases by the rule
RULE: Grid = (("rule", (0.0,)),)
"""What `fedsim train` does where nothing is said of its update."""
CONSTANT, LINEAR = ("constant", 0.0), ("linear", 0.0)  # (schedule, warmup)
FRESH = ("pydocs", "scotus")
PRETRAINED, LORA = ("scotus, pre-trained",), ("scotus, LoRA",)
EVERY = FRESH + PRETRAINED + LORA
UNSEEN = ("shakespeare", "package descriptions")
"""Data that the rule was not made on."""
GROUP = ("case", "algorithm", "epsilon", "num_steps", "seed")


@dataclasses.dataclass(frozen=True)
class Screen:
    """Trainings that are run together: all combinations. A case is a data set, with the model that
    it starts from."""

    cases: tuple[str, ...] = FRESH
    algorithms: tuple[str, ...] = ("uls", "els")
    epsilons: tuple[float, ...] = (4.0,)
    num_steps: tuple[int, ...] = (100,)
    seeds: tuple[int, ...] = (0,)
    grid: Grid = GRID
    schedules: tuple[tuple[str, float], ...] = (CONSTANT,)

    def cells(self) -> Iterator["Cell"]:
        """In the order in which they are run: the widest view first."""
        axes = (self.seeds, self.num_steps, self.epsilons, self.schedules)
        groups = itertools.product(*axes, self.cases, self.algorithms, self.grid)
        for seed, steps, epsilon, schedule, case, algorithm, (name, rates) in groups:
            for rate in rates:
                yield Cell(case, algorithm, epsilon, steps, seed, name, rate, *schedule)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The screens of one scale, and what all their trainings have in common."""

    screens: tuple[Screen, ...]
    budget: int = 128
    max_length: int = 64
    eval_examples: int = 1024
    seconds: float = 0.17
    """Of a step, on two cores, for the estimate."""


ULS = ("uls",)
SMALL = (
    Screen(FRESH + UNSEEN, grid=(*RULE, *MOMENTUM[:1], ("adafactor", (0.1,)))),
    Screen(PRETRAINED + LORA, ULS, grid=RULE),
    Screen(PRETRAINED + LORA, ULS, grid=SMALLER),
    Screen(LORA, ULS, grid=(("momentum", (0.3, 1.0)),)),
    Screen(FRESH, ULS, epsilons=(1.0, 8.0), grid=MOMENTUM[:1]),
    Screen(PRETRAINED, ULS, num_steps=(500,), grid=SMALLER),
    Screen(FRESH, ULS, num_steps=(500,), grid=MOMENTUM),
    Screen(PRETRAINED + LORA, ("els",), grid=SMALLER),
    Screen(PRETRAINED + LORA, ULS, grid=LIKELY),
    Screen(algorithms=ULS, grid=FALLING, schedules=(LINEAR,)),
    Screen(),
    Screen(seeds=(1, 2), grid=MOMENTUM),
)
SETTINGS = {
    "smoke": Settings(
        (
            Screen(
                ("pydocs",),
                ULS,
                num_steps=(2,),
                grid=(("momentum", (0.1,)), ("adam", (0.01,))),
            ),
        ),
        budget=8,
        max_length=24,
        eval_examples=16,
    ),
    "small": Settings(SMALL),
    "paper": Settings(
        (
            *SMALL,
            Screen(EVERY, epsilons=(1.0, 4.0, 8.0), grid=MOMENTUM + LIKELY),
            Screen(EVERY, num_steps=(500,), grid=MOMENTUM + LIKELY[:1]),
            Screen(EVERY, seeds=(1, 2), grid=MOMENTUM + LIKELY[:1]),
        )
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    case: str
    algorithm: str
    epsilon: float
    num_steps: int
    seed: int
    optimizer: str
    learning_rate: float
    schedule: str
    warmup: float

    @property
    def group(self) -> tuple:
        """What runs that are compared have in common."""
        return self.case, self.algorithm, self.epsilon, self.num_steps, self.seed


def cells(settings: Settings) -> list[Cell]:
    """Those of all screens, each once."""
    return list(dict.fromkeys(cell for screen in settings.screens for cell in screen.cells()))


def source(case: str) -> dict[str, Any]:
    """Settings of a case: data, model, adapters."""
    from experiments import starting_model

    name, _, start = case.partition(", ")
    if not start:
        data = str(common.SHARED / f"{name}.parquet")
        data = {"pydocs": name, UNSEEN[1]: str(descriptions())}.get(name, data)
        return {"data": data, "model": "tiny"}
    data, model = str(starting_model.users(name)), str(starting_model.model())
    return {"data": data, "model": model, "lora_rank": 8 if start == "LoRA" else 0}


def checksums(cases: Iterable[str]) -> dict[str, Any]:
    """Of the files of the data of cases; nothing where the data are no file."""
    found = {}
    for case in cases:
        name, _, start = case.partition(", ")
        file = None if start else Path(source(name)["data"])
        if file is None or not file.is_file():
            found.setdefault(name, None)
        else:
            found[name] = {
                "file": file.name,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
    return found


def descriptions() -> Path:
    """What installed packages say of themselves, a text for each paragraph, as a Parquet file."""
    file = files.cache_dir() / "experiments" / "descriptions.parquet"
    if not file.exists():
        texts = [
            (found.name, paragraph)
            for found in sorted(importlib.metadata.distributions(), key=lambda each: each.name)
            for paragraph in (found.metadata["Description"] or "").split("\n\n")
            if len(paragraph.split()) > 3
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table(dict(zip(("user_id", "text"), zip(*texts, strict=True), strict=True))), file
        )
    return file


def train(cell: Cell, sizes: Settings) -> dict[str, Any]:
    """What comes of a cell: held-out losses of the last iterate and of the averages."""
    from fedsim.clipping.clip import num_coordinates
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.engine.local_engine import LocalEngine
    from fedsim.evaluate import evaluate, headline
    from fedsim.keys import SecretKey
    from fedsim.optimizers import averaged, is_finite, rate_of, update_rule
    from fedsim.plan import complete, make_plan, method_for
    from fedsim.run.model_source import find_model, load_data, make_task
    from fedsim.training import settled_by

    started, start = time.monotonic(), source(cell.case)
    settings = dataclasses.asdict(cell)
    by_rule = cell.optimizer == RULE[0][0]
    own = ("warmup", "seed") + (() if by_rule else ("optimizer", "learning_rate", "schedule"))
    run = run_config(
        **start,
        run_dir=Path("."),
        engine="local",
        max_length=sizes.max_length if start["model"] == "tiny" else None,
        **{name: settings[name] for name in own},
    )
    model = find_model(run.model.source)
    data = load_data(run.data, model, lambda text: None)
    algorithm = Algorithm(cell.algorithm)
    privacy = PrivacyConfig(epsilon=cell.epsilon, num_steps=cell.num_steps, budget=sizes.budget)
    privacy, _ = complete(algorithm, privacy, data)
    key = SecretKey.create(cell.seed, str(cell.group))
    method = method_for(algorithm, privacy, data.train, key)
    task, params = make_task(run, model, data, key.jax_key("parameters"))
    size = num_coordinates(params)
    plan = make_plan(algorithm, privacy, data.train, method, size, [], "")
    run = settled_by(plan, None, run, fresh=model is None)
    rule = update_rule(run, rate_of(run, cell.num_steps))
    engine = LocalEngine(task, num_lanes=1)
    averages = dict.fromkeys({*AVERAGES, run.ema or 0.0}, params)
    before = headline(evaluate(engine, params, data, sizes.eval_examples))
    for step, params in enumerate(common.iterates(plan, method, engine, params, rule), 1):  # noqa: B020
        if is_finite(params):
            averages = {ema: averaged(old, params, ema, step) for ema, old in averages.items()}
    found = {"last": params, **{f"ema {ema}": average for ema, average in averages.items()}}
    losses = {
        name: headline(evaluate(engine, p, data, sizes.eval_examples)) for name, p in found.items()
    }
    return {
        **settings,
        "num_parameters": size,
        "num_users": plan.num_users,
        "noise_multiplier": plan.noise_multiplier,
        "before": before,
        "losses": losses,
        **({"rate": run.learning_rate, "released": losses[f"ema {run.ema}"]} if by_rule else {}),
        "seconds": round(time.monotonic() - started, 1),
    }


def best(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each optimizer and schedule of a group: of its best rate."""
    ways: dict[tuple, list[dict[str, Any]]] = {}
    for row in found:
        key = (*(row[name] for name in GROUP), row["optimizer"], row["schedule"])
        ways.setdefault(key, []).append(row)
    table = []
    for key, tried in sorted(ways.items()):
        # A run that diverged has no loss, or one that is no number.
        row = min(
            tried, key=lambda r: (r["losses"]["last"] != r["losses"]["last"], r["losses"]["last"])
        )
        grid = sorted(r["learning_rate"] for r in tried)
        cell = dict(zip((*GROUP, "optimizer", "schedule"), key, strict=True))
        cell |= {"learning_rate": row["learning_rate"], "num_users": row["num_users"]}
        cell |= {"inside_grid": grid[0] < row["learning_rate"] < grid[-1]}
        losses = {name: row["losses"].get(name) for name in WAYS}  # the first rows have fewer
        of_all = (loss for each in tried for loss in each["losses"].values())
        least = {"least": min(filter(math.isfinite, of_all), default=None)}  # of any rate and way
        parameters = {"num_parameters": row["num_parameters"]}
        table.append({**cell, **parameters, "before": row["before"], **losses, **least})
    return table


def check(rows: Rows) -> common.Claims:
    """What comes of the rule, and of the paper's settings, beside the best of a grid."""
    to_grid, to_paper = {}, {}
    for group, own in by(rows, lambda row: tuple(row[name] for name in GROUP)).items():
        ways = {row["optimizer"]: row for row in own if row["schedule"] == "constant"}
        if (rule := ways.pop("rule", None)) is None:
            continue
        name, loss = f"{group[0]} {group[1].upper()}", rule[RELEASED]
        to_grid[name] = loss - min(row["least"] for row in ways.values())
        paper = ways.get("adafactor")
        if paper is not None and paper["learning_rate"] == PAPER["learning_rate"]:
            to_paper[name] = loss - paper["last"]

    def listed(found):
        return "; ".join(f"{name} {value:+.3f}" for name, value in found.items())

    return [
        (
            f"untuned, the rule is within {NEAR} nats of the best of the grid",
            bool(to_grid) and max(to_grid.values()) <= NEAR,
            listed(to_grid),
        ),
        (
            "untuned, a fresh model learns more by the rule than by the paper's settings",
            bool(to_paper) and max(to_paper.values()) < 0,
            listed(to_paper),
        ),
    ]


def plot(table: Sequence[dict[str, Any]]) -> Figure:
    """A panel for each group: the loss of each optimizer's best rate, last and averaged."""
    groups = list(dict.fromkeys(tuple(row[name] for name in GROUP) for row in table))
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    size = (4.5 * columns, 3.5 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, group in zip(axes.flat, groups, strict=False):
        own = [row for row in table if tuple(row[name] for name in GROUP) == group]
        names = [f"{row['optimizer']}, {row['schedule']}" for row in own]
        for way, marker in zip(WAYS, "o<x>s", strict=True):
            losses = [np.nan if row[way] is None else row[way] for row in own]
            axis.plot(losses, names, marker, label=way, alpha=0.7)
        case, algorithm, epsilon, steps, seed = group
        axis.set_title(
            f"{case}, {algorithm.upper()}, ε = {epsilon:g}, T = {steps}", fontsize="small"
        )
        axis.set_xlabel("held-out nats per token")
    axes[0][0].legend(fontsize="small")
    return figure


def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training")
    settings = SETTINGS[given.scale]
    if given.dry_run:
        todo = cells(settings)
        print(f"{len(todo)} trainings: {', '.join(dict.fromkeys(cell.case for cell in todo))}")
        minutes = sum(cell.num_steps for cell in todo) * settings.seconds / 60
        print(f"about {minutes:.0f} minutes on two cores")
        return
    out = common.out_of(given)
    file = out / "optimizers.jsonl"
    compute(train, missing(cells(settings), file), settings, file, given.minutes)
    table = best(kept(file))
    figures, claims = {"optimizers": plot(table)}, check(as_written(table))
    common.finish(
        "optimizers",
        given.scale,
        out,
        settings,
        table,
        figures,
        claims,
        run_minutes=round(sum(row["seconds"] for row in kept(file)) / 60, 1),
        data=checksums(row["case"] for row in table),
        model={"source": "tiny; pre-trained and LoRA: the public starting model of experiments"},
    )


if __name__ == "__main__":
    main()
