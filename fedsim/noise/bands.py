"""How many bands correlated noise is to have: what each number of them is predicted to cost."""

import dataclasses
from collections.abc import Callable

from fedsim.errors import ConfigError
from fedsim.noise.toeplitz import coefficients, prefix_error

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
