"""Gradient canaries: made-up users that an audit plants in the data, and that are easy to notice.

A canary has a linear loss, so that its gradient has the same direction in every step, and is far
longer than the clip norm; directions of different canaries have no coordinate in common. For
sampling, clipping and noise a canary is an ordinary user: its losses go through the engine, the
strategy and the mechanism.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets, num_coordinates
from fedsim.data import Dataset, UserStore
from fedsim.engine import Task, WrappedTask
from fedsim.errors import expect
from fedsim.sampling import graph_of
from fedsim.trust.bounds import ReleasedNoise

LENGTH = 1e3
"""Length of a canary's gradient, in clip norms, so that clipping matters."""
POOLS = 4
"""In ELS a canary wrote this many times its share of the pool, so that a missing cap shows."""


@dataclasses.dataclass(frozen=True)
class Directions:
    """Orthogonal unit vectors, one for each gradient canary, which need no memory.

    Canary i has the parameters with numbers congruent to i modulo `count`, with random signs.
    """

    count: int

    def _of_leaves(self, params: Any) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
        """(leaf, canary of each of its parameters, sign of each)."""
        leaves, start = [], 0
        for number, leaf in enumerate(jax.tree.leaves(params)):
            places = start + jnp.arange(leaf.size, dtype=jnp.int32).reshape(leaf.shape)
            key = jax.random.fold_in(jax.random.key(0), number)
            signs = jax.random.rademacher(key, leaf.shape, jnp.float32)
            leaves.append((leaf, places % self.count, signs))
            start += leaf.size
        return leaves

    def along(self, params: Any, canary: jax.Array) -> jax.Array:
        """Inner product of params and the direction of `canary` (int scalar); differentiable."""
        size, total = num_coordinates(params), jnp.float32(0)
        size_of_canary = size // self.count + (canary < size % self.count)
        for leaf, owner, sign in self._of_leaves(params):
            total += jnp.sum(jnp.where(owner == canary, sign, 0) * leaf.astype(jnp.float32))
        return total / jnp.sqrt(jnp.maximum(size_of_canary, 1).astype(jnp.float32))

    def scores(self, total: Any) -> np.ndarray:
        """Inner products of `total` and the direction of each canary, float64 [count]."""
        products, sizes = np.zeros(self.count), np.zeros(self.count)
        for leaf, owner, sign in self._of_leaves(total):
            owner = np.asarray(owner).ravel()
            values = (np.asarray(leaf, np.float64) * np.asarray(sign)).ravel()
            products += np.bincount(owner, values, self.count)
            sizes += np.bincount(owner, minlength=self.count)
        return products / np.sqrt(sizes)


class CanaryTask(WrappedTask):
    """A task with the losses of gradient canaries in some rows.

    Args:
      inner: the task of the other rows.
      canaries: int32 [examples] of the training split; the canary of a row, or -1.
      directions: of the canaries.
      clip_norm: C.
    """

    def __init__(self, inner: Task, canaries: np.ndarray, directions: Directions, clip_norm: float):
        super().__init__(inner)
        self.canaries, self.directions, self.clip_norm = canaries, directions, clip_norm

    @property
    def buckets(self) -> Buckets | None:
        """The inner task's buckets for rows of this task."""
        inner = self.inner.buckets
        if inner is None:
            return None
        return Buckets(
            inner.lengths,
            lambda batch: inner.sizes(batch["inner"]),
            lambda batch, length: {**batch, "inner": inner.trim(batch["inner"], length)},
            side_by_side=inner.side_by_side,
        )

    def read(self, split: str, rows: np.ndarray) -> dict[str, Any]:
        """The inner task's rows, and the canary of each."""
        canary = np.full(len(rows), -1, np.int32)
        if split == "train":
            canary = np.where(rows >= 0, self.canaries[rows], np.int32(-1))
        return {"inner": self.inner.read(split, rows), "canary": canary}

    def dummy_batch(self, rows: np.ndarray) -> dict[str, Any]:
        """The inner task's rows, none of which is a canary's."""
        return {"inner": self.inner.dummy_batch(rows), "canary": np.full(len(rows), -1, np.int32)}

    def nats(self, params: Any, batch: Any, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """The inner task's losses and predictions."""
        return self.inner.nats(params, batch["inner"], *frozen)

    def losses(self, params: Any, batch: Any, *frozen: Any) -> jax.Array:
        """Losses of rows: linear in the parameters for canaries, else the inner task's."""
        canaries = batch["canary"]
        linear = jax.vmap(lambda canary: self.directions.along(params, canary))(canaries)
        scaled = LENGTH * self.clip_norm * linear
        return jnp.where(canaries >= 0, scaled, self.inner.losses(params, batch["inner"], *frozen))


class StoreWithCanaries:
    """A store of users, followed by canaries.

    A canary's row has the tokens of the first row of the data; `CanaryTask` replaces its loss.
    """

    def __init__(self, store: UserStore, count: int, rows: int, planted: int):
        """Add users to the store.

        Args:
          count: number of canaries in the data.
          rows: examples of each.
          planted: number of tossed coins, for the run's plan.
        """
        self.store, self.canaries = store, {"gradient": planted}
        self.added = rows * np.arange(1, count + 1)
        self.num_users = store.num_users + count
        self.num_examples = store.num_examples + rows * count
        self.max_length, self.vocab_size = store.max_length, store.vocab_size
        self.is_flagged = store.is_flagged
        both = f"{store.fingerprint} {count} canaries of {rows} rows"
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [users + 1]; see `UserStore.offsets`."""
        return np.concatenate([self.store.offsets, self.store.num_examples + self.added])

    def user_ids(self) -> list[str]:
        """Ids of the real users; made-up users are not counted in the ledger of the data."""
        return self.store.user_ids()

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """See `UserStore.sizes`."""
        return self.store.sizes(self._in_store(rows))

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """See `UserStore.gather`."""
        return self.store.gather(self._in_store(rows), length)

    def trained(self, rows: np.ndarray, length: int) -> np.ndarray | None:
        """See `UserStore.trained`."""
        return self.store.trained(self._in_store(rows), length)

    def _in_store(self, rows: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        return np.where(rows < self.store.num_examples, rows, 0)


class Canaries:
    """The canaries of one audit: those in the data, and what the run reveals about them."""

    def __init__(self, included: np.ndarray, rows: int, clip_norm: float):
        """Plan canaries.

        Args:
          included: the coins, bool [canaries].
          rows: examples of a canary, at least as many as a user may have in a step.
        """
        self.included, self.rows, self.clip_norm = included, rows, clip_norm
        self.directions = Directions(len(included))
        self.total: Any = None
        """Sum of all privatised gradients."""
        self.noise = ReleasedNoise()
        self.record_noise = self.noise.record_noise

    def data(self, data: Dataset) -> Dataset:
        """The data, with the included canaries as the last users.

        Raises: ConfigError: texts have several owners.
        """
        store, canaries = data.train, np.flatnonzero(self.included)
        alone = graph_of(store) is None
        expect("data", data.path, alone, "texts with one owner each: canaries share no texts")
        of_real = np.full(store.num_examples, -1, np.int32)
        self.owners = np.concatenate([of_real, np.repeat(canaries, self.rows).astype(np.int32)])
        train: Any = StoreWithCanaries(store, len(canaries), self.rows, len(self.included))
        return dataclasses.replace(data, train=train)

    def task(self, task: Any, params: Any) -> Any:
        """The run's task, with the losses of canaries.

        Raises: ConfigError: there are more canaries than parameters.
        """
        count, size = len(self.included), num_coordinates(params)
        expect("gradient_canaries", count, count <= size, f"<= {size} parameters")
        return CanaryTask(task, self.owners, self.directions, self.clip_norm)

    def on_release(
        self, gradient: Any, unit: float, coefficients: np.ndarray | None = None
    ) -> None:
        """Record a step's privatised gradient, which is public; see `ReleasedNoise`."""
        self.noise.on_release(gradient, unit, coefficients)
        first = self.total is None
        self.total = gradient if first else jax.tree.map(jnp.add, self.total, gradient)

    def scores(self) -> np.ndarray:
        """Sum of all steps along each canary's direction, float64 [canaries]."""
        return self.directions.scores(self.total)


def coins(count: int, rng: np.random.Generator) -> np.ndarray:
    """Independent coins, bool [count], each True with probability 1/2."""
    return rng.random(count) < 0.5
