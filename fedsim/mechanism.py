"""The Gaussian mechanism on a clipped sum: the only place where noise is made."""

from typing import Any

import jax
import jax.numpy as jnp


def noisy_mean(grad_sum: Any, *, stddev: float, count: float, key: jax.Array) -> Any:
    """(grad_sum + N(0, stddev^2 I)) / count: the last line of a step of Algorithms 1 and 2.

    Guarantees: if one unit changes grad_sum by at most S in L2 norm and stddev = S sigma, this is
      the Gaussian mechanism with noise multiplier sigma. Every step needs a key of its own; the
      leaves of grad_sum get independent noise.
    Args:
      count: B or M, the *expected* number of units; it must not depend on the draw.
    Returns: a tree like grad_sum, float32.
    Raises: ValueError: count <= 0 or stddev < 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.

    >>> float(noisy_mean(jnp.array(6.0), stddev=0.0, count=3.0, key=jax.random.key(0)))
    2.0
    """
    if not count > 0:
        raise ValueError(f"count={count}: expected > 0")
    if not stddev >= 0:
        raise ValueError(f"stddev={stddev}: expected >= 0")
    return _noisy_mean(grad_sum, jnp.float32(stddev), jnp.float32(count), key)


@jax.jit
def _noisy_mean(grad_sum, stddev, count, key):
    leaves, treedef = jax.tree.flatten(grad_sum)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        (leaf.astype(jnp.float32) + stddev * jax.random.normal(k, leaf.shape, jnp.float32)) / count
        for leaf, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)
