"""Loss on users' own text before and after a model is personalized to them (Appendix G).

The examples of each user are halved. SGD makes a few epochs over one half, and the loss on the
other half measures the gain. The users are held-out ones, whom training did not see, or those of a
test split, where it may have seen earlier examples of them. Nothing here is private, and no
personal model is kept.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.config import RunConfig
from fedsim.data import UserStore
from fedsim.engine import Worker
from fedsim.errors import ConfigError, expect
from fedsim.evaluate import last_model
from fedsim.keys import SecretKey
from fedsim.run import Console, StoredRun
from fedsim.sampling import graph_of


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
            params = self._step(params, batch, rows >= 0, rate, *self._worker.programs.frozen())
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


def personalize(
    task: Any,
    params: Any,
    store: UserStore,
    split: str,
    settings: Personalization,
    console: Console,
) -> dict[str, Any]:
    """Losses of a model with and without personalization, averaged over users.

    Returns:
      num_users; left_out_users, who have one example; loss, without personalization;
      learning_rate, the best; personalized_loss, gain and gain_error, its standard error over
      users; rates, with the last four for each learning rate; per_user, an array [users, 2] of
      losses without personalization and gains.
    Raises: ConfigError: no user has two examples.
    """
    key = SecretKey.create(settings.seed, "personalize")
    users = halves(store, settings, key)
    expect(split, f"{store.num_users} users", bool(users), "a user with two examples at least")
    personalizer = Personalizer(task, params, split, settings)
    before = np.array([personalizer.before(user) for user in users])
    tried: list[dict[str, Any]] = []
    all_gains = []
    for rate in settings.learning_rates:
        gains = before - [personalizer.after(user, rate, key) for user in users]
        all_gains.append(gains)
        tried.append({"learning_rate": rate, **_of_users(before, gains)})
        console.note(
            f"learning rate {rate:g}: {before.mean():.4f} -> {(before - gains).mean():.4f}"
        )
    best = int(np.argmax([row["gain"] if np.isfinite(row["gain"]) else -np.inf for row in tried]))
    left_out = int((np.diff(store.offsets) == 1).sum())
    counts = {"num_users": len(users), "left_out_users": left_out}
    losses = {"loss": float(before.mean()), **tried[best], "rates": tried}
    return {**counts, **losses, "per_user": np.stack([before, all_gains[best]], axis=1)}


def _of_users(before: np.ndarray, gains: np.ndarray) -> dict[str, float]:
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else 0.0
    after = float((before - gains).mean())
    return {"personalized_loss": after, "gain": float(gains.mean()), "gain_error": error}


def personalize_run(
    stored: StoredRun,
    run: RunConfig,
    console: Console,
    *,
    split: str = "eval_users",
    settings: Personalization = Personalization(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """`personalize` for the last checkpoint of a run.

    Args:
      run: settings of the run, with the engine to compute with.
      split: eval_users, or test: later examples, some of them by users of the training data.
    Raises: ConfigError: there is no checkpoint or no such split, the data have changed, or their
      texts have several owners.
    """
    task, params, data, path = last_model(stored, run, console)
    store = getattr(data, split)
    if store is None:
        raise ConfigError.of("split", split, f"data with {split}, found {', '.join(data.splits())}")
    alone = graph_of(store) is None
    expect("data", run.data.source, alone, "texts with one owner each")
    result = personalize(task, params, store, split, settings, console)
    about = {"run_dir": str(run.run_dir), "checkpoint": path.name, "split": split}
    return {**about, "loss_unit": data.loss_unit, **result}
