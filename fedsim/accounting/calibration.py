"""Finding the parameter that spends a privacy budget, and keeping what was found on disk, where
it is a hint that is checked.

Knows nothing of mechanisms: `accountant` says what a parameter spends. Root finding is SciPy's.
"""

import functools
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from scipy import optimize

from fedsim.errors import ConfigError
from fedsim.files import NotOurs, cache_dir, own_directory

ACCOUNTANT_VERSION = 5
"""Raised whenever a number may change, so that calibrations kept on disk are not reused."""

SPEND_ACCURACY = 1e-4
"""Relative accuracy of the epsilons that decide."""

PARAMETER_ACCURACY = 1e-5
"""Relative distance between a calibrated parameter and the best one."""

SKETCH_ACCURACY = 1e-2  # enough to find where to look closely

NEXT = 1e-3
"""Relative distance between a calibrated parameter and one that certainly spends too much."""

UNBOUNDED = 1e100
"""The epsilon that stands for an infinite one."""

LONGEST_FILE = 2**16  # bytes that are read of a file of the cache
LARGEST_VALUE = 1e10  # of anything that is calibrated

Progress = Callable[[str], None] | None


def calibrate(
    name: str,
    spend: Callable[[float, float], float],
    target: float,
    guess: float,
    limits: tuple[float, float],
    progress: Progress,
) -> float:
    """The parameter within `limits` (cheapest, dearest) that spends nearly the target, not more.

    `spend` takes the parameter and an accuracy. A sketch on coarse grids finds the region; only a
    parameter whose fine epsilon was computed and found within the target is returned.
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
    finely = excess_on(SPEND_ACCURACY)
    found = _from_sketch(finely, sketch, limits)
    if found is not None:
        return found
    nearest = min(sketch, key=lambda parameter: abs(sketch[parameter]))
    fine = _search(finely, nearest, limits, PARAMETER_ACCURACY)
    within = [parameter for parameter, excess in fine.items() if excess <= 0]
    if not within:
        least = target * math.exp(min(fine.values()))
        if least >= UNBOUNDED * (1 - 1e-9):
            found = "spends no finite epsilon at this delta: expected a larger delta, or more noise"
            raise ConfigError(f"{name}={limits[0]:g}: even that {found}", field=name)
        raise ConfigError.of(
            "epsilon", target, f"at least {least:.4g}, which {name}={limits[0]:g} spends"
        )
    return max(within) if limits[1] > limits[0] else min(within)


def _from_sketch(
    excess: Callable[[float], float], sketch: dict[float, float], limits: tuple[float, float]
) -> float | None:
    """The parameter, by Newton's method with the sketch's slope: mostly the second that is tried.
    None: not found so."""
    if len(sketch) < 2:
        return None
    (one, at_one), (other, at_other) = sorted(sketch.items(), key=lambda pair: abs(pair[1]))[:2]
    slope = (at_one - at_other) / math.log(one / other)
    if not slope:
        return None
    # Aimed half of what is allowed to the side that spends less.
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
    of slope one bracket the root and Brent's method closes in on it.
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
    """solve(), or what it returned for the same arguments and version of the accountant.

    What is kept on disk is a hint that anyone may have changed. It counts only if it spends no more
    than the target, and hardly less; whatever else is there is as if absent.
    Args:
      spend: epsilon of a value.
      dearer: a value next to one, that spends a little more; None: there is none.
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
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"arguments": words, "value": value}, file)
        os.replace(file.name, path)
    except OSError:
        pass  # a cache that cannot be written costs time, never an answer
    return value


def _kept(path: Path) -> float | None:
    """The number in a file of the cache; None: there is no such file, or no number in it."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(LONGEST_FILE))["value"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 < value <= LARGEST_VALUE else None


def throttled(progress: Progress) -> Callable[[str], None]:
    """`progress`, silent for two seconds and then at most once a second."""
    quiet_until = time.monotonic() + 2

    def report(message: str) -> None:
        nonlocal quiet_until
        if progress is not None and time.monotonic() >= quiet_until:
            quiet_until = time.monotonic() + 1
            progress(message)

    return report
