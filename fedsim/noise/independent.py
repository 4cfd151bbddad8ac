"""Independent Gaussian noise for the sum of one step: whole numbers, drawn block by block.

The sum S is whole numbers. What is released is round((S + round(X)) / 2^shift), X being Gaussian.
Since S is whole, S + round(X) = round(S + X), which is computed from S + X alone: were X ideal, the
release would be exactly the Gaussian mechanism, rounded afterwards. `slack` bounds how far the X
that is drawn is from the ideal; see docs/theory/noise.md for the proof.

Each block has a stream of its own, so that all cores can draw and the bits do not depend on how
many there are.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedsim.keys import SecretKey

if TYPE_CHECKING:
    from fedsim.accounting import Errors, Slack

BLOCK = 2**19  # numbers drawn from one stream: fewer would wait for Python's lock
TAIL = 3.6541528853610088  # where NumPy's ziggurat begins to draw from the tail
CELLS_BITS = 8  # a standard deviation of the noise is 2^8 to 2^9 cells of what is released
NARROW = 9  # bits that are rounded away, from which on what is left of 32 fits into 32, with noise
FARTHEST = 20.0  # standard deviations up to which CELL_ERRORS hold: P(beyond) = 6e-89
OUTSIDE = 3e-4  # more than the probability that a number lies beyond TAIL, or in a cell with it
CELL_ERRORS = (1.0, 2.0**-38), (OUTSIDE, 2.0**-36)
"""(probability, eta): the probability of a cell is that of the ideal noise up to a factor of
e^(+-eta); beyond TAIL, where floats are coarser, eta is the second one."""


class AddNoise(Protocol):
    """A kind of noise; `add_gaussian` is the independent one."""

    def __call__(
        self, sums: list[np.ndarray], *, stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """The sums of a step with its noise, rounded; see `add_gaussian`."""
        ...


def release_shift(stddev: float) -> int:
    """How many bits of a noisy sum are rounded away, for noise of so many units: public."""
    return max(0, math.floor(math.log2(stddev)) - CELLS_BITS) if stddev > 0 else 0


def released_dtype(stddev: float) -> np.dtype:
    """The type of noisy sums, for noise of so many units: public."""
    return np.dtype(np.int32 if release_shift(stddev) >= NARROW else np.int64)


def add_gaussian(
    sums: Sequence[np.ndarray],
    *,
    stddev: float,
    key: SecretKey,
    step: int,
) -> list[np.ndarray]:
    """round((sum + N(0, stddev^2 I)) / 2^release_shift(stddev)) for every array.

    int32, or int64 where there is little noise; which of them does not depend on the sums.

    Guarantees: the noise of every number depends on (key, step, its place) alone, and is
      independent of that of every other number and step.
    Args:
      sums: whole numbers [n] each.
      stddev: in units of the sums.
    """
    if not stddev:
        return [leaf.astype(np.int64) for leaf in sums]
    shift, dtype = release_shift(stddev), released_dtype(stddev)
    released = [np.empty(leaf.shape, dtype) for leaf in sums]

    own = threading.local()  # of each thread: fresh memory takes half as long as drawing

    def fill(leaf: int, number: int, part: slice) -> None:
        rng = key.generator("noise", step, leaf, number)
        total, out = sums[leaf][part], released[leaf][part]
        if not hasattr(own, "room"):
            own.room = np.empty(BLOCK)
        # Whole numbers below 2^53 are exact in float64, and so is dividing them by 2^shift.
        noisy = gaussian(rng, own.room[: len(total)])
        noisy *= stddev
        np.rint(noisy, out=noisy)
        noisy += total
        noisy *= 2.0**-shift
        np.rint(noisy, out=noisy)
        if dtype == np.int32 and total.dtype != np.int32:  # else it fits
            np.clip(noisy, -(2.0**31), 2.0**31 - 1, out=noisy)  # free, as is rounding
        out[:] = noisy

    in_blocks(fill, released)
    return released


def noisy_number(total: int, stddev: float, rng: np.random.Generator) -> int:
    """`total` with Gaussian noise, rounded to a multiple of 2^release_shift(stddev).

    Guarantees: as `add_gaussian`, of one number. Every call needs a generator of its own.
    """
    cell = 2 ** release_shift(stddev)
    noisy = total + round(float(gaussian(rng, np.empty(1))[0]) * stddev)
    return round(noisy / cell) * cell


def in_blocks(run: Callable[[int, int, slice], None], leaves: Sequence[np.ndarray]) -> None:
    """Call run(leaf, number, part) for every block of every array [n], on all cores."""
    every = blocks([array.size for array in leaves])
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for call in [threads.submit(run, *block) for block in every]:
            call.result()


def blocks(sizes: Sequence[int]) -> list[tuple[int, int, slice]]:
    """(array, number, part) of every block of arrays of these sizes."""
    return [
        (leaf, start // BLOCK, slice(start, start + BLOCK))
        for leaf, size in enumerate(sizes)
        for start in range(0, size, BLOCK)
    ]


def gaussian(rng: np.random.Generator, out: np.ndarray) -> np.ndarray:
    """Fill float64 `out` [n] with standard normal numbers, fine-grained in the tails, too.

    NumPy's ziggurat is a grid of 3.911 * 2^-52 or finer up to TAIL, and coarser farther out. The
    numbers beyond TAIL, one of 3,900, are drawn again as it should be.
    """
    rng.standard_normal(out=out)
    outside = np.flatnonzero((out > TAIL) | (out < -TAIL))
    if len(outside):
        out[outside] = np.copysign(_tail(rng, len(outside)), out[outside])
    return out


def _tail(rng: np.random.Generator, count: int) -> np.ndarray:
    """Standard normal numbers above TAIL. Source: Marsaglia 1964."""
    found, have = np.empty(count), 0
    while have < count:
        above = _exponential(rng, count - have) / TAIL
        below = 2 * _exponential(rng, count - have) > above**2
        accepted = above[below]
        found[have : have + len(accepted)] = TAIL + accepted
        have += len(accepted)
    return found


def _exponential(rng: np.random.Generator, count: int) -> np.ndarray:
    """Exponential numbers: how often ln 2 fits, a count of coin tosses, and the rest, on a grid of
    2^-53 wherever that is."""
    return _tosses(rng, count) * math.log(2) - np.log1p(-rng.random(count) / 2)


def _tosses(rng: np.random.Generator, count: int) -> np.ndarray:
    """How often a fair coin shows heads before it shows tails."""
    words = rng.integers(0, 2**64, count, np.uint64, endpoint=False) | np.uint64(2**63)
    found = np.frexp((words & -words).astype(np.float64))[1] - 1  # zeros at the end
    if len(on := np.flatnonzero(found == 63)):  # 63 times heads: that coin goes on
        found[on] += _tosses(rng, len(on))
    return found


def slack(
    count: float, epsilon: float, delta: float, cell_errors: "Errors" = CELL_ERRORS
) -> "Slack":
    """How far a mechanism that draws `count` numbers here is from one with ideal noise: what is to
    be added to its epsilon and delta; see `accounting.slack`."""
    from fedsim import accounting  # takes a second to import; who adds noise does without

    return accounting.slack(count, epsilon, delta, cell_errors)


PER_UNIT = 2**20  # parts that L / 2, the sensitivity of the sum, is made of


def noisy_mean_loss(
    losses: np.ndarray, *, bound: float, count: float, stddev: float, rng: np.random.Generator
) -> float:
    """The mean of losses, each cut to [0, L], with noise on their sum.

    Guarantees: the Gaussian mechanism, on a lattice: a loss counts as its distance from L / 2, so
      that one more or less moves the sum by L / 2 at most, whatever it is. What is not finite
      counts as L.
    Args:
      losses: [those who have texts], nats. Whoever has none adds nothing: they count as L / 2.
      bound: L > 0, public.
      count: what the sum is divided by, public, with those who have no texts.
      stddev: of the noise on the sum, in units of L / 2.
      rng: of this release alone.
    """
    losses = np.nan_to_num(losses.astype(np.float64), nan=bound, posinf=bound, neginf=0.0)
    cut = 2 * np.clip(losses, 0.0, bound) / bound - 1
    total = int(np.rint(cut * PER_UNIT).astype(np.int64).sum())
    released = noisy_number(total, stddev * PER_UNIT, rng) / PER_UNIT
    return bound / 2 * (1 + released / count)
