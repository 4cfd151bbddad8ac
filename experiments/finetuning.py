"""What the fine-tuning experiments share: data sets, the model, sweeps of runs, the grid of ULS.

Runs are kept under the user's cache by their settings, so an experiment that is run again, or that
shares runs with another, computes only what is new. `--model` names the model to start from; the
paper's is a pre-trained one.
"""

import argparse
import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import common
from fedsim import files, metrics
from fedsim.config import RunConfig
from fedsim.console import Console
from fedsim.data import corpora
from fedsim.data.dataset import Dataset
from fedsim.sweep import plan_jobs, sweep
from fedsim.tuner import Configuration

STACK_OVERFLOW, CC_NEWS = "Stack Overflow", "CC-News"
SMALL = {STACK_OVERFLOW: "scotus", CC_NEWS: "reddit_links"}  # what stands in at small scale
PAPER = {STACK_OVERFLOW: "stack-overflow", CC_NEWS: "cc-news"}  # built by these recipes
PAPER_STEPS = {STACK_OVERFLOW: 10_000, CC_NEWS: 2_000}
EPSILONS = (1.0, 4.0, 16.0, 64.0)
GRADIENTS_PER_SECOND = 300.0  # of the model `tiny` on two cores, for estimates


@dataclasses.dataclass(frozen=True)
class Training:
    """What all runs of an experiment have in common."""

    num_steps: dict[str, int]
    """By data set; its keys are the data sets of the experiment."""
    epsilons: tuple[float, ...] = EPSILONS
    seeds: tuple[int, ...] = (0, 1)
    learning_rates: tuple[float, ...] = (0.1,)
    clip_norms: tuple[float, ...] = (1.0,)
    """Of normalised clipping. The best learning rate and clip norm of a cell count (the paper tunes
    them throughout)."""
    optimizer: str = "adafactor"
    eval_examples: int = 512
    max_length: int | None = None
    """Of data that are built on the way."""


@dataclasses.dataclass(frozen=True)
class UlsGrid:
    """Equation 13: group sizes, cohort sizes."""

    training: Training
    group_sizes: tuple[int, ...]
    cohort_sizes: tuple[int, ...]

    @property
    def configurations(self) -> list[Configuration]:
        """Every pair."""
        pairs = itertools.product(self.group_sizes, self.cohort_sizes)
        return [Configuration(*pair) for pair in pairs]


SMOKE_TRAINING = Training({STACK_OVERFLOW: 2}, (4.0,), (0,), eval_examples=16, max_length=24)
ULS_GRIDS = {
    "smoke": UlsGrid(SMOKE_TRAINING, (1, 2), (8, 16)),
    "small": UlsGrid(Training({STACK_OVERFLOW: 40, CC_NEWS: 40}), (1, 2, 4, 8), (16, 32, 64, 128)),
    "paper": UlsGrid(
        Training(PAPER_STEPS, learning_rates=(0.01, 0.03, 0.1, 0.3), clip_norms=(0.1, 1.0)),
        tuple(2**n for n in range(9)),
        tuple(2**n for n in range(5, 13)),
    ),
}
"""Of Figures 5, 13, 14 and 15, which are views of the same runs."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of the command line."""

    scale: str
    out: Path
    model: str
    dry_run: bool

    @property
    def runs(self) -> Path:
        """Where runs are kept: for good, but at the scale that tests use."""
        return self.out / "runs" if self.scale == "smoke" else files.cache_dir() / "experiments"


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> Arguments:
    """--scale and --out as for all experiments, --model and --dry-run."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a size, or a model to start from")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")
    own, rest = parser.parse_known_args(argv)
    scale, out = common.parse_arguments(description, rest)
    return Arguments(scale, out, own.model, own.dry_run)


def data_of(name: str, arguments: Arguments) -> str:
    """Where a data set is, built first if need be: what `--data` of train is given."""
    if arguments.scale == "smoke":
        return str(_made_up(arguments.out / "texts.parquet"))
    if arguments.scale == "small":
        directory = files.cache_dir() / "experiments" / "data"
        if not (directory / SMALL[name]).is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            common.prepare(SMALL[name], directory)
        return str(directory / SMALL[name])
    return str(Path("data") / PAPER[name])  # `fedsim data build --recipe R --out data/R`


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
    return RunConfig(data=data, run_dir=Path(), engine=engine, **given)


def losses(
    cells: Iterable[dict[str, Any]], training: Training, arguments: Arguments, figure: str
) -> list[dict[str, Any]]:
    """Train every cell, and say what came out: one row per cell.

    A cell has `dataset`, `epsilon` and settings of train. Its row has these, `loss` and `loss_std`
    over seeds (at the best learning rate and clip norm, which are there, too), and `seeds`.
    At --dry-run the cost is printed, and there are no rows.
    """
    cells = list(cells)
    settings = [
        _settings(cell, training, arguments, rate, clip, seed)
        for cell in cells
        for rate, clip in itertools.product(training.learning_rates, training.clip_norms)
        for seed in training.seeds
    ]
    directory = arguments.runs / figure
    if arguments.dry_run:
        gradients = sum(each["budget"] * each["num_steps"] for each in settings)
        hours = gradients / GRADIENTS_PER_SECOND / 3600
        print(f"{figure}: {len(settings)} runs, {gradients:,} gradients; with the model tiny on")
        print(f"two cores about {hours:.1f} hours ({GRADIENTS_PER_SECOND:g} gradients a second)")
        return []
    done = sweep(settings, directory, Console(), here=arguments.scale == "smoke")
    failed = [row["error"] for row in done if row["status"] != "done"]
    if failed:
        raise SystemExit(f"{len(failed)} runs failed, the first: {failed[0]}")
    by_name = {row["run"]: row for row in done}
    names = [job.name for each in settings for job in plan_jobs([each], directory)]
    found = [_loss(by_name[name], directory) for name in names]
    per_cell = np.reshape(found, (len(cells), -1, len(training.seeds)))
    tuned = list(itertools.product(training.learning_rates, training.clip_norms))
    rows = []
    for cell, values in zip(cells, per_cell, strict=True):
        means = np.where(np.isfinite(values).all(axis=1), values.mean(axis=1), np.inf)
        best = int(np.argmin(means))
        rate, clip = tuned[best]
        spread = float(values[best].std(ddof=1)) if len(training.seeds) > 1 else 0.0
        came = {"loss": float(means[best]), "loss_std": spread, "seeds": len(training.seeds)}
        rows.append({**cell, **came, "learning_rate": rate, "clip_norm": clip})
    return rows


def report_claims(claims: Sequence[tuple[str, bool, str]], scale: str) -> None:
    """Say of each claim (what, whether it held, the numbers) whether it held.

    Claims are about training that gets somewhere: at the smallest scale they are only computed.
    """
    for what, holds, numbers in claims:
        verdict = "not judged at this scale" if scale == "smoke" else "yes" if holds else "no"
        print(f"{what}: {verdict} ({numbers})")


def uls_grid_losses(
    grid: UlsGrid, arguments: Arguments, datasets: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Loss of ULS for every configuration, epsilon and data set."""
    names = [name for name in grid.training.num_steps if datasets is None or name in datasets]
    cells = [
        {
            "dataset": name,
            "epsilon": epsilon,
            "algorithm": "uls",
            "budget": at.budget,
            "group_size": at.group_size,
            "cohort_size": at.cohort_size,
        }
        for name in names
        for epsilon in grid.training.epsilons
        for at in grid.configurations
    ]
    return losses(cells, grid.training, arguments, "uls_grid")


def by(rows: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list]:
    """Rows by what `key` says of them, in order of appearance."""
    found: dict[Any, list] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _settings(cell, training: Training, arguments: Arguments, rate, clip, seed) -> dict[str, Any]:
    given = {n: v for n, v in cell.items() if n not in ("dataset", "cohort_size")}
    common_ = {
        "data": data_of(cell["dataset"], arguments) if not arguments.dry_run else cell["dataset"],
        "num_steps": training.num_steps[cell["dataset"]],
        "eval_every": training.num_steps[cell["dataset"]],
        "model": arguments.model,
        "learning_rate": rate,
        "clip_norm": clip,
        "seed": seed,
        "optimizer": training.optimizer,
        "eval_examples": training.eval_examples,
        "strategy": "scan:4",  # a timer's choice would be part of the bits
        "num_lanes": 1,  # a run computes in one process: no more pieces than need be
    }
    if training.max_length is not None:
        common_["max_length"] = training.max_length
    return {**common_, **given}


def _loss(row: dict[str, Any], directory: Path) -> float:
    """Final held-out loss: of held-out users, or where there are none of held-out examples."""
    loss = float(row["final_eval_loss"])
    if math.isfinite(loss):
        return loss
    name = "non_private/eval_examples_loss"
    found = [line[name] for line in metrics.read(directory / "runs" / row["run"]) if name in line]
    return float(found[-1]) if found else math.inf


def _made_up(file: Path) -> Path:
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
