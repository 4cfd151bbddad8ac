"""The strategies `layers` and `twice`: models that one device cannot hold, layer by layer.

What is here runs on one device, for one unit and one layer's whole weights; nothing of it knows how
many devices there are. So a unit's numbers are the same on any number of them: what crosses devices
(see engine/sharded.py) is weights, and contributions, whole numbers that are added exactly.

`layers` keeps a unit's gradient on its device until the norm is known. `twice` keeps one layer's:
a first backward pass finds the norm, and a second one, by the same programs, finds each layer's
gradient again and rounds it. That both found the same squares is looked at; so the proof in
contribution.py is one of the gradients of the second pass.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping.clip import MODEL, Clip, num_coordinates
from fedsim.clipping.contribution import (
    additions,
    factor,
    root_and_bound,
    sum_of_squares,
)
from fedsim.clipping.products import in_one_product

BLOCKS = "blocks"
"""Name of the parameters that are stacked, leaves [layers, ...]; those of the rest have others."""

Params = Any
"""A dict of trees, one of which may be `BLOCKS`."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """A loss as a stem, equal blocks one after another, and a head.

    `own` are parameters that are trained, `fixed` those that are not; stem and head get all but
    `BLOCKS`, a block those of its layer.
    """

    stem: Callable[[Params, Params, Any], jax.Array]
    """(own, fixed, rows) -> x [rows, ...]."""
    block: Callable[[Params, Params, jax.Array], jax.Array]
    """(own, fixed, x) -> x."""
    head: Callable[[Params, Params, jax.Array, Any], tuple[jax.Array, jax.Array]]
    """(own, fixed, x, rows) -> (nats, predictions), each [rows]."""


def rest_of(params: Params) -> Params:
    """The parameters that are in no block."""
    return {name: leaf for name, leaf in params.items() if name != BLOCKS}


def num_layers(*params: Params) -> int:
    """How many blocks there are in one of these, or else in the next."""
    return len(jax.tree.leaves([each.get(BLOCKS, {}) for each in params])[0])


class Programs:
    """Functions of one unit on one device, to be compiled one by one.

    In all of them: rows, tree of arrays [group, ...]; real, bool [group]; found, a gradient of the
    mean loss over the real rows, float32.
    """

    def __init__(self, layers: Layers):
        scope = jax.named_scope(MODEL)
        self._stem, self._block, self._head = (
            scope(in_one_product(each)) for each in (layers.stem, layers.block, layers.head)
        )

    def stem(self, own: Params, fixed: Params, rows: Any) -> jax.Array:
        """The input of the first block."""
        return self._stem(own, fixed, rows)

    def block(self, own: Params, fixed: Params, x: jax.Array) -> jax.Array:
        """The output of a block whose input is x."""
        return self._block(own, fixed, x)

    def nats(self, own: Params, fixed: Params, x: jax.Array, rows: Any) -> Any:
        """The sum of losses and the number of predictions of each row."""
        return self._head(own, fixed, x, rows)

    def head(self, own: Params, fixed: Params, x: jax.Array, rows: Any, real: jax.Array) -> Any:
        """(loss, gradient with respect to own, and to x)."""
        count = jnp.maximum(real.sum(), 1).astype(jnp.float32)

        def mean_loss(own, x):
            nats, predictions = self._head(own, fixed, x, rows)
            return jnp.sum(jnp.where(real, nats / jnp.maximum(predictions, 1), 0)) / count

        loss, (of_own, dx) = jax.value_and_grad(mean_loss, (0, 1))(own, x)
        return loss, of_own, dx

    def block_back(self, own: Params, fixed: Params, x: jax.Array, dx: jax.Array) -> Any:
        """(found, dx before the block) from dx after it."""
        _, pull = jax.vjp(lambda own, x: self._block(own, fixed, x), own, x)
        found, dx = pull(dx)
        return _in_float32(found), dx

    def stem_back(self, own: Params, fixed: Params, rows: Any, of_head: Any, dx: jax.Array) -> Any:
        """What is found of all but the blocks."""
        _, pull = jax.vjp(lambda own: self._stem(own, fixed, rows), own)
        return _in_float32(jax.tree.map(jnp.add, of_head, *pull(dx)))

    def squares(self, found: Any) -> jax.Array:
        """The sum of squares of what another program found. In that program XLA might compute an
        elementwise gradient once more for its squares, with other roundings."""
        return sum_of_squares(found)


def norm_and_scale(
    squares: Sequence[jax.Array], real: jax.Array, norm: jax.Array, *, clip: Clip, whole: Params
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(norm, scale, dropped) of a unit, from the sums of squares of its parts.

    Args:
      norm: C.
      clip: how it is used.
      whole: the shapes of all parameters.
    """
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), whole)
    parts = layer.get(BLOCKS, {}), rest_of(whole)
    # Of an array, then of the arrays of a part, then of the parts.
    most = max(map(additions, parts)) + max(len(jax.tree.leaves(part)) for part in parts)
    total = jnp.float32(0)
    for part in squares:
        total = total + part
    found, bound = root_and_bound(total, most + len(squares) + 1)
    own, some = dataclasses.replace(clip, norm=norm), real.any()
    scale, dropped = factor(bound, some, own, num_coordinates(whole))
    return jnp.where(some, found, 0), scale, dropped


def _in_float32(grad):
    return jax.tree.map(lambda g: g.astype(jnp.float32), grad)
