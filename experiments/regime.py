"""The regime that the paper is about, on one machine: Figures 4, 5, 6, 8 and 14 once more.

300 steps of 512 gradients of a model of 1,055,488 parameters that was pre-trained on public text,
on two sets of users: all speakers of scotus, of whom a step sees few; and 600 of them with 100
texts and more, where a cohort of 512 is nearly everyone, so that only larger groups can use more
text. Measured norms of users' gradients, L_ULS(G), are beside (regime_norms.csv). The update is
that of `fedsim train` where nothing is said of it: untuned, its rate follows from the noise alone.
Without noise that is the largest rate of the rule. What is claimed of the losses is in
claims.toml, which were committed before any run.

Rows are appended to regime.jsonl beside the results as they come; the same command goes on with
what is missing, also on another machine. Pre-training there may come to other bits, so to another
starting model: cells that are compared with each other, a block, are all trained from the same
one. A block that was begun from another model is begun again.

    python -m experiments.regime --scale small [--minutes 60] [--processes 1]     (--dry-run: cost)
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import starting_model
from experiments.harness import common
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, Rows, kept, missing
from experiments.regime_views import ALL, FEW, FIGURES, SEEDS, check

NAME, NORMS = "regime", "regime_norms"
FIRST_COHORT = 32  # of Estimate-and-Double, as in the paper
MEASURED = 1_055_488, 32
"""Parameters, and tokens of a text, of which it is known how long a gradient takes."""
SEED_OF_LOOK = 0
ROWS = 4  # of a pass
BLOCK = ("data", "seed", "epsilon", "budget", "times")
"""What cells of a block have in common: they differ in algorithm and group size."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale. Of all cells but those of Figure 8: `budget` gradients a step, the users there
    are."""

    data: tuple[str, ...] = (ALL, FEW)
    epsilons: tuple[float, ...] = (4.0, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    seeds_few: tuple[int, ...] = (0, 1)
    """Of the few users."""
    num_steps: int = 300
    budget: int = 512
    uls_groups: tuple[int, ...] = (1, 4, 16)
    """Beside what Estimate-and-Double says, which they are a bound of."""
    times: tuple[int, ...] = (1, 100)
    """Of Figure 8: as if there were so many times the users, in the accounting."""
    small_budget: int = 64
    """Of Figure 8, beside the budget."""
    seeds_times: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    few_users: int = 600
    few_least: int = 100
    """Texts, of each of the few users."""
    source: str = "scotus"
    model: str = "small"
    max_length: int = 32
    eval_examples: int = 1024
    seconds_per_gradient: float = 0.003
    """Of one core, for the estimate: with MEASURED parameters and texts of MEASURED tokens."""


SETTINGS = {
    "smoke": Settings(
        epsilons=(4.0,),
        seeds=(0,),
        seeds_few=(0,),
        num_steps=2,
        budget=16,
        uls_groups=(1,),
        times=(1,),
        seeds_times=(),
        few_users=20,
        few_least=2,
        source="pydocs",
        model="micro",
        max_length=24,
        eval_examples=16,
    ),
    "small": Settings(),
    "paper": Settings(num_steps=2_000, budget=2_048, seeds_few=(0, 1, 2, 3)),
}


@dataclasses.dataclass(frozen=True)
class Users:
    """One of the sets of users."""

    data: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    data: str
    seed: int
    algorithm: str
    epsilon: float
    group_size: int
    budget: int
    times: int = 1


def cells(settings: Settings, looks: Mapping[str, Row]) -> Iterator[Cell]:
    """All trainings: the cheap ones of the first seed, those that claims are judged by, then the
    other seeds.

    Args: looks: a row of `look` for each set of users.
    """
    times, small = settings.times, settings.small_budget
    yield from cells_of_users(settings, looks, settings.seeds_times[:1], small, times)
    yield from cells_of_seeds(settings, looks, settings.seeds[:SEEDS])
    # Last those of blocks that have cells of `cells_of_seeds`, too.
    for budget, which in ((small, times), (settings.budget, times[1:]), (settings.budget, times)):
        yield from cells_of_users(settings, looks, settings.seeds_times, budget, which)
    yield from cells_of_seeds(settings, looks, settings.seeds[SEEDS:])


def cells_of_seeds(
    settings: Settings, looks: Mapping[str, Row], seeds: Sequence[int]
) -> Iterator[Cell]:
    """Group sizes of both algorithms, at every epsilon and without noise."""
    for seed in seeds:
        for epsilon, data in itertools.product((*settings.epsilons, math.inf), settings.data):
            if data == ALL or seed in settings.seeds_few:
                for algorithm, group in groups(settings, looks[data], epsilon):
                    yield Cell(data, seed, algorithm, epsilon, group, settings.budget)


def cells_of_users(
    settings: Settings,
    looks: Mapping[str, Row],
    seeds: Sequence[int],
    budget: int,
    which: Sequence[int],
) -> Iterator[Cell]:
    """Figure 8: both algorithms by their heuristics, as if there were more users. A cell
    may be one that comes elsewhere, too."""
    epsilon, look = settings.epsilons[0], looks[settings.data[0]]
    for seed, times in itertools.product(seeds, which):
        uls = heuristic(settings, look, epsilon, budget, times)
        for algorithm, group in (("els", look["median_examples"]), ("uls", uls)):
            yield Cell(look["data"], seed, algorithm, epsilon, group, budget, times)


def groups(settings: Settings, look: Row, epsilon: float) -> list[tuple[str, int]]:
    """Algorithms and group sizes that are compared, those of the heuristics first."""
    median, uls = look["median_examples"], settings.uls_groups
    if math.isinf(epsilon):
        return [("els", median), ("uls", 1)]
    chosen = heuristic(settings, look, epsilon, settings.budget)
    both = [("els", median), ("uls", chosen)]
    both += [("uls", group) for group in reversed(uls) if group != chosen]
    others = (1, 8, 2 * median) if look["data"] == ALL else (1,)
    return both + [("els", group) for group in others if group != median]


def heuristic(settings: Settings, look: Row, epsilon: float, budget: int, times: int = 1) -> int:
    """G_ULS by Estimate-and-Double, of the norms that were measured."""
    from fedsim.tuning import doubling

    users, norms = look["num_users"], look["norms"]
    first = doubling.Configuration(1, min(FIRST_COHORT, budget))
    limits = doubling.Limits(max(settings.uls_groups), users)
    noise = doubling.uls_noise(epsilon, users**-1.1, settings.num_steps, users * times)
    norm = {int(group): value for group, (value, *_) in norms.items()}
    found, _ = doubling.estimate_and_double(budget, norm.__getitem__, noise, first, limits)
    return found.group_size


def started(data: str, settings: Settings, seed: int) -> tuple[Any, ...]:
    """(Run settings, model, data, key, task, parameters before training); texts are cut."""
    from fedsim import engine
    from fedsim.keys import SecretKey
    from fedsim.models import LanguageModelTask
    from fedsim.run import make_task

    engine.keep_compiled()
    run, model, users = opened(data, settings)
    key = SecretKey.create(seed, "regime")
    task, params = make_task(run, model, users, key.jax_key("parameters"))
    length = {"max_length": settings.max_length, "num_positions": task.config.table}
    config = dataclasses.replace(task.config, **length)
    return run, model, users, key, LanguageModelTask(users, config), params


@functools.lru_cache(maxsize=2)
def opened(data: str, settings: Settings) -> tuple[Any, Any, Any]:
    """(Run settings, model, data) of a set of users; the few are drawn among those with text, and
    held-out users are the same."""
    from fedsim.config import run_config
    from fedsim.data import UserStore
    from fedsim.run import find_model, load_data

    made_up = settings.source == "pydocs"
    built = settings.source if made_up else starting_model.users(settings.source)
    start = settings.model if made_up else str(starting_model.model(settings.model))
    run = run_config(
        data=str(built),
        run_dir=Path("."),
        model=start,
        engine="local",
        max_length=settings.max_length if made_up else None,
    )
    model = find_model(start)
    found = load_data(run.data, model, lambda text: None)
    if data == ALL:
        return run, model, found
    users, ids = found.train, found.train.user_ids()
    rich = np.flatnonzero(np.diff(users.offsets) >= settings.few_least)
    chosen = np.random.default_rng(0).choice(rich, settings.few_users, replace=False)
    texts = {}
    for user in chosen:
        texts[ids[user]] = common.tokens_of(users, user)
    few = UserStore.from_examples(texts, users.max_length, users.vocab_size)
    return run, model, dataclasses.replace(found, train=few)


def look(at: Users, settings: Settings) -> Row:
    """What the heuristics look at: the median user, and L_ULS(G) at the starting model with the
    interval that it is in with a confidence of 95 %."""
    from fedsim.clipping import num_coordinates
    from fedsim.engine.worker import LocalEngine
    from fedsim.run import model_sha256
    from fedsim.sampling import median_group_size
    from fedsim.tuning.estimates import GradientNorms

    _, model, data, key, task, params = started(at.data, settings, SEED_OF_LOOK)
    tried = [2**n for n in range(max(settings.uls_groups).bit_length())]
    engine = LocalEngine(task, num_lanes=1)
    norms = GradientNorms(engine, params, data.train.offsets, key, max_group_size=tried[-1])
    found = {group: norms.user_norm(group) for group in tried}
    return {
        **dataclasses.asdict(at),
        "seed": SEED_OF_LOOK,
        "num_users": data.train.num_users,
        "num_examples": data.train.num_examples,
        "median_examples": median_group_size(np.diff(data.train.offsets)),
        "norms": {
            str(group): [norm, *(norms.intervals[norm] or (None, None))]
            for group, norm in found.items()
        },
        "fingerprint": data.train.fingerprint,
        "model": model_sha256(model),
        "num_parameters": num_coordinates(params),
        **came_from(),
    }


def facts_of(at: common.Prepared) -> Row:
    """What rows say of a training."""
    from fedsim.run import model_sha256

    users = at.data.train
    return {
        "num_users": at.plan.num_users,
        "median_examples": int(np.median(np.diff(users.offsets))),
        "num_parameters": at.plan.num_parameters,
        "expected_count": at.plan.expected_count,
        "noise_multiplier": at.plan.noise_multiplier,
        "delta": at.plan.delta,
        "learning_rate": at.run.learning_rate,
        "model": short_hash(model_sha256(at.model)),
    }


def prepared(cell: Cell, settings: Settings) -> common.Prepared:
    """The training of a cell. Draws and fresh noise of a seed are the same for all."""
    from fedsim.config import ADD_OR_REMOVE, PrivacyConfig

    run, model, data, key, task, params = started(cell.data, settings, cell.seed)
    users = data.train
    privacy = PrivacyConfig(
        cell.epsilon,
        settings.num_steps,
        cell.budget,
        group_size=cell.group_size,
        delta=users.num_users**-1.1,
        adjacency=ADD_OR_REMOVE,
    )
    rest = privacy, run, model, data, task, params, key
    return common.prepared(cell.algorithm, *rest, times=cell.times)


def train(cell: Cell, settings: Settings) -> Row:
    """What comes of a cell."""
    from fedsim.evaluate import evaluate, headline

    began, used = time.monotonic(), time.process_time()
    at = prepared(cell, settings)
    before, average, last = (
        headline(evaluate(at.engine, each, at.data, settings.eval_examples))
        for each in (at.params, *at.trained(rows=ROWS))
    )
    return {
        **dataclasses.asdict(cell),
        **facts_of(at),
        "loss_before": before,
        "loss": average,
        "loss_last": last,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        **came_from(),
    }


def cost(todo: Sequence[Cell], done: int, settings: Settings, num_parameters: int) -> str:
    """What is to be run, and how long it takes: as what was measured, by steps, gradients, tokens
    and parameters."""
    gradients = sum(cell.budget for cell in todo) * settings.num_steps
    size = num_parameters * settings.max_length / math.prod(MEASURED)
    hours = gradients * settings.seconds_per_gradient * size / 3600
    what = f"{len(todo)} trainings of {num_parameters:,} parameters, {gradients:,} gradients, "
    what += f"{done} trainings of them done: "
    return what + f"about {hours / 2:,.1f} hours on two cores for all"


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    out = common.out_of(given)
    file, looks_file = out / f"{NAME}.jsonl", out / f"{NORMS}.jsonl"
    if given.dry_run:
        assumed = {"num_users": 7_014, "median_examples": 154, "norms": dict.fromkeys("124", [1.0])}
        assumed["norms"] |= {"8": [1.0], "16": [1.0]}
        assumed["num_parameters"] = MEASURED[0]
        looks = {data: {"data": data, **assumed} for data in settings.data}
        looks |= {row["data"]: row for row in kept(looks_file)}
    else:
        looks = looked(settings, looks_file, given.processes)
    todo = list(dict.fromkeys(cells(settings, looks)))
    if given.dry_run:
        kinds = dict.fromkeys((cell.data, f"epsilon {cell.epsilon:g}") for cell in todo)
        print("; ".join(", ".join(kind) for kind in kinds))
        num_parameters = max(row["num_parameters"] for row in looks.values())
        done = len(todo) - len(missing(todo, file))
        print(cost(todo, done, settings, num_parameters))
        return
    if given.minutes:
        model = model_of(settings)
        left = to_train(todo, kept(file), model)
        compute(train, left, settings, file, given.minutes, given.processes)
    write(settings, out, given.scale, looks, todo)


def looked(settings: Settings, file: Path, processes: int | None) -> dict[str, Row]:
    """A row of `look` for each set of users, by its name. Args: file: rows that are kept, to which
    those that are missing are appended."""
    if left := missing([Users(data) for data in settings.data], file):
        model_of(settings)  # here, because processes side by side would make it in one place
        compute(look, left, settings, file, math.inf, processes)
    return {row["data"]: row for row in kept(file)}


def described(settings: Settings, looks: Mapping[str, Row]) -> dict[str, Any]:
    """What a record says of the users and the starting model."""
    first = next(iter(looks.values()))
    model = {name: first[name] for name in ("model", "num_parameters")}
    return {
        "data": {
            n: common.origin(settings.source, each["fingerprint"]) for n, each in looks.items()
        },
        "model": {"source": f"{settings.model}, pre-trained on public text", **model},
    }


def model_of(settings: Settings) -> str:
    """What rows call the starting model of this machine, which is made if need be."""
    from fedsim.run import model_sha256

    return short_hash(model_sha256(opened(settings.data[0], settings)[1]))


def short_hash(sha256: str | None) -> str:
    """As rows have it; nothing of a fresh model."""
    return (sha256 or "")[:12]


def by_block(cells: Iterable[Cell]) -> dict[tuple, list[Cell]]:
    """Cells that are compared with each other, in order."""
    found: dict[tuple, list[Cell]] = {}
    for cell in cells:
        found.setdefault(tuple(getattr(cell, name) for name in BLOCK), []).append(cell)
    return found


def trained_from(block: Sequence[Cell], rows: Rows) -> str | None:
    """The starting model of most of a block's rows, of equals the first; None: it has none."""
    own = [row for row in rows if any(is_of(row, cell) for cell in block)]
    models = [row["model"] for row in own]
    return max(dict.fromkeys(models), key=models.count, default=None)


def is_of(row: Row, cell: Cell) -> bool:
    """Whether it is what came of the cell."""
    return dataclasses.asdict(cell).items() <= row.items()


def to_train(todo: Iterable[Cell], rows: Rows, model: str) -> list[Cell]:
    """The cells that have no row from the model of their block: which is this machine's, unless
    the block is whole."""
    todo, left = list(todo), set()
    for block in by_block(todo).values():
        for of in dict.fromkeys((trained_from(block, rows), model)):
            found = [c for c in block if not any(is_of(r, c) and r["model"] == of for r in rows)]
            if not found:
                break
        left.update(found)
    return [cell for cell in todo if cell in left]


def that_count(rows: Rows, todo: Iterable[Cell]) -> list[bool]:
    """Whether each row does: it is of a planned cell, and from the model of its block."""
    model_of_cell = {
        cell: trained_from(block, rows) for block in by_block(todo).values() for cell in block
    }
    names = [field.name for field in dataclasses.fields(Cell)]
    each = (Cell(**{name: row[name] for name in names}) for row in rows)
    return [row["model"] == model_of_cell.get(cell) for row, cell in zip(rows, each, strict=True)]


def write(
    settings: Settings, out: Path, scale: str, looks: Mapping[str, Row], todo: Sequence[Cell]
) -> None:
    """Records of the norms, and of the trainings that there are."""
    about, rows = described(settings, looks), kept(out / f"{NAME}.jsonl")
    norms = [
        {"data": name, "group_size": int(group), "norm": norm, "low": low, "high": high}
        for name, each in looks.items()
        for group, (norm, low, high) in each["norms"].items()
    ]
    common.finish(NORMS, scale, out, settings, norms, {}, [], trainings=[*looks.values()], **about)
    if not rows:
        return
    table: Rows = as_written(
        [
            {**row, **chosen(settings, looks, row), "counts": counts, "planned": len(todo)}
            for row, counts in zip(rows, that_count(rows, todo), strict=True)
        ]
    )
    common.finish(
        NAME,
        scale,
        out,
        settings,
        table,
        {name: plot(table) for name, plot in FIGURES.items()},
        check(table),
        data=about["data"],
        model={**about["model"], "trained_from": list(dict.fromkeys(row["model"] for row in rows))},
        trainings=rows,
    )


def chosen(settings: Settings, looks: Mapping[str, Row], row: Row) -> Row:
    """What Estimate-and-Double says where a row was trained; nothing where there is no noise."""
    if math.isinf(row["epsilon"]):
        return {"heuristic_group_size": None}
    where = row["epsilon"], row["budget"], row["times"]
    return {"heuristic_group_size": heuristic(settings, looks[row["data"]], *where)}


if __name__ == "__main__":
    main()
