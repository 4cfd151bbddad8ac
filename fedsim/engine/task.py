"""The contract between a model with its data and whatever computes: what a worker needs of both.

A task says how rows are read, what the parameters are and what the loss of each row is. To train a
model of one's own is to write `init`, `read` and `losses`; everything else has a default. A task is
pickled to the workers, so it should hold sizes and paths, or arrays that every worker may hold.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets, LocalSteps

Params = Any
"""A tree of float32 arrays."""
Batch = Any
"""A tree of arrays [rows, ...]."""


class Task(Protocol):
    """A model and the rows that it is trained and evaluated on.

    Guarantees that an implementation must give: the loss of a row depends on the parameters and on
      this row alone. Normalisation over a batch, for example, breaks that, and the privacy with it.
    """

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self.describe()})"

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        ...

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """The examples `rows` (int [rows], -1 = padding) of a split, as NumPy arrays [rows, ...].

        What a row of padding holds does not matter, but it must be the same whoever is in the data,
        and its loss and gradient must be finite: zeros, for example.
        """
        ...

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray | None:
        """How long each of these examples is, in what `buckets` counts, int [rows], without reading
        them whole: those about as long are computed together. None: nobody knows."""
        return None

    def losses(self, params: Params, batch: Batch, *frozen: Any) -> jax.Array:
        """f(theta, z) per row, float32 [rows]; traced by JAX."""
        ...

    def nats(self, params: Params, batch: Batch, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """(sum of losses, predictions) per row: evaluation divides the sums over all rows. By
        default every row is one prediction."""
        losses = self.losses(params, batch, *frozen)
        return losses, jnp.ones(losses.shape, jnp.int32)

    def describe(self) -> dict[str, Any]:
        """What `config.json` says of the model."""
        return {"task": f"{type(self).__module__}.{type(self).__qualname__}"}

    @property
    def frozen(self) -> Any:
        """Parameters that stay as they are, or None: the last argument of `losses` and `nats`.
        They reach a worker once, with the task, and its device once."""
        return None

    @property
    def buckets(self) -> Buckets | None:
        """The lengths that rows may be cut to, or None."""
        return None

    @property
    def local_steps(self) -> LocalSteps | None:
        """The users' own SGD, whose update is clipped instead of their gradient, or None."""
        return None


class WrappedTask(Task):
    """Another task, but for what a subclass defines itself. Everything is forwarded."""

    def __init__(self, inner: Task):
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    def init(self, key: jax.Array) -> Params:
        """The inner task's fresh parameters."""
        return self.inner.init(key)

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """The inner task's rows."""
        return self.inner.read(split, rows)

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray | None:
        """The inner task's lengths of examples."""
        return self.inner.sizes(split, rows)

    def losses(self, params: Params, batch: Batch, *frozen: Any) -> jax.Array:
        """The inner task's losses."""
        return self.inner.losses(params, batch, *frozen)

    def nats(self, params: Params, batch: Batch, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """The inner task's losses and predictions."""
        return self.inner.nats(params, batch, *frozen)

    def describe(self) -> dict[str, Any]:
        """What the inner task says of its model."""
        return self.inner.describe()

    @property
    def frozen(self) -> Any:
        """The inner task's frozen parameters."""
        return self.inner.frozen

    @property
    def buckets(self) -> Buckets | None:
        """The inner task's lengths."""
        return self.inner.buckets

    @property
    def local_steps(self) -> LocalSteps | None:
        """The inner task's local steps."""
        return self.inner.local_steps
