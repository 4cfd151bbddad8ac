"""Privacy loss of random allocation: a user takes part in exactly one of W steps, uniformly chosen.

With Y_i = exp((y_i - 1/2) / sigma^2) for the noisy sums y of the W steps, P is to Q as
S / W = (Y_1 + ... + Y_W) / W, and under Q the Y_i are independent log-normals of mean 1. So

    H_(e^eps)(P, Q) = E_Q max(S / W - e^eps, 0),  H_(e^eps)(Q, P) = E_Q max(1 - e^eps S / W, 0).

Both are convex in every Y_i. Therefore any law of Y that has the same mean and is more spread out
(larger in the convex order) gives an upper bound on both, at every eps at once, and so does the
pair that S' / W belongs to, under any composition. Masses are moved to the points of a geometric
grid, each shared between its two neighbours so that its mean stays: a spread, whose effect is of
second order in the grid's width. Sums of independent, more spread-out variables are more spread
out. W terms are added up by doubling. What is cut off above is added to P's infinite loss, what is
cut off below is shared between zero and the lowest point.

Sources: the reduction is Chua et al. 2024's (balls and bins) and Feldman and Shenfeld 2025's
(arXiv 2502.08202); the spread that keeps the mean is connect the dots, for sums.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy import special

from fedsim.accounting.composition import ADD, GridTooLargeError, check_size

FINENESS = 0.05  # width of a grid, in standard deviations of the logarithm of the sum
REACH = 8.6  # standard deviations of the noise beyond which masses are cut off: below 1e-17
CUT = 1e-18  # of the mean, above which, and of mass, below which, a grid may end
ROUNDING = 1e-11  # relative: thousands of additions of positive numbers
MAX_NOISE = 3e5  # times the square root of the steps; a grid for more would not fit into memory
LARGEST = 700.0  # logarithm that a value can have without becoming inf


class Law(NamedTuple):
    """A variable that is 0 with some probability, and else e^((first + i) width)."""

    width: float
    first: int
    masses: np.ndarray
    zero: float
    lost: float
    """Part of its mean that was cut off."""

    def points(self) -> np.ndarray:
        """Logarithms of its values."""
        return (self.first + np.arange(self.masses.size)) * self.width


def one_window_pmf(
    noise_multiplier: float, steps: int, discretization: float, direction: int
) -> DensePLDPmf:
    """The discretised loss of `steps` steps, an upper bound in one direction.

    Raises: GridTooLargeError: the grid would be longer than MAX_GRID_POINTS.
    """
    law = _window(noise_multiplier, steps)
    losses = law.points() - math.log(steps)
    first = math.floor(losses[0] / discretization)
    size = math.ceil(losses[-1] / discretization) - first + 2
    check_size(size, discretization)
    low, part = _shared(losses / discretization, discretization)
    probs = np.zeros(size)
    for index, share in ((low - first, 1 - part), (low - first + 1, part)):
        probs += np.bincount(index, law.masses * share, size)
    if direction == ADD:
        return _pmf(discretization, -(first + size - 1), probs[::-1], law.zero)
    levels = (first + np.arange(size)) * discretization
    return _pmf(discretization, first, probs * np.exp(levels), law.lost / steps)


def loss_range(noise_multiplier: float, steps: int) -> tuple[float, float]:
    """The lowest and highest privacy loss of REMOVE. Raises: GridTooLargeError."""
    points = _window(noise_multiplier, steps).points() - math.log(steps)
    return float(points[0]), float(points[-1])


def _pmf(discretization: float, first: int, probs: np.ndarray, infinite: float) -> DensePLDPmf:
    masses = np.ascontiguousarray(probs) * (1 + ROUNDING)
    return DensePLDPmf(discretization, first, masses, infinite * (1 + ROUNDING), True)


@functools.lru_cache(maxsize=64)
def _window(noise_multiplier: float, steps: int) -> Law:
    """The law of S, more spread out than it is: by doubling, from the first binary digit on."""
    noise_multiplier = min(noise_multiplier, MAX_NOISE / math.sqrt(steps))  # less costs more
    spread = 1 / noise_multiplier**2
    highest = spread / 2 + REACH * math.sqrt(spread) + math.log(steps)
    if highest > LARGEST:
        raise GridTooLargeError.of(
            "noise_multiplier",
            f"{noise_multiplier:g}",
            f"more noise: losses are below {LARGEST:g}, and here they reach {highest:.4g}",
        )
    widest = FINENESS * math.sqrt(spread)

    def width(terms: int) -> float:
        """The grid for so many terms: `widest`, halved until it is fine enough for their sum."""
        needed = FINENESS * math.sqrt(math.log1p(math.expm1(min(spread, 500.0)) / terms))
        return widest * 2.0 ** -max(0, math.ceil(math.log2(widest / needed) - 1e-9))

    terms, law = 1, _log_normal(spread, widest)
    for digit in f"{steps:b}"[1:]:
        law = _trimmed(_sum(law, law, width(2 * terms)), 2 * terms)
        terms *= 2
        if digit == "1":
            law = _trimmed(_sum(law, _log_normal(spread, law.width), law.width), terms + 1)
            terms += 1
    return law


@functools.lru_cache(maxsize=16)
def _log_normal(spread: float, width: float) -> Law:
    """exp(N(-spread / 2, spread)), of mean 1, on a grid."""
    root = math.sqrt(spread)
    first = math.floor((-spread / 2 - REACH * root) / width)
    last = math.ceil((spread / 2 + REACH * root) / width)
    points = np.arange(first, last + 1) * width
    mass = _between(points / root + root / 2)  # of each interval, with those beyond the ends
    mean = _between(points / root - root / 2)
    ends = np.exp(points)
    above = np.clip((mean[1:-1] / ends[:-1] - mass[1:-1]) / math.expm1(width), 0, mass[1:-1])
    masses = np.zeros(points.size)
    masses[:-1] += mass[1:-1] - above
    masses[1:] += above
    up = min(mass[0], mean[0] / ends[0])
    masses[0] += up
    masses[-1] += mass[-1]
    lost = max(0.0, mean[-1] - mass[-1] * ends[-1])
    return Law(width, first, masses, mass[0] - up, lost)


def _between(ends: np.ndarray) -> np.ndarray:
    """P(N(0, 1) in each interval between the `ends`), the first from -inf, the last to inf."""
    low, high = np.concatenate([[-np.inf], ends]), np.concatenate([ends, [np.inf]])
    # Of two tails the smaller ones are subtracted.
    upper = low > 0
    return np.where(
        upper, special.ndtr(-low) - special.ndtr(-high), special.ndtr(high) - special.ndtr(low)
    )


def _sum(one: Law, other: Law, width: float) -> Law:
    """The sum of two independent variables on grids of equal width, on one of `width`."""
    finer = round(one.width / width)
    first = min(one.first, other.first)
    a, b = one.masses, other.masses
    start_a, start_b = one.first - first, other.first - first
    last = max(start_a + a.size, start_b + b.size)
    masses = np.zeros(last * finer + math.ceil(math.log(2) / width) + 2)
    # Pairs whose places differ by the same number land equally far above the larger one.
    differences = np.arange(max(start_a + a.size - start_b, start_b + b.size - start_a))
    rises = np.log1p(np.exp(-differences * one.width)) / width
    offsets, parts = _shared(rises, width)
    for difference in range(-(start_b + b.size - 1 - start_a), start_a + a.size - start_b):
        # a at place + difference, b at place.
        low = max(start_b, start_a - difference)
        high = min(start_b + b.size, start_a + a.size - difference)
        if low >= high:
            continue
        both = a[low + difference - start_a : high + difference - start_a]
        both = both * b[low - start_b : high - start_b]
        size, larger = abs(difference), low + max(difference, 0)
        at = larger * finer + int(offsets[size])
        end = at + (high - low - 1) * finer + 1
        raised = both * parts[size]
        masses[at:end:finer] += both - raised
        masses[at + 1 : end + 1 : finer] += raised
    for law, start, zero in ((one, start_a, other.zero), (other, start_b, one.zero)):
        masses[start * finer : (start + law.masses.size - 1) * finer + 1 : finer] += (
            zero * law.masses
        )
    zero, lost = one.zero * other.zero, one.lost + other.lost
    return Law(width, first * finer, masses, zero, lost)


def _trimmed(law: Law, terms: int) -> Law:
    """The law without the ends of the grid, which hold next to nothing."""
    values = np.exp(law.points())
    above = np.cumsum((law.masses * values)[::-1])[::-1]  # of the mean, from each point on
    last = int(np.count_nonzero(above > CUT * terms))
    below = np.cumsum(law.masses)
    first = min(int(np.count_nonzero(below < CUT)), last - 1)
    masses = law.masses[first:last].copy()
    masses[-1] += law.masses[last:].sum()
    rest = law.masses[last:]
    lost = float(rest @ (values[last:] - values[last - 1]))
    up = float(law.masses[:first] @ values[:first]) / float(values[first])
    masses[0] += up
    zero = law.zero + max(0.0, float(law.masses[:first].sum()) - up)
    return Law(law.width, law.first + first, masses, zero, law.lost + lost)


def _shared(places: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The grid points below `places`, and the share of the points above that keeps the mean."""
    low = np.floor(places)
    part = np.expm1((places - low) * width) / math.expm1(width)
    return low.astype(np.int64), np.clip(part, 0, 1)
