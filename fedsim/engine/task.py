"""The contract between a model with its data and the workers that compute its losses.

A task reads rows, creates the parameters and computes the loss of each row. To train another model,
write `init`, `read` and `losses`; all other methods have defaults. A task is pickled to the
workers, so it should hold sizes and paths, or arrays that every worker may hold.
"""

from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets

Params = Any
"""A tree of float32 arrays."""
Batch = Any
"""A tree of arrays [rows, ...]."""
DUMMY = "dummy"
"""Split of the rows of `Task.dummy_batch`."""


class Task(Protocol):
    """A model and the rows on which it is trained and evaluated.

    Guarantees that an implementation must give: the loss of a row depends on the parameters and on
      this row alone. Normalisation over a batch, for example, breaks this and with it the privacy.
    Guarantees to an implementation: in a process, one call of `read`, `sizes` or `dummy_batch` ends
      before the next one begins, so they may share an open file.
    """

    def init(self, key: jax.Array) -> Params:
        """Create fresh parameters, float32.

        Args: key: JAX key; the parameters must be a function of it.
        """
        ...

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """Read examples of a split.

        Args:
          split: train, or a split of the evaluation.
          rows: example indices, int [rows], -1 = padding.
        Returns: NumPy arrays [rows, ...]. A row of padding must not depend on the data and must
          have a finite loss and gradient; zeros, for example.
        """
        ...

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray | None:
        """Return the length of each example without reading it, int [rows], in units of `buckets`.

        Examples of about one length are computed together. None: lengths are unknown.
        """
        return None

    def dummy_batch(self, rows: np.ndarray) -> Batch:
        """Make up rows like those of `read`, for checks before the first step.

        They must not depend on the data: the results of the checks are published. By default they
        are rows of padding with normal numbers in the place of all floats.
        """

        def varied(leaf: Any) -> Any:
            if not np.issubdtype(leaf.dtype, np.floating):
                return leaf
            return np.random.default_rng(0).normal(size=leaf.shape).astype(leaf.dtype)

        return jax.tree.map(varied, self.read("train", np.full(len(rows), -1)))

    def losses(self, params: Params, batch: Batch, *frozen: Any) -> jax.Array:
        """Compute f(theta, z) of each row; traced by JAX.

        Args:
          params: theta.
          batch: the result of `read`.
          frozen: the parameters of `frozen`, if there are any.
        Returns: float32 [rows].
        """
        ...

    def nats(self, params: Params, batch: Batch, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """Compute (sum of losses in nats, number of predictions) of each row; traced by JAX.

        Evaluation divides the sums over all rows. By default every row is one prediction.
        """
        losses = self.losses(params, batch, *frozen)
        return losses, jnp.ones(losses.shape, jnp.int32)

    def describe(self) -> dict[str, Any]:
        """Describe the model for `config.json`."""
        return {"task": f"{type(self).__module__}.{type(self).__qualname__}"}

    @property
    def frozen(self) -> Any:
        """Parameters that are not trained, or None: the last argument of `losses` and `nats`.

        They are sent to a worker once, with the task, and to its device once.
        """
        return None

    @property
    def buckets(self) -> Buckets | None:
        """Lengths to which rows may be trimmed, or None."""
        return None


class WrappedTask(Any if TYPE_CHECKING else object):
    """A task that forwards everything to an inner task, except for what a subclass overrides."""

    def __init__(self, inner: Task):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)
