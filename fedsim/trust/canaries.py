"""Canaries: made-up users that an audit plants in a run's data, and that are easy to notice.

A *gradient canary* has a linear loss, so that its gradient has the same direction in every step,
and is far longer than the clip norm; directions of different canaries have no coordinate in common.
A *text canary* is a user who wrote one line of made-up words. For sampling, clipping and noise both
are ordinary users: their losses go through the engine, the strategy and the mechanism.
"""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets, num_coordinates
from fedsim.data import Dataset, Tokenizer, UserStore
from fedsim.engine import Task, WrappedTask
from fedsim.errors import expect
from fedsim.sampling import graph_of
from fedsim.trust.bounds import ReleasedNoise

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
MAX_TOKENS = 32
WORDS = 24  # more words than MAX_TOKENS tokens hold
LENGTH = 1e3
"""Length of a gradient canary's gradient, in clip norms, so that clipping matters."""
POOLS = 4
"""In ELS a canary wrote this many times its share of the pool, so that a missing cap shows."""


def canary_text(rng: np.random.Generator) -> str:
    """A text of made-up words and numbers.

    Unlike random token ids, a user could have written it, with any tokenizer.
    """
    words = []
    for _ in range(WORDS):
        letters = (rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 2 + (CONSONANTS,))
        words.append("".join(letters) if rng.random() < 0.7 else str(rng.integers(10, 100_000)))
    return " ".join(words)


def canary_tokens(data: Dataset, count: int, rng: np.random.Generator) -> list[list[int]]:
    """Tokens of the texts of `count` canaries, of equal lengths; random ones without a
    tokenizer."""
    store = data.train
    length = min(store.max_length, MAX_TOKENS)
    if data.tokenizer_path is None:
        return rng.integers(0, store.vocab_size, (count, length)).tolist()
    tokenizer = Tokenizer.load(data.tokenizer_path)
    texts = tokenizer.encode_batch([canary_text(rng) for _ in range(count)])
    return [[tokenizer.begin_id, *ids][:length] for ids in texts]


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
        """Inner products of `total` and the direction of each canary, float64 [count].

        Raises:
          ConfigError: there are more canaries than parameters.
        """
        expect_directions(self.count, total)
        products, sizes = np.zeros(self.count), np.zeros(self.count)
        for leaf, owner, sign in self._of_leaves(total):
            owner = np.asarray(owner).ravel()
            values = (np.asarray(leaf, np.float64) * np.asarray(sign)).ravel()
            products += np.bincount(owner, values, self.count)
            sizes += np.bincount(owner, minlength=self.count)
        return products / np.sqrt(sizes)


def expect_directions(count: int, params: Any) -> None:
    """Raise ConfigError if there are more gradient canaries than parameters."""
    size = num_coordinates(params)
    expect("gradient_canaries", count, count <= size, f"<= {size} parameters")


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

    def __repr__(self) -> str:
        return f"CanaryTask({self.inner}, {self.directions})"

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
    """A store of users, followed by the users of another store."""

    def __init__(
        self, store: UserStore, planted: UserStore, canaries: dict[str, int] | None = None
    ):
        """Join the stores.

        Args:
          canaries: number of tossed coins by kind, for the run's plan.
        """
        self.store, self.planted, self.canaries = store, planted, canaries
        self.num_users = store.num_users + planted.num_users
        self.num_examples = store.num_examples + planted.num_examples
        self.max_length, self.vocab_size = store.max_length, store.vocab_size
        both = f"{store.fingerprint} {planted.fingerprint}"
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        self.metadata, self.path, self.owners = store.metadata, None, None

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [users + 1]; see `UserStore.offsets`."""
        return np.concatenate(
            [self.store.offsets, self.store.num_examples + self.planted.offsets[1:]]
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, int32 [examples]."""
        return np.concatenate([self.store.lengths, self.planted.lengths])

    def user_ids(self) -> list[str]:
        """Ids of the real users; made-up users are not counted in the ledger of the data."""
        return self.store.user_ids()

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of rows of both stores without padding, int64 [rows]; see `UserStore.sizes`."""
        real, planted = self._parted(rows)
        return self.store.sizes(real) + self.planted.sizes(planted)

    def gather(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of rows of both stores; see `UserStore.gather`."""
        real, planted = self._parted(rows)
        both = self.store.gather(real, length), self.planted.gather(planted, length)
        tokens, sizes = (a + b for a, b in zip(*both, strict=True))  # padding is zero
        return tokens, sizes

    @property
    def is_flagged(self) -> bool:
        """True if only some tokens are trained on."""
        return self.store.is_flagged

    def trained(self, rows: np.ndarray, length: int) -> np.ndarray | None:
        """Which tokens of `gather` are trained on; of canaries all are. See `UserStore.trained`."""
        real, planted = self._parted(rows)
        trained = self.store.trained(real, length)
        if trained is None:
            return None
        of_planted = np.arange(length) < self.planted.sizes(planted)[:, None]
        return trained | of_planted

    def _parted(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows in the numbering of each store, -1 for rows of the other one."""
        rows, first = np.asarray(rows, np.int64), self.store.num_examples
        return np.where(rows < first, rows, -1), np.where(rows >= first, rows - first, -1)


@dataclasses.dataclass
class Canaries:
    """The canaries of one audit: those in the data, and what the run reveals about them."""

    num_gradient: int
    num_text: int
    rows: int
    """Number of examples of a canary, at least as many as a user may have in a step."""
    clip_norm: float
    included: np.ndarray
    """The coins, bool [gradient canaries, then text canaries]."""
    rng: np.random.Generator
    """Draws the canaries' texts."""

    def __post_init__(self) -> None:
        self.directions = Directions(max(1, self.num_gradient))
        self.first: Any = None
        """Parameters before the first step."""
        self.task_inner: Any = None
        self.total: Any = None
        """Sum of all privatised gradients."""
        self.noise = ReleasedNoise()
        self.record_noise = self.noise.record_noise

    @property
    def gradient_included(self) -> np.ndarray:
        """The coins of gradient canaries, bool."""
        return self.included[: self.num_gradient]

    @property
    def text_included(self) -> np.ndarray:
        """The coins of text canaries, bool."""
        return self.included[self.num_gradient :]

    def data(self, data: Dataset) -> Dataset:
        """The data, with the included canaries as the last users.

        Raises: ConfigError: texts have several owners.
        """
        store = data.train
        alone = graph_of(store) is None
        expect("data", data.path, alone, "texts with one owner each: canaries share no texts")
        tokens = canary_tokens(data, len(self.included), self.rng)
        self.texts = UserStore.from_examples(
            {f"{i:08d}": [row] for i, row in enumerate(tokens[self.num_gradient :])},
            store.max_length,
            store.vocab_size,
        )
        examples = {f"{i:08d}": [tokens[i]] * self.rows for i in np.flatnonzero(self.included)}
        planted = UserStore.from_examples(examples, store.max_length, store.vocab_size)
        self.owners = np.full(store.num_examples + planted.num_examples, -1, np.int32)
        own = np.flatnonzero(self.gradient_included)
        self.owners[store.num_examples :][: len(own) * self.rows] = np.repeat(own, self.rows)
        canaries = {"gradient": self.num_gradient, "text": self.num_text}
        return dataclasses.replace(data, train=StoreWithCanaries(store, planted, canaries))

    def task(self, task: Any, params: Any) -> Any:
        """The run's task, with the losses of canaries."""
        self.first, self.task_inner = params, task
        expect_directions(self.num_gradient, params)
        if not self.num_gradient:
            return task
        return CanaryTask(task, self.owners, self.directions, self.clip_norm)

    def on_release(
        self, gradient: Any, unit: float, coefficients: np.ndarray | None = None
    ) -> None:
        """Record a step's privatised gradient, which is public; see `ReleasedNoise`."""
        self.noise.on_release(gradient, unit, coefficients)
        first = self.total is None
        self.total = gradient if first else jax.tree.map(jnp.add, self.total, gradient)

    def gradient_scores(self) -> np.ndarray:
        """Sum of all steps along each canary's direction, float64 [gradient canaries]."""
        return self.directions.scores(self.total)


def coins(count: int, rng: np.random.Generator) -> np.ndarray:
    """Independent coins, bool [count], each True with probability 1/2."""
    return rng.random(count) < 0.5
