"""Language modelling as a task: from row numbers to cross entropy of the next token, in nats.

Shape suffixes: B rows, L positions, V vocabulary; 1 is an axis of length one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import SHORT, Buckets, in_parts, layers_are_recorded, packed
from fedsim.data import Dataset
from fedsim.errors import DataError
from fedsim.models import lora
from fedsim.models.attention import is_fused
from fedsim.models.transformer import Transformer, TransformerConfig, head_logits

WHOLE_LOGITS = 2**24
"""Most logits of a pass that are computed at once."""
CHUNK_LOGITS = 2**23
"""Logits of a chunk of tokens."""


def predicted(
    tokens_BL: jax.Array, sizes_B: jax.Array, trained_BL: jax.Array | None = None
) -> jax.Array:
    """Tokens after the first that are predicted, bool [B, L - 1].

    Args:
      tokens_BL: ids, starting with the begin token.
      sizes_B: number of real tokens of each row; the rest is padding, which is not predicted.
      trained_BL: bool, tokens to predict; None: all real ones. The first is never predicted.
    """
    real_BL = jnp.arange(1, tokens_BL.shape[1])[None] < sizes_B[:, None]
    return real_BL if trained_BL is None else real_BL & trained_BL[:, 1:]


def _summed(nats_BL: jax.Array, real_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(jnp.where(real_BL, nats_BL, 0), axis=1), real_BL.sum(axis=1)


def is_in_chunks(c: TransformerConfig, num_tokens: int) -> bool:
    """True if the logits of a pass are too many to be whole. Public: sizes of the model and of the
    pass decide. `ghost` needs the inputs and cotangents of a whole head."""
    return num_tokens * c.vocab_size > WHOLE_LOGITS and not layers_are_recorded()


def nats_in_chunks(
    c: TransformerConfig, params: Any, x_BLD: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    """Cross entropy of every target, float32 [B, L], with the logits of a few tokens at a time.

    The backward pass computes the logits of a chunk again, so that they never exist at once.

    Args: x_BLD: the output of a `Transformer` without its head.
    """
    count, most = targets_BL.size, max(1, CHUNK_LOGITS // c.vocab_size)
    size = -(-count // -(-count // most))  # of equal chunks, with little padding

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def nats(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        return cross_entropy(head_logits(c, params, chunk[0]), chunk[1])

    tokens = x_BLD.reshape(count, -1), targets_BL.reshape(count)
    chunks = jax.tree.map(lambda leaf: in_parts(leaf, size)[:, None], tokens)  # rows of one
    return jax.lax.map(nats, chunks).reshape(-1)[:count].reshape(targets_BL.shape)


def cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """-log_softmax(logits)[targets], at least float32 [B, L], for targets in [0, V)."""
    return _cross_entropy(
        logits_BLV.astype(jnp.promote_types(logits_BLV.dtype, jnp.float32)), targets_BL
    )


@jax.custom_vjp
def _cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    """Its gradient equals JAX's bit for bit, in a form that XLA does not compute twice."""
    # Not _cross_entropy_forward's value: alone, XLA rounds that otherwise in the last bit.
    log_probs_BLV = jax.nn.log_softmax(logits_BLV)
    return -jnp.take_along_axis(log_probs_BLV, targets_BL[..., None], axis=-1)[..., 0]


def _cross_entropy_forward(logits_BLV, targets_BL):
    max_BL1 = logits_BLV.max(axis=-1, keepdims=True)
    sum_BL1 = jnp.exp(logits_BLV - max_BL1).sum(axis=-1, keepdims=True)
    target_BL1 = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)
    nats_BL = -(target_BL1 - max_BL1 - jnp.log(sum_BL1))[..., 0]
    return nats_BL, (logits_BLV, max_BL1, sum_BL1, targets_BL)


def _cross_entropy_backward(residuals, cotangent_BL):
    logits_BLV, max_BL1, sum_BL1, targets_BL = residuals
    cotangent_BL1 = cotangent_BL[..., None]
    ids_BLV = jax.lax.broadcasted_iota(jnp.int32, logits_BLV.shape, 2)
    is_target_BLV = ids_BLV == targets_BL[..., None]
    probs_BLV = jnp.exp(logits_BLV - max_BL1) * (cotangent_BL1 / sum_BL1)
    return jnp.where(is_target_BLV, -cotangent_BL1, 0) + probs_BLV, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


LARGE = 10_000_000  # weights in blocks above which a program costs less than it saves
SIDE_BY_SIDE = (32, 4), (48, 2)  # of a large model: see `Buckets.side_by_side`
ROW = 128  # minimum length of a row of several texts: processors multiply that well


class LanguageModelTask:
    """A transformer and the data it is trained on. Pickles as sizes and paths.

    The protocol is `engine.task.Task`.
    """

    def __init__(self, dataset: Dataset | None, config: TransformerConfig, frozen: Any = None):
        """Make a task.

        Args:
          dataset: splits to read rows from; None: losses alone are computed.
          config: the transformer.
          frozen: parameters of the model, if its adapters alone are trained.
        """
        self.dataset: Any = dataset
        self.config = config
        self.frozen = frozen

    def __repr__(self) -> str:
        return f"LanguageModelTask({self.config})"

    def describe(self) -> dict[str, Any]:
        """The configuration of the transformer, as JSON."""
        return dataclasses.asdict(self.config)

    @property
    def buckets(self) -> Buckets:
        """Lengths that rows may be cut to, and the rule by which short texts share a row.

        A small model has few lengths: another program costs more than it saves in padding. A large
        one has passes of about a hundred tokens: more side by side gain little, cost memory and are
        padded.
        """
        c = self.config
        many = 12 * c.num_layers * c.width**2 > LARGE
        lengths = lengths_up_to(c.max_length, many=many)
        shared = lengths_up_to(max(c.max_length, SHORT), many=many)[not many :]
        return Buckets(lengths, _sizes, _trim, self._packed, shared, SIDE_BY_SIDE if many else ())

    def _packed(self, batch: Any) -> Any:
        return packed(batch, np.maximum(ROW, self.buckets.holding(batch["sizes"])))

    @property
    def kernels(self) -> str:
        """What computes the attention of the longest rows, on a GPU."""
        c = self.config
        own = c.max_length - 1, c.num_heads, c.head, c.kv_heads, c.dtype or "float32"
        windows = {c.of_block(i).window for i in range(c.num_layers)}
        names = {"XLA" if c.attention_cap or not is_fused(*own, w) else "cuDNN" for w in windows}
        by = f", attention by {' and '.join(sorted(names))}"
        return by if jax.default_backend() == "gpu" else ""

    def init(self, key: jax.Array) -> Any:
        """Initial parameters, float32."""
        tokens = jnp.zeros((1, self.config.max_length), jnp.int32)
        return Transformer(self.config).init(key, tokens)["params"]

    def read(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Read examples by row number; -1 is padding.

        Returns:
          {"tokens": int32 [rows, max_length], "sizes": int32 [rows], number of real tokens}, and
          "trained": bool [rows, max_length], if not all tokens are trained on.

        Raises: DataError: a token is not in the vocabulary.
        """
        store, length = getattr(self.dataset, split), self.config.max_length
        tokens, sizes = store.gather(rows, length)
        if tokens.view(np.uint32).max(initial=0) >= self.config.vocab_size:  # negative ones, too
            expected = f"ids in [0, {self.config.vocab_size})"
            raise DataError.of("data", f"{split} with a token that the model lacks", expected)
        trained = store.trained(rows, length)
        found = {"tokens": tokens, "sizes": sizes}
        return found if trained is None else {**found, "trained": trained}

    def dummy_batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of random tokens, as of `read`: half of max_length, a half and a quarter of it."""
        length, rng = self.config.max_length, np.random.default_rng(0)
        tokens = rng.integers(self.config.vocab_size, size=(rows.max() + 1, length), dtype=np.int32)
        sizes = np.maximum(1, length >> np.array([0, 0, 1, 2])[rows % 4]).astype(np.int32)
        real = np.arange(length) < sizes[:, None]
        found = {"tokens": np.where(real, tokens[rows], 0), "sizes": sizes}
        return {**found, "trained": real} if self.dataset.train.is_flagged else found

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Number of tokens of examples, at most max_length, int64 [rows]; 0 for -1."""
        sizes = getattr(self.dataset, split).sizes(rows)
        return np.minimum(sizes, self.config.max_length)

    def nats(self, params: Any, batch: Any, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """(nats, number of predictions) of each row, for evaluation."""
        return _summed(*self._each(params, batch, *frozen))

    def losses(self, params: Any, batch: Any, *frozen: Any) -> jax.Array:
        """Loss f(theta, z) of each row: mean nats per trained token of its own, float32 [rows].

        Of a row of several texts, as of `clipping.in_shared_rows`, the weighted sum.
        """
        nats_BL, real_BL = self._each(params, batch, *frozen)
        if "weights" in batch:
            return jnp.sum(jnp.where(real_BL, nats_BL * batch["weights"], 0), axis=1)
        nats, predictions = _summed(nats_BL, real_BL)
        return nats / jnp.maximum(predictions, 1)

    def _each(self, params: Any, batch: Any, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """(nats of each target, True where it is predicted), each [B, L]."""
        c, tokens_BL = self.config, batch["tokens"]
        params = lora.joined(frozen[0], params) if frozen else params
        if "positions" in batch:  # rows of several texts, as `clipping.packing.packed` makes them
            targets_BL, real_BL = jnp.maximum(batch["targets"], 0), batch["targets"] >= 0
            inputs = tokens_BL, None, batch["positions"]
        else:
            real_BL = predicted(tokens_BL, batch["sizes"], batch.get("trained"))
            targets_BL, inputs = tokens_BL[:, 1:], (tokens_BL[:, :-1],)
        whole = not is_in_chunks(c, targets_BL.size)
        x: Any = Transformer(c).apply({"params": params}, *inputs, head=whole)
        if whole:
            return cross_entropy(x, targets_BL), real_BL
        return nats_in_chunks(c, params, x, targets_BL), real_BL


def lengths_up_to(longest: int, *, many: bool = False) -> tuple[int, ...]:
    """32, 64, 128, ... below `longest`, and `longest`.

    If `many`, multiples of 16 up to 128, and then four lengths to each doubling.
    """
    lengths = [2**n for n in range(5, longest.bit_length())]
    if many:
        quarters = (2**n * k // 4 for n in range(6, longest.bit_length()) for k in (4, 5, 6, 7))
        lengths = [16, 32, 48, *quarters]
    return (*(length for length in lengths if length < longest), longest)


def _sizes(batch: dict[str, Any]) -> Any:
    return batch["sizes"]


def _trim(batch: dict[str, Any], length: int) -> dict[str, Any]:
    own = ("tokens", "trained")
    return {name: x[..., :length] if name in own else x for name, x in batch.items()}
