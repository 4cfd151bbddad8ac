"""The best value of one number of a run, given the others: noise, sampling probability or steps.

Each is searched for with the accountant's own epsilon, which for the result is at most the
target's.
"""

import math
from collections.abc import Callable
from typing import Any

from fedsim.accounting import calibration
from fedsim.accounting.accountant import RELATIVE_ACCURACY, spent
from fedsim.accounting.calibration import Progress, cached
from fedsim.accounting.composition import least_delta
from fedsim.accounting.events import (
    LEAST_MEAN,
    LEAST_PROB,
    MOST_STEPS,
    Phases,
    StepEvent,
    cyclic_event,
)
from fedsim.accounting.rounding import at_most
from fedsim.errors import expect, expect_count

_MOST_NOISE, _LEAST_NOISE = 1e6, 1e-2  # that is looked for


def calibrate_noise(
    event: Callable[[float], StepEvent],
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    before: Phases = (),
    progress: Progress = None,
) -> float:
    """The smallest sigma that keeps num_steps steps, and `before`, within (epsilon, delta).

    Guarantees: the module's epsilon() of the result is at most `epsilon`. Kept on disk, and checked
      when it is taken from there.
    Args: event: sigma -> what one step with it is; a sampler's or an algorithm's `event`.
    Raises: ConfigError: an argument is out of range, or no sigma up to 1e6 is enough.
    """
    _expect_steps(num_steps)
    unit = event(1.0)
    composed = math.ceil(num_steps / unit.cycle) + sum(count for _, count in before)
    _expect_target(epsilon, delta, composed)
    # A Gaussian mechanism with the mean contribution as its sensitivity is the right size.
    blocks = math.ceil(num_steps / unit.cycle)
    most = unit.max_contributions + 2 * unit.max_changed
    most *= 1 / math.sqrt(unit.cycle) if unit.allocated else 1.0
    mean = most * unit.sampling_prob * math.sqrt(blocks)
    guess = max(0.5, mean * math.sqrt(2 * math.log(1.25 / delta)) / epsilon)

    def spend(sigma: float, accuracy: float) -> float:
        return spent([*before, (event(sigma), num_steps)], delta, accuracy)

    def solve() -> float:
        most = min(_MOST_NOISE, unit.sampling_prob / LEAST_MEAN)
        return calibration.calibrate(
            "noise_multiplier", spend, epsilon, guess, (most, _LEAST_NOISE), progress
        )

    def finely(sigma: float) -> float:
        return spend(sigma, calibration.SPEND_ACCURACY)

    def dearer(sigma: float) -> float | None:
        return sigma * (1 - calibration.NEXT) if sigma > _LEAST_NOISE else None

    key = (epsilon, delta, num_steps, unit, *before)
    return cached("noise_multiplier", key, solve, finely, epsilon, dearer)


def noise_multiplier(
    *,
    sampling_prob: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    **target: Any,
) -> float:
    """`calibrate_noise` of steps with this sampling: Poisson, or cyclic with several bands.

    Args: target: epsilon, delta and num_steps; before and progress, as there.
    """
    unit = sampling_prob, max_contributions, bands, max_changed
    return calibrate_noise(lambda sigma: cyclic_event(sigma, *unit), **target)


def sampling_prob(
    *,
    epsilon: float,
    delta: float,
    num_steps: int,
    noise_multiplier: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    progress: Progress = None,
) -> float:
    """The largest sampling probability that keeps num_steps steps within (epsilon, delta).

    With several bands, that of cyclic sampling: at most 1 / bands.
    Raises: ConfigError: an argument is out of range, or even 1e-12 is too much.
    """
    _expect_steps(num_steps)
    _expect_target(epsilon, delta, math.ceil(num_steps / bands))
    event = StepEvent(noise_multiplier, 1.0, max_contributions, bands, max_changed)
    limits = (max(LEAST_PROB, noise_multiplier * LEAST_MEAN), 1.0 / bands)

    def spend(prob: float, accuracy: float) -> float:
        step = cyclic_event(noise_multiplier, prob, max_contributions, bands, max_changed)
        return spent([(step, num_steps)], delta, accuracy)

    def solve() -> float:
        return calibration.calibrate("sampling_prob", spend, epsilon, 1e-2, limits, progress)

    def finely(prob: float) -> float:
        return spend(prob, calibration.SPEND_ACCURACY)

    def dearer(prob: float) -> float | None:
        return prob * (1 + calibration.NEXT) if prob * (1 + calibration.NEXT) < limits[1] else None

    key = (epsilon, delta, num_steps, event)
    return cached("sampling_prob", key, solve, finely, epsilon, dearer)


def num_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_prob: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    progress: Progress = None,
) -> int:
    """The largest number of steps, up to 1e7, that stays within (epsilon, delta).

    Raises: ConfigError: an argument is out of range, or even one step is too much.
    """
    _expect_target(epsilon, delta, 1)
    event = cyclic_event(noise_multiplier, sampling_prob, max_contributions, bands, max_changed)
    report = calibration.throttled(progress)

    def spent_by(steps: int) -> float:
        value = spent([(event, steps)], delta, RELATIVE_ACCURACY)
        report(f"num_steps {steps}: epsilon {value:.6g}")
        return value

    def solve() -> float:
        least = spent_by(1)
        expect("epsilon", epsilon, least <= epsilon, f"at least {least:.4g}, spent by one step")
        low, high = 1, 2
        while high <= MOST_STEPS and spent_by(high) <= epsilon:
            low, high = high, 4 * high
        high = min(high, MOST_STEPS + 1)
        while high - low > 1:
            middle = max(low + 1, min(high - 1, round(math.sqrt(low * high))))
            low, high = (middle, high) if spent_by(middle) <= epsilon else (low, middle)
        return low

    def finely(steps: float) -> float:
        expect_count("num_steps", steps, 1)
        return spent([(event, int(steps))], delta, RELATIVE_ACCURACY)

    def dearer(steps: float) -> float | None:
        return steps + 1 if steps < MOST_STEPS else None

    return int(cached("num_steps", (epsilon, delta, event), solve, finely, epsilon, dearer))


def _expect_steps(num_steps: int) -> None:
    expect_count("num_steps", num_steps, 1)
    expect("num_steps", num_steps, num_steps <= MOST_STEPS, f"at most {MOST_STEPS}")


def _expect_target(epsilon: float, delta: float, composed: int) -> None:
    expect("epsilon", epsilon, 0 < epsilon < math.inf, "> 0 and finite")
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    least = least_delta(composed)
    above = f"above {at_most(least, '.2g')}: with so many steps nothing smaller is resolved"
    expect("delta", delta, delta > least, above)
