"""How many users does a training need? Forecasts (harness/forecasts.py), held to account.

Beyond the paper. A few users of a corpus are what somebody has: a forecast says what so many and
2, 4 and 8 times as many would gain. Then there are so many: users drawn from the rest
join, and each number is trained with three seeds, at the settings that were recommended for the
few. Held-out users stay the same.

Claims (claims.toml) were committed before the runs. The first try was on reddit_links alone,
with probes of 16 examples a step; its rows are forecast_first.jsonl and forecast_first_said.jsonl.
It was off by too much, so probes have a quarter of the batch size since; that was settled on
reddit_links, and scotus was forecast by it unseen. What was forecast is kept in forecast_said.jsonl
before the first training; rows are appended to forecast.jsonl as they come, and the same command
goes on with what is missing. The model is that of starting_model.py.

    python -m experiments.forecast --scale small [--minutes 60] [--processes 1]   (--dry-run: cost)
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments import starting_model
from experiments.harness import common, finetuning
from experiments.harness.claims import Claims, Quantity, cell_error, judged, mean_error
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, Rows, by, kept, missing, over_seeds

NAME, SAID = "forecast", "forecast_said"
MADE_UP = "made-up text"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    first: tuple[tuple[str, int], ...] = (("scotus", 1_000), ("reddit_links", 3_500))
    """Users that there are at first, by corpus; a fifth is held out."""
    times: tuple[int, ...] = (1, 2, 4, 8)
    epsilons: tuple[float, ...] = (4.0, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    num_steps: int = 100
    budget: int = 128
    max_length: int = 64
    eval_examples: int = 1024
    """As forecasts evaluate."""


SETTINGS = {
    "smoke": Settings(((MADE_UP, 30),), (1, 2), (8.0,), (0,), 2, 8, 24, 16),
    "small": Settings(),
}
TRAININGS = 24
"""Of a corpus, before it is judged."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    source: str
    epsilon: float
    times: int
    seed: int


def cells(settings: Settings) -> Iterator[Cell]:
    """All trainings, the first seed first."""
    sources = [source for source, _ in settings.first]
    every = itertools.product(settings.seeds, sources, settings.epsilons, settings.times)
    for seed, source, epsilon, times in every:
        yield Cell(source, epsilon, times, seed)


@functools.lru_cache(maxsize=2)
def built(source: str, settings: Settings) -> tuple[Path, Path]:
    """(The first users' data, the others'): directories, which are built if need be."""
    from fedsim.data import build

    made_up, first = source == MADE_UP, dict(settings.first)[source]
    folder = starting_model.directory() / "forecast" / f"{source}-{first}"
    parts = folder / "first", folder / "others"
    if all(part.is_dir() for part in parts):
        return parts
    folder.mkdir(parents=True, exist_ok=True)
    texts = finetuning.made_up(folder / "texts.parquet") if made_up else common.shared(source)
    table = pq.read_table(texts, columns=["user_id", "text"])
    names = np.array(sorted(set(table["user_id"].to_pylist())))
    chosen = np.random.default_rng(0).permutation(names)[:first]
    inside = pc.is_in(table["user_id"], value_set=pa.array(chosen.tolist()))  # pyright: ignore
    tokenizer = "bytes" if made_up else str(starting_model.public() / "tokenizer.json")
    options = {"tokenizer": tokenizer, "max_length": settings.max_length, "eval_examples": False}
    for part, rows, share in zip(parts, (inside, pc.invert(inside)), (0.2, 0.0), strict=True):  # pyright: ignore
        file = folder / f"{part.name}.parquet"
        pq.write_table(table.filter(rows), file)
        build(file, part, eval_users=share, num_workers=1, **options)
        file.unlink()
    return parts


def model_of(source: str) -> str:
    """What is started from."""
    return "micro" if source == MADE_UP else str(starting_model.model())


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What the first users ask."""

    source: str
    epsilon: float


def said(of: Forecast, settings: Settings) -> Row:
    """What is recommended to the first users, and forecast of so many and more."""
    import fedsim
    from experiments.harness import forecasts

    found = fedsim.recommend(
        str(built(of.source, settings)[0]),
        epsilon=of.epsilon,
        num_steps=settings.num_steps,
        batch_size=settings.budget,
        model=model_of(of.source),
        sampling="poisson",
        engine="local",
        seed=0,
    )
    names = ("group_size", "batch_size", "clip_norm", "noise_multiplier")
    advice = getattr(found, found.algorithm)
    prober, units = prober_of(of, settings, found.algorithm, advice)
    asked = dataclasses.replace(prober.settings, delta=None)  # that of so many users
    by_users = forecasts.signals_by_users(advice, asked, prober.data.train.num_users, units)
    return {
        **dataclasses.asdict(of),
        "algorithm": found.algorithm,
        **{name: getattr(advice, name) for name in names},
        **forecasts.expectations(prober, by_users),
        **came_from(),
    }


def prober_of(of: Forecast, settings: Settings, algorithm: str, advice: Any) -> tuple[Any, int]:
    """(What trains the probes of a forecast, the number of sampling units that there are)."""
    from experiments.harness.forecasts import Prober
    from fedsim.clipping import Strategy
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.data import Dataset
    from fedsim.engine.worker import LocalEngine
    from fedsim.keys import SecretKey
    from fedsim.plan import fill_defaults
    from fedsim.run import find_model, make_task

    first, start = built(of.source, settings)[0], model_of(of.source)
    data = Dataset.open(first)
    run = run_config(data=str(first), run_dir=Path("."), model=start, engine="local")
    model, group = find_model(run.model.source), advice.group_size
    lanes = run.engine.num_lanes
    task, params = make_task(run, model, data, SecretKey.create(0).jax_key("init"))
    asked = PrivacyConfig(of.epsilon, settings.num_steps, advice.batch_size, group_size=group)
    privacy, _ = fill_defaults(Algorithm(algorithm), asked, data)
    prober = Prober(
        *(run, data, params, SecretKey.create(0, "recommend"), LocalEngine(task, num_lanes=lanes)),
        algorithm=Algorithm(algorithm),
        settings=dataclasses.replace(privacy, clip_norm=advice.clip_norm),
        strategy=Strategy("scan", 4),  # as the runs that it forecasts
        fresh=model is None,
    )
    return prober, data.train.num_users * (group if algorithm == Algorithm.ELS else 1)


@functools.lru_cache(maxsize=1)
def users(source: str, times: int, settings: Settings) -> Any:
    """The first users' data with so many times their training users."""
    from fedsim.data import Dataset, UserStore

    first, others = map(Dataset.open, built(source, settings))
    wanted = times * first.train.num_users
    texts = {}
    for store in (first.train, others.train):
        names = store.user_ids()
        order = np.random.default_rng(1).permutation(len(names))
        for user in order[: wanted - len(texts)]:
            texts[names[user]] = common.tokens_of(store, user)
    train = UserStore.from_examples(texts, first.train.max_length, first.train.vocab_size)
    return dataclasses.replace(first, train=train)


def train(cell: Cell, settings: Settings, advice: Mapping[tuple[str, float], Row]) -> Row:
    """What comes of a training. Args: advice: by corpus and epsilon, from `said`."""
    from fedsim import engine
    from fedsim.config import PrivacyConfig, run_config
    from fedsim.evaluate import evaluate, headline
    from fedsim.keys import SecretKey
    from fedsim.run import find_model, make_task

    began, used = time.monotonic(), time.process_time()
    engine.keep_compiled()
    data = users(cell.source, cell.times, settings)
    own, start = advice[cell.source, cell.epsilon], model_of(cell.source)
    first = str(built(cell.source, settings)[0])
    run = run_config(data=first, run_dir=Path("."), model=start, engine="local")
    model = find_model(run.model.source)
    key = SecretKey.create(cell.seed, f"{NAME} {cell.source} {cell.epsilon} {cell.times}")
    fresh = SecretKey.create(0).jax_key("init")  # as recommend and train do
    task, params = make_task(run, model, data, fresh)
    privacy = PrivacyConfig(
        cell.epsilon,
        settings.num_steps,
        own["batch_size"],
        group_size=own["group_size"],
        clip_norm=own["clip_norm"],
    )
    at = common.prepared(own["algorithm"], privacy, run, model, data, task, params, key)
    average, _ = at.trained()
    before, after = (
        headline(evaluate(at.engine, each, data, settings.eval_examples))
        for each in (params, average)
    )
    return {
        **dataclasses.asdict(cell),
        "algorithm": own["algorithm"],
        **common.facts_of(at.plan),
        "learning_rate": at.run.learning_rate,
        "loss_before": before,
        "gain": before - after,
        "fingerprint": data.train.fingerprint[:12],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        **came_from(),
    }


def whole(rows: Rows) -> Rows:
    """A row for each epsilon and number of users of a corpus: over the seeds, `loss` being minus
    the gain."""
    found = []
    for own in by(rows, lambda row: (row["epsilon"], row["times"])).values():
        came = over_seeds([-row["gain"] for row in sorted(own, key=lambda row: row["seed"])])
        found.append({**own[0], **came, "gain": -came["loss"]})
    return found


def quantities(rows: Rows) -> dict[str, Quantity]:
    """Of each corpus all of whose trainings are there. The seeds of a number of users share no draw
    and no noise, but all gains of an epsilon are forecast by one curve, so they may be off
    together."""
    found = {}
    for source, own in by(rows, lambda row: row["source"]).items():
        if len(own) < TRAININGS:
            continue
        cells = whole(own)
        inside = sum(row["low"] <= row["gain"] <= row["high"] for row in own)
        off = float(np.mean([abs(cell["gain"] - cell["forecast"]) for cell in cells]))
        gain, error = float(np.mean([cell["gain"] for cell in cells])), mean_error(cells)
        more = {}
        for epsilon, each in by(cells, lambda cell: cell["epsilon"]).items():
            first, *_, last = sorted(each, key=lambda cell: cell["times"])
            came, said = (last[name] - first[name] for name in ("gain", "forecast"))
            more[f"at epsilon {epsilon:g} {came:.4f}, beyond the forecast"] = came - said
        spread = float(np.sqrt(2)) * cell_error(cells, ("epsilon",))
        found |= {
            f"{source} inside": Quantity({f"of {TRAININGS}": inside}),
            f"{source} off": Quantity({f"of {gain:.4f} nats the share": off / gain}, error / gain),
            f"{source} more": Quantity(more, spread),
        }
    return found


def check(rows: Rows) -> Claims:
    """Whether the gains came as they were forecast, of each corpus by itself."""
    return judged(NAME, quantities(rows))


def plot(rows: Sequence[Row]) -> Figure:
    """Gains against the number of users, on the forecast and its interval."""
    corpora = by(rows, lambda row: row["source"])
    figure, axes = common.panels(1, len(corpora), 5, 4)
    for axis, (source, of_source) in zip(axes[0], corpora.items(), strict=True):
        for epsilon, own in by(of_source, lambda row: row["epsilon"]).items():
            by_users = {row["num_users"]: row for row in own}
            cells = [by_users[number] for number in sorted(by_users)]
            users, said, low, high = (
                [cell[name] for cell in cells] for name in ("num_users", "forecast", "low", "high")
            )
            (line,) = axis.plot(users, said, label=f"ε = {epsilon:g}: forecast")
            axis.fill_between(users, low, high, alpha=0.2, color=line.get_color(), lw=0)
            gains = [row["num_users"] for row in own], [row["gain"] for row in own]
            axis.plot(*gains, "o", ms=4, color=line.get_color(), label=f"ε = {epsilon:g}: trained")
        axis.set(title=source, xlabel="users")
        common.log2_axis(axis, [row["num_users"] for row in of_source])
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("fall of held-out loss (nats per token)")
    common.legend_below(figure)
    return figure


@common.mistakes()
def main() -> None:
    """Forecast, train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    common.at_hand(given, SETTINGS)
    settings = SETTINGS[given.scale]
    todo = list(cells(settings))
    out = common.out_of(given)
    file, before = out / f"{NAME}.jsonl", out / f"{SAID}.jsonl"
    if given.dry_run:
        gradients = len(todo) * settings.num_steps * settings.budget
        print(
            *(f"{s}, epsilon {e:g}" for s, _ in settings.first for e in settings.epsilons), sep="; "
        )
        done = len(todo) - len(missing(todo, file))
        minutes = gradients / finetuning.GRADIENTS_PER_CORE_SECOND / 120
        print(f"{len(todo)} trainings, {gradients:,} gradients, {done} trainings done: ", end="")
        print(f"about {minutes:.0f} minutes on two cores for all, and as many for the forecasts")
        return
    for source, _ in settings.first:  # here, because processes side by side would build it at once
        built(source, settings)
        model_of(source)
    ask = [Forecast(source, e) for source, _ in settings.first for e in settings.epsilons]
    compute(said, missing(ask, before), settings, before, float("inf"), given.processes)
    advice = {(row["source"], row["epsilon"]): row for row in kept(before)}
    left = missing(todo, file) if given.minutes else []
    run = functools.partial(train, advice=advice)
    compute(run, left, settings, file, given.minutes, given.processes)
    if rows := kept(file):
        write(settings, out, given.scale, rows, advice)


def write(
    settings: Settings,
    out: Path,
    scale: str,
    rows: Rows,
    advice: Mapping[tuple[str, float], Row],
) -> None:
    """The record of the trainings that there are, beside what was forecast of them."""
    table = []
    for row in rows:
        own = advice[row["source"], row["epsilon"]]["users"]
        one = next(each for each in own if each["num_users"] == row["num_users"])
        table.append({**row, "forecast": one["gain"], "low": one["low"], "high": one["high"]})
    table = as_written(table)
    origin: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["times"] == min(settings.times) and row["source"] not in origin:
            origin[row["source"]] = {"fingerprint": row["fingerprint"]}
    for source in origin if scale != "smoke" else ():
        origin[source] |= common.checksum(common.shared(source))
    common.finish(
        NAME,
        scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        data=origin,
        model={"name": "of the scale small", "num_parameters": rows[0]["num_parameters"]},
        trainings=rows,
    )


if __name__ == "__main__":
    main()
