"""What synthetic text with user-level privacy is worth: SmolLM2-135M with LoRA, two sources.

Beyond the paper. SmolLM2-135M-Instruct is fine-tuned on users' texts with privacy (ULS, G = 1), and
texts are sampled from it. A small fresh model is trained on these texts and tested on held-out
users' texts: against the same small model trained on the users' texts without privacy, trained on
them with privacy at the same epsilon, and untrained. Claims (claims.toml) were committed
before the runs. SmolLM2 was trained on text from the web, so it may have seen these texts.

The committed rows have more columns, of commit bd8366bf: distances of n-grams and lengths, the area
of a divergence curve, and a search for training users' texts.

The model's file and the sources are those of real_model.py. Rows are appended to
synthetic_text.jsonl beside the results as they come; the same command goes on with what is missing.

    python -m experiments.synthetic_text --scale small [--minutes 60] [--processes 1]
"""

import dataclasses
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments import real_model
from experiments.harness import common, smollm2
from experiments.harness.claims import Claims, Quantity, judged
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, by, kept, missing
from experiments.real_model_views import MODEL

NAME = "synthetic_text"
SEEDS = 2
"""Of a source and an epsilon, before it is judged."""
STUDENT_LENGTH, STUDENT_BATCH, STUDENT_RATE = 128, 32, 3e-3
"""Of the small model: most tokens of a text, texts of a step, peak of Adam's learning rate."""
MAX_USERS, TEXTS_OF_USER, ROWS_AT_ONCE = 256, 4, 16
"""Held-out users whose loss is computed, texts of each, and texts of a program."""


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
        strategy="direct",
        rows_per_pass=8,
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
    from fedsim.config import Sampling
    from fedsim.evaluate import last_model
    from fedsim.generate import generate_texts
    from fedsim.run import Console, directory

    began = time.monotonic()
    shape = real_model.Settings(max_length=settings.max_length)
    _, data = real_model.opened(cell.source, shape)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        run, summary = trained(cell, settings, data, place / "run", small=False)
        out = place / "synthetic.parquet"
        generate_texts(
            str(place / "run"),
            out,
            settings.num_texts,
            num_tokens=settings.max_length,
            how=Sampling(),
            seed=cell.seed,
            engine=run.engine,
            console=Console(),
        )
        synthetic = store_of(pq.read_table(out)["text"].to_pylist(), data)
        learnt = {
            "synthetic": train_student(synthetic, data, settings, cell.seed),
            "real_without_privacy": train_student(data.train, data, settings, cell.seed),
        }
        task = learnt["synthetic"][0]
        learnt["untrained"] = task, task.init(student_key(cell.seed).jax_key("init"))
        own_task, params, *_ = last_model(directory.load(place / "run"), run, Console())
        learnt["run"] = own_task, params
        small, _ = trained(cell, settings, data, place / "small", small=True)
        small_task, params, *_ = last_model(directory.load(place / "small"), small, Console())
        learnt["real_with_privacy"] = small_task, params
        losses = {name: loss_of(*each) for name, each in learnt.items()}
    return {
        **dataclasses.asdict(cell),
        **losses,
        "texts": synthetic.num_examples,
        "num_users": data.train.num_users,
        "num_parameters": summary["num_parameters"],
        "fingerprint": data.train.fingerprint[:12],
        "seconds": round(time.monotonic() - began, 1),
        **came_from(),
    }


def store_of(texts: Iterable[str], data: Any) -> Any:
    """Texts in the tokens of the data, each as its own user; empty ones are left out."""
    from fedsim.data import Tokenizer, UserStore

    tokenizer, longest = Tokenizer.load(data.tokenizer_path), data.train.max_length
    tokenised = tokenizer.encode_batch([text for text in texts if text])
    framed = [[tokenizer.begin_id, *ids, tokenizer.end_id][:longest] for ids in tokenised]
    users = {f"{number:09d}": [ids] for number, ids in enumerate(framed)}
    return UserStore.from_examples(users, longest, data.train.vocab_size)


def student_key(seed: int) -> Any:
    """The key of a small model's parameters and of the order of its texts."""
    from fedsim.keys import SecretKey

    return SecretKey.create(seed, "student")


def train_student(store: Any, data: Any, settings: Settings, seed: int) -> tuple[Any, Any]:
    """(task, parameters) of a small model that is trained on the texts of a store without
    privacy."""
    import jax
    import optax

    from experiments.pretraining import Batches
    from fedsim.models import LanguageModelTask, preset
    from fedsim.training import optimizers

    key, steps = student_key(seed), settings.student_steps
    model = preset(settings.student, store.vocab_size, min(STUDENT_LENGTH, store.max_length))
    task = LanguageModelTask(dataclasses.replace(data, train=store), model)
    params, size = task.init(key.jax_key("init")), min(STUDENT_BATCH, store.num_examples)
    batches, buckets = Batches(store.lengths, size, size, key), task.buckets
    rule = optax.adam(optax.cosine_decay_schedule(STUDENT_RATE, steps))
    update, state = optimizers.updater(rule), rule.init(params)
    gradient = jax.jit(jax.grad(lambda params, batch: task.losses(params, batch).mean()))
    for step in range(steps):
        batch = task.read("train", batches.draw(step).ravel())
        batch = buckets.trim(batch, int(buckets.holding(buckets.sizes(batch).max())))
        params, state = update(gradient(params, batch), state, params)
    return task, params


def loss_of(task: Any, params: Any) -> float:
    """Mean over some held-out users of the loss on some of their texts, in nats per token, without
    noise. The users and texts are always the same."""
    import jax

    from fedsim.training.private_evaluation import rows_of_users

    offsets, split = task.dataset.eval_users.offsets, "eval_users"
    texts = rows_of_users(offsets, min(MAX_USERS, len(offsets) - 1), TEXTS_OF_USER)
    rows = np.concatenate(texts)
    needed, frozen = task.buckets.holding(task.sizes(split, rows)), task.frozen
    compute = jax.jit(task.nats)
    nats, tokens = np.zeros((2, len(rows)))
    for length in np.unique(needed):
        places = np.flatnonzero(needed == length)
        for part in np.split(places, range(ROWS_AT_ONCE, len(places), ROWS_AT_ONCE)):
            padded = np.pad(rows[part], (0, ROWS_AT_ONCE - len(part)), constant_values=-1)
            batch = task.buckets.trim(task.read(split, padded), int(length))
            found = compute(params, batch, *(() if frozen is None else (frozen,)))
            nats[part], tokens[part] = (np.asarray(each)[: len(part)] for each in found)
    ends = np.cumsum([len(each) for each in texts])[:-1]
    sums = [[part.sum() for part in np.split(each, ends)] for each in (nats, tokens)]
    return float(np.mean(np.divide(sums[0], np.maximum(sums[1], 1))))


def quantities(rows: Sequence[Row]) -> dict[str, Quantity]:
    """By source and epsilon, where all seeds are there: differences of the small model's losses, by
    seed."""
    found = {"missing": Quantity({"": rows[0]["planned"] - len(rows)})}
    for (source, epsilon), own in by(rows, lambda row: (row["source"], row["epsilon"])).items():
        if len(own) < SEEDS:
            continue
        for name, above, below in (
            ("learnt", "untrained", "synthetic"),
            ("ahead", "real_with_privacy", "synthetic"),
            ("behind", "synthetic", "real_without_privacy"),
        ):
            falls = {f"seed {row['seed']}": row[above] - row[below] for row in own}
            found[f"{source} {epsilon:g} {name}"] = Quantity(falls)
        if "alarm" in own[0]:  # rows of commit bd8366bf and before
            p = {row["seed"]: f"seed {row['seed']}, p {row['p_value']:.2g}" for row in own}
            alarms = {f"{p[row['seed']]}, alarms": int(row["alarm"]) for row in own}
            found[f"{source} {epsilon:g} alarms"] = Quantity(alarms)
    return found


def check(rows: Sequence[Row]) -> Claims:
    """What synthetic text is worth, source by source."""
    return judged(NAME, quantities(rows))


def plot(rows: Sequence[Row]) -> Figure:
    """Held-out loss of the small model by what it was trained on, for each source."""
    sources = by(rows, lambda row: row["source"])
    figure, axes = common.panels(1, len(sources), 3.6, 3.4)
    names = ("real_without_privacy", "synthetic", "real_with_privacy", "untrained")
    for axis, (source, own) in zip(axes[0], sources.items(), strict=True):
        for name in names:
            points = sorted((row["epsilon"], row[name]) for row in own)
            axis.plot(*zip(*points, strict=True), "o", label=name.replace("_", " "))
        epsilons = sorted({row["epsilon"] for row in own})
        axis.set(title=source, xlabel="ε", xticks=epsilons, xlim=(0, epsilons[-1] + epsilons[0]))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("held-out loss (nats per token)")
    common.legend_below(figure)
    return figure


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
