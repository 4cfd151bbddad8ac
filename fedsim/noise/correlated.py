"""Correlated noise: each step subtracts part of the noise of the steps before (banded Toeplitz).

With a strategy c = (1, c_1, ..., c_(b-1)), a sum of whole numbers x_t and Gaussian X_t, step t is

    w_t = round(tau X_t - c_1 w_(t-1) - ... - c_(b-1) w_(t-b+1)),
    released: round((x_t + w_t) / 2^j).

Given all x_s + w_s of the steps before, x_t + w_t is a Gaussian with mean x_t - sum_i c_i w_(t-i),
rounded. If a user adds v to x_s and nothing to the b - 1 sums after it, an equal x_s + w_s has a
w_s that is smaller by v, so the means of steps s, ..., s + b - 1 move by v, c_1 v, ..., c_(b-1) v:
together by |c| |v|, and no other step's mean moves. With tau at least |c| times the noise that
hides |v|, this is the Gaussian mechanism, once for every b steps. A segment subtracts rows of its
own steps alone, which moves fewer means: a row that another machine drew could be drawn otherwise
here, and no row is stored. The c_i are multiples of a power of
two, so that their sum is exact in float64. docs/theory/correlated.md has the proof.

Which c is best: let S be the lower triangular Toeplitz matrix with bands s_0, ..., s_(b-1) and
columns of norm at most 1. Steps get the noise S^-1 z, z being independent. The parameters of SGD
are prefix sums of gradients; with A the matrix of ones on and below the diagonal, the noise on the
prefix sum of step t has the variance of row t of A S^-1.
"""

import dataclasses
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

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

PIECE = 2**13  # numbers at a time, so that they and all intermediate results fit into the cache
HALF = np.int64(-(2**27))  # mask of the first 26 significant bits of a float64
MIDDLE, FAR = 1.62, 16.0
"""Factors of the grid's share of eta beyond two standard deviations, and beyond TAIL."""
BEYOND_TWO = 0.046  # bound on the probability of a number beyond two standard deviations
FINEST = 24  # most bits after the point of a coefficient; fewer if the noise is large
MAX_BANDS = 64  # memory: each band keeps a row of noise as large as the parameters


@functools.lru_cache(maxsize=256)
def coefficients(num_steps: int, bands: int) -> np.ndarray:
    """Compute the best s_0, ..., s_(b-1) for a number of steps.

    BFGS with the gradient in closed form starts from the series of (1 - z)^(-1/2), which is optimal
    as bands and steps grow. A worse optimum costs accuracy, never the guarantee, which depends on
    the norm alone.
    Args:
      num_steps: T.
      bands: b, at most T.
    Returns: float64 [bands], of norm 1.
    Source: McKenna 2024 (arXiv 2405.15913), Section 3.
    """
    start = np.cumprod([1.0, *(1 - 0.5 / np.arange(1, bands))])
    if bands > 1:
        weights = np.arange(num_steps, 0, -1) / num_steps
        found = optimize.minimize(_loss, start[1:], (weights,), method="BFGS", jac=True)
        start[1:] = found.x
    return start / np.linalg.norm(start)


def prefix_error(strategy: np.ndarray, num_steps: int) -> float:
    """Root mean square, over the steps, of the noise on prefix sums, for z of variance 1.

    Args:
      strategy: s_0, ..., s_(b-1).
      num_steps: T.
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
    """log(|c|^2 mean square error) of c = (1, *tail), invariant to scaling, and its gradient."""
    c, steps = np.concatenate([[1.0], tail]), len(weights)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _prefix_sums(c, steps)
        weighted = weights * sums
        error, square = weighted @ sums, c @ c
        if not np.isfinite(error):
            return 1e300, np.zeros_like(tail)
        change = np.asarray(signal.lfilter([1.0], c, sums))  # d sums / d c_j = -z^j sums / c
        lags = range(1, min(len(c), steps))
        slopes = np.zeros_like(tail)
        slopes[: len(lags)] = [-2 * weighted[j:] @ change[: steps - j] for j in lags]
    return float(np.log(square * error)), slopes / error + 2 * tail / square


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted noise of a number of bands."""

    bands: int
    """b."""
    noise_multiplier: float
    """sigma; rises with the bands, because fewer users share a step."""
    error: float
    """Root mean square, over the steps, of the noise on the sum of all gradients so far, in units
    of the sensitivity."""


def predicted_error(noise_multiplier: float, num_steps: int, bands: int) -> float:
    """Predict the noise on prefix sums, `Prediction.error`, in units of the sensitivity."""
    return noise_multiplier * prefix_error(coefficients(num_steps, bands), num_steps)


def predictions(
    noise_multiplier: Callable[[int], float], num_steps: int, most: int
) -> list[Prediction]:
    """Predict the noise of 1, 2, 3, 4, 6, 8, 12, ... bands, and of the bands that divide the steps
    into one to four cycles, until four in a row do not improve on the best.

    Args:
      noise_multiplier: bands -> the calibrated sigma. Raises ConfigError if there is none.
      num_steps: T.
      most: the largest number of bands that the number of users allows.
    Raises: ConfigError: there is no sigma for one band.
    """
    tried: list[Prediction] = []
    powers = [2**n for n in range(MAX_BANDS.bit_length())]
    cycles = {-(-num_steps // count) for count in (1, 2, 3, 4)}
    for bands in sorted({*powers, *(3 * n // 2 for n in powers[1:]), *cycles}):
        if bands > min(most, num_steps, MAX_BANDS):
            break
        try:
            sigma = noise_multiplier(bands)
        except ConfigError:
            if tried:
                break
            raise
        tried.append(Prediction(bands, sigma, predicted_error(sigma, num_steps, bands)))
        errors = [prediction.error for prediction in tried]
        if min(errors) not in errors[-4:]:
            break
    return tried


def best(predicted: list[Prediction]) -> Prediction:
    """Return the prediction with the least error."""
    return min(predicted, key=lambda prediction: prediction.error)


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Coefficients rounded for noise of a given standard deviation. All of it is public."""

    coefficients: np.ndarray
    """1, c_1, ..., c_(b-1): multiples of 2^-FINEST or coarser, float64 [bands]."""
    stddev: float
    """tau: standard deviation of the fresh noise of a step, in units of the sums."""
    largest: float
    """Bound on |w_t| while the fresh noise stays within FARTHEST standard deviations."""

    @property
    def dtype(self) -> type[np.signedinteger]:
        """Integer type that holds a row of noise."""
        return np.int32 if self.largest < 2.0**30 else np.int64

    @property
    def cell_errors(self) -> tuple[tuple[float, float], ...]:
        """(probability, eta): the probability that x_t + w_t is a given whole number is that of
        ideal noise up to a factor of e^(+-eta), as in `independent.CELL_ERRORS`.

        A cell of tau X is 1 / tau wide. Three errors move its probability: the rounding of tau X
        minus the rows at both ends; one point more or less of the ziggurat's grid in each layer;
        and the rounding of X itself, which grows beyond 2 and again beyond TAIL.
        """
        ends, grid = 2 * rounding(FARTHEST * self.stddev), self.stddev * TAIL * 2.0**-52
        near, middle, far = (ends + grid * share for share in (1.0, MIDDLE, FAR))
        return (1.0, 1.01 * near), (BEYOND_TWO, 1.01 * middle), (OUTSIDE, 1.01 * far)


@functools.lru_cache(maxsize=8)
def strategy(num_steps: int, bands: int, stddev: float) -> Strategy:
    """Return the best strategy for T steps whose noise hides as much as noise of `stddev`.

    Guarantees: tau is at least stddev |c|, and sums of c_i w_(t-i) are exact in float64.
    Args:
      num_steps: T.
      bands: b; 1 is independent noise.
      stddev: of the equivalent independent noise, in units of the sums.
    """
    unscaled = coefficients(num_steps, bands)
    exact, bits = unscaled / unscaled[0], FINEST
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
    """Compute round(stddev * fresh - back) with an error before rounding of at most `rounding`.

    stddev * fresh has 106 bits. The product of the first halves of both is exact; the fractional
    parts of that product and of `back` are small, so adding the other products loses little.
    Args:
      fresh: float64 [n], within FARTHEST.
      stddev: tau.
      back: multiples of a power of two, below 2^53 of it, float64 [n]; overwritten.
      room: three float64 [n], overwritten; the result is one of them.
    Returns: float64 [n].
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
    """Bound the error of `difference` before it rounds, for products of at most `largest`.

    Five operations round or add two products of a first and a second half, each at most
    2^-25 largest, and two numbers of at most 1/2.
    """
    return 5 * 2.0**-53 * (2 * 2.0**-25 * largest + 1)


def _first_half(number: float) -> float:
    return float((np.array([number]).view(np.int64) & HALF).view(np.float64)[0])


class Correlated:
    """Correlated noise for consecutive steps; keeps the rows of the last bands - 1 steps.

    Guarantees: the noise is a function of (key, segment, step, coordinate). With one band it equals
      the noise of `add_gaussian`, bit by bit. A step that does not follow the last one draws the
      rows of its segment's earlier steps again.
    """

    def __init__(self, num_steps: int, bands: int):
        self.num_steps, self.bands = num_steps, bands
        self._rows: deque[list[np.ndarray]] = deque(maxlen=bands - 1)
        """w of the steps before, the newest first."""
        self._next: tuple[object, ...] = ()
        """(step, key, stddev, sizes) for which the rows are up to date; empty: for none."""
        self._begun: tuple[tuple[object, ...], Any] = (), None
        """The same of a row that a thread draws, and the row."""

    def begin(self, threads: Executor, *of: Any) -> None:
        """Have a thread draw the noise of the next call before there are its sums. Args: of: step,
        key, stddev and sizes of the call, as a tuple."""
        self._begun = of, threads.submit(self._row, *of)

    def __call__(
        self, sums: Sequence[np.ndarray], *, stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """Compute round((sum + w_step) / 2^release_shift(stddev)); see `add_gaussian`."""
        of = (step, key, stddev, tuple(leaf.size for leaf in sums))
        (begun, row), self._begun = self._begun, ((), None)
        row = row and row.result()
        if not stddev or self.bands == 1:
            row = row if begun == of else None
            return add_gaussian(sums, stddev=stddev, key=key, step=step, row=row)
        row = row if begun == of else self._row(*of)
        shift = release_shift(stddev)
        released = [np.empty(leaf.shape, np.int64) for leaf in sums]

        def fill(leaf: int, _: int, part: slice) -> None:
            noisy = np.add(sums[leaf][part], row[leaf][part], dtype=np.float64)
            noisy *= 2.0**-shift
            released[leaf][part] = np.rint(noisy, out=noisy)

        in_blocks(fill, released)
        return released

    def _row(
        self, step: int, key: SecretKey, stddev: float, sizes: Sequence[int]
    ) -> list[np.ndarray]:
        """Draw w of `step`, and first those of the segment's steps before if it follows none."""
        of = (key, stddev, sizes)
        if self.bands > 1 and self._next != (step, *of):
            self._rows.clear()
            for before in range(key.first, step):
                self._advance(sizes, stddev, key, before)
        self._next = ()  # an interrupted step must not be continued from
        row = self._advance(sizes, stddev, key, step)
        self._next = (step + 1, *of)
        return row

    def _advance(
        self, sizes: Sequence[int], stddev: float, key: SecretKey, step: int
    ) -> list[np.ndarray]:
        """Draw w of `step`, which becomes the newest row."""
        plan = strategy(self.num_steps, self.bands, stddev)
        row = [np.empty(size, plan.dtype) for size in sizes]
        local = threading.local()

        def fill(leaf: int, number: int, part: slice) -> None:
            if not hasattr(local, "room"):
                local.room = np.empty(BLOCK), *np.empty((5, PIECE))
            fresh, *room = local.room
            out, rows = row[leaf][part], [each[leaf][part] for each in self._rows]
            gaussian(key.fresh.generator("noise", step, leaf, number), fresh[: len(out)])
            if self.bands == 1:
                out[:] = np.rint(fresh[: len(out)] * stddev)
                return
            for start in range(0, len(out), PIECE):
                piece = slice(start, min(start + PIECE, len(out)))
                back, term, *free = (each[: piece.stop - start] for each in room)
                back[:] = 0
                for c, before in zip(plan.coefficients[1:], rows, strict=False):
                    back += np.multiply(before[piece], c, out=term)
                out[piece] = difference(fresh[piece], plan.stddev, back, free)

        in_blocks(fill, row)
        self._rows.appendleft(row)
        return row
