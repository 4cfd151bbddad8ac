"""Noise that workers add to a sum which they keep: each to the blocks of its share.

Only where the user trusts the workers with it. Who holds the keys of a block can take its noise
away; so what leaves the driver are the keys of one step's blocks, to each worker those of its own
share. The keys of other steps, of the draws and of the seals do not follow from them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fedsim.keys import GivenStreams, SecretKey
from fedsim.noise.independent import BLOCK, add_gaussian, blocks, released_dtype


@dataclasses.dataclass(frozen=True)
class Share:
    """What a worker is told to release: some blocks of the sum of a step."""

    blocks: Sequence[tuple[int, int]]
    """(array, number) of each."""
    stddev: float
    step: int
    keys: GivenStreams
    """Of the noise of these blocks."""

    def released(self, sums: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The blocks with their noise, as `add_gaussian` has them. Args: sums: of all arrays."""
        parts = [
            np.ravel(sums[leaf])[number * BLOCK : (number + 1) * BLOCK]
            for leaf, number in self.blocks
        ]
        own = {"stddev": self.stddev, "key": self.keys, "step": self.step}
        return add_gaussian(parts, **own, places=self.blocks)


@dataclasses.dataclass(frozen=True)
class HeldSum:
    """A sum that workers hold and that the driver does not see."""

    like: Any
    """A tree of arrays, or of their shapes, like it."""
    num_workers: int
    release: Callable[[list[Share]], list[list[np.ndarray]]]
    """Has each worker release its share."""

    def noisy(self, *, stddev: float, key: SecretKey, step: int) -> list[np.ndarray]:
        """What `add_gaussian` returns of this sum [n] each, put together from the shares.

        Guarantees: the same bits for any number of workers.
        """
        leaves = jax.tree.leaves(self.like)
        every = [(leaf, number) for leaf, number, _ in blocks([leaf.size for leaf in leaves])]
        shares = []
        for worker in range(self.num_workers):
            own = every[worker :: self.num_workers]
            keys = key.given("noise", [(step, *place) for place in own])
            shares.append(Share(own, stddev, step, keys))
        released = [np.empty(leaf.size, released_dtype(stddev)) for leaf in leaves]
        for share, parts in zip(shares, self.release(shares), strict=True):
            for (leaf, number), part in zip(share.blocks, parts, strict=True):
                released[leaf][number * BLOCK : (number + 1) * BLOCK] = part
        return released
