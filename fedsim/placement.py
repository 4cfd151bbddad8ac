"""Arrays that several devices have between them, a part each; see engine/sharded.py."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

ADDITIONS = ("reduce_sum", "dot_general", "cumsum", "conv_general")  # of JAX's operations


def is_cut(leaf: Any) -> bool:
    """Whether an array lies on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def any_cut(tree: Any) -> bool:
    """Whether an array of a tree does."""
    return any(map(is_cut, jax.tree.leaves(tree)))


def beside(leaf: Any, like: Any) -> Any:
    """An array on the devices of another one, cut in the same way, if that one is cut."""
    return jax.device_put(leaf, like.sharding) if is_cut(like) else leaf


def slabs(leaf: Any, most: int) -> Iterator[np.ndarray]:
    """An array's consecutive parts along its first axis, of at most so many bytes, or of one entry:
    on the host there is one of them at a time, wherever the others are."""
    shape, entry = np.shape(leaf), max(1, leaf.nbytes // max(1, len(leaf)))
    size = max(1, most // entry)
    for start in range(0, shape[0], size):
        stop = min(start + size, shape[0])
        if not is_cut(leaf):
            yield np.ascontiguousarray(leaf[start:stop])
            continue
        slab = np.empty((stop - start, *shape[1:]), leaf.dtype)
        for part in leaf.addressable_shards:
            first, *rest = part.index
            low, high, _ = first.indices(shape[0])
            low, high = max(low, start), min(high, stop)
            if part.replica_id == 0 and low < high:
                own = low - (first.start or 0)
                cut = jax.lax.dynamic_slice_in_dim(part.data, own, high - low)
                slab[(slice(low - start, high - start), *rest)] = np.asarray(cut)
        yield slab


def adds_up(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function adds up numbers of its arrays: their order would depend on the cut."""
    equations = _equations(jax.make_jaxpr(function)(*arguments))
    return any(str(each.primitive).startswith(ADDITIONS) for each in equations)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
