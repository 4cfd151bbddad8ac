"""What synthetic text with user-level privacy is worth: SmolLM2-135M with LoRA, two sources.

Beyond the paper. SmolLM2-135M-Instruct is fine-tuned on users' texts with privacy (ULS, G = 1), and
texts are sampled from it. A small fresh model is trained on these texts and tested on held-out
users' texts: against the same small model trained on the users' texts without privacy, trained on
them with privacy at the same epsilon, and untrained. Beside the losses are distances of n-grams and
lengths, the area of the divergence curve with the features of SmolLM2, and the search for training
users' texts. Claims (`synthetic_claims`) were committed before the runs. SmolLM2 was trained on
text from the web, so it may have seen these texts.

The model's file and the sources are those of real_model.py. Rows are appended to
synthetic_text.jsonl beside the results as they come; the same command goes on with what is missing.

    python -m experiments.synthetic_text --scale small [--minutes 60] [--processes 1]
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from experiments import real_model
from experiments.harness import common, smollm2
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, kept, missing
from experiments.real_model_claims import MODEL
from experiments.synthetic_claims import check_text as check, plot_text as plot

NAME = "synthetic_text"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    sources: tuple[str, ...] = ("scotus", "reddit_links")
    epsilons: tuple[float, ...] = (8.0, 4.0)
    seeds: tuple[int, ...] = (0, 1)
    model: str = MODEL
    lora_rank: int = 8
    num_steps: int = 40
    budget: int = 32
    max_length: int = 32
    num_texts: int = 4_000
    student: str = "tiny"
    student_steps: int = 400


SETTINGS = {
    "smoke": Settings(
        sources=("pydocs",),
        epsilons=(8.0,),
        seeds=(0,),
        model="micro",
        lora_rank=0,
        num_steps=2,
        budget=8,
        max_length=24,
        num_texts=48,
        student="micro",
        student_steps=2,
    ),
    "small": Settings(),
    "paper": Settings(num_steps=400, budget=256, max_length=128, num_texts=20_000),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training of the generator, and what comes of its texts."""

    source: str
    epsilon: float
    seed: int


def cells(settings: Settings) -> Iterator[Cell]:
    """All cells, the first seed first."""
    for seed in settings.seeds:
        for source in settings.sources:
            for epsilon in settings.epsilons:
                yield Cell(source, epsilon, seed)


def run_config_of(cell: Cell, settings: Settings, data: str, run_dir: Path, small: bool) -> Any:
    """The settings of the run of the generator, or of the small model."""
    from fedsim.config import run_config

    made_up = cell.source == "pydocs"
    generator = {
        "model": settings.model if made_up else str(smollm2.directory()),
        "lora_rank": settings.lora_rank,
    }
    return run_config(
        data=data,
        run_dir=run_dir,
        engine="local",
        budget_ledger=str(run_dir.parent / "ledger"),
        seed=cell.seed,
        strategy="direct:8",
        eval_examples=256,
        **({"model": settings.student} if small else generator),
    )


def trained(cell: Cell, settings: Settings, data: Any, run_dir: Path, *, small: bool) -> Any:
    """(Settings of a run, summary of its training). Args: small: of the small model."""
    from fedsim.config import ADD_OR_REMOVE, Algorithm, PrivacyConfig
    from fedsim.run import Console
    from fedsim.training import train

    run = run_config_of(cell, settings, str(data.path), run_dir, small)
    privacy = PrivacyConfig(
        cell.epsilon,
        settings.num_steps,
        settings.budget,
        delta=data.train.num_users**-1.1,
        group_size=1,
        adjacency=ADD_OR_REMOVE,
    )
    return run, train(Algorithm.ULS, privacy, run, Console())


def compare(cell: Cell, settings: Settings) -> Row:
    """What comes of a cell."""
    from fedsim.config import Sampling, Synthesis
    from fedsim.evaluate import last_model
    from fedsim.run import Console, directory
    from fedsim.synthesis import Student, measure, search, store_of, synthesize
    from fedsim.synthesis.quality import loss_of

    began = time.monotonic()
    shape = real_model.Settings(max_length=settings.max_length)
    _, data = real_model.opened(cell.source, shape)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        run, summary = trained(cell, settings, data, place / "run", small=False)
        wanted = Synthesis(settings.num_texts, settings.max_length, seed=cell.seed)
        where = place / "synthetic.parquet", wanted, Sampling(), run.engine, Console()
        file = synthesize(str(place / "run"), *where)["file"]
        texts = pq.read_table(file, columns=["text"]).to_pylist()
        student = Student(settings.student, settings.student_steps)
        stored = directory.load(place / "run")
        found = measure(stored, run, texts, student=student, seed=cell.seed)["private"]
        leaks = search(store_of(texts, data), data)
        small, _ = trained(cell, settings, data, place / "small", small=True)
        task, params, *_ = last_model(directory.load(place / "small"), small, Console())
        losses = {**found["student"]["losses"], "real_with_privacy": loss_of(task, params)}
    return {
        **dataclasses.asdict(cell),
        **losses,
        **{
            f"{name} {kind}": value
            for name, row in found["distances"].items()
            for kind, value in row.items()
        },
        "area": found["curve"]["area"],
        "area_of_users": found["curve"]["area_of_users"],
        "alarm": leaks["alarm"],
        "p_value": min(row["p_value"] for row in leaks["users"]),
        "texts": len(texts),
        "num_users": data.train.num_users,
        "num_parameters": summary["num_parameters"],
        "fingerprint": data.train.fingerprint[:12],
        "seconds": round(time.monotonic() - began, 1),
        **came_from(),
    }


@common.mistakes()
def main() -> None:
    """Run what is missing, and write what was found."""
    given = common.resumable(__doc__, "cell", processes=True)
    settings = SETTINGS[given.scale]
    todo = list(cells(settings))
    out = common.out_of(given)
    file = out / f"{NAME}.jsonl"
    if given.dry_run:
        done = len(todo) - len(missing(todo, file))
        print(*settings.sources, sep=", ")
        gradients = 2 * len(todo) * settings.num_steps * settings.budget  # of both models
        print(f"{len(todo)} cells, {gradients:,} gradients, {done} of the cells done")
        return
    left = missing(todo, file) if given.minutes else []
    for source in dict.fromkeys(cell.source for cell in left):
        real_model.opened(source, real_model.Settings(max_length=settings.max_length))
    compute(compare, left, settings, file, given.minutes, given.processes)
    rows = [{**row, "planned": len(todo)} for row in kept(file)]
    if not rows:
        return
    table = as_written(rows)
    origins = {row["source"]: row for row in rows}.values()
    common.finish(
        NAME,
        given.scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        data={row["source"]: common.origin(row["source"], row["fingerprint"]) for row in origins},
        model={"source": settings.model, "num_parameters": rows[0]["num_parameters"]},
        trainings=rows,
    )


if __name__ == "__main__":
    main()
