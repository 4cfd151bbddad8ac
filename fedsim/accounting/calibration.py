"""Search for the noise, sampling probability or number of steps that spends a privacy budget.

Each search uses the accountant's own epsilon: that of the returned value was computed on a fine
grid and is at most the target. Results are cached on disk, where anyone may have changed them, so a
cached value is checked before it is used. SciPy finds the roots.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy import optimize

from fedsim.accounting.accountant import RELATIVE_ACCURACY, at_most, spent
from fedsim.accounting.composition import Progress, least_delta, throttled
from fedsim.accounting.events import (
    LEAST_MEAN,
    LEAST_PROB,
    MOST_STEPS,
    Phases,
    StepEvent,
    cyclic_event,
)
from fedsim.errors import ConfigError, expect, expect_count
from fedsim.files import NotOurs, cache_dir, keep_in_cache, own_directory

ACCOUNTANT_VERSION = 6
"""Incremented whenever a number may change, so that cached calibrations are not reused."""

PARAMETER_ACCURACY = 1e-5
"""Relative distance between a calibrated parameter and the best one."""

SKETCH_ACCURACY = 1e-2  # of epsilon; enough to find the region of the root

NEXT = 1e-3
"""Relative distance between a calibrated parameter and one that certainly spends too much."""

UNBOUNDED = 1e100
"""The epsilon that stands for an infinite one."""

LONGEST_FILE = 2**16  # bytes that are read of a file of the cache
LARGEST_VALUE = 1e10  # of anything that is calibrated

_MOST_NOISE, _LEAST_NOISE = 1e6, 1e-2  # bounds of the search for sigma


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

    Guarantees: epsilon() of the result is at most `epsilon`, also where it comes from the cache.
    Args:
      event: sigma -> one step with this noise multiplier; `event` of a sampler or an algorithm.
      before: what is released before the first step, such as the draw of a group size.
      progress: called with a line about once a second while the search goes on.
    Raises: ConfigError: an argument is out of range, or no sigma up to 1e6 is enough.
    """
    _expect_steps(num_steps)
    unit = event(1.0)
    blocks = math.ceil(num_steps / unit.cycle)
    _expect_target(epsilon, delta, blocks + sum(count for _, count in before))
    # A Gaussian mechanism with the mean contribution as its sensitivity is the right size.
    most = unit.max_contributions + 2 * unit.max_changed
    most *= 1 / math.sqrt(unit.cycle) if unit.allocated else 1.0
    mean = most * unit.sampling_prob * math.sqrt(blocks)

    def spend(sigma: float, accuracy: float) -> float:
        return spent([*before, (event(sigma), num_steps)], delta, accuracy)

    return _solved(
        "noise_multiplier",
        (epsilon, delta, num_steps, unit, *before),
        spend,
        epsilon,
        guess=max(0.5, mean * math.sqrt(2 * math.log(1.25 / delta)) / epsilon),
        limits=(min(_MOST_NOISE, unit.sampling_prob / LEAST_MEAN), _LEAST_NOISE),
        dearer=lambda sigma: sigma * (1 - NEXT) if sigma > _LEAST_NOISE else None,
        progress=progress,
    )


def noise_multiplier(
    *,
    sampling_prob: float,
    max_contributions: int = 1,
    max_changed: int = 0,
    bands: int = 1,
    **target: Any,
) -> float:
    """`calibrate_noise` for Poisson sampling, or for cyclic sampling with several bands.

    Args: target: epsilon, delta, num_steps and optionally before and progress, as there.
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
    most = 1.0 / bands

    def spend(prob: float, accuracy: float) -> float:
        step = cyclic_event(noise_multiplier, prob, max_contributions, bands, max_changed)
        return spent([(step, num_steps)], delta, accuracy)

    return _solved(
        "sampling_prob",
        (epsilon, delta, num_steps, event),
        spend,
        epsilon,
        guess=1e-2,
        limits=(max(LEAST_PROB, noise_multiplier * LEAST_MEAN), most),
        dearer=lambda prob: prob * (1 + NEXT) if prob * (1 + NEXT) < most else None,
        progress=progress,
    )


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
    report = throttled(progress)

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


def _solved(
    name: str,
    key: tuple,
    spend: Callable[[float, float], float],
    target: float,
    *,
    guess: float,
    limits: tuple[float, float],
    dearer: Callable[[float], float | None],
    progress: Progress,
) -> float:
    """`calibrate`, behind the cache. Args: key, dearer: of `cached`; the rest of `calibrate`."""

    def solve() -> float:
        return calibrate(name, spend, target, guess, limits, progress)

    def finely(value: float) -> float:
        return spend(value, RELATIVE_ACCURACY)

    return cached(name, key, solve, finely, target, dearer)


def calibrate(
    name: str,
    spend: Callable[[float, float], float],
    target: float,
    guess: float,
    limits: tuple[float, float],
    progress: Progress,
) -> float:
    """The parameter within `limits` that spends nearly the target epsilon, and not more.

    A sketch on coarse grids finds the region; the returned parameter's epsilon was computed on a
    fine grid and is at most the target.
    Args:
      name: name of the parameter in messages.
      spend: (parameter, accuracy) -> epsilon.
      limits: (cheapest, most expensive) parameter.
    Raises: ConfigError: even the cheapest parameter spends more than the target.
    """
    report = throttled(progress)

    def excess_on(accuracy: float) -> Callable[[float], float]:
        @functools.cache
        def excess(parameter: float) -> float:
            spent = spend(parameter, accuracy)
            report(f"{name} {parameter:.6g}: epsilon {spent:.6g}")
            return math.log(min(max(spent, 1 / UNBOUNDED), UNBOUNDED)) - math.log(target)

        return excess

    sketch = _search(excess_on(SKETCH_ACCURACY), guess, limits, SKETCH_ACCURACY)
    finely = excess_on(RELATIVE_ACCURACY)
    parameter = _from_sketch(finely, sketch, limits)
    if parameter is not None:
        return parameter
    nearest = min(sketch, key=lambda parameter: abs(sketch[parameter]))
    fine = _search(finely, nearest, limits, PARAMETER_ACCURACY)
    within = [parameter for parameter, excess in fine.items() if excess <= 0]
    if not within:
        least = target * math.exp(min(fine.values()))
        if least >= UNBOUNDED * (1 - 1e-9):
            why = "spends no finite epsilon at this delta: expected a larger delta, or more noise"
            raise ConfigError(f"{name}={limits[0]:g}: even that {why}", field=name)
        raise ConfigError.of(
            "epsilon", target, f"at least {least:.4g}, which {name}={limits[0]:g} spends"
        )
    return max(within) if limits[1] > limits[0] else min(within)


def _from_sketch(
    excess: Callable[[float], float], sketch: dict[float, float], limits: tuple[float, float]
) -> float | None:
    """The parameter by Newton's method with the sketch's slope, mostly in two evaluations.

    None: it did not converge.
    """
    if len(sketch) < 2:
        return None
    (one, at_one), (other, at_other) = sorted(sketch.items(), key=lambda pair: abs(pair[1]))[:2]
    slope = (at_one - at_other) / math.log(one / other)
    if not slope:
        return None
    # Aim for half the tolerance below the target, on the side that spends less.
    aim, position = -abs(slope) * PARAMETER_ACCURACY / 2, math.log(one)
    low, high = sorted(map(math.log, limits))
    for _ in range(3):
        if not low <= position <= high:
            return None
        value = excess(math.exp(position))
        if 2 * aim <= value <= 0:
            return math.exp(position)
        position += (aim - value) / slope
    return None


def _search(
    excess: Callable[[float], float], guess: float, limits: tuple[float, float], tolerance: float
) -> dict[float, float]:
    """Every parameter tried on the way to the root of `excess`, with its value.

    excess is the logarithm of something close to a power law: in the parameter's logarithm, steps
    of slope one bracket the root and Brent's method converges to it.
    """
    seen: dict[float, float] = {}

    def value(position: float) -> float:
        parameter = math.exp(position)
        if parameter not in seen:
            seen[parameter] = excess(parameter)
        return seen[parameter]

    cheapest, dearest = map(math.log, limits)
    sign = math.copysign(1.0, dearest - cheapest)
    low, high = sorted((cheapest, dearest))
    start = here = min(max(math.log(guess), low), high)
    while (value(here) > 0) == (value(start) > 0):
        stride = min(max(-1.2 * value(here), -2.0), 2.0) - math.copysign(5 * tolerance, value(here))
        moved = min(max(here + sign * stride, low), high)
        if moved == here:
            return seen
        start, here = here, moved
    optimize.root_scalar(value, bracket=(start, here), xtol=tolerance)
    return seen


def cached(
    name: str,
    key: tuple,
    solve: Callable[[], float],
    spend: Callable[[float], float],
    target: float,
    dearer: Callable[[float], float | None],
) -> float:
    """solve(), or its earlier result for the same arguments and version of the accountant.

    A cached value is a hint that anyone may have changed. It counts only if it spends no more than
    the target, and hardly less; any other content of the file is ignored.
    Args:
      spend: epsilon of a value.
      dearer: a neighbouring value that spends a little more; None: there is none.
    """
    words = [name, *map(repr, key), str(ACCOUNTANT_VERSION), version("dp-accounting")]
    digest = hashlib.sha256("|".join(words).encode()).hexdigest()
    try:
        path = own_directory(cache_dir()) / f"{digest[:32]}.json"
    except NotOurs:
        return solve()

    def meets(value: float) -> bool:
        try:
            if spend(value) > target:
                return False
            after = dearer(value)
            return after is None or spend(after) > target
        except ConfigError:  # out of range
            return False

    if (kept := _kept(path)) is not None and meets(kept):
        return kept
    value = solve()
    with suppress(OSError):  # a cache that cannot be written costs time, never an answer
        keep_in_cache(path, json.dumps({"arguments": words, "value": value}).encode())
    return value


def _kept(path: Path) -> float | None:
    """The number in a file of the cache; None: there is no such file, or no valid number in it."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(LONGEST_FILE))["value"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 < value <= LARGEST_VALUE else None
