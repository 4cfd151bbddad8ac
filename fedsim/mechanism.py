"""The Gaussian mechanism on a clipped sum: the only place where noise is made.

Noise is drawn block by block, each block from a stream of its own, so that all cores can draw and
the bits do not depend on how many there are. It is drawn and added in float64 and rounded once:
a float32 inverse of the normal distribution ends at 5.4 standard deviations, and float32 noise on a
float32 sum shows more of the sum in its low bits (Mironov 2012).
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from fedsim.keys import SecretKey

BLOCK = 2**17  # numbers drawn from one stream: what fits in a processor's cache


def noisy_mean(grad_sum: Any, *, stddev: float, count: float, key: SecretKey, step: int) -> Any:
    """(grad_sum + N(0, stddev^2 I)) / count: the last line of a step of Algorithms 1 and 2.

    Guarantees: if one unit changes grad_sum by at most S in L2 norm and stddev = S sigma, this is
      the Gaussian mechanism with noise multiplier sigma. Every step has noise of its own, the same
      one whenever it is run; so has every number of grad_sum.
    Args:
      count: B or M, the *expected* number of units; it must not depend on the draw.
    Returns: a tree like grad_sum of NumPy float32.
    Raises: ValueError: count <= 0 or stddev < 0.
    Source: Charles et al. 2024, Algorithms 1 and 2.

    >>> float(noisy_mean(6.0, stddev=0.0, count=3.0, key=SecretKey.create(), step=0))
    2.0
    """
    if not 0 < count < np.inf:
        raise ValueError(f"count={count}: expected > 0")
    if not 0 <= stddev < np.inf:
        raise ValueError(f"stddev={stddev}: expected >= 0")
    leaves, treedef = jax.tree.flatten(grad_sum)
    sums = [np.ravel(leaf) for leaf in leaves]
    means = [np.empty(leaf.shape, np.float32) for leaf in sums]

    def fill(block: tuple[int, int]) -> None:
        leaf, number = block
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        noisy = key.generator("noise", step, leaf, number).standard_normal(len(sums[leaf][part]))
        noisy *= stddev
        noisy += sums[leaf][part]
        np.divide(noisy, count, out=means[leaf][part], casting="same_kind")

    blocks = [(i, n) for i, leaf in enumerate(sums) for n in range(-(-leaf.size // BLOCK))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done in [threads.submit(fill, block) for block in blocks]:
            done.result()
    shaped = [mean.reshape(np.shape(leaf)) for mean, leaf in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(treedef, shaped)
