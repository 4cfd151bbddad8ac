"""Section 5's order of things: non-private pre-training on public text, then private fine-tuning.

Claim: pre-training on text that is not the users' (screened against it, as C4-- was) does part of
the work, and both algorithms lower the loss on held-out users further at epsilon = 8. The public
text is Debian's package descriptions and news, the users are speakers before the Supreme Court
(shared/data); `smoke` makes both up.

Both algorithms are tuned alike, with the first seed: each of two group sizes with the rule's
learning rate and thirds and threefolds of it, until the best is not at the edge. What is best is
trained again with other seeds, which no choice was made on; verdicts are theirs. The held-out users
are the same, so that a little of their loss may be the choice's, for both alike.

Rows are appended to table_pretraining.jsonl beside the results as they come; the same command goes
on with what is missing.

    python -m experiments.table_pretraining --scale small [--minutes 60] [--processes 2]
"""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import starting_model
from experiments.data import Screen, prepare
from experiments.harness import common
from experiments.harness.claims import ahead, cell_error, mean_error, no_worse
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import (
    Row,
    Rows,
    by,
    kept,
    losses_by_power,
    missing,
    over_seeds,
    powers_to_try,
)
from experiments.pretraining import Settings as Pretraining, pretrain
from fedsim import files
from fedsim.config import ADD_OR_REMOVE, PrivacyConfig, run_config
from fedsim.data import Dataset, build
from fedsim.errors import DataError
from fedsim.run import Console

NAME = "table_pretraining"
EPSILON = 8.0
MEDIAN = -1
"""As a group size: the median user's number of texts."""
STEP = 3.0
"""From one learning rate to the next."""
MAX_STEPS = 3
"""Away from the rule's rate."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of one scale."""

    model: str
    vocabulary: int
    max_length: int
    pretrain_steps: int
    batch_size: int
    num_steps: int
    budget: int
    pretrain_rate: float = 0.03
    eval_examples: int = 512
    groups: tuple[tuple[str, int], ...] = (("els", 1), ("els", MEDIAN), ("uls", 1), ("uls", 4))
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """Of fine-tuning; settings are chosen with the first."""
    made_up: bool = False
    """The texts, and nothing is kept."""
    seconds_per_gradient: float = 0.06
    """On one core, for the estimate."""


SETTINGS = {
    "smoke": Settings(
        *("tiny", 300, 24, 30, 32, 4, 16),
        pretrain_rate=0.1,
        eval_examples=64,
        groups=(("els", 1), ("uls", 1)),
        seeds=(0, 1),
        made_up=True,
    ),
    # 10 M parameters: a vocabulary of 20,000 pieces of 256 features, and six blocks.
    "small": Settings("medium", 20_000, 64, 100, 128, 30, 64),
    "paper": Settings("medium", 20_000, 64, 1_000, 128, 200, 128),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fine-tuning."""

    seed: int
    algorithm: str
    group: int
    """Or MEDIAN."""
    power: int
    """The rate is the rule's times 3 to the power."""


def sources(made_up: bool, directory: Path) -> tuple[Path, Path, str]:
    """(public text, users' text, the column of both that holds it), as Parquet files."""
    public = directory / "public.parquet"
    if not made_up:
        starting_model.write_public_text(public)
        return public, common.shared("scotus"), "text"
    private = directory / "private.parquet"
    for file, seed, evenness in ((public, 0, 1.0), (private, 1, 0.7)):
        rng = np.random.default_rng(seed)
        words = np.array("the court of a law and is to be held that it was case not this".split())
        # Every user has words of their own; the private ones have some in common, too.
        likely = rng.dirichlet(3 * evenness ** np.arange(len(words)), size=200)
        rows = [
            (f"user{user:03d}", " ".join(rng.choice(words, rng.integers(4, 12), p=likely[user])))
            for user in range(200)
            for _ in range(rng.integers(2, 12))
        ]
        users, texts = zip(*rows, strict=True)
        pq.write_table(pa.table({"user_id": users, "text": texts}), file)
    return public, private, "text"


def data_of(settings: Settings, directory: Path) -> tuple[Dataset, Dataset]:
    """(public, users'), in the tokens of a WordPiece that was learnt from the public text."""
    public, private = directory / "public", directory / "private"
    if not private.is_dir():
        public_file, private_file, column = sources(settings.made_up, directory)
        options: dict[str, Any] = {"max_length": settings.max_length, "text_column": column}
        note = Console().note
        if not public.is_dir():
            screen = Screen((f"{private_file}#{column}",))
            tokenizer = f"wordpiece:{settings.vocabulary}"
            own = {"tokenizer": tokenizer, "screen": screen, "long_texts": "split"}
            prepare(public_file, public, progress=note, **own, **options)
        own = {"tokenizer": public / "tokenizer.json", "tokenizer_is_public": True}
        build(private_file, private, progress=note, **own, **options)
    return Dataset.open(public), Dataset.open(private)


def make_start(settings: Settings, directory: Path) -> None:
    """Make what is missing of the data and of the run that fine-tuning starts from."""
    public, _ = data_of(settings, directory)
    run = run_config(
        data=str(public.path),
        run_dir=directory / "pretrain",
        model=settings.model,
        optimizer="adafactor",
        learning_rate=settings.pretrain_rate,
        engine="local",
        seed=0,
        eval_examples=settings.eval_examples,
    )
    steps = Pretraining(settings.pretrain_steps, settings.batch_size, 8)
    if not pretrain(steps, run, Console()):
        raise KeyboardInterrupt


@functools.lru_cache(maxsize=1)
def at_start(settings: Settings, directory: Path) -> tuple[Any, Any, float, float]:
    """(Pre-trained model, users' data, held-out loss of a fresh model, of this one)."""
    from fedsim.keys import SecretKey
    from fedsim.run import find_model, make_task

    model, data = find_model(str(directory / "pretrain")), Dataset.open(directory / "private")
    key = SecretKey.create(0, NAME).jax_key("parameters")
    task, params = make_task(fine_tuning(directory), model, data, key)
    return model, data, held_out(task, task.init(key), settings), held_out(task, params, settings)


def fine_tuning(directory: Path) -> Any:
    """The settings of a run that starts from the pre-trained model."""
    model = str(directory / "pretrain")
    return run_config(
        data=str(directory / "private"), run_dir=Path("."), model=model, engine="local"
    )


def held_out(task: Any, params: Any, settings: Settings) -> float:
    """The loss on held-out users."""
    from fedsim.engine.worker import LocalEngine
    from fedsim.evaluate import evaluate, headline

    engine = LocalEngine(task, num_lanes=1)
    return headline(evaluate(engine, params, task.dataset, settings.eval_examples))


def train(cell: Cell, settings: Settings, directory: Path) -> Row:
    """What comes of a cell."""
    from fedsim import engine
    from fedsim.keys import SecretKey
    from fedsim.run import make_task, model_sha256
    from fedsim.sampling import median_group_size

    engine.keep_compiled()
    model, data, untrained, before = at_start(settings, directory)
    used, users = time.process_time(), data.train
    group = median_group_size(np.diff(users.offsets)) if cell.group == MEDIAN else cell.group
    privacy = PrivacyConfig(
        EPSILON,
        settings.num_steps,
        settings.budget,
        delta=users.num_users**-1.1,
        group_size=group,
        adjacency=ADD_OR_REMOVE,
    )
    key, run = SecretKey.create(cell.seed, NAME), fine_tuning(directory)
    task, params = make_task(run, model, data, key.jax_key("parameters"))
    at = common.prepared(cell.algorithm, privacy, run, model, data, task, params, key)
    average, _ = at.trained(STEP**cell.power, rows=4)
    return {
        **dataclasses.asdict(cell),
        **common.facts_of(at.plan),
        "learning_rate": at.run.learning_rate * STEP**cell.power,
        "loss_untrained": untrained,
        "loss_before": before,
        "loss": held_out(task, average, settings),
        "cpu_seconds": round(time.process_time() - used, 1),
        "model": (model_sha256(model) or "")[:12],
        "fingerprint": users.fingerprint[:12],
        **came_from(),
    }


def to_tune(settings: Settings, rows: Rows) -> list[Cell]:
    """The trainings with the first seed, as far as it is known which there are."""
    todo = []
    for algorithm, group in settings.groups:
        losses = of_powers(rows, settings.seeds[0], algorithm, group)
        powers = powers_to_try(losses, MAX_STEPS)
        todo += [Cell(settings.seeds[0], algorithm, group, power) for power in powers]
    return todo


def of_powers(rows: Rows, seed: int, algorithm: str, group: int) -> dict[int, float]:
    """The losses by how far the rate is from the rule's."""
    own = {"seed": seed, "algorithm": algorithm, "group": group}
    return losses_by_power(row for row in rows if own.items() <= row.items())


def best(rows: Rows, algorithm: str) -> Row:
    """The row with the least loss, of those of the first seed."""
    first = min(row["seed"] for row in rows)
    own = [row for row in rows if row["algorithm"] == algorithm and row["seed"] == first]
    return min(own, key=lambda row: row["loss"] if math.isfinite(row["loss"]) else math.inf)


def to_judge(settings: Settings, rows: Rows) -> list[Cell]:
    """The best of each algorithm, with the other seeds."""
    chosen = [best(rows, algorithm) for algorithm in ("els", "uls")]
    return [
        Cell(seed, row["algorithm"], row["group"], row["power"])
        for seed in settings.seeds[1:]
        for row in chosen
    ]


def check(rows: Rows) -> common.Claims:
    """Held-out losses before and after, of seeds on which nothing was chosen."""
    first = min(row["seed"] for row in rows)
    found = by([row for row in rows if row["seed"] != first], lambda row: row["algorithm"])
    seeds = rows[0]["seeds_planned"] - 1
    if [len(own) for own in found.values()] != [seeds] * 2:
        there = sum(map(len, found.values()))
        what = "pre-training, then private fine-tuning, helps"
        return [(what, None, f"{there} of {2 * seeds} trainings are run that are judged")]
    means = {
        name: over_seeds([row["loss"] for row in sorted(own, key=lambda row: row["seed"])])
        for name, own in found.items()
    }
    none, before = rows[0]["loss_untrained"], rows[0]["loss_before"]
    one, two = mean_error([*means.values()]), math.sqrt(2) * cell_error([*means.values()], ())
    els, uls = means["els"]["loss"], means["uls"]["loss"]
    shown = f"{els:.4f} with ELS, {uls:.4f} with ULS"
    chosen = [best(rows, name) for name in ("els", "uls")]
    edges = [
        row["power"] in ends(of_powers(rows, first, row["algorithm"], row["group"]))
        for row in chosen
    ]
    said = ", ".join(
        f"{row['algorithm'].upper()} G = {row['group_size']}, rate {row['learning_rate']:.3g}"
        for row in chosen
    )
    return [
        (
            "pre-training on other text helps",
            ahead(none - before, one),
            f"{none:.2f} to {before:.2f}",
        ),
        (
            "private fine-tuning helps further",
            ahead([before - els, before - uls], one),
            f"{before:.4f} to {shown}; standard error {one:.2g}",
        ),
        (
            "ULS is at least as good as ELS, both tuned",
            no_worse(els - uls, two),
            f"{shown}; standard error {two:.2g}",
        ),
        ("ours: no learning rate is at the edge of those that were tried", not any(edges), said),
    ]


def ends(losses: dict[int, float]) -> tuple[int, int]:
    """The least and the largest."""
    return min(losses), max(losses)


@common.mistakes()
def main() -> None:
    """Train what is missing, and write what was found."""
    given = common.resumable(__doc__, "training", processes=True)
    settings = SETTINGS[given.scale]
    out = common.out_of(given)
    file = out / f"{NAME}.jsonl"
    if given.dry_run:
        tuned = 3 * len(settings.groups)
        count = tuned + 2 * len(settings.seeds) - 2
        gradients = count * settings.num_steps * settings.budget
        gradients += settings.pretrain_steps * settings.batch_size
        hours = gradients * settings.seconds_per_gradient / 7200
        print(f"{count} trainings at least, {len(kept(file))} of them done")
        print(f"{gradients:,} gradients: about {hours:.1f} hours on two cores for all")
        return
    sizes = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    directory = files.cache_dir() / NAME / hashlib.sha256(sizes.encode()).hexdigest()[:12]
    if settings.made_up:
        directory = out / NAME
        shutil.rmtree(directory, ignore_errors=True)
    if given.minutes:
        directory.mkdir(parents=True, exist_ok=True)
        make_start(settings, directory)
    fine_tune = functools.partial(train, directory=directory)
    ends_at = time.monotonic() + 60 * given.minutes
    while left := missing(todo(settings, kept(file)), file):
        minutes = max(0.0, ends_at - time.monotonic()) / 60
        compute(fine_tune, left, settings, file, minutes, given.processes)
        if minutes == 0:
            break
    write(settings, out, given.scale, kept(file))


def todo(settings: Settings, rows: Rows) -> list[Cell]:
    """All trainings that are known to be needed."""
    tuned = to_tune(settings, rows)
    known = {dataclasses.astuple(cell) for cell in tuned}
    done = {(r["seed"], r["algorithm"], r["group"], r["power"]) for r in rows}
    return tuned + (to_judge(settings, rows) if known <= done else [])


def write(settings: Settings, out: Path, scale: str, rows: Rows) -> None:
    """The record of the rows that there are."""
    if not rows:
        return
    for row in rows:
        if row["model"] != rows[0]["model"]:
            expected = f"expected {rows[0]['model']}, as in the first row"
            raise DataError(f"{NAME}.jsonl: model={row['model']}: {expected}")
    table = as_written([{**row, "seeds_planned": len(settings.seeds)} for row in rows])
    model = {"name": f"{settings.model}, pre-trained here", "model": rows[0]["model"]}
    common.finish(
        NAME,
        scale,
        out,
        settings,
        table,
        {},
        check(table),
        data={"made up" if settings.made_up else "scotus": rows[0]["fingerprint"]},
        model={**model, "num_parameters": rows[0]["num_parameters"]},
        trainings=rows,
    )


if __name__ == "__main__":
    main()
