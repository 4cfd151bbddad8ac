"""The Gaussian mechanism on a clipped sum: the only place where noise is added.

How the noise is drawn is in `noise`.
"""

from typing import Any

import jax
import numpy as np

from fedsim.errors import expect
from fedsim.keys import SecretKey
from fedsim.noise import add_gaussian


def noisy_mean(grad_sum: Any, *, stddev: float, count: float, key: SecretKey, step: int) -> Any:
    """(grad_sum + N(0, stddev^2 I)) / count: the last line of a step of Algorithms 1 and 2.

    Guarantees: if one unit changes grad_sum by at most S in L2 norm and stddev = S sigma, this is
      the Gaussian mechanism with noise multiplier sigma. Every step has noise of its own, the same
      one whenever it is run; so has every number of grad_sum.
    Args:
      count: B or M, the *expected* number of units; it must not depend on the draw.
    Returns: a tree like grad_sum of NumPy float32.
    Raises: ConfigError: count <= 0 or stddev < 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.

    >>> float(noisy_mean(6.0, stddev=0.0, count=3.0, key=SecretKey.create(), step=0))
    2.0
    """
    expect("count", count, 0 < count < np.inf, "> 0")
    expect("stddev", stddev, 0 <= stddev < np.inf, ">= 0")
    leaves, treedef = jax.tree.flatten(grad_sum)
    sums = [np.ravel(leaf) for leaf in leaves]
    means = add_gaussian(sums, stddev=stddev, divisor=count, key=key, step=step)
    shaped = [mean.reshape(np.shape(leaf)) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(treedef, shaped)
