"""Which optimizer, rate, schedule and average learn most from noisy gradients: a screen, by grid.

What follows the privatised gradient costs no privacy, so on public text it may be tuned at will.
The texts are public: Python's own documentation, and what the other experiments train on. Runs of a
group (case, algorithm, epsilon, T, seed) share draws and noise, so that their differences are those
of the update. Averages of the iterates are taken on the way, in each run.

Rows are appended to optimizers.jsonl beside the results as they come; the same command goes on with
what is missing. What is claimed was written before the runs on the data that the rule was not made
on.

    python -m experiments.optimizers --scale small [--minutes 60] [--processes 1]     (smoke: 15 s)
"""

import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments.harness import common, smollm2
from experiments.harness.claims import ahead, no_worse
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, Rows, by, kept, missing
from experiments.harness.screens import (
    AVERAGES,
    EARLIER,
    FEW,
    LARGER,
    NEAR,
    RULE,
    SETTINGS,
    SMOLLM2,
    UNSEEN,
    WAYS,
    Cell,
    Settings,
    cells,
)
from experiments.harness.updates import (
    CORRECTED,
    SCALED,
    SCALED_ARRAYS,
    adam_corrected,
    model_of,
    scaled,
    scaled_start,
)
from fedsim import files
from fedsim.config import RunConfig
from fedsim.engine import Task
from fedsim.evaluate import VALIDATION
from fedsim.plan import Plan
from fedsim.training import optimizers
from fedsim.training.optimizers import AVERAGED, PAPER

GROUP = ("case", "algorithm", "epsilon", "num_steps")


def source(case: str) -> dict[str, Any]:
    """Settings of a case: data, model, adapters."""
    from experiments import starting_model

    name, _, start = case.partition(", ")
    if case in SMOLLM2:
        data = str(common.shared(name))
        return {"data": data, "model": str(smollm2.directory()), "lora_rank": 8}
    if not start:
        elsewhere = {"pydocs": lambda: name, FEW[1]: descriptions}
        data = elsewhere.get(name, lambda: common.shared(name))()
        return {"data": str(data), "model": "tiny"}
    size = start.removeprefix("pre-trained, ") if case in LARGER else starting_model.MODEL
    users = {"reddit_links": "reddit_links, 8 or more"}.get(name, name)
    found = {"data": str(starting_model.users(users)), "model": str(starting_model.model(size))}
    return {**found, "lora_rank": 8 if start == "LoRA" else 0}


def checksums(cases: Iterable[str]) -> dict[str, Any]:
    """Of the files of the data of cases; nothing where the data are no file."""
    found = {}
    for case in cases:
        name, _, start = case.partition(", ")
        file = None if start and case not in SMOLLM2 else Path(source(name)["data"])
        if file is None or not file.is_file():
            found.setdefault(name, None)
        else:
            found[name] = common.checksum(file)
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
    from fedsim.config import PrivacyConfig, run_config
    from fedsim.engine.worker import LocalEngine
    from fedsim.evaluate import evaluate
    from fedsim.keys import SecretKey
    from fedsim.run import find_model, load_data, make_task
    from fedsim.training import with_plan

    started, start, real = time.monotonic(), source(cell.case), cell.case in SMOLLM2
    budget, eval_examples = sizes.real if real else (sizes.budget, sizes.eval_examples)
    settings = dataclasses.asdict(cell)
    by_rule, own_way = cell.optimizer == RULE[0][0], cell.optimizer in OWN
    given = () if by_rule else ("learning_rate", "schedule")
    given += () if by_rule or own_way else ("optimizer",)
    run = run_config(
        **start,
        run_dir=Path("."),
        engine="local",
        max_length=sizes.max_length if start["model"] == "tiny" or real else None,
        **{name: settings[name] for name in ("warmup", "seed", *given)},
    )
    model = find_model(run.model.source)
    data = load_data(run.data, model, lambda text: None)
    privacy = PrivacyConfig(epsilon=cell.epsilon, num_steps=cell.num_steps, batch_size=budget)
    key = SecretKey.create(cell.seed, str(cell.group))
    task, params = make_task(run, model, data, key.jax_key("parameters"))
    plan, method = common.planned(cell.algorithm, privacy, data, key, params)
    run = with_plan(plan, None, run, fresh=model is None)
    engine = LocalEngine(task, num_lanes=1)
    learner, first, rule, read = update_of(cell, run, plan, task, params)
    before = held_out(evaluate(engine, params, data, eval_examples))
    workers, rows = LocalEngine(learner, num_lanes=1), 4 if real else 8
    steps = common.iterates(plan, method, workers, first, rule, rows)
    last, averages = common.followed(map(read, steps), params, {*AVERAGES, run.ema or 0.0})
    found = {"last": last, **{f"ema {ema}": average for ema, average in averages.items()}}
    losses = {name: held_out(evaluate(engine, p, data, eval_examples)) for name, p in found.items()}
    return {
        **settings,
        "num_parameters": plan.num_parameters,
        "num_users": plan.num_users,
        "noise_multiplier": plan.noise_multiplier,
        "fingerprint": data.train.fingerprint[:12],
        "before": before,
        "losses": losses,
        **({"rate": run.learning_rate, "released": losses[f"ema {run.ema}"]} if by_rule else {}),
        "seconds": round(time.monotonic() - started, 1),
        **came_from(),
    }


OWN = (CORRECTED, SCALED, SCALED_ARRAYS)


def held_out(losses: Mapping[str, float]) -> float:
    """The loss of users who are held out; where none are, of held-out texts."""
    return losses.get(VALIDATION["eval_users"]) or losses[VALIDATION["eval_examples"]]


def update_of(
    cell: Cell, run: RunConfig, plan: Plan, task: Task, params: Any
) -> tuple[Task, Any, optax.GradientTransformation, Callable[[Any], Any]]:
    """(task, its first parameters, optimizer, what reads the model from parameters)."""
    stddev = plan.clip.sensitivity * plan.gradient_noise_multiplier / plan.expected_count
    if cell.optimizer == CORRECTED:
        return task, params, adam_corrected(cell.learning_rate, stddev), lambda own: own
    if cell.optimizer in OWN:
        arrays = cell.optimizer == SCALED_ARRAYS
        rule = scaled(cell.learning_rate, stddev, arrays=arrays)
        return *scaled_start(task, params), rule, model_of
    rule = optimizers.update_rule(run, optimizers.rate_of(run, cell.num_steps))
    return task, params, rule, lambda own: own


def best(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each optimizer and schedule of a group: of its best rate, by the mean over seeds;
    once for the first seed, and once for all seeds of which there are most."""
    table = []
    for group, rows in sorted(by(found, lambda row: tuple(row[name] for name in GROUP)).items()):
        trained = by(rows, lambda r: (r["optimizer"], r["schedule"], r["learning_rate"]))
        every = max((sorted(row["seed"] for row in own) for own in trained.values()), key=len)
        for seeds in sorted({(every[0],), tuple(every)}):
            at = dict(zip((*GROUP, "seeds"), (*group, len(seeds)), strict=True))
            table += [{**at, **row} for row in over(trained, seeds)]
    return table


def over(trained: Mapping[tuple, Rows], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of what was trained with all of these seeds, by (optimizer, schedule, rate)."""
    rates: dict[tuple, dict[float, Rows]] = {}
    for (optimizer, schedule, rate), own in sorted(trained.items()):
        chosen = [row for row in own if row["seed"] in seeds]
        if len(chosen) == len(seeds):
            rates.setdefault((optimizer, schedule), {})[rate] = chosen

    def mean(rows: Rows, way: str) -> float:
        losses = [row["losses"].get(way) for row in rows]  # the first rows have fewer
        known = all(loss is not None and math.isfinite(loss) for loss in losses)
        return float(np.mean(losses)) if known else math.inf  # some diverged

    for (optimizer, schedule), tried in rates.items():
        rate, rows = min(tried.items(), key=lambda each: mean(each[1], "last"))
        losses = {way: mean(rows, way) for way in WAYS}
        least = min(mean(own, way) for own in tried.values() for way in WAYS)  # of any rate
        lasts = [row["losses"]["last"] for row in rows]
        yield {
            **{"optimizer": optimizer, "schedule": schedule, "learning_rate": rate},
            "num_users": rows[0]["num_users"],
            "inside_grid": min(tried) < rate < max(tried),
            "num_parameters": rows[0]["num_parameters"],
            "before": float(np.mean([row["before"] for row in rows])),
            **{way: loss if math.isfinite(loss) else None for way, loss in losses.items()},
            "loss_std": float(np.std(lasts, ddof=1)) if len(lasts) > 1 else None,
            "least": least if math.isfinite(least) else None,
        }


def most_seeds(rows: Rows) -> dict[tuple, Rows]:
    """The rows of each group with as many seeds as the rule was run with, or as there are."""
    found = {}
    for group, own in by(rows, lambda row: tuple(row[name] for name in GROUP)).items():
        rules = [row["seeds"] for row in own if row["optimizer"] == RULE[0][0]]
        seeds = max(rules, default=max(row["seeds"] for row in own))
        found[group] = [row for row in own if row["seeds"] == seeds]
    return found


def check(rows: Rows) -> common.Claims:
    """What comes of the rule, and of Adafactor at one rate, beside the best of a grid."""
    to_grid: dict[str, tuple[float, float]] = {}  # gap, standard error
    to_paper: dict[str, tuple[float, float]] = {}
    for group, own in most_seeds(rows).items():
        ways = {row["optimizer"]: row for row in own if row["schedule"] == "constant"}
        rule = ways.pop(RULE[0][0], None)
        grids = [row for row in ways.values() if tuned(row)]
        if rule is None or not grids:
            continue
        case, algorithm, epsilon, steps = group
        name, loss = f"{case} {algorithm.upper()} {epsilon:g} {steps}", came_to(rule)
        best_of_grid = min(grids, key=came_to)
        to_grid[name] = loss - came_to(best_of_grid), gap_error(rule, best_of_grid)
        paper = ways.get("adafactor")
        if paper is not None and paper["learning_rate"] == PAPER["learning_rate"]:
            to_paper[name] = loss - paper["last"], gap_error(rule, paper)
    unseen = {name: gap for name, gap in to_grid.items() if name.startswith(UNSEEN)}

    def listed(found):
        shown = [
            f"{name} {gap:+.3f} ({f'{error:.3f}' if math.isfinite(error) else 'one seed'})"
            for name, (gap, error) in found.items()
        ]
        return "; ".join(shown) + "; in brackets the standard error"

    def judged(found, test, *margin):
        gaps, errors = np.array([*found.values()]).reshape(-1, 2).T
        return test(-gaps, errors, *margin) if found else None

    return [
        (
            f"the rule is within {NEAR} nats of a grid's best on data that it was not made on",
            judged(unseen, no_worse, NEAR),
            listed(unseen),
        ),
        (
            f"untuned, the rule is within {NEAR} nats of the best of the grid",
            judged(to_grid, no_worse, NEAR),
            listed(to_grid),
        ),
        (
            "untuned, a fresh model learns more by the rule than by Adafactor with one rate",
            judged(to_paper, ahead),
            listed(to_paper),
        ),
    ]


def gap_error(one: Row, other: Row) -> float:
    """Standard error of the difference of two rows' losses; infinite for one seed. Rows have
    deviations over seeds alone, of the last step."""
    if min(one["seeds"], other["seeds"]) < 2:
        return math.inf
    return math.sqrt(sum(row["loss_std"] ** 2 / row["seeds"] for row in (one, other)))


def plot(table: Rows) -> Figure:
    """A line for each group: how far the best of each optimizer is from the best of all."""
    groups = {group: own for group, own in most_seeds(table).items() if len(own) > 1}
    names = {f"{row['optimizer']}, {row['schedule']}": None for row in table}
    figure, axis = plt.subplots(figsize=(11, 1.5 + 0.4 * len(groups)), layout="constrained")
    points: dict[str, list[tuple[float, str]]] = {name: [] for name in names}
    for group, own in groups.items():
        case, algorithm, epsilon, steps = group
        label = f"{case}, {algorithm.upper()}, ε = {epsilon:g}, T = {steps}"
        label += f", {own[0]['seeds']} seeds" if own[0]["seeds"] > 1 else ""
        ruled = any(row["optimizer"] == RULE[0][0] for row in own)
        label += "" if ruled else " (rule not trained)"
        found = {f"{row['optimizer']}, {row['schedule']}": came_to(row) for row in own}
        best = min(loss for row, loss in zip(own, found.values(), strict=True) if tuned(row))
        for name, loss in found.items():
            points[name].append((max(loss - best, -NEAR), label))
    points = {name: own for name, own in points.items() if own}
    for number, (name, own) in enumerate(points.items()):
        ours = name.startswith(RULE[0][0])
        losses, labels = zip(*own, strict=True)
        style = {
            "marker": "*" if ours else "os^vDPX<>"[number % 9],
            "color": plt.get_cmap("tab20")(number),
            "zorder": 2 + ours,
        }
        axis.scatter(losses, labels, s=130 if ours else 30, alpha=0.8, label=name, **style)
    axis.set_xscale("symlog", linthresh=NEAR)
    axis.set_xticks([-NEAR, 0, NEAR, 0.1, 0.5], ["-0.02", "0", "0.02", "0.1", "0.5"])
    axis.axvspan(-NEAR, NEAR, color="0.9", zorder=0)
    what = "held-out nats per token above the best of the grid"
    axis.set_xlabel(
        f"{what}\n(grey: linear, -{NEAR} is {NEAR} or more below; beyond it: logarithmic)"
    )
    axis.invert_yaxis()
    axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def tuned(row: Row) -> bool:
    """Whether a row is the best of a grid, not of a rule."""
    return row["optimizer"] not in (RULE[0][0], EARLIER)


def came_to(row: Row) -> float:
    """The least loss of a grid's rates and averages; of a rule, what it releases."""
    if tuned(row):
        return math.inf if row["least"] is None else row["least"]
    return row[f"ema {1 - AVERAGED / row['num_steps']:g}"]


STARTS = "tiny; pre-trained and LoRA: the public starting model of experiments; SmolLM2-135M"


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    if given.dry_run:
        todo = cells(settings)
        print(f"{len(todo)} trainings: {', '.join(dict.fromkeys(cell.case for cell in todo))}")
        minutes = sum(cell.num_steps for cell in todo) * settings.seconds / 60
        print(f"about {minutes:.0f} minutes on two cores")
        return
    out = common.out_of(given)
    file = out / "optimizers.jsonl"
    absent = () if smollm2.VARIABLE in os.environ else SMOLLM2
    todo = [cell for cell in missing(cells(settings), file) if cell.case not in absent]
    compute(train, todo, settings, file, given.minutes, given.processes)
    rows = kept(file)
    table, sizes = best(rows), {row["case"]: row["num_parameters"] for row in rows}
    figures, claims = {"optimizers": plot(list(table))}, check(as_written(table))
    common.finish(
        "optimizers",
        given.scale,
        out,
        settings,
        table,
        figures,
        claims,
        data=checksums(row["case"] for row in table),
        model={"source": STARTS, "parameters_by_case": sizes},
        trainings=rows,
    )


if __name__ == "__main__":
    main()
