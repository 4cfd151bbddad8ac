"""Mean estimation as a task (Section 4 of the paper): f(theta, z) = |theta - z|^2 / 2."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class MeanTask:
    """Points of users in memory; the gradient at an example is theta - z.

    The protocol is `engine.task.Task`.
    """

    layers = frozen = buckets = None

    def __init__(self, points: np.ndarray):
        self.points = np.asarray(points, np.float32)  # [examples, d]

    def describe(self) -> dict[str, Any]:
        """The number of dimensions."""
        return {"task": "mean estimation", "dimensions": self.points.shape[1]}

    def init(self, key: jax.Array) -> jax.Array:
        """theta^0 = 0, whatever the key."""
        return jnp.zeros(self.points.shape[1])

    def read(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Points [rows, d]; zeros for padding (-1): a point would take its user into other units,
        where 0 * nan is nan."""
        return np.where(rows[:, None] >= 0, self.points[rows], np.float32(0))

    def dummy_batch(self, rows: np.ndarray) -> np.ndarray:
        """Normal points [rows, d]."""
        drawn = np.random.default_rng(0).normal(size=(rows.max() + 1, self.points.shape[1]))
        return drawn[rows].astype(np.float32)

    def sizes(self, split: str, rows: np.ndarray) -> None:
        """A point has no length."""

    def losses(self, params: jax.Array, batch: jax.Array, *frozen: Any) -> jax.Array:
        """f per row, [rows]."""
        return 0.5 * jnp.sum(jnp.square(params[None] - batch), axis=1)

    def nats(
        self, params: jax.Array, batch: jax.Array, *frozen: Any
    ) -> tuple[jax.Array, jax.Array]:
        """(loss, 1) per row."""
        return self.losses(params, batch), jnp.ones(len(batch), jnp.int32)
