"""Correlated noise: each step takes back part of the noise of the steps before (banded Toeplitz).

With a strategy c = (1, c_1, ..., c_(b-1)), a sum of whole numbers x_t and Gaussian X_t, step t is

    w_t = round(tau X_t - c_1 w_(t-1) - ... - c_(b-1) w_(t-b+1)),
    released: round((x_t + w_t) / 2^j).

Given all x_s + w_s of the steps before, x_t + w_t is a Gaussian with mean x_t - sum_i c_i w_(t-i),
rounded. Where a user adds v to x_s and nothing to the b - 1 sums after it, the same x_s + w_s mean
a w_s that is v less, so the means of steps s, ..., s + b - 1 are moved by v, c_1 v, ...,
c_(b-1) v: together by |c| |v|, and no other step's is. With tau at least |c| times the noise that
hides |v|, that is the Gaussian mechanism, once for every b steps. The w_t follow from the key
alone: a row is never stored, and a resumed run draws the rows again. The c_i are multiples of a
power of two, such that their sum is exact in float64. docs/noise.md has the proof.
"""

import dataclasses
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, signal

from fedsim.errors import ConfigError
from fedsim.keys import SecretKey
from fedsim.noise.independent import (
    BLOCK,
    FARTHEST,
    OUTSIDE,
    TAIL,
    add_gaussian,
    gaussian,
    in_blocks,
    release_shift,
)


PIECE = 2**13  # numbers that fit into the processor's cache, with all that is made of them
HALF = np.int64(-(2**27))  # mask: the first 26 bits of what float64 holds
MIDDLE, FAR = 1.62, 16.0
"""How much larger the grid's share of eta is beyond two standard deviations, and beyond TAIL."""
BEYOND_TWO = 0.046  # more than the probability that a number lies there
FINEST = 24  # bits after the point of the coefficients, or fewer where there is much noise
MOST_BANDS = 64  # of which one is chosen; each is a row of noise as large as the parameters


@functools.lru_cache(maxsize=256)
def coefficients(num_steps: int, bands: int) -> np.ndarray:
    """s_0, ..., s_(b-1), float64 [bands], of norm 1: the best ones for so many steps.

    Found by BFGS with the gradient in closed form, from the series of (1 - z)^(-1/2), which is
    the best one as bands and steps grow. A better or worse optimum changes the noise's use, never
    the guarantee, which rests on the norm alone.
    Source: McKenna 2024 (arXiv 2405.15913), Section 3.
    """
    start = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, bands))])
    if bands > 1:
        weights = np.arange(num_steps, 0, -1) / num_steps
        found = optimize.minimize(_loss, start[1:], (weights,), method="BFGS", jac=True)
        start[1:] = found.x
    return start / np.linalg.norm(start)


def prefix_error(strategy: np.ndarray, num_steps: int) -> float:
    """The root mean square, over the steps, of the noise on prefix sums; that of z is 1.

    Args: strategy: s_0, ..., s_(b-1).
    """
    weights = np.arange(num_steps, 0, -1) / num_steps
    return float(np.sqrt(weights @ _prefix_sums(strategy, num_steps) ** 2))


def inverse(strategy: np.ndarray, num_steps: int) -> np.ndarray:
    """The first column of S^-1, float64 [num_steps]."""
    impulse = np.zeros(num_steps)
    impulse[0] = 1
    return np.asarray(signal.lfilter([1.0], strategy, impulse))


def _prefix_sums(strategy: np.ndarray, num_steps: int) -> np.ndarray:
    """The first column of A S^-1."""
    return np.cumsum(inverse(strategy, num_steps))


def _loss(tail: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """log(|c|^2 mean square error) of c = (1, *tail), which no factor changes, and its gradient."""
    c, steps = np.concatenate([[1.0], tail]), len(weights)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _prefix_sums(c, steps)
        weighted = weights * sums
        error, square = weighted @ sums, c @ c
        if not np.isfinite(error):
            return 1e300, np.zeros_like(tail)
        change = np.asarray(signal.lfilter([1.0], c, sums))  # of sums with c_j: -z^j sums / c
        lags = range(1, min(len(c), steps))
        slopes = np.zeros_like(tail)
        slopes[: len(lags)] = [-2 * weighted[j:] @ change[: steps - j] for j in lags]
    return float(np.log(square * error)), slopes / error + 2 * tail / square


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What some bands are predicted to give."""

    bands: int
    noise_multiplier: float
    """sigma, which rises with the bands, for fewer users share a step."""
    error: float
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity."""


def predicted_error(noise_multiplier: float, num_steps: int, bands: int) -> float:
    """The `error` of a `Prediction`."""
    return noise_multiplier * prefix_error(coefficients(num_steps, bands), num_steps)


def predictions(
    noise_multiplier: Callable[[int], float], num_steps: int, most: int
) -> list[Prediction]:
    """What to expect of 1, 2, 3, 4, 6, 8, 12, ... bands, and of those that make a few whole cycles
    of the steps, until four in a row are no better than the best.

    Args:
      noise_multiplier: bands -> the calibrated sigma.
      most: bands, by the users there are.
    """
    found: list[Prediction] = []
    powers = [2**n for n in range(MOST_BANDS.bit_length())]
    cycles = {-(-num_steps // count) for count in (1, 2, 3, 4)}
    for bands in sorted({*powers, *(3 * n // 2 for n in powers[1:]), *cycles}):
        if bands > min(most, num_steps, MOST_BANDS):
            break
        try:
            sigma = noise_multiplier(bands)
        except ConfigError:
            if found:
                break
            raise
        found.append(Prediction(bands, sigma, predicted_error(sigma, num_steps, bands)))
        errors = [each.error for each in found]
        if min(errors) not in errors[-4:]:
            break
    return found


def best(found: list[Prediction]) -> Prediction:
    """The one with the least error."""
    return min(found, key=lambda each: each.error)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The coefficients as they are used for noise of a standard deviation; all public."""

    coefficients: np.ndarray
    """1, c_1, ..., c_(b-1): multiples of 2^-FINEST or coarser, float64 [bands]."""
    stddev: float
    """tau: of the fresh noise of a step, in units of the sums."""
    largest: float
    """What no |w_t| exceeds while the fresh noise stays within FARTHEST standard deviations."""

    @property
    def dtype(self) -> type[np.signedinteger]:
        """The integers that hold a row of noise."""
        return np.int32 if self.largest < 2.0**30 else np.int64

    @property
    def bytes_per_number(self) -> int:
        """What the rows of earlier steps take, for each number of a gradient."""
        return (len(self.coefficients) - 1) * np.dtype(self.dtype).itemsize

    @property
    def cell_errors(self) -> tuple[tuple[float, float], ...]:
        """(probability, eta): the probability that x_t + w_t is some whole number is that of ideal
        noise up to a factor of e^(+-eta), as in `independent.CELL_ERRORS`.

        A cell of tau X is 1 / tau wide. Both of its ends move by the rounding of tau X less the
        rows; the ziggurat's grid has a point more or less in each layer; and X itself is rounded,
        which counts for more from 2 on, and for most beyond TAIL.
        """
        ends, grid = 2 * rounding(FARTHEST * self.stddev), self.stddev * TAIL * 2.0**-52
        near, middle, far = (ends + grid * share for share in (1.0, MIDDLE, FAR))
        return (1.0, 1.01 * near), (BEYOND_TWO, 1.01 * middle), (OUTSIDE, 1.01 * far)


@functools.lru_cache(maxsize=8)
def strategy(num_steps: int, bands: int, stddev: float) -> Strategy:
    """The best strategy for so many steps, which hides what noise of `stddev` does.

    Guarantees: tau is at least stddev |c|, and sums of c_i w_(t-i) are exact in float64.
    """
    found = coefficients(num_steps, bands)
    exact, bits = found / found[0], FINEST
    while True:
        c = np.rint(exact * 2.0**bits) * 2.0**-bits
        length = math.sqrt(math.fsum(c**2)) * (1 + 2.0**-50) if bands > 1 else 1.0
        tau = length * stddev
        largest = float(np.abs(inverse(c, num_steps)).sum()) * (FARTHEST * tau + 1)
        needed = 1 + float(np.abs(c[1:]).sum()) * largest
        if needed * 2.0**bits < 2.0**53 or bands == 1:
            return Strategy(c, tau, largest)
        bits -= 1


def difference(
    fresh: np.ndarray, stddev: float, back: np.ndarray, room: Sequence[np.ndarray]
) -> np.ndarray:
    """round(stddev fresh - back), float64 [n]: `rounding` says how exactly.

    stddev fresh has 106 bits. The product of the first halves of both is exact, and what is left of
    it and of `back` without their whole numbers is small.
    Args:
      fresh: float64 [n], within FARTHEST.
      back: whole multiples of a power of two, below 2^53 of it; overwritten.
      room: three float64 [n], overwritten; the result is in one of them.
    """
    high, whole, rest = room
    first = _first_half(stddev)
    np.bitwise_and(fresh.view(np.int64), HALF, out=high.view(np.int64))
    np.subtract(fresh, high, out=rest)
    rest *= stddev
    np.multiply(high, first, out=whole)
    high *= stddev - first
    rest += high
    np.rint(whole, out=high)
    whole -= high
    rest += whole
    np.rint(back, out=whole)
    back -= whole
    rest -= back
    high -= whole
    high += np.rint(rest, out=rest)
    return high


def rounding(largest: float) -> float:
    """What `difference` errs by before it rounds, for products of at most `largest`.

    Two products of a first and a second half, of at most 2^-25 largest each, and two numbers of at
    most 1/2 are rounded or added up, in five operations.
    """
    return 5 * 2.0**-53 * (2 * 2.0**-25 * largest + 1)


def _first_half(number: float) -> float:
    return float((np.array([number]).view(np.int64) & HALF).view(np.float64)[0])


class Correlated:
    """Adds the noise of one step after another, and keeps the rows of the last bands - 1.

    Guarantees: the noise is a function of (key, step, place), as that of `add_gaussian`; with one
      band it is that, bit by bit. A step that is not the next one draws the steps before it again.
    """

    def __init__(self, num_steps: int, bands: int):
        self.num_steps, self.bands = num_steps, bands
        self._rows: deque[list[np.ndarray]] = deque(maxlen=bands - 1)
        """w of the steps before, the newest first."""
        self._next: tuple[object, ...] = ()
        """What the rows are of: the step that they are for, key and noise."""
        self.drawn: Callable[[int, list[np.ndarray]], None] | None = None
        """Called with each step's row, also where one is drawn again: the row must be the same."""

    def __call__(
        self, sums: Sequence[np.ndarray], *, stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """round((sum + w_step) / 2^release_shift(stddev)) for every array; see `add_gaussian`."""
        if not stddev or self.bands == 1:
            return add_gaussian(sums, stddev=stddev, key=key, step=step)
        sizes = tuple(leaf.size for leaf in sums)
        of = (key, stddev, sizes)
        if self._next != (step, *of):
            self._rows.clear()
            for before in range(step):
                self._advance(sizes, stddev, key, before)
        self._next = ()  # a step that is cut off leaves nothing to go on from
        row = self._advance(sizes, stddev, key, step)
        self._next = (step + 1, *of)
        shift = release_shift(stddev)
        released = [np.empty(leaf.shape, np.int64) for leaf in sums]

        def fill(leaf: int, _: int, part: slice) -> None:
            noisy = np.add(sums[leaf][part], row[leaf][part], dtype=np.float64)
            noisy *= 2.0**-shift
            released[leaf][part] = np.rint(noisy, out=noisy)

        in_blocks(fill, released)
        return released

    def _advance(
        self, sizes: Sequence[int], stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """w of `step`, which becomes the newest row."""
        plan = strategy(self.num_steps, self.bands, stddev)
        row = [np.empty(size, plan.dtype) for size in sizes]
        own = threading.local()

        def fill(leaf: int, number: int, part: slice) -> None:
            if not hasattr(own, "room"):
                own.room = np.empty(BLOCK), *np.empty((5, PIECE))
            fresh, *room = own.room
            out, rows = row[leaf][part], [each[leaf][part] for each in self._rows]
            gaussian(key.generator("noise", step, leaf, number), fresh[: len(out)])
            for start in range(0, len(out), PIECE):
                piece = slice(start, min(start + PIECE, len(out)))
                back, term, *free = (each[: piece.stop - start] for each in room)
                back[:] = 0
                for c, before in zip(plan.coefficients[1:], rows, strict=False):
                    back += np.multiply(before[piece], c, out=term)
                out[piece] = difference(fresh[piece], plan.stddev, back, free)

        in_blocks(fill, row)
        if self.drawn is not None:
            self.drawn(step, row)
        self._rows.appendleft(row)
        return row
