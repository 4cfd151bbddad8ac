"""Privacy loss of one step, N(Binomial(G, p), sigma^2) against N(0, sigma^2): Theorems 1 and 2.

The discretisation (connect the dots), the bounds on what composition truncates and delta at an
epsilon are those of dp_accounting. This module replaces what lies beneath them and takes
dp_accounting 97 % of its time, the inversion of the privacy loss, by vectorised Newton steps on all
grid points at once, and runs the composing FFT in extended precision.

Notation, with y the noisy sum: Q = N(0, sigma^2), P = sum_k p_k N(k, sigma^2) and
L(y) = log P(y)/Q(y), which is increasing and convex. The REMOVE direction is P against Q with loss
L, the ADD direction is Q against P with loss -L.

Every departure from the exact distributions makes the answer larger:
  - Contribution counts in the tails of the binomial (at most TAIL_MASS together) are left out of P.
    The adversary is told when such a count was drawn: infinite loss, with that probability, in
    REMOVE; missing mass in P in ADD. Telling is post-processing undone, so this is an upper bound.
  - Hockey-stick divergences are raised by a bound on their rounding error.
  - Connect the dots and the truncation of the composed loss are upper bounds by construction.
What remains is the rounding error of the FFT. It runs in extended precision, where it is about
1e-18 per step in delta; where long double is only double (some ARM machines), about 1e-15.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from dp_accounting.pld import common, pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, optimize, signal, special, stats

TAIL_MASS = math.exp(-50)
"""Probability of one step that may be sent to infinite loss, as dp_accounting's default."""

COMPOSED_TAIL_MASS = 1e-15
"""Probability that composition may send to infinite loss, as dp_accounting's default."""

MAX_GRID_POINTS = 2**23
"""Longest discretised privacy loss, before or after composition: about half a gigabyte."""

_BLOCK = 2**20  # numbers held at once in a [points, components] array
_ROUNDING = 5e-14  # relative error of scipy.special.ndtr in the tails, with room for the sums


class GridTooLargeError(ValueError):
    """A privacy loss that does not fit into MAX_GRID_POINTS at its discretization."""


class Mixture(NamedTuple):
    """sum_k probs[k] N(counts[k], stddev^2), plus `tail` probability that is told apart."""

    stddev: float
    counts: np.ndarray
    probs: np.ndarray
    tail: float


def binomial_mixture(stddev: float, max_contributions: int, sampling_prob: float) -> Mixture:
    """N(Binomial(max_contributions, sampling_prob), stddev^2), with unlikely counts told apart.

    Guarantees: the counts left out have at most TAIL_MASS probability, which is in `tail`.
    """
    every = np.arange(max_contributions + 1)
    at_most = stats.binom.cdf(every, max_contributions, sampling_prob)
    above = stats.binom.sf(every, max_contributions, sampling_prob)
    low = int(np.count_nonzero(at_most <= TAIL_MASS / 4))
    high = int(np.argmax(above <= TAIL_MASS / 4))
    tail = float(above[high] + (at_most[low - 1] if low else 0.0))
    counts = np.arange(low, high + 1)
    probs = stats.binom.pmf(counts, max_contributions, sampling_prob)
    return Mixture(stddev, counts.astype(np.float64), probs, tail)


def log_ratio(mixture: Mixture, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L(y) = log P(y)/Q(y) and its derivative, for y of any length."""
    variance = mixture.stddev**2
    constants = np.log(mixture.probs) - mixture.counts**2 / (2 * variance)
    value, slope = np.empty_like(y), np.empty_like(y)
    for block in _blocks(y.size, mixture.counts.size):
        terms = constants + np.multiply.outer(y[block] / variance, mixture.counts)
        largest = terms.max(axis=1)
        terms = np.exp(terms - largest[:, None])
        total = terms.sum(axis=1)
        value[block] = largest + np.log(total)
        slope[block] = terms @ mixture.counts / (total * variance)
    return value, slope


def invert_log_ratio(mixture: Mixture, levels: np.ndarray, low: float, high: float) -> np.ndarray:
    """The y in [low, high] with L(y) = level, for each of the increasing `levels`.

    Levels that L does not reach within [low, high] get -inf or +inf. A table of L brackets every
    root; Newton steps, kept inside the bracket, converge quadratically because L is convex.
    The divergence is stationary in y, so an error of 1e-9 sigma in y is one of 1e-18 in delta.
    """
    spread = float(np.ptp(mixture.counts)) + 1.0
    cells = int(np.clip((high - low) * spread / mixture.stddev**2, 256, 4096))
    table_y = np.linspace(low, high, cells + 1)
    table_level = np.maximum.accumulate(log_ratio(mixture, table_y)[0])
    cell = np.clip(np.searchsorted(table_level, levels, side="right"), 1, cells)
    left, right = table_y[cell - 1], table_y[cell]
    y = np.clip(np.interp(levels, table_level, table_y), left, right)
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


def one_step_pld(mixture: Mixture, discretization: float) -> PrivacyLossDistribution:
    """The discretised privacy loss of one step, an upper bound in both directions.

    Raises: GridTooLargeError: the grid would be longer than MAX_GRID_POINTS.
    """
    low, high = _support(mixture)
    (lowest, add_lowest, highest), _ = log_ratio(mixture, np.array([low, -low, high]))
    first, last = math.floor(lowest / discretization), math.ceil(highest / discretization)
    check_size(last - first + 1, discretization)
    levels = np.arange(first, last + 1) * discretization
    remove, add = _divergences(mixture, levels, low, high)
    # ADD samples from Q, whose own tail ends the grid; P reaches further.
    add = add[: max(2, math.ceil(add_lowest / discretization) - first + 1)][::-1]
    return PrivacyLossDistribution(
        _connect_dots(discretization, first, remove),
        _connect_dots(discretization, -(first + add.size - 1), add),
    )


def compose(steps: Sequence[tuple[PrivacyLossDistribution, int]]) -> PrivacyLossDistribution:
    """Each step run its number of times.

    Raises: GridTooLargeError: the composed grid would be longer than MAX_GRID_POINTS.
    """
    parts = [
        PrivacyLossDistribution(*(self_compose(pmf, count) for pmf in directions(pld)))
        for pld, count in steps
    ]
    return functools.reduce(lambda one, other: one.compose(other), parts)


def self_compose(pmf: pld_pmf.DensePLDPmf, num_steps: int) -> pld_pmf.DensePLDPmf:
    """DensePLDPmf.self_compose, but with the FFT in extended precision and finer Chernoff orders.

    In double precision the FFT alone errs by up to 1e-15 per step in delta, either way. As in
    dp_accounting, mass outside the composed grid is bounded and goes to infinite loss.
    """
    if num_steps == 1:
        return pmf
    orders = [sign * 4.0**power / pmf.size for sign in (-1, 1) for power in range(5)]
    with np.errstate(over="ignore"):  # tiny masses overflow harmlessly in scipy's logsumexp
        low, high = common.compute_self_convolve_bounds(
            cast(list[float], pmf._probs), num_steps, COMPOSED_TAIL_MASS, orders
        )
    check_size(high - low + 1, pmf._discretization)
    length = fft.next_fast_len(max(high - low + 1, pmf.size), real=True)
    spectrum = np.asarray(fft.rfft(pmf._probs.astype(np.longdouble), length))
    wrapped = np.asarray(fft.irfft(_power(spectrum, num_steps), length))
    probs = np.roll(wrapped, -low)[: high - low + 1]
    return pld_pmf.DensePLDPmf(
        pmf._discretization,
        pmf._lower_loss * num_steps + low,
        probs.astype(np.float64),
        COMPOSED_TAIL_MASS - math.expm1(num_steps * math.log1p(-pmf._infinity_mass)),
        True,
    )


def epsilon_at(pld: PrivacyLossDistribution, delta: float) -> float:
    """The smallest epsilon >= 0 at which both directions have at most delta; inf if there is none.

    The library's own search underflows for losses above 700.
    """
    return max(_epsilon_at(pmf, delta) for pmf in directions(pld))


def directions(pld: PrivacyLossDistribution) -> tuple[pld_pmf.DensePLDPmf, pld_pmf.DensePLDPmf]:
    """The REMOVE and ADD halves; the library has no accessor."""
    return pld._pmf_remove.to_dense_pmf(), pld._pmf_add.to_dense_pmf()


def check_size(size: int, discretization: float) -> None:
    """Refuses grids that would need more memory than allowed."""
    if size > MAX_GRID_POINTS:
        raise GridTooLargeError(
            f"discretization={discretization:g}: expected a privacy loss of at most "
            f"{MAX_GRID_POINTS} grid points, got {size}: raise noise_multiplier or discretization"
        )


def _power(spectrum: np.ndarray, exponent: int) -> np.ndarray:
    """spectrum ** exponent, by repeated squaring of what does not end below e^-100."""
    kept = np.abs(spectrum.astype(np.complex128)) > math.exp(-100 / exponent)
    base, product = spectrum[kept], np.ones_like(spectrum[kept])
    while exponent:
        if exponent & 1:
            product *= base
        base, exponent = base * base, exponent >> 1
    result = np.zeros_like(spectrum)
    result[kept] = product
    return result


def _epsilon_at(pmf: pld_pmf.DensePLDPmf, delta: float) -> float:
    if pmf._infinity_mass > delta:
        return math.inf
    grid, descending = pmf._discretization, pmf._probs[::-1]
    reached = pmf._infinity_mass + np.cumsum(descending)
    # paid[j] = sum over losses l >= l_j of p(l) e^(l_j - grid - l), by its recurrence.
    decay = math.exp(-grid)
    paid = np.asarray(signal.lfilter([decay], [1.0, -decay], descending))
    enough = reached - paid > delta
    index = int(np.argmax(enough)) if enough.any() else enough.size - 1
    start = (pmf._lower_loss + pmf.size - 2 - index) * grid
    return max(0.0, start + math.log((reached[index] - delta) / paid[index]))


def _divergences(
    mixture: Mixture, levels: np.ndarray, low: float, high: float
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds on H_{e^level}(P, Q) and on H_{e^-level}(Q, P), at every level.

    With L(y) = level and S = P(Y > y) - Q(Y > y), they are S - (e^level - 1) Q(Y > y) and
    e^-level S - (e^-level - 1) Q(Y < y). Written so, a small sampling probability leaves no
    difference of two numbers near one.
    """
    y = invert_log_ratio(mixture, levels, low, high) / mixture.stddev
    above, below = special.ndtr(-y), special.ndtr(y)
    gained = _gained(mixture, y, above, below)
    paid = _expm1_times(levels, special.log_ndtr(-y))
    remove = gained - paid + mixture.tail * below
    # Q(Y < y) - e^-level P(Y < y) is the form of ADD that does not cancel at losses above one.
    far, near = levels < -1, np.maximum(levels, -1)
    add = np.exp(-near) * (gained + mixture.tail * below) - np.expm1(-near) * below
    add[far] = below[far] - np.exp(_log_mass_below(mixture, y[far]) - levels[far])
    rounding = _ROUNDING * (1 + np.abs(levels))
    moved = gained + mixture.probs[mixture.counts > 0].sum() * np.minimum(above, below)
    remove += rounding * (moved + np.abs(paid))
    add += rounding * (np.exp(-near) * moved + np.abs(np.expm1(-near)) * below)
    return _monotone(remove), _monotone(add[::-1])[::-1]


def _gained(mixture: Mixture, y: np.ndarray, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """P(Y > y) - Q(Y > y) for y in units of stddev, as a sum of differences of small tails."""
    gained = np.zeros_like(y)
    finite = np.flatnonzero(np.isfinite(y))
    for block in _blocks(finite.size, mixture.counts.size):
        index = finite[block]
        shifted = np.subtract.outer(y[index], mixture.counts / mixture.stddev)
        sign = np.where(y[index] > 0, -1.0, 1.0)
        tail = np.where(y[index] > 0, above[index], below[index])
        differences = tail[:, None] - special.ndtr(sign[:, None] * shifted)
        gained[index] = sign * (differences @ mixture.probs)
    return gained


def _log_mass_below(mixture: Mixture, y: np.ndarray) -> np.ndarray:
    """log P(Y < y) for y in units of stddev; hugely negative, not -inf, at -inf."""
    log_mass = np.empty_like(y)
    for block in _blocks(y.size, mixture.counts.size):
        shifted = np.subtract.outer(np.maximum(y[block], -1e9), mixture.counts / mixture.stddev)
        terms = np.log(mixture.probs) + special.log_ndtr(shifted)
        largest = terms.max(axis=1)
        log_mass[block] = largest + np.log(np.exp(terms - largest[:, None]).sum(axis=1))
    return log_mass


def _expm1_times(levels: np.ndarray, log_mass: np.ndarray) -> np.ndarray:
    """(e^level - 1) mass, without overflow where e^level is huge and the mass tiny."""
    with np.errstate(divide="ignore"):
        log_magnitude = np.maximum(levels, 0) + np.log(-np.expm1(-np.abs(levels)))
    return np.sign(levels) * np.exp(log_magnitude + log_mass)


def _monotone(deltas: np.ndarray) -> np.ndarray:
    """Probabilities that do not increase, each at least what came in plus the tail of the noise."""
    return np.minimum(np.maximum.accumulate(deltas[::-1] + TAIL_MASS)[::-1], 1.0)


def _support(mixture: Mixture) -> tuple[float, float]:
    """[low, high] outside which Q has at most TAIL_MASS below, and P above."""
    reach = -float(special.ndtri(TAIL_MASS / 2)) * mixture.stddev

    def excess(y: float) -> float:
        above = mixture.probs @ special.ndtr((mixture.counts - y) / mixture.stddev)
        return math.log(max(above, 1e-300) / TAIL_MASS) + math.log(2)

    end = reach + mixture.counts[-1] + mixture.stddev
    precision = 1e-3 * mixture.stddev
    return -reach, optimize.root_scalar(excess, bracket=(0.0, end), xtol=precision).root + precision


def _newton_step(
    mixture: Mixture, levels: np.ndarray, y: np.ndarray, left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One step towards L(y) = level, and the narrowed bracket that it stays in."""
    value, slope = log_ratio(mixture, y)
    left, right = np.where(value < levels, y, left), np.where(value < levels, right, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        target = y - (value - levels) / slope
    inside = (target >= left) & (target <= right)
    return np.where(inside, target, (left + right) / 2) - y, left, right


def _connect_dots(discretization: float, first: int, deltas: np.ndarray) -> pld_pmf.DensePLDPmf:
    """dp_accounting's discretisation of a privacy curve given from grid point `first` on."""
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        discretization, first, first + deltas.size - 1, deltas
    ).to_dense_pmf()


def _blocks(rows: int, columns: int) -> list[slice]:
    """Slices of rows such that rows * columns numbers stay within _BLOCK."""
    step = max(1, _BLOCK // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]
