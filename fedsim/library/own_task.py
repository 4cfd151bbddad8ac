"""Training of a custom model: a task, and the owner of every row that it can read."""

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
from flax import linen as nn
from flax.core import tracers

from fedsim.config import RunConfig
from fedsim.data import SPLITS, Dataset, is_string, user_ids
from fedsim.engine import Batch, Params, Task, WrappedTask
from fedsim.errors import DataError, FileDamaged, expect

ROWS = 4096
"""Rows that are read at a time to compute a fingerprint."""


def owner_ids(split: str, owners: Sequence[Any]) -> np.ndarray:
    """Normalise the owners of rows, [rows], by the rules for files; see `user_ids`.

    Raises: DataError: a row has no owner, or owners are of another type or of several.
    """
    expected = "an owner for each row, all texts or all whole numbers"
    try:
        ids = pa.array(owners, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise DataError.of("data", split, expected) from None
    if is_string(ids.type):
        ids = user_ids.as_ids(ids, f"owners of {split}", range(len(ids)))
    elif not pa.types.is_integer(ids.type):
        raise DataError.of("data", f"{split} with owners of type {ids.type}", expected)
    if ids.null_count:
        raise DataError.of("data", f"{split} with {ids.null_count} rows without owner", expected)
    return np.asarray(ids.to_pylist())


class OwnedRows:
    """The rows of a split, sorted by their owners, as sampling and accounting use them.

    Attributes:
      num_users, num_examples: totals.
      offsets: int64 [num_users + 1]; user u owns the positions offsets[u]:offsets[u + 1].
      order: int64 [num_examples]; the task's number of the row at each position.
    """

    def __init__(self, task: Task, split: str, owners: np.ndarray):
        """Sort the rows. Args: owners: the id of each row's owner, [rows]; see `owner_ids`."""
        unique, codes, counts = np.unique(owners, return_inverse=True, return_counts=True)
        self._task, self._split, self._names = task, split, unique
        self.order = np.argsort(codes, kind="stable")
        self.offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.num_users, self.num_examples = len(unique), len(owners)
        self.fingerprint = self._digest()

    def check(self) -> None:
        """Raise FileDamaged if the task reads other rows than before."""
        if self._digest() != self.fingerprint:
            raise FileDamaged(f"data: the rows of {self._split} have changed")

    def user_ids(self) -> list[str]:
        """Ids of the owners, [num_users], in the order of the users."""
        return [str(name) for name in self._names]

    def _digest(self) -> str:
        """sha256 (hex) of the owners and of all rows that the task reads."""
        digest = hashlib.sha256(repr(self._names.tolist()).encode())
        digest.update(self.offsets.tobytes())
        for low in range(0, self.num_examples, ROWS):
            part = self.order[low : low + ROWS]
            for leaf in jax.tree.leaves(self._task.read(self._split, part)):
                digest.update(np.ascontiguousarray(leaf).tobytes())
        return digest.hexdigest()


class OwnedTask(WrappedTask):
    """A task whose rows are numbered by their positions in `OwnedRows`."""

    def __init__(self, inner: Task, orders: Mapping[str, np.ndarray]):
        super().__init__(inner)
        self.orders = orders

    def read(self, split: str, rows: np.ndarray) -> Batch:
        """The inner task's rows, with zeros for padding.

        A row in place of padding would put its owner into the units of other users.
        """
        real = rows >= 0
        batch = self.inner.read(split, self.orders[split][np.where(real, rows, 0)])

        def blank(leaf: Any) -> np.ndarray:
            leaf = np.asarray(leaf)
            return np.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, leaf.dtype.type(0))

        return jax.tree.map(blank, batch)

    def dummy_batch(self, rows: np.ndarray) -> Batch:
        """Rows of zeros: a task of the user's own may have no other rows than the users'."""
        return self.read("train", np.full(len(rows), -1))

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray | None:
        """The inner task's sizes of these rows, 0 for padding."""
        real = rows >= 0
        sizes = self.inner.sizes(split, self.orders[split][np.where(real, rows, 0)])
        return None if sizes is None else np.where(real, sizes, 0)


@dataclasses.dataclass
class OwnTask:
    """Source of data and initial parameters for a custom task; see `training.open.CustomTask`.

    Attributes:
      task: the model.
      owners: of each row of the split train, or a dict of that by the names of splits.
    """

    task: Task
    owners: Sequence[Any] | Mapping[str, Sequence[Any]]

    def data(self) -> Dataset:
        """The rows of all splits, as users' examples.

        Raises: DataError: there is no split train, an unknown split, or a user of train in
          eval_users.
        """
        owners = self.owners if isinstance(self.owners, Mapping) else {"train": self.owners}
        if "train" not in owners or not owners.keys() <= set(SPLITS):
            expected = f"owners of the split train, and of others of {', '.join(SPLITS)}"
            raise DataError.of("data", ", ".join(map(str, owners)), expected)
        ids = {split: owner_ids(split, each) for split, each in owners.items()}
        both = np.intersect1d(ids["train"], ids.get("eval_users", ids["train"][:0]))
        if len(both):
            expected = "owners of no row of train, since what is computed of them is not protected"
            raise DataError.of("data", f"eval_users with the owner {both[0]}", expected)
        stores = {split: OwnedRows(self.task, split, each) for split, each in ids.items()}
        return Dataset(**stores)  # type: ignore[arg-type]

    def start(self, data: Dataset, run: RunConfig, key: jax.Array) -> tuple[Task, Params]:
        """The task on positions of rows, and its initial parameters in float32.

        Raises: DataError: a row has an unknown id; see `expect_known_ids`.
        """
        orders = {split: store.order for split, store in data.splits().items()}  # type: ignore
        params = jax.tree.map(_float32, self.task.init(key))
        for split, order in orders.items():
            expect_known_ids(self.task, params, split, order)
        warn_of_coupled_rows(self.task, params, orders["train"])
        return OwnedTask(self.task, orders), params


def expect_known_ids(task: Task, params: Params, split: str, order: np.ndarray) -> None:
    """Raise DataError if the model looks up an id of a row that is not in an `nn.Embed`'s table.

    JAX counts some such ids from the end and takes nan for others. All rows are read; of the model,
    only what its ids depend on is computed. Args: order: the rows to read, int [rows].
    """

    @jax.jit
    def has_unknown(batch: Batch, params: Params, *frozen: Any) -> jax.Array:
        found, here = [jnp.array(False)], tracers.current_trace()

        def seen(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module, is_call = context.module, context.method_name == "__call__"
            # Inside of a loop or of remat, a tracer would leak; there, nothing is checked.
            if isinstance(module, nn.Embed) and is_call and tracers.current_trace() == here:
                (ids,) = (each.astype(jnp.int32) for each in (*args, *kwargs.values()))
                found.append(jnp.any((ids < 0) | (ids >= module.num_embeddings)))
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(seen):
            task.losses(params, batch, *frozen)
        return jnp.stack(found).any()

    frozen = () if task.frozen is None else (task.frozen,)
    for low in range(0, len(order), ROWS):
        if has_unknown(task.read(split, order[low : low + ROWS]), params, *frozen):
            expected = "ids that are >= 0 and below num_embeddings of their nn.Embed"
            raise DataError.of("data", f"{split} with an unknown id", expected)


def warn_of_coupled_rows(task: Task, params: Params, order: np.ndarray) -> None:
    """Warn if the loss of the first row is another one beside the last row, near the parameters."""
    frozen, rng = () if task.frozen is None else (task.frozen,), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape), params)
    pairs = (task.read("train", order[[0, other]]) for other in (0, -1))
    alone, beside = (float(task.losses(params, pair, *frozen)[0]) for pair in pairs)
    if not np.isclose(alone, beside, rtol=1e-3, equal_nan=True):
        warnings.warn(
            f"task={type(task).__name__}: the loss of a row depends on the rows beside it "
            f"({alone:.4g}, {beside:.4g}), so clipping bounds nobody's influence",
            stacklevel=2,
        )


def _float32(leaf: Any) -> np.ndarray:
    leaf = np.asarray(leaf)
    holds = np.issubdtype(leaf.dtype, np.floating) and bool(np.isfinite(leaf).all())
    expect("task", f"init() with {leaf.dtype}", holds, "parameters that are finite floats")
    return leaf.astype(np.float32)
