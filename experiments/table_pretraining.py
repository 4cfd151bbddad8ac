"""Section 5's order of things: non-private pre-training on public text, then private fine-tuning.

Claim: pre-training on text that is not the users' (screened against it, as C4-- was) does part of
the work, and both algorithms lower the loss on held-out users further at epsilon = 8. The public
text is Debian's package descriptions and news, the users are speakers before the Supreme Court
(shared/data); `smoke` makes both up. Fine-tuning has two seeds, and starts from one pre-trained
model. A run that was interrupted goes on with the same command.

    python -m experiments.table_pretraining --scale small      (half an hour; smoke: 30 s)
"""

import dataclasses
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import common, starting_model
from experiments.rows import margin, over_seeds
from fedsim.config import Algorithm, PretrainConfig, PrivacyConfig, RunConfig, run_config
from fedsim.data.building.build import build
from fedsim.data.building.screen import Screen
from fedsim.data.dataset import Dataset
from fedsim.engine.local_engine import LocalEngine
from fedsim.evaluate import evaluate, headline
from fedsim.files import cache_dir
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import preset
from fedsim.pretrain import pretrain
from fedsim.run.console import Console
from fedsim.training import train

EPSILON = 8.0
WORK = cache_dir() / "table_pretraining"


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
    group_size: int
    """Of ULS; ELS takes the median user's number of examples."""
    engine: str
    pretrain_rate: float = 0.03
    rate: float = 0.01
    eval_examples: int = 512
    seeds: tuple[int, ...] = (0, 1)
    """Of fine-tuning."""
    made_up: bool = False
    """The texts, and nothing is kept."""


SETTINGS = {
    "smoke": Settings(
        *("tiny", 300, 24, 30, 32, 12, 32, 2, "local"), pretrain_rate=0.1, rate=0.1, made_up=True
    ),
    # 10 M parameters: a vocabulary of 20,000 pieces of 256 features, and six blocks.
    "small": Settings("medium", 20_000, 64, 100, 128, 30, 64, 4, "ray"),
    "paper": Settings("medium", 20_000, 64, 1_000, 128, 200, 128, 4, "ray"),
}


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
            build(public_file, public, progress=note, **own, **options)
        own = {"tokenizer": public / "tokenizer.json"}
        build(private_file, private, progress=note, **own, **options)
    return Dataset.open(public), Dataset.open(private)


def untrained(settings: Settings, data: Dataset) -> float:
    """The loss of a fresh model."""
    sizes = preset(settings.model, data.train.vocab_size, data.train.max_length)
    task = LanguageModelTask(data, sizes)
    workers = LocalEngine(task, num_lanes=1)
    losses = evaluate(workers, task.init(jax.random.key(0)), data, settings.eval_examples)
    return headline(losses)


def run(settings: Settings) -> list[dict[str, Any]]:
    """A row for each stage; losses are of held-out users, with deviations over seeds."""
    sizes = json.dumps(dataclasses.asdict(settings), sort_keys=True)
    directory = WORK / hashlib.sha256(sizes.encode()).hexdigest()[:12]
    if settings.made_up:
        with tempfile.TemporaryDirectory() as scratch:
            return run_in(Path(scratch), settings)
    directory.mkdir(parents=True, exist_ok=True)
    return run_in(directory, settings)


def run_in(directory: Path, settings: Settings) -> list[dict[str, Any]]:
    """The rows, from what is in the directory already, or made there."""
    public, private = data_of(settings, directory)
    console = Console()

    def run_of(name: str, data: Dataset, model: str, rate: float, seed: int) -> RunConfig:
        return run_config(
            data=str(data.path),
            run_dir=directory / name,
            model=model,
            learning_rate=rate,
            engine=settings.engine,
            strategy="scan:4",  # a timer's choice would be part of the bits
            seed=seed,
            resume=True,
            eval_examples=settings.eval_examples,
        )

    first = run_of("pretrain", public, settings.model, settings.pretrain_rate, seed=0)
    steps = PretrainConfig(settings.pretrain_steps, settings.batch_size, 8)
    before = pretrain(steps, first, console)
    tuned = {}
    for algorithm in Algorithm:
        group = settings.group_size if algorithm == Algorithm.ULS else None
        privacy = PrivacyConfig(EPSILON, settings.num_steps, settings.budget, group_size=group)
        runs = [
            run_of(f"{algorithm}-{seed}", private, str(first.run_dir), settings.rate, seed)
            for seed in settings.seeds
        ]
        tuned[algorithm] = [train(algorithm, privacy, own, console) for own in runs]
    start_loss = [tuned[Algorithm.ELS][0]["initial_eval_loss"]]
    gradients = before["gradients_computed"]
    rows = [
        _row("none", "", [untrained(settings, private)], 0),
        _row("pre-training", "inf (public text)", start_loss, gradients),
    ]
    for algorithm, found in tuned.items():
        losses, each = (
            [own[name] for own in found] for name in ("final_eval_loss", "gradients_computed")
        )
        what = f"pre-training, then {algorithm.upper()}"
        rows.append(_row(what, EPSILON, losses, round(np.mean(each))))
    return rows


def _row(training: str, epsilon: Any, losses: list[float], gradients: int) -> dict[str, Any]:
    what = {"training": training, "epsilon": epsilon}
    return {**what, **over_seeds(losses), "gradients": gradients}


def check(rows: list[dict[str, Any]]) -> common.Claims:
    """Held-out losses of the four models, beyond what the seeds explain."""
    none, before, *tuned = rows
    noise, shown = margin(tuned, cells=1), [f"{row['loss']:.2f}" for row in rows]
    return [
        (
            "pre-training on other text helps",
            before["loss"] < none["loss"] - noise,
            f"{shown[0]} to {shown[1]}",
        ),
        (
            "private fine-tuning helps further",
            all(row["loss"] < before["loss"] - noise for row in tuned),
            f"{shown[2]} with ELS, {shown[3]} with ULS; seeds explain {noise:.2g}",
        ),
    ]


if __name__ == "__main__":
    common.main("table_pretraining", __doc__, SETTINGS, run, check)
