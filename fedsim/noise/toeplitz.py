"""Strategy matrices of correlated noise: which multiples of earlier noise a step takes back.

S is lower triangular and Toeplitz with b bands s_0, ..., s_(b-1) and columns of norm at most 1.
Steps get the noise S^-1 z, z being independent. What matters is the noise of prefix sums of
gradients, which is what the parameters of SGD are: with A the matrix of ones on and below the
diagonal, that of step t has the variance of row t of A S^-1.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from scipy import optimize, signal

from fedsim.errors import ConfigError


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


MOST_BANDS = 64  # of which one is chosen; each is a row of noise as large as the parameters


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
