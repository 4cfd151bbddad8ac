"""Arrays that several devices have between them, a part each; see engine/sharded.py."""

from collections.abc import Callable
from typing import Any

import jax

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
