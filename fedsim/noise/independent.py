"""Independent Gaussian noise for the sum of one step: whole numbers, drawn block by block.

The sum S is whole numbers. The release is round((S + round(X)) / 2^shift) with Gaussian X. Since S
is whole, S + round(X) = round(S + X), a function of S + X alone: with ideal X, the release is
exactly the Gaussian mechanism, rounded afterwards. `slack` bounds the distance of the X that is
drawn from ideal noise; docs/theory/noise.md has the proof.

Each block has its own stream, so all cores can draw and the bits do not depend on their number.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fedsim.keys import SecretKey

BLOCK = 2**19  # numbers of one stream; with smaller blocks, threads wait for Python's lock
TAIL = 3.6541528853610088  # beyond it, NumPy's ziggurat draws from the tail
CELLS_BITS = 8  # a standard deviation of the noise is 2^8 to 2^9 cells of the release
NARROW = 9  # shift from which on a noisy 32-bit sum fits into 32 bits
FARTHEST = 20.0  # standard deviations up to which CELL_ERRORS hold: P(beyond) = 6e-89
OUTSIDE = 3e-4  # bound on the probability of a number beyond TAIL, or in the cell that has TAIL
CELL_ERRORS = (1.0, 2.0**-38), (OUTSIDE, 2.0**-36)
"""(probability, eta): the probability of a cell is that of ideal noise up to a factor of
e^(+-eta). The second pair is for cells beyond TAIL, where floats are coarser."""
PER_UNIT = 2**20  # parts of L / 2, the sensitivity of a sum of losses


AddNoise = Callable[..., list[np.ndarray]]
"""A kind of noise: `add_gaussian`, whose arguments it takes, or `Correlated`."""


def release_shift(stddev: float) -> int:
    """Bits by which a noisy sum is shifted before it is released. Public.

    Args:
      stddev: of the noise, in units of the sum.
    """
    return max(0, math.floor(math.log2(stddev)) - CELLS_BITS) if stddev > 0 else 0


def add_gaussian(
    sums: Sequence[np.ndarray],
    *,
    stddev: float,
    key: SecretKey,
    step: int,
    row: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """round((sum + N(0, stddev^2 I)) / 2^release_shift(stddev)) for every array.

    Guarantees: the noise of a number depends on (key, segment, step, coordinate) alone and is
      independent of the noise of every other number, step and segment.
    Args:
      sums: arrays of whole numbers [n].
      stddev: standard deviation, in units of the sums; 0: no noise.
      key: secret key of the run in its segment.
      step: t, from 0.
      row: the same noise, drawn before: round(N(0, stddev^2 I)).
    Returns: an array [n] for each sum: int32, or int64 if there is little noise; the type does not
      depend on the sums.
    """
    if not stddev:
        return [leaf.astype(np.int64) for leaf in sums]
    shift = release_shift(stddev)
    dtype = np.int32 if shift >= NARROW else np.int64
    released = [np.empty(leaf.shape, dtype) for leaf in sums]

    local = threading.local()  # a thread reuses its buffer: fresh memory costs half of drawing

    def fill(leaf: int, number: int, part: slice) -> None:
        total, out = sums[leaf][part], released[leaf][part]
        if not hasattr(local, "room"):
            local.room = np.empty(BLOCK)
        # Whole numbers below 2^53 are exact in float64, and so is dividing them by 2^shift.
        noisy = local.room[: len(total)]
        if row is None:
            noisy = gaussian(key.fresh.generator("noise", step, leaf, number), noisy)
            noisy *= stddev
            np.rint(noisy, out=noisy)
        else:
            noisy[:] = row[leaf][part]
        noisy += total
        noisy *= 2.0**-shift
        np.rint(noisy, out=noisy)
        if dtype == np.int32 and total.dtype != np.int32:  # an int32 sum fits, by NARROW
            np.clip(noisy, -(2.0**31), 2.0**31 - 1, out=noisy)  # post-processing: no privacy cost
        out[:] = noisy

    in_blocks(fill, released)
    return released


def noisy_number(total: int, stddev: float, rng: np.random.Generator) -> int:
    """Add Gaussian noise to a whole number, and round to a multiple of 2^release_shift(stddev).

    Guarantees: as `add_gaussian`, for one number. Every call needs a fresh generator.
    """
    cell = 2 ** release_shift(stddev)
    noisy = total + round(float(gaussian(rng, np.empty(1))[0]) * stddev)
    return round(noisy / cell) * cell


def in_blocks(run: Callable[[int, int, slice], None], leaves: Sequence[np.ndarray]) -> None:
    """Call run(leaf, number, part) for every block of every array [n], on all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        calls = [threads.submit(run, *block) for block in blocks([leaf.size for leaf in leaves])]
        for call in calls:
            call.result()


def blocks(sizes: Sequence[int]) -> list[tuple[int, int, slice]]:
    """List (array, number of the block in it, its slice) for arrays of these sizes."""
    return [
        (leaf, start // BLOCK, slice(start, start + BLOCK))
        for leaf, size in enumerate(sizes)
        for start in range(0, size, BLOCK)
    ]


def gaussian(rng: np.random.Generator, out: np.ndarray) -> np.ndarray:
    """Fill float64 `out` [n] with standard normal numbers that are fine-grained in the tails, too.

    NumPy's ziggurat has a grid of 3.911 * 2^-52 or finer up to TAIL, and a coarser one beyond. So
    the numbers beyond TAIL, one in 3,900, are drawn again by `_tail`.
    """
    rng.standard_normal(out=out)
    outside = np.flatnonzero((out > TAIL) | (out < -TAIL))
    if len(outside):
        out[outside] = np.copysign(_tail(rng, len(outside)), out[outside])
    return out


def _tail(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw standard normal numbers above TAIL by rejection. Source: Marsaglia 1964."""
    numbers, done = np.empty(count), 0
    while done < count:
        above = _exponential(rng, count - done) / TAIL
        below = 2 * _exponential(rng, count - done) > above**2
        accepted = above[below]
        numbers[done : done + len(accepted)] = TAIL + accepted
        done += len(accepted)
    return numbers


def _exponential(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw exponential numbers on a grid of 2^-53 at every size: the number of times ln 2 fits is
    geometric, and the remainder is drawn separately."""
    return _tosses(rng, count) * math.log(2) - np.log1p(-rng.random(count) / 2)


def _tosses(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw the number of heads of a fair coin before its first tails."""
    words = rng.integers(0, 2**64, count, np.uint64, endpoint=False) | np.uint64(2**63)
    heads = np.frexp((words & -words).astype(np.float64))[1] - 1  # trailing zeros of a word
    if len(unfinished := np.flatnonzero(heads == 63)):
        heads[unfinished] += _tosses(rng, len(unfinished))
    return heads


def noisy_mean_loss(
    losses: np.ndarray, *, bound: float, count: float, stddev: float, rng: np.random.Generator
) -> float:
    """Release the mean of losses, each clipped to [0, L], with noise on their sum.

    Guarantees: the Gaussian mechanism on a lattice. A loss counts as its distance from L / 2, so
      adding or removing one moves the sum by at most L / 2, whatever the loss. A loss that is not
      finite counts as L.
    Args:
      losses: of the units that have texts, [units], nats. A unit without texts adds nothing to the
        sum, which is a loss of L / 2.
      bound: L > 0, public.
      count: the public count that divides the sum; includes units without texts.
      stddev: of the noise on the sum, in units of L / 2.
      rng: generator of this release alone.
    Returns: the noisy mean, nats.
    """
    losses = np.nan_to_num(losses.astype(np.float64), nan=bound, posinf=bound, neginf=0.0)
    clipped = 2 * np.clip(losses, 0.0, bound) / bound - 1
    total = int(np.rint(clipped * PER_UNIT).astype(np.int64).sum())
    released = noisy_number(total, stddev * PER_UNIT, rng) / PER_UNIT
    return bound / 2 * (1 + released / count)
