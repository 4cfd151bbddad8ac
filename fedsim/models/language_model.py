"""Language modelling as a task: what a worker needs to turn example indices into losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping import Buckets, LocalSteps
from fedsim.data.dataset import Dataset
from fedsim.models import lora
from fedsim.models.loss import next_token_nats, packed_nats
from fedsim.models.shared_rows import packed
from fedsim.models.transformer import Transformer, TransformerConfig

LARGE = 10_000_000  # weights in blocks, from which on a program costs less than it saves
ROW = 128  # tokens of a row of several texts, at least: what a processor multiplies well


class LanguageModelTask:
    """A transformer and the data it is trained on. Pickles as sizes and paths.

    The protocol is `engine.task.Task`.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: TransformerConfig,
        frozen: Any = None,
        local_steps: LocalSteps | None = None,
    ):
        """Args: frozen: the model, if the parameters that are trained are its adapters."""
        self.dataset = dataset
        self.config = config
        self.frozen = frozen
        self.local_steps = local_steps

    def __repr__(self) -> str:
        local = f", {self.local_steps}" if self.local_steps else ""
        return f"LanguageModelTask({self.config}{local})"

    def describe(self) -> dict[str, Any]:
        """The transformer's configuration."""
        return self.config.as_dict()

    @property
    def buckets(self) -> Buckets:
        """Lengths that rows may be cut to: few of a small model, to which another program costs
        more than padding; and how short texts share a row."""
        c = self.config
        lengths = lengths_up_to(c.max_length, many=12 * c.num_layers * c.width**2 > LARGE)
        return Buckets(lengths, _sizes, _trim, self._packed)

    def _packed(self, batch: Any) -> Any:
        return packed(batch, lambda sizes: np.maximum(ROW, self.buckets.holding(sizes)))

    def init(self, key: jax.Array) -> Any:
        """Fresh parameters, float32."""
        tokens = jnp.zeros((1, self.config.max_length), jnp.int32)
        return Transformer(self.config).init(key, tokens)["params"]

    def read(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Examples of a split by index, -1 = padding: {tokens [rows, length], sizes [rows]}."""
        tokens, sizes = getattr(self.dataset, split).gather(rows, self.config.max_length)
        return {"tokens": tokens, "sizes": sizes}

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Tokens of examples of a split, at most the task's length; 0 where the index is -1."""
        sizes = getattr(self.dataset, split).sizes(rows)
        return np.minimum(sizes, self.config.max_length)

    def nats(self, params: Any, batch: Any, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        """(nats, predictions) per row: what evaluation adds up. Rows may have several texts."""
        if frozen:
            params = lora.joined(frozen[0], params)
        if "positions" in batch:
            return packed_nats(Transformer(self.config), params, batch)
        return next_token_nats(Transformer(self.config), params, batch["tokens"], batch["sizes"])

    def losses(self, params: Any, batch: Any, *frozen: Any) -> jax.Array:
        """f(theta, z) per row: mean cross entropy in nats per predicted token, float32 [rows]."""
        nats, predictions = self.nats(params, batch, *frozen)
        return nats / jnp.maximum(predictions, 1)


def lengths_up_to(longest: int, *, many: bool = False) -> tuple[int, ...]:
    """32, 64, 128, ... below `longest`, and `longest`; `many`: 16, 32, 64, 96, 128, 192, ..."""
    lengths = [2**n for n in range(5, longest.bit_length())]
    if many:
        lengths = sorted([16, *lengths, *(length * 3 // 2 for length in lengths[1:])])
    return (*(length for length in lengths if length < longest), longest)


def _sizes(batch: dict[str, Any]) -> Any:
    return batch["sizes"]


def _trim(batch: dict[str, Any], length: int) -> dict[str, Any]:
    return {**batch, "tokens": batch["tokens"][..., :length]}
