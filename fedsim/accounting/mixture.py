"""Privacy loss of one step, N(Binomial(G, p), sigma^2) against N(0, sigma^2): Theorems 1 and 2;
and where units change instead of being gone, against N(-Binomial(k, p), sigma^2).

The method is dp_accounting's, connect the dots, and so is the type of the result. What takes
dp_accounting 97 % of its time, the inversion of the privacy loss, is done here by vectorised Newton
steps on all grid points at once.

Notation, with y the noisy sum: Q = N(0, sigma^2), P = sum_k p_k N(k, sigma^2) and
L(y) = log P(y)/Q(y), which is increasing and convex. With `others`, Q = sum_j q_j N(-j, sigma^2),
and L is increasing. The REMOVE direction is P against Q with loss
L, the ADD direction is Q against P with loss -L.

Every departure from the exact distributions makes the answer larger:
  - Contribution counts in the tails of the binomial (at most TAIL_MASS together) are left out of P.
    The adversary is told when such a count was drawn: infinite loss, with that probability, in
    REMOVE; missing mass in P in ADD. Telling is post-processing undone, so this is an upper bound.
  - Hockey-stick divergences are raised by a bound on their rounding error.
  - Connect the dots gives an upper bound by construction.
"""

import math
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy import optimize, special, stats

from fedsim.accounting.composition import COMPOSED_TAIL_MASS, check_size

TAIL_MASS = math.exp(-50)
"""Probability of one step that may be sent to infinite loss, as dp_accounting's default."""

_BLOCK = 2**20  # numbers held at once in a [points, components] array
_ROUNDING = 5e-14  # relative error of scipy.special.ndtr in the tails, with room for the sums


class Mixture(NamedTuple):
    """P = sum_k probs[k] N(counts[k], stddev^2), plus `tail` probability that is revealed."""

    stddev: float
    counts: np.ndarray
    probs: np.ndarray
    tail: float
    others: np.ndarray | None = None
    """Q = sum_j other_probs[j] N(-others[j], stddev^2). None: N(0, stddev^2)."""
    other_probs: np.ndarray | None = None
    told: float = 0.0
    """Addition to every hockey-stick divergence for counts of P and Q that were left out."""


def binomial_mixture(stddev: float, max_contributions: int, sampling_prob: float) -> Mixture:
    """N(Binomial(max_contributions, sampling_prob), stddev^2), where unlikely counts are revealed.

    Guarantees: the counts left out have at most TAIL_MASS probability, which is in `tail`.
    """
    trials = (max_contributions, sampling_prob)
    rare = TAIL_MASS / 4
    below = range(max_contributions)
    low = bisect_left(below, True, key=lambda k: bool(stats.binom.cdf(k, *trials) > rare))
    high = bisect_left(below, True, key=lambda k: bool(stats.binom.sf(k, *trials) <= rare))
    left_out = stats.binom.cdf(low - 1, *trials) if low else 0.0
    tail = float(stats.binom.sf(high, *trials) + left_out)
    counts = np.arange(low, high + 1)
    probs = stats.binom.pmf(counts, max_contributions, sampling_prob)
    return Mixture(stddev, counts.astype(np.float64), probs, tail)


def changing_mixture(
    stddev: float, max_contributions: int, max_changed: int, sampling_prob: float
) -> Mixture:
    """N(Binomial(m + k, p), stddev^2) against N(-Binomial(k, p), stddev^2): of m units a user's
    absence takes what they add, of k others it changes what they add to anything else.

    Guarantees: what leaving out unlikely counts takes from a divergence is at most `told`. For the
      terms are P' - e^level Q', primes standing for the counts that are kept, of masses 1 - s and
      1 - t: what is left out adds at most s or t, and that the masses differ at most e max(s, t).
    """
    upper = binomial_mixture(stddev, max_contributions + max_changed, sampling_prob)
    lower = binomial_mixture(stddev, max_changed, sampling_prob)
    told = 4 * (upper.tail + lower.tail)
    return Mixture(stddev, upper.counts, upper.probs, 0.0, lower.counts, lower.probs, told)


def log_ratio(mixture: Mixture, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L(y) = log P(y)/Q(y) and its derivative, for y of any length."""
    value, slope = _log_ratio_to_noise(mixture.stddev, mixture.counts, mixture.probs, y)
    if mixture.others is not None:
        of_q = _log_ratio_to_noise(mixture.stddev, -mixture.others, mixture.other_probs, y)
        value, slope = value - of_q[0], slope - of_q[1]
    return value, slope


def _log_ratio_to_noise(
    stddev: float, shifts: np.ndarray, probs: np.ndarray | None, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The log of sum_k probs[k] N(shifts[k], stddev^2) over N(0, stddev^2), and its derivative."""
    variance = stddev**2
    constants = np.log(probs) - shifts**2 / (2 * variance)  # pyright: ignore
    value, slope = np.empty_like(y), np.empty_like(y)
    for block in _blocks(y.size, shifts.size):
        terms = np.multiply.outer(shifts, y[block] / variance) + constants[:, None]
        largest = terms.max(axis=0)
        terms = np.exp(np.subtract(terms, largest, out=terms), out=terms)
        total = terms.sum(axis=0)
        value[block] = largest + np.log(total)
        slope[block] = shifts @ terms / (total * variance)
    return value, slope


def invert_log_ratio(mixture: Mixture, levels: np.ndarray, low: float, high: float) -> np.ndarray:
    """The y in [low, high] with L(y) = level, for each of the increasing `levels`.

    Levels that L does not reach within [low, high] get -inf or +inf. A table of L brackets every
    root and gives a first guess, mostly good to 1e-7 sigma; Newton steps, kept inside the bracket,
    converge quadratically, for L is convex or nearly so.
    The divergence is stationary in y, so an error of 1e-9 sigma in y is one of 1e-18 in delta.
    """
    spread = float(np.ptp(mixture.counts)) + 1.0
    spread += 0.0 if mixture.others is None else float(np.ptp(mixture.others))
    cells = int(np.clip((high - low) * spread / mixture.stddev**2, 1024, 4096))
    table_y = np.linspace(low, high, cells + 1)
    table_level, table_slope = log_ratio(mixture, table_y)
    table_level = np.maximum.accumulate(table_level)
    cell = np.clip(np.searchsorted(table_level, levels, side="right"), 1, cells)
    left, right = table_y[cell - 1], table_y[cell]
    slope = table_slope * (high - low) / cells
    y = left + (right - left) * _interpolate(table_level, slope, cell, levels)
    active = np.flatnonzero((levels > table_level[0]) & (levels < table_level[-1]))
    for _ in range(100):
        step, left[active], right[active] = _newton_step(
            mixture, levels[active], y[active], left[active], right[active]
        )
        y[active] += step
        active = active[np.abs(step) > 1e-6 * mixture.stddev]
        if active.size == 0:
            break
    y[levels <= table_level[0]] = -np.inf
    y[levels >= table_level[-1]] = np.inf
    return y


def loss_range(mixture: Mixture) -> tuple[float, float]:
    """The lowest and highest privacy loss of REMOVE outside tails of TAIL_MASS."""
    low, high = log_ratio(mixture, np.array(_support(mixture)))[0]
    return float(low), float(high)


def one_step_pmf(mixture: Mixture, discretization: float, direction: int) -> DensePLDPmf:
    """The discretised privacy loss of one step in one direction, an upper bound.

    Raises: GridTooLargeError: the grid would be longer than MAX_GRID_POINTS.
    """
    return (_remove, _add)[direction](_crossings(mixture, discretization))


class _Crossings(NamedTuple):
    """Crossings of L with each level: y / stddev, and the mass of P and Q on either side."""

    mixture: Mixture
    discretization: float
    first: int  # index of the lowest level
    levels: np.ndarray
    y: np.ndarray
    above: np.ndarray  # log Q(Y > y)
    below: np.ndarray  # Q(Y < y)
    gained: np.ndarray  # P(Y > y) - Q(Y > y)
    moved: np.ndarray  # what the rounding of `gained` is in proportion to


def _crossings(mixture: Mixture, discretization: float) -> _Crossings:
    low, high = _support(mixture)
    (lowest, highest), _ = log_ratio(mixture, np.array([low, high]))
    first, last = math.floor(lowest / discretization), math.ceil(highest / discretization)
    check_size(last - first + 1, discretization)
    levels = np.arange(first, last + 1) * discretization
    y = invert_log_ratio(mixture, levels, low, high) / mixture.stddev
    above, below = special.ndtr(-y), special.ndtr(y)  # of N(0, stddev^2)
    shifts, smaller = mixture.counts / mixture.stddev, np.minimum(above, below)
    gained = _gained(shifts, mixture.probs, y, above, below)
    moved = gained + mixture.probs[mixture.counts > 0].sum() * smaller
    log_above = special.log_ndtr(-y)
    if mixture.others is not None and mixture.other_probs is not None:
        shifts, probs = mixture.others / mixture.stddev, mixture.other_probs
        gained = gained - _gained(-shifts, probs, y, above, below)
        moved = moved + gained + probs[mixture.others > 0].sum() * smaller
        log_above = _log_mass_below(shifts, probs, -y)
        below = np.exp(_log_mass_below(-shifts, probs, y))
    return _Crossings(mixture, discretization, first, levels, y, log_above, below, gained, moved)


def _remove(at: _Crossings) -> DensePLDPmf:
    """REMOVE from upper bounds on H_{e^level}(P, Q) = S - (e^level - 1) Q(Y > y)."""
    # S = P(Y > y) - Q(Y > y): at a small sampling probability no difference of numbers near one.
    paid = _expm1_times(at.levels, at.above)
    deltas = at.gained - paid + at.mixture.tail * at.below
    deltas += _ROUNDING * (1 + np.abs(at.levels)) * (at.moved + np.abs(paid))
    return _connect_dots(at.discretization, at.first, _monotone(deltas, at.mixture.told))


def _add(at: _Crossings) -> DensePLDPmf:
    """ADD from upper bounds on H_{e^-level}(Q, P) = e^-level S - (e^-level - 1) Q(Y < y)."""
    # The grid ends where Q does: the little that is below is counted as if it were at the end.
    end = np.array([-special.ndtri(COMPOSED_TAIL_MASS) * at.mixture.stddev])
    size = math.ceil(float(log_ratio(at.mixture, end)[0][0]) / at.discretization) - at.first + 1
    kept = slice(0, max(2, size))
    levels, y, below = at.levels[kept], at.y[kept], at.below[kept]
    # Q(Y < y) - e^-level P(Y < y) does not cancel at losses above one.
    far, near = levels < -1, np.maximum(levels, -1)
    deltas = np.exp(-near) * (at.gained[kept] + at.mixture.tail * below) - np.expm1(-near) * below
    shifts = at.mixture.counts / at.mixture.stddev
    mass = _log_mass_below(shifts, at.mixture.probs, y[far])
    deltas[far] = below[far] - np.exp(mass - levels[far])
    error = np.exp(-near) * at.moved[kept] + np.abs(np.expm1(-near)) * below
    deltas += _ROUNDING * (1 + np.abs(levels)) * error
    losses = -(at.first + levels.size - 1)
    return _connect_dots(at.discretization, losses, _monotone(deltas[::-1], at.mixture.told))


def _gained(
    shifts: np.ndarray, probs: np.ndarray, y: np.ndarray, above: np.ndarray, below: np.ndarray
) -> np.ndarray:
    """sum_k probs[k] (P(Z + shifts[k] > y) - P(Z > y)), Z ~ N(0, 1), by small tails."""
    gained = np.zeros_like(y)
    finite = np.flatnonzero(np.isfinite(y))
    for block in _blocks(finite.size, shifts.size):
        index = finite[block]
        shifted = np.subtract.outer(y[index], shifts)
        sign = np.where(y[index] > 0, -1.0, 1.0)
        tail = np.where(y[index] > 0, above[index], below[index])
        differences = tail[:, None] - special.ndtr(sign[:, None] * shifted)
        gained[index] = sign * (differences @ probs)
    return gained


def _log_mass_below(shifts: np.ndarray, probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """log sum_k probs[k] P(Z + shifts[k] < y), Z ~ N(0, 1); hugely negative, not -inf, at -inf."""
    log_mass = np.empty_like(y)
    for block in _blocks(y.size, shifts.size):
        shifted = np.subtract.outer(np.maximum(y[block], -1e9), shifts)
        terms = np.log(probs) + special.log_ndtr(shifted)
        largest = terms.max(axis=1)
        log_mass[block] = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return log_mass


def _expm1_times(levels: np.ndarray, log_mass: np.ndarray) -> np.ndarray:
    """(e^level - 1) mass, without overflow where e^level is huge and the mass tiny."""
    with np.errstate(divide="ignore"):
        log_magnitude = np.maximum(levels, 0) + np.log(-np.expm1(-np.abs(levels)))
    return np.sign(levels) * np.exp(log_magnitude + log_mass)


def _monotone(deltas: np.ndarray, told: float) -> np.ndarray:
    """Non-increasing probabilities, each at least its input plus TAIL_MASS and `told`."""
    return np.minimum(np.maximum.accumulate(deltas[::-1] + (TAIL_MASS + told))[::-1], 1.0)


def _support(mixture: Mixture) -> tuple[float, float]:
    """[low, high] outside which Q has at most TAIL_MASS below, and P above."""
    low = -float(special.ndtri(TAIL_MASS / 2)) * mixture.stddev
    if mixture.others is not None and mixture.other_probs is not None:
        low = _end(mixture.stddev, mixture.others, mixture.other_probs)
    return -low, _end(mixture.stddev, mixture.counts, mixture.probs)


def _end(stddev: float, counts: np.ndarray, probs: np.ndarray) -> float:
    """The y, rounded up, above which sum_k probs[k] N(counts[k], stddev^2) has TAIL_MASS / 2."""
    reach = -float(special.ndtri(TAIL_MASS / 2)) * stddev

    def excess(y: float) -> float:
        above = probs @ special.ndtr((counts - y) / stddev)
        return math.log(max(above, 1e-300) / TAIL_MASS) + math.log(2)

    end, precision = reach + counts[-1] + stddev, 1e-3 * stddev
    return optimize.root_scalar(excess, bracket=(0.0, end), xtol=precision).root + precision


def _interpolate(
    level: np.ndarray, slope: np.ndarray, cell: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    """Place in its cell of a table where each level is reached, in [0, 1]: a Hermite cubic."""
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = np.diff(level)
        start, stop = (np.fmin(rise / end, 3.0)[cell - 1] for end in (slope[:-1], slope[1:]))
        part = np.clip((levels - level[cell - 1]) / rise[cell - 1], 0.0, 1.0)
    rest = 1 - part
    return part * (part * (3 - 2 * part - stop * rest) + start * rest**2)


def _newton_step(
    mixture: Mixture, levels: np.ndarray, y: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One step towards L(y) = level, and the narrowed bracket around the root."""
    value, slope = log_ratio(mixture, y)
    left, right = np.where(value < levels, y, left), np.where(value < levels, right, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        target = y - (value - levels) / slope
    inside = (target >= left) & (target <= right)
    return np.where(inside, target, (left + right) / 2) - y, left, right


def _connect_dots(discretization: float, first: int, deltas: np.ndarray) -> DensePLDPmf:
    """The loss whose privacy curve joins the `deltas` by lines in e^epsilon: an upper bound."""
    # Doroshenko et al. 2022, Algorithm 1.
    falls, gap = np.diff(deltas), math.expm1(discretization)
    probs = np.empty_like(deltas)
    probs[0] = 1 - deltas[0] + falls[0] / gap
    probs[1:-1] = (falls[1:] - falls[:-1] * (1 + gap)) / gap
    probs[-1] = falls[-1] / math.expm1(-discretization)
    return DensePLDPmf(discretization, first, np.maximum(probs, 0), float(deltas[-1]), True)


def _blocks(rows: int, columns: int) -> list[slice]:
    """Slices of rows such that rows * columns numbers stay within _BLOCK."""
    step = max(1, _BLOCK // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]
