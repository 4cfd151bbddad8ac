"""Search for the noise that spends a privacy budget.

The search uses the accountant's own epsilon: that of the returned value was computed on a fine
grid and is at most the target. A process remembers the noise it found. SciPy finds the roots.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from scipy import optimize

from fedsim.accounting.accountant import RELATIVE_ACCURACY, at_most, spent
from fedsim.accounting.composition import least_delta
from fedsim.accounting.events import MAX_STEPS, MIN_MEAN, Events, StepEvent, cyclic_event
from fedsim.errors import ConfigError, expect, expect_count

PARAMETER_ACCURACY = 1e-5
"""Relative distance between a calibrated parameter and the best one."""

SKETCH_ACCURACY = 1e-2  # of epsilon; enough to find the region of the root

UNBOUNDED = 1e100
"""The epsilon that stands for an infinite one."""

_MAX_NOISE, _MIN_NOISE = 1e6, 1e-2  # bounds of the search for sigma
_found: dict[tuple[Any, ...], float] = {}  # sigma by the arguments of the search


def calibrate_noise(
    event: Callable[[float], StepEvent],
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    before: Events = (),
) -> float:
    """The smallest sigma that keeps num_steps steps, and `before`, within (epsilon, delta).

    Guarantees: epsilon() of the result is at most `epsilon`.
    Args:
      event: sigma -> one step with this noise multiplier; `event` of a sampler or an algorithm.
      before: what is released before the first step, such as the draw of a group size.
    Raises: ConfigError: an argument is out of range, or no sigma up to 1e6 is enough.
    """
    expect_count("num_steps", num_steps, 1)
    expect("num_steps", num_steps, num_steps <= MAX_STEPS, f"at most {MAX_STEPS}")
    expect("epsilon", epsilon, 0 < epsilon < math.inf, "> 0 and finite")
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    unit = event(1.0)
    blocks = math.ceil(num_steps / unit.cycle)
    least = least_delta(blocks + sum(count for _, count in before))
    above = f"above {at_most(least, '.2g')}: with so many steps nothing smaller is resolved"
    expect("delta", delta, delta > least, above)
    # A Gaussian mechanism with the mean contribution as its sensitivity is the right size.
    mean = unit.max_contributions + 2 * unit.max_changed
    mean *= 1 / math.sqrt(unit.cycle) if unit.allocated else 1.0
    mean = mean * unit.sampling_prob * math.sqrt(blocks)

    def spend(sigma: float, accuracy: float) -> float:
        return spent([*before, (event(sigma), num_steps)], delta, accuracy)

    asked = (epsilon, delta, num_steps, unit, *map(tuple, before))
    if asked not in _found:
        guess = max(0.5, mean * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)
        most = min(_MAX_NOISE, unit.sampling_prob / MIN_MEAN)
        _found[asked] = calibrate(spend, epsilon, guess, most)
    return _found[asked]


def noise_multiplier(
    *,
    sampling_prob: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    **target: Any,
) -> float:
    """`calibrate_noise` for Poisson sampling, or for cyclic sampling with several bands.

    Args: target: epsilon, delta, num_steps and optionally before, as there.
    """
    unit = sampling_prob, max_contributions, bands, max_changed
    return calibrate_noise(lambda sigma: cyclic_event(sigma, *unit), **target)


def calibrate(
    spend: Callable[[float, float], float], target: float, guess: float, most: float
) -> float:
    """The least noise, at most `most`, that spends nearly the target epsilon, and not more.

    A sketch on coarse grids finds the region; the returned noise's epsilon was computed on a fine
    grid and is at most the target.
    Args:
      spend: (noise multiplier, accuracy) -> epsilon.
    Raises: ConfigError: even the most noise spends more than the target.
    """

    def excess_on(accuracy: float) -> Callable[[float], float]:
        @functools.cache
        def excess(sigma: float) -> float:
            spent = min(max(spend(sigma, accuracy), 1 / UNBOUNDED), UNBOUNDED)
            return math.log(spent) - math.log(target)

        return excess

    sketch = _search(excess_on(SKETCH_ACCURACY), guess, most, SKETCH_ACCURACY)
    finely = excess_on(RELATIVE_ACCURACY)
    sigma = _from_sketch(finely, sketch, most)
    if sigma is not None:
        return sigma
    nearest = min(sketch, key=lambda sigma: abs(sketch[sigma]))
    fine = _search(finely, nearest, most, PARAMETER_ACCURACY)
    within = [sigma for sigma, excess in fine.items() if excess <= 0]
    if not within:
        least = target * math.exp(min(fine.values()))
        name = "noise_multiplier"
        if least >= UNBOUNDED * (1 - 1e-9):
            why = "spends no finite epsilon at this delta: expected a larger delta, or more noise"
            raise ConfigError(f"{name}={most:g}: even that {why}", field=name)
        raise ConfigError.of(
            "epsilon", target, f"at least {least:.4g}, which {name}={most:g} spends"
        )
    return min(within)


def _from_sketch(
    excess: Callable[[float], float], sketch: dict[float, float], most: float
) -> float | None:
    """The noise by Newton's method with the sketch's slope; None: it did not converge."""
    if len(sketch) < 2:
        return None
    (one, at_one), (other, at_other) = sorted(sketch.items(), key=lambda pair: abs(pair[1]))[:2]
    slope = (at_one - at_other) / math.log(one / other)
    if not slope:
        return None
    # Aim for half the tolerance below the target, on the side that spends less.
    aim, position = -abs(slope) * PARAMETER_ACCURACY / 2, math.log(one)
    low, high = math.log(_MIN_NOISE), math.log(most)
    for _ in range(3):
        if not low <= position <= high:
            return None
        value = excess(math.exp(position))
        if 2 * aim <= value <= 0:
            return math.exp(position)
        position += (aim - value) / slope
    return None


def _search(
    excess: Callable[[float], float], guess: float, most: float, tolerance: float
) -> dict[float, float]:
    """All noise tried on the way to the root of `excess`, with its value."""
    # The logarithm of something close to a power law: in that of the noise, steps of slope one
    # bracket the root and Brent's method converges to it.
    seen: dict[float, float] = {}

    def value(position: float) -> float:
        sigma = math.exp(position)
        if sigma not in seen:
            seen[sigma] = excess(sigma)
        return seen[sigma]

    low, high = math.log(_MIN_NOISE), math.log(most)
    start = here = min(max(math.log(guess), low), high)
    while (value(here) > 0) == (value(start) > 0):
        stride = min(max(-1.2 * value(here), -2.0), 2.0) - math.copysign(5 * tolerance, value(here))
        moved = min(max(here - stride, low), high)
        if moved == here:
            return seen
        start, here = here, moved
    optimize.root_scalar(value, bracket=(start, here), xtol=tolerance)
    return seen
