"""Figure 18 (Appendix G): Figure 6's models with and without personalization, on Stack Overflow.

Each model is fine-tuned further by four local epochs of SGD on half of each test user's examples,
and evaluated on the other half, as is the model itself; losses are means over users. The paper
tunes the learning rate of SGD, on what is not said; here it is tuned for each algorithm on held-out
users at the middle epsilon and budget. The models are Figure 6's, of all seeds; bars are deviations
over seeds. The paper takes every test user; here they are drawn: 10,000 at `paper`, 64 at `small`,
with at most 512 and 32 examples of a half. Users of the test split may have earlier examples in
training. Nothing of personalization is private, and no personal model is kept.

    python -m experiments.fig18_personalization --scale small      (--dry-run: its cost)
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import finetuning, heuristics
from experiments.finetuning import STACK_OVERFLOW, Comparison
from experiments.harness import plots
from experiments.harness.rows import Rows, by, middle
from fedsim.config import changed_run
from fedsim.data import UserStore
from fedsim.engine import Worker
from fedsim.errors import ConfigError, expect
from fedsim.evaluate import last_model
from fedsim.keys import SecretKey
from fedsim.run import Console, directory
from fedsim.sampling import graph_of

SMALLER_RATES = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
"""Of the users' own steps; of an earlier grid from 0.01 to 0.3 the smallest was the best."""


@dataclasses.dataclass(frozen=True)
class Personalization:
    """SGD on one user's texts. The defaults are those of the paper where it states them."""

    num_epochs: int = 4
    """Epochs of SGD over a user's training half. >= 1."""

    batch_size: int = 8
    """Examples per SGD step. >= 1."""

    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """Learning rates to try; the best one is reported. > 0."""

    users: int = 256
    """Number of users, drawn at random. >= 1."""

    max_examples: int = 64
    """Largest number of examples in each half of a user's texts. >= 1."""

    seed: int = 0
    """Seed for the draw of users, for halving their texts and for the order of examples; the same
    for all models."""


@dataclasses.dataclass(frozen=True)
class Halves:
    """Rows of one user's examples, in two halves."""

    user: int
    own: np.ndarray
    """Rows to personalize with."""
    reserved: np.ndarray
    """Rows to evaluate on."""


def halves(store: UserStore, settings: Personalization, key: SecretKey) -> list[Halves]:
    """Draw users with at least two examples, without replacement, and halve their examples.

    Guarantees: a user's halves share no row and depend on (key, user) only.
    Args: store: anything with the users' `offsets`.
    """
    sizes = np.diff(store.offsets)
    owners = np.flatnonzero(sizes >= 2)
    count = min(settings.users, len(owners))
    chosen = np.sort(key.generator("personalize: users").choice(owners, count, replace=False))
    pairs = []
    for user in map(int, chosen):
        rows = key.generator("personalize: halves", user).permutation(sizes[user])
        rows = store.offsets[user] + rows
        half = min(len(rows) // 2, settings.max_examples)
        pairs.append(Halves(user, rows[:half], rows[half:][: settings.max_examples]))
    return pairs


class Personalizer:
    """Personalizes a model to one user at a time, in this process."""

    def __init__(self, task: Any, params: Any, split: str, settings: Personalization):
        """Args: split: split of the data that the users are from."""
        self._task, self._split, self._settings = task, split, settings
        self._params = jax.tree.map(jnp.asarray, params)
        self._worker = Worker(task)
        self._version = 0
        self._step = jax.jit(self._descend)

    def loss(self, params: Any, rows: np.ndarray) -> float:
        """Mean loss over rows [n], nats per predicted token."""
        self._version += 1  # other parameters
        nats, predictions = self._worker.lane_nats(self._version, params, rows, self._split)
        return nats / max(predictions, 1)

    def before(self, user: Halves) -> float:
        """Loss of the model itself on a user's reserved half."""
        return self.loss(self._params, user.reserved)

    def after(self, user: Halves, learning_rate: float, key: SecretKey) -> float:
        """Loss on the reserved half after SGD on the other half."""
        return self.loss(self.personal(user, learning_rate, key), user.reserved)

    def personal(self, user: Halves, learning_rate: float, key: SecretKey) -> Any:
        """Parameters after SGD on a user's own half; batches are drawn anew in each epoch."""
        params, rate = self._params, jnp.float32(learning_rate)
        for rows in self._batches(user, key):
            batch = self._task.read(self._split, rows)
            params = self._step(params, batch, rows >= 0, rate, *self._worker.programs.frozen)
        return params

    def _batches(self, user: Halves, key: SecretKey) -> Iterator[np.ndarray]:
        """Rows [batch_size] of each step, -1 = padding."""
        size = self._settings.batch_size
        for epoch in range(self._settings.num_epochs):
            rows = key.generator("personalize: order", user.user, epoch).permutation(user.own)
            rows = np.pad(rows, (0, -len(rows) % size), constant_values=-1)
            yield from rows.reshape(-1, size)

    def _descend(self, params, batch, real, rate, *frozen):
        def mean_loss(params):
            losses = jnp.where(real, self._task.losses(params, batch, *frozen), 0)
            return losses.sum() / jnp.maximum(real.sum(), 1)

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(mean_loss)(params))


def personalized(
    task: Any, params: Any, store: UserStore, split: str, settings: Personalization
) -> dict[str, Any]:
    """A model's losses before and after personalization to users of a split.

    Returns: learning_rate, the best on average; per_user, an array [users, 2] of losses without
      personalization and gains.
    Raises: ConfigError: no user has two examples.
    """
    key = SecretKey.create(settings.seed, "personalize")
    users = halves(store, settings, key)
    expect(split, f"{store.num_users} users", bool(users), "a user with two examples at least")
    personalizer = Personalizer(task, params, split, settings)
    before = np.array([personalizer.before(user) for user in users])
    gains = [
        before - [personalizer.after(user, rate, key) for user in users]
        for rate in settings.learning_rates
    ]
    means = [each.mean() for each in gains]
    best = int(np.argmax([mean if np.isfinite(mean) else -np.inf for mean in means]))
    per_user = np.stack([before, gains[best]], axis=1)
    return {"learning_rate": settings.learning_rates[best], "per_user": per_user}


@dataclasses.dataclass(frozen=True)
class Settings:
    models: Comparison
    personalization: Personalization
    split: str = "test"
    """Of the users: the later examples, as in the paper."""


MODELS = {
    scale: dataclasses.replace(own, training=own.training.on(STACK_OVERFLOW))
    for scale, own in finetuning.COMPARISONS.items()
}
SETTINGS = {
    "smoke": Settings(
        dataclasses.replace(MODELS["smoke"], budgets=(16,)),
        Personalization(learning_rates=(0.1,), users=4, max_examples=8),
        split="eval_users",
    ),
    "small": Settings(
        MODELS["small"],
        Personalization(learning_rates=SMALLER_RATES, users=64, max_examples=32),
    ),
    "paper": Settings(MODELS["paper"], Personalization(users=10_000, max_examples=512)),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One model to personalize."""

    run_dir: Path
    how: Personalization
    split: str


def run(settings: Settings, arguments: finetuning.Arguments) -> Rows:
    """A row for each epsilon, budget and algorithm: losses with and without personalization."""
    training, split = settings.models.training, settings.split
    if not arguments.dry_run:  # one's own may have no later examples
        (name,) = training.num_steps
        own = finetuning.open_data(name, arguments, training)
        split = split if getattr(own, split) is not None else "eval_users"
    cells = heuristics.cells_of(settings.models.budgets, training, arguments)
    rows = finetuning.tuned_losses(cells, training, arguments)
    if arguments.dry_run:
        how = settings.personalization
        steps = how.num_epochs * how.max_examples * how.users
        tuning = 2 * len(how.learning_rates)
        print(
            f"personalization: {len(cells) + tuning} times at most {steps:,} gradients, less those "
            "that short users lack"
        )
        return []
    seeds = training.seeds
    models = [[finetuning.run_dir_of(r, training, arguments, seed) for seed in seeds] for r in rows]
    how = tuned(settings, rows, [own[0] for own in models], arguments)
    jobs = [
        Job(model, how[row["algorithm"]], split)
        for row, own in zip(rows, models, strict=True)
        for model in own
    ]
    found = arguments.runs.side_by_side(personalize_one, jobs)
    per_user = np.array([each["per_user"] for each in found])
    per_user = per_user.reshape(len(rows), len(seeds), -1, 2)  # losses before, gains
    own = {
        (row["epsilon"], row["budget"], row["algorithm"]): values
        for row, values in zip(rows, per_user, strict=True)
    }
    names = ("dataset", "epsilon", "budget", "algorithm", "group_size")
    return [
        {
            **{name: row[name] for name in names},
            "learning_rate": how[row["algorithm"]].learning_rates[0],
            "inside_grid": inside(how[row["algorithm"]].learning_rates[0], settings),
            **losses_of(values),
            **difference(*(own[row["epsilon"], row["budget"], name] for name in ("els", "uls"))),
        }
        for row, values in zip(rows, per_user, strict=True)
    ]


def inside(rate: float, settings: Settings) -> bool:
    """Whether a rate is at no end of those that were tried."""
    tried = settings.personalization.learning_rates
    return len(tried) == 1 or min(tried) < rate < max(tried)


def losses_of(per_user: np.ndarray) -> dict[str, float]:
    """What a row says of its models. Args: per_user: losses before, and gains [seeds, users, 2]."""
    before, gain = per_user[..., 0], per_user[..., 1]
    counts = {"num_users": per_user.shape[1], "seeds": len(per_user)}
    columns = {"loss": before, "personalized_loss": before - gain, "gain": gain}
    return {**counts, **estimates(columns)}


def difference(els: np.ndarray, uls: np.ndarray) -> dict[str, float]:
    """How far ULS is ahead of ELS for the same users.

    Args: els, uls: losses without personalization and gains [seeds, users, 2].
    """
    ahead, more = (els - uls)[..., 0], (uls - els)[..., 1]
    return estimates({"ahead": ahead, "more_gain": more, "ahead_after": ahead + more})


def estimates(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Of values [seeds, users]: mean, its standard error over users, and deviation over seeds."""
    found = {}
    for name, values in columns.items():
        users = np.mean(values, axis=0)
        found[name] = float(users.mean())
        found[f"{name}_error"] = float(users.std(ddof=1) / np.sqrt(len(users)))
        spread = np.mean(values, axis=1).std(ddof=1) if len(values) > 1 else 0.0
        found[f"{name}_std"] = float(spread)
    return found


def tuned(settings: Settings, rows, models, arguments) -> dict[str, Personalization]:
    """By algorithm, with the learning rate that is best for held-out users at the middle epsilon
    and budget."""
    how, algorithms = settings.personalization, ("els", "uls")
    if len(how.learning_rates) == 1:
        return dict.fromkeys(algorithms, how)
    own = [[row for row in rows if row["algorithm"] == each] for each in algorithms]
    at = [rows.index(middle(each)) for each in own]
    jobs = [Job(models[i], how, "eval_users") for i in at]
    found = arguments.runs.side_by_side(personalize_one, jobs)
    return {
        algorithm: dataclasses.replace(how, learning_rates=(each["learning_rate"],))
        for algorithm, each in zip(algorithms, found, strict=True)
    }


def personalize_one(job: Job) -> dict[str, Any]:
    """Runs in a process apart. Raises: ConfigError: there is no checkpoint or no such split, or
    texts have several owners."""
    stored = directory.load(job.run_dir)
    run = changed_run(stored.run, engine="local")
    task, params, data, _ = last_model(stored, run, Console())
    store = getattr(data, job.split)
    if store is None:
        found = ", ".join(data.splits())
        raise ConfigError.of("split", job.split, f"data with {job.split}, found {found}")
    alone = graph_of(store) is None
    expect("data", run.data.source, alone, "texts with one owner each")
    return personalized(task, params, store, job.split, job.how)


def plot(rows: Rows) -> Figure:
    """A panel for each budget; dashed with personalization."""
    panels = by(rows, lambda row: row["budget"])
    figure, axes = plots.panels(1, len(panels), 3.4, 3, sharey=True)
    for axis, (budget, own) in zip(axes[0], panels.items(), strict=True):
        for algorithm, series in by(own, lambda row: row["algorithm"].upper()).items():
            colour = plots.COLOURS[algorithm]
            for name, style, label in (
                ("loss", "-o", algorithm),
                ("personalized_loss", "--s", f"{algorithm}, personalized"),
            ):
                values = [[row[key] for row in series] for key in ("epsilon", name, f"{name}_std")]
                axis.errorbar(*values, fmt=style, color=colour, capsize=2, label=label)
        plots.log2_axis(axis, [row["epsilon"] for row in own])
        axis.set(xlabel=r"$\varepsilon$", title=f"$B$ = {budget}")
        axis.grid(alpha=0.3)
    axes[0, 0].set(ylabel="test users' loss (nats per token)")
    plots.legend_below(figure)
    return figure


if __name__ == "__main__":
    finetuning.main(globals())
