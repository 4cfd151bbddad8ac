"""Independent Gaussian noise for the sum of one step, drawn block by block.

Each block has a stream of its own, so that all cores can draw and the bits do not depend on how
many there are. Noise is drawn and added in float64 and rounded once: a float32 inverse of the
normal distribution ends at 5.4 standard deviations, and float32 noise on a float32 sum shows more
of the sum in its low bits (Mironov 2012).
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedsim.keys import SecretKey

BLOCK = 2**17  # numbers drawn from one stream: what fits in a processor's cache


def add_gaussian(
    sums: Sequence[np.ndarray], *, stddev: float, divisor: float, key: SecretKey, step: int
) -> list[np.ndarray]:
    """(sum + N(0, stddev^2 I)) / divisor for every array, float32.

    Guarantees: the noise of every number depends on (key, step, its place) alone, and is
      independent of that of every other number and step.
    Args: sums: float32 [n] each.
    """
    means = [np.empty(leaf.shape, np.float32) for leaf in sums]

    def fill(block: tuple[int, int]) -> None:
        leaf, number = block
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        noisy = key.generator("noise", step, leaf, number).standard_normal(len(sums[leaf][part]))
        noisy *= stddev
        noisy += sums[leaf][part]
        np.divide(noisy, divisor, out=means[leaf][part], casting="same_kind")

    blocks = [(i, n) for i, leaf in enumerate(sums) for n in range(-(-leaf.size // BLOCK))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done in [threads.submit(fill, block) for block in blocks]:
            done.result()
    return means
