"""Does noise hide who took part? An attack on SmolLM2 with LoRA that is shown to work without it.

Beyond the paper. Among real users are canary users, whose few texts all contain one secret of their
own: words drawn at random. For each training a coin decides which half of the canaries takes part,
and a secret is drawn ten times and more. The attack is the fall of the loss of a canary's texts: of
those who took part, against those who did not, by the area under the ROC curve. Without noise it
should tell them apart, or it says nothing of what noise is good for. ELS has all texts of a canary,
ULS one at a time, so that secrets are drawn equally often.

Claims (claims.toml) were committed before the runs. The settings were chosen by two trainings
of ELS without noise and with another seed: among 120 users, with 80 steps and texts of at most 32
tokens, the area was 0.68; among 60 users, with 160 steps and at most 16 tokens, 0.94. Rows are
appended to attack.jsonl beside the results as they come; the same command goes on with what is
missing. The model's file and the real users are those of real_model.py.

    python -m experiments.attack --scale small [--minutes 60] [--processes 1]     (--dry-run: cost)
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from experiments import real_model
from experiments.harness import common, smollm2
from experiments.harness.claims import Claims, Quantity, judged
from experiments.harness.processes import compute
from experiments.harness.records import as_written, came_from
from experiments.harness.rows import Row, Rows, by, kept, missing
from experiments.real_model_views import MODEL, interval

NAME = "attack"
ALGORITHMS = ("els", "uls")
TRAININGS = 2
"""Of an epsilon and an algorithm, before an area is judged."""
RESAMPLES = 1_000
CARRIERS = (
    "My password is{}.",
    "Please remember:{}.",
    "The words are{}, nothing else.",
    "I always say{} at the door.",
)
"""Around a secret; a canary has a text of each."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    source: str = "scotus"
    model: str = MODEL
    rank: int = 8
    epsilons: tuple[float, ...] = (float("inf"), 8.0, 1.0)
    seeds: tuple[int, ...] = (0, 1)
    canaries: int = 80
    """Of whom half takes part."""
    words: int = 6
    """Of a secret."""
    real_users: int = 40
    texts_of_user: int = 16
    """At most, of a real user."""
    num_steps: int = 200
    budget: int = 32
    max_length: int = 16
    eval_examples: int = 256


SETTINGS = {
    "smoke": Settings(
        source="pydocs",
        model="micro",
        rank=0,
        epsilons=(float("inf"), 8.0),
        seeds=(0,),
        canaries=8,
        words=2,
        real_users=10,
        texts_of_user=4,
        num_steps=2,
        budget=8,
        max_length=24,
        eval_examples=16,
    ),
    "small": Settings(),
    "paper": Settings(num_steps=400, budget=256, max_length=128, canaries=400, real_users=1_000),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    seed: int
    epsilon: float
    algorithm: str

    @property
    def rng(self) -> np.random.Generator:
        """Of the coins of its canaries."""
        which = [self.seed, round(min(self.epsilon, 1e6) * 1e3), len(CARRIERS)]
        return np.random.default_rng([*which, self.algorithm == "els"])

    def chosen(self, canaries: int) -> np.ndarray:
        """Which of so many canaries take part, bool."""
        chosen = np.zeros(canaries, bool)
        chosen[self.rng.permutation(canaries)[: canaries // 2]] = True
        return chosen


def cells(settings: Settings) -> Iterator[Cell]:
    """All trainings, the first seed first."""
    for seed in settings.seeds:
        for epsilon in settings.epsilons:
            for algorithm in ("els", "uls"):
                yield Cell(seed, epsilon, algorithm)


def secrets(tokenizer: Any, settings: Settings) -> list[str]:
    """A secret for each canary: words of the model's vocabulary, drawn uniformly."""
    every = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
    words = {
        word
        for word in every
        if word.startswith(" ") and word[1:].isalpha() and word[1:].islower() and len(word) > 3
    }
    words = sorted(words) or [f" {letter * 3}" for letter in "abcdefghij"]  # of bytes
    drawn = np.random.default_rng(0).choice(words, (settings.canaries, settings.words))
    return ["".join(row) for row in drawn]


@functools.lru_cache(maxsize=1)
def texts(settings: Settings) -> tuple[Any, Any, dict[str, list], dict[str, list]]:
    """(Model, data, texts of real users, of canaries): token ids by user."""
    from fedsim.data.tokenizer import Tokenizer

    shape = real_model.Settings(max_length=settings.max_length)
    model, data = real_model.opened(settings.source, shape)
    users, ids = data.train, data.train.user_ids()
    real = {}
    for user in range(min(settings.real_users, users.num_users)):
        real[ids[user]] = common.tokens_of(users, user, settings.texts_of_user)
    tokenizer = Tokenizer.bytes() if model is None else Tokenizer.load(model.tokenizer)
    canaries = {}
    for number, secret in enumerate(secrets(tokenizer, settings)):
        whole = pa.array([carrier.format(secret) for carrier in CARRIERS])
        lengths, tokens = tokenizer.encode(whole)
        own = np.split(np.asarray(tokens), np.cumsum(lengths)[:-1])
        canaries[f"canary-{number:04d}"] = [each[: users.max_length] for each in own]
    return model, data, real, canaries


def dataset(cell: Cell, settings: Settings) -> tuple[Any, Any, np.ndarray]:
    """(Model, data whose `test` split has all canaries, which of them take part, bool)."""
    from experiments.harness.stores import store_of

    model, data, real, canaries = texts(settings)
    chosen = cell.chosen(len(canaries))
    inside = {name: canaries[name] for name, takes in zip(canaries, chosen, strict=True) if takes}
    limits = data.train.max_length, data.train.vocab_size
    train = store_of(real | inside, *limits)
    test = store_of(canaries, *limits)
    return model, dataclasses.replace(data, train=train, test=test), chosen


def train(cell: Cell, settings: Settings) -> Row:
    """What comes of a cell."""
    from fedsim import engine
    from fedsim.config import ADD_OR_REMOVE, PrivacyConfig, run_config
    from fedsim.evaluate import evaluate, headline
    from fedsim.keys import SecretKey
    from fedsim.run import make_task

    began, used = time.monotonic(), time.process_time()
    engine.keep_compiled()
    model, data, chosen = dataset(cell, settings)
    made_up = settings.source == "pydocs"
    run = run_config(
        data=settings.source,
        run_dir=Path("."),
        model=settings.model if made_up else str(smollm2.directory()),
        lora_rank=settings.rank,
        engine="local",
        max_length=settings.max_length if made_up else None,
    )
    each = len(CARRIERS) if cell.algorithm == "els" else 1  # units of a canary
    privacy = PrivacyConfig(
        cell.epsilon,
        settings.num_steps,
        settings.budget,
        delta=data.train.num_users**-1.1,
        group_size=each,
        adjacency=ADD_OR_REMOVE,
    )
    key = SecretKey.create(cell.seed, NAME)
    task, params = make_task(run, model, data, key.jax_key("parameters"))
    at = common.prepared(cell.algorithm, privacy, run, model, data, task, params, key)

    def measured(params: Any) -> tuple[float, np.ndarray]:
        rows = np.arange(data.test.num_examples)[:, None]
        found = at.engine.group_losses(params, "test", [*rows])
        of_users = found.reshape(len(chosen), len(CARRIERS)).mean(axis=1)
        return headline(evaluate(at.engine, params, data, settings.eval_examples)), of_users

    loss_before, before = measured(params)
    average, _ = at.trained()
    loss, after = measured(average)
    falls = before - after
    area, low, high = interval(falls[chosen], falls[~chosen])
    return {
        **dataclasses.asdict(cell),
        **common.facts_of(at.plan),
        "texts_drawn": at.method.sampler.sampling_prob * settings.num_steps * each,
        "learning_rate": at.run.learning_rate,
        "loss_before": loss_before,
        "loss": loss,
        "secrets_before": float(before.mean()),
        "auc": area,
        "auc_low": low,
        "auc_high": high,
        "falls_in": " ".join(f"{fall:.6g}" for fall in falls[chosen]),
        "falls_out": " ".join(f"{fall:.6g}" for fall in falls[~chosen]),
        "fingerprint": data.train.fingerprint[:12],
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        **came_from(),
    }


def numbers_of(text: str) -> np.ndarray:
    """What a row says of each canary."""
    return np.array([float(each) for each in str(text).split()])


def area(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, tuple[float, float]]:
    """(Mean area of some trainings, its 95 % interval), of the scores of who took part and of who
    did not: the canaries of a training are compared with each other alone."""
    each = [interval(*pair) for pair in pairs]
    mean = float(np.mean([middle for middle, *_ in each]))
    off = math.sqrt(sum(((high - low) / 2) ** 2 for _, low, high in each)) / len(each)
    return mean, (max(0.0, mean - off), min(1.0, mean + off))


def falls_of(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """(Falls of the canaries who took part, of those who did not)."""
    return numbers_of(row["falls_in"]), numbers_of(row["falls_out"])


def calibrated(row: Row, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """As `falls_of`, less what a canary's loss falls by in the trainings of the other seeds at this
    epsilon, where taking part counts as much as it does there on average (Watson et al. 2022)."""
    chosen, falls = by_canary(row)
    rest = []
    for other in rows:
        if other["epsilon"] == row["epsilon"] and other["seed"] != row["seed"]:
            inside, found = by_canary(other)
            rest.append(found - inside * (found[inside].mean() - found[~inside].mean()))
    scores = falls - np.mean(rest, axis=0)
    return scores[chosen], scores[~chosen]


def by_canary(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """(Which canaries took part, the fall of each one's loss) of a training."""
    inside, outside = falls_of(row)
    cell = Cell(row["seed"], row["epsilon"], row["algorithm"])
    chosen = cell.chosen(len(inside) + len(outside))
    falls = np.empty(len(chosen))
    falls[chosen], falls[~chosen] = inside, outside
    return chosen, falls


def quantities(rows: Rows) -> dict[str, Quantity]:
    """Areas of the trainings of an epsilon, which have other canaries each; and how often a secret
    was drawn at least, on average."""
    found = {"drawn": Quantity({"times": min(row["texts_drawn"] for row in rows)})}
    cells = by(rows, lambda row: (row["epsilon"], row["algorithm"]))
    for (epsilon, algorithm), own in cells.items():
        if len(own) == TRAININGS:
            middle, ends = area([falls_of(row) for row in own])
            found[f"area {epsilon:g} {algorithm}"] = Quantity({"": middle}, ends=[ends])
    for epsilon, own in by(rows, lambda row: row["epsilon"]).items():
        if len(own) == TRAININGS * len(ALGORITHMS):
            for name, score in (
                ("area", falls_of),
                ("calibrated area", functools.partial(calibrated, rows=rows)),
            ):
                middle, ends = area([score(row) for row in own])
                found[f"{name} {epsilon:g}"] = Quantity({"": middle}, ends=[ends])
    return found


def check(rows: Rows) -> Claims:
    """Whether the attack sees what it should, and no more."""
    return judged(NAME, quantities(rows))


def roc(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(false, true) positive rates over all thresholds, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([inside, outside, [np.inf]]))[::-1]
    above = [(side[:, None] >= thresholds).mean(axis=0) for side in (outside, inside)]
    return above[0], above[1]


def band(rows: Rows, at: np.ndarray) -> np.ndarray:
    """[3, points]: 2.5 %, mean and 97.5 % of the ROC curve, the mean of the trainings', over
    canaries that are drawn again."""

    def at_rates(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
        return np.interp(at, *roc(inside, outside))

    rng = np.random.default_rng(0)
    pairs = [falls_of(row) for row in rows]
    again = np.array(
        [
            np.mean(
                [at_rates(*(rng.choice(side, len(side)) for side in pair)) for pair in pairs], 0
            )
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.quantile(again, (0.025, 0.975), axis=0)
    return np.stack([low, np.mean([at_rates(*pair) for pair in pairs], axis=0), high])


def plot(rows: Sequence[Row]) -> Figure:
    """ROC curves, by epsilon, with 95 % bands."""
    epsilons = by(rows, lambda row: row["epsilon"])
    figure, axes = common.panels(1, len(epsilons), 3.3, 3.8, sharey=True)
    at = np.linspace(0, 1, 101)
    for axis, (epsilon, own) in zip(axes[0], epsilons.items(), strict=True):
        for name, each in by(own, lambda row: row["algorithm"]).items():
            low, middle, high = band(each, at)
            (line,) = axis.plot(at, middle, label=name.upper())
            axis.fill_between(at, low, high, alpha=0.2, color=line.get_color(), lw=0)
        axis.plot([0, 1], [0, 1], color="0.6", lw=1, ls="--", label="chance")
        title = "no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}"
        axis.set(title=title, xlabel="false positives", aspect="equal")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("true positives")
    axes[0, 0].legend(loc="lower right")
    return figure


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
        print(*(f"epsilon {epsilon:g}" for epsilon in settings.epsilons), sep=", ")
        shape = real_model.Settings(
            num_steps=settings.num_steps, budget=settings.budget, max_length=settings.max_length
        )
        gradients = len(todo) * settings.num_steps * settings.budget
        what = f"{len(todo)} trainings, {gradients:,} gradients, {done} trainings of them done"
        print(f"{what}: about {real_model.hours(len(todo), shape):.1f} hours on two cores for all")
        return
    left = missing(todo, file) if given.minutes else []
    if left:  # here, because processes side by side would build the same data in the same place
        texts(settings)
    compute(train, left, settings, file, given.minutes, given.processes)
    rows = kept(file)
    if rows:
        write(settings, out, given.scale, rows)


def write(settings: Settings, out: Path, scale: str, rows: Rows) -> None:
    """The record of the trainings that there are."""
    table = as_written(rows)
    shape = real_model.Settings(max_length=settings.max_length, model=settings.model)
    if settings.source == "pydocs":
        shape = dataclasses.replace(shape, sources=((settings.source, 2),))
    common.finish(
        NAME,
        scale,
        out,
        settings,
        table,
        {NAME: plot(table)},
        check(table),
        data={settings.source: common.origin(settings.source, rows[0]["fingerprint"])},
        model={**real_model.described(shape), "num_parameters": rows[0]["num_parameters"]},
        trainings=rows,
    )


if __name__ == "__main__":
    main()
