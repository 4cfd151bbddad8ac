"""Composition of discretised privacy losses on a fine enough grid, and epsilon of the result.

Chernoff bounds say what may be truncated, as in dp_accounting, whose types are used. The FFT runs
in extended precision, and its rounding error is paid for in delta: 4e-19 per step, which is four
times the observed error; where long double is only double (some ARM machines), 1e-15. This module
is independent of mechanisms: `accountant` passes the losses, and the query on the result.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import fft, signal

from fedsim.errors import ConfigError

COMPOSED_TAIL_MASS = 1e-15
"""Probability that composition may send to infinite loss, as dp_accounting's default."""

LARGEST_DELTA = 1 - 1e-6
"""Closer to one, sums of probabilities are not resolved; epsilon is that of this delta."""

MAX_GRID_POINTS = 2**23
"""Longest discretised privacy loss, before or after composition: about half a gigabyte."""

MAX_EXPONENT = 700.0
"""Largest epsilon whose exponential is a number."""

REMOVE, ADD = 0, 1
"""The two directions of adjacency, as indices into what `directions` returns."""

_FFT_ROUNDING = 4 * float(np.finfo(np.longdouble).eps)  # probability per step, either way


class GridTooLargeError(ConfigError):
    """A privacy loss that does not fit into MAX_GRID_POINTS at its discretization."""


def compose_pmfs(steps: Sequence[tuple[DensePLDPmf, int]]) -> DensePLDPmf:
    """The sum of losses, each repeated its number of times, by one FFT in extended precision.

    Mass outside the composed grid and the rounding of the FFT are bounded and go to infinite loss.
    Raises: GridTooLargeError: the composed grid would be longer than MAX_GRID_POINTS.
    """
    grid = steps[0][0]._discretization
    if [count for _, count in steps] == [1]:
        return steps[0][0]
    if any(pmf._infinity_mass >= 1 for pmf, _ in steps):
        return DensePLDPmf(grid, 0, np.zeros(1), 1.0, True)
    low, high = _composed_range(steps)
    check_size(high - low + 1, grid)
    longest = max(pmf.size for pmf, _ in steps)
    length = fft.next_fast_len(max(high - low + 1, longest), real=True)
    spectra = [
        _power(np.asarray(fft.rfft(pmf._probs.astype(np.longdouble), length)), count)
        for pmf, count in steps
    ]
    wrapped = np.asarray(fft.irfft(functools.reduce(np.multiply, spectra), length))
    finite = sum(count * math.log1p(-pmf._infinity_mass) for pmf, count in steps)
    paid = COMPOSED_TAIL_MASS + _FFT_ROUNDING * sum(count for _, count in steps)
    return DensePLDPmf(
        grid,
        sum(count * pmf._lower_loss for pmf, count in steps) + low,
        np.roll(wrapped, -low)[: high - low + 1].astype(np.float64),
        paid - math.expm1(finite),
        True,
    )


def directions(pld: PrivacyLossDistribution) -> tuple[DensePLDPmf, DensePLDPmf]:
    """The REMOVE and ADD halves; the library has no accessor."""
    return pld._pmf_remove.to_dense_pmf(), pld._pmf_add.to_dense_pmf()


def check_size(size: int, discretization: float) -> None:
    """Raise GridTooLargeError for grids that need more memory than allowed."""
    if size > MAX_GRID_POINTS:
        raise GridTooLargeError.of(
            "discretization",
            f"{discretization:g}",
            f"a privacy loss of at most {MAX_GRID_POINTS} grid points, got {size}: raise "
            "noise_multiplier or discretization",
        )


def least_delta(num_steps: int) -> float:
    """The delta below which epsilon is infinite after num_steps steps, whatever the noise."""
    return 1.01 * (COMPOSED_TAIL_MASS + _FFT_ROUNDING * num_steps)  # a hundredth for tails of steps


def pmf_epsilon_at(pmf: DensePLDPmf, delta: float) -> float:
    """The smallest epsilon >= 0 for this delta, in one direction; inf if there is none.

    The library's own search underflows for losses above 700.
    """
    delta = min(delta, LARGEST_DELTA)
    if pmf._infinity_mass > delta:
        return math.inf
    grid, descending = pmf._discretization, pmf._probs[::-1]
    reached = pmf._infinity_mass + np.cumsum(descending)
    if delta > 0.5:  # a part of all probabilities is lost to rounding: here it would matter
        reached += max(0.0, 1 - reached[-1])
    # paid[j] = sum over losses l >= l_j of p(l) e^(l_j - grid - l), by its recurrence.
    decay = math.exp(-grid)
    paid = np.asarray(signal.lfilter([decay], [1.0, -decay], descending))
    enough = reached - paid > delta
    index = int(np.argmax(enough)) if enough.any() else enough.size - 1
    start = (pmf._lower_loss + pmf.size - 2 - index) * grid
    epsilon = start + math.log((reached[index] - delta) / paid[index])
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)


def deltas_at(pmf: DensePLDPmf, epsilons: np.ndarray) -> np.ndarray:
    """delta at each epsilon >= 0 [n], in one direction; linear in e^epsilon between losses."""
    grid, descending = pmf._discretization, pmf._probs[::-1]
    decay = math.exp(-grid)
    reached = pmf._infinity_mass + np.cumsum(descending)
    paid = np.asarray(signal.lfilter([decay], [1.0, -decay], descending))
    at = (pmf._lower_loss + pmf.size - 2 - np.arange(pmf.size)) * grid
    deltas = np.concatenate([reached[-1:], (reached - paid)[::-1], [pmf._infinity_mass]])
    levels = np.concatenate([[-math.inf], at[::-1], [at[0] + grid]])
    kept = max(2, int(np.searchsorted(levels, MAX_EXPONENT, side="right")))
    places = np.exp(np.minimum(levels[:kept], MAX_EXPONENT))
    # Beyond the last place that is kept, its delta is returned, which is no smaller.
    return np.interp(np.exp(np.minimum(epsilons, MAX_EXPONENT)), places, deltas[:kept])


def _power(spectrum: np.ndarray, exponent: int) -> np.ndarray:
    """spectrum ** exponent by repeated squaring, where the result is above e^-100."""
    kept = np.abs(spectrum.astype(np.complex128)) > math.exp(-100 / exponent)
    base, product = spectrum[kept], np.ones_like(spectrum[kept])
    while exponent:
        if exponent & 1:
            product *= base
        base, exponent = base * base, exponent >> 1
    result = np.zeros_like(spectrum)
    result[kept] = product
    return result


def _composed_range(steps: Sequence[tuple[DensePLDPmf, int]]) -> tuple[int, int]:
    """Indices that contain the composed loss but for COMPOSED_TAIL_MASS, by Chernoff bounds."""
    # A sketch of each loss tells which order is best; the bound is that of the whole loss.
    upper = sum(count * (pmf.size - 1) for pmf, count in steps)
    whole = [(np.arange(pmf.size), pmf._probs, count) for pmf, count in steps]
    sketches = [(*_sketch(positions, probs), count) for positions, probs, count in whole]
    losses, sketches = _with_logarithms(whole), _with_logarithms(sketches)
    longest, bounds = max(pmf.size for pmf, _ in steps), [0, upper]
    for side, sign in ((0, -1), (1, 1)):

        def width(exponent: float, sign: int = sign) -> float:
            return sign * _chernoff(sketches, sign * 2.0**exponent / longest)

        coarse = min(range(-10, 10), key=width)
        best = 2.0 ** min(np.arange(coarse - 0.75, coarse + 1, 0.25), key=width) / longest
        bound = _chernoff(losses, sign * best)
        if math.isfinite(bound):
            bounds[side] = math.floor(bound) if side == 0 else math.ceil(bound)
    return max(0, bounds[0]), min(upper, bounds[1])


def _with_logarithms(
    losses: list[tuple[np.ndarray, np.ndarray, int]],
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """The positions with positive probability, and the logarithm of that probability."""
    positive = [(probs > 0, positions, probs, count) for positions, probs, count in losses]
    return [(at[kept], np.log(probs[kept]), count) for kept, at, probs, count in positive]


def _sketch(positions: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A loss on at most 4096 points, each the middle of the points that it represents."""
    width = -(-positions.size // 4096)
    starts = np.arange(0, positions.size, width)
    return starts + (width - 1) / 2, np.add.reduceat(probs, starts)


def _chernoff(losses: list[tuple[np.ndarray, np.ndarray, int]], order: float) -> float:
    """A bound that sums of `count` draws of each loss rarely cross, from below if order < 0."""
    total = math.log(2 / COMPOSED_TAIL_MASS)
    for positions, logs, count in losses:
        terms = logs + order * positions
        largest = terms.max()  # the end of the grid may have no probability to speak of
        total += count * (largest + math.log(np.exp(terms - largest).sum()))
    return total / order


_LARGEST = 2**18  # composed points: half a second or so

Query = Callable[[DensePLDPmf], np.ndarray]
"""A question about a composed loss in one direction; the larger answer counts."""


def refine(
    compose: Callable[[float], DensePLDPmf],
    query: Query,
    grid: float,
    accuracy: float,
    enough: np.ndarray | None,
) -> tuple[np.ndarray, float]:
    """The query's answer, and the grid that was fine enough for it, starting from `grid`.

    Args:
      compose: discretization -> composed loss, an upper bound.
      accuracy: relative, of the answer.
      enough: answers that need not be refined further; None: there are none.
    Guarantees: an upper bound that is predicted to lie within `accuracy` of the exact answer, or is
      nowhere above `enough`, or comes from a loss of about 2^18 points.
    """
    composed = compose(grid)
    answer, factor = query(composed), 4
    falls: list[tuple[int, np.ndarray]] = []
    while np.isfinite(answer).all() and answer.any():
        factor = min(factor, _LARGEST // composed.size)
        if factor < 2 or (enough is not None and np.all(answer <= enough)):
            break
        grid /= factor
        composed = compose(grid)
        before, answer = answer, query(composed)
        falls.append((factor, (before - answer) / np.maximum(answer, 1e-300)))
        error = _error_left(falls)
        if error <= accuracy:
            break
        factor = int(np.clip(math.ceil(math.sqrt(error / accuracy)), 2, 8))
    return answer, grid


def _error_left(falls: list[tuple[int, np.ndarray]]) -> float:
    """Predicted relative distance of the last answer above the exact one, from how answers fell."""
    # Connecting the dots errs as the grid's width or its square; a third grid tells which.
    factor, fall = falls[-1]
    order = np.ones_like(fall)
    if len(falls) > 1:
        factor_before, fall_before = falls[-2]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = fall_before / fall * (1 - 1 / factor) / (1 - 1 / factor_before)
            seen = np.log(ratio) / math.log(factor_before)
        order = np.where((seen > 1) & (seen < 2.3), np.minimum(seen, 2), 1)
    return float(np.max(fall / (factor**order - 1)))


SHARE = 1e-6
"""Fraction of delta for the unlikely sums of errors."""
BEYOND = 1e-70
"""Bound on the probability that one of 10^18 numbers lies so far out that no eta holds."""
Errors = Sequence[tuple[float, float]]
"""(probability that a number lies there, eta there): several entries where eta is larger far
out."""


class Slack(NamedTuple):
    """(epsilon, delta) to be added for noise that is not ideal."""

    epsilon: float
    delta: float


def slack(count: float, epsilon: float, delta: float, cell_errors: Errors) -> Slack:
    """Slack of a mechanism that draws `count` numbers, against one with ideal noise.

    If that is (epsilon, delta)-DP, the mechanism is (epsilon + slack.epsilon, delta +
    slack.delta)-DP. Proof: let L be the log of the ratio of the probabilities of a number as it is
    drawn and of the ideal one, given the numbers before. |L| is at most b, the largest eta; L^2 has
    a mean of at most v, the mean of eta^2. E[e^-L] = 1, so that 0 <= E[L] <= v e^b / 2. By
    Freedman's inequality the sum of all n is at most

        e = n v e^b / 2 + b l / 3 + sqrt((b l / 3)^2 + 2 n v l),   l = ln(1/d),

    but for a probability of d. So P(real) <= e^e P(ideal) + d and the other way round, for whatever
    is computed from the numbers. `_both_ways` follows.
    """
    if not math.isfinite(epsilon):
        return Slack(0.0, 0.0)
    share = max(delta * SHARE * math.exp(-epsilon), 1e-300)
    largest = max(eta for _, eta in cell_errors)
    variance = count * sum(probability * eta**2 for probability, eta in cell_errors)
    logarithm = -math.log(share)
    linear = largest * logarithm / 3
    error = variance * math.exp(largest) / 2 + linear
    error += math.sqrt(linear**2 + 2 * variance * logarithm)
    return Slack(*map(float, _both_ways(error, share + BEYOND, epsilon, delta)))


def together(parts: Sequence[tuple[float, float]], epsilon: Any, delta: Any) -> tuple[Any, Any]:
    """The slack of mechanisms that together would be (epsilon, delta)-DP with ideal noise.

    Adding up the deltas of their own slacks would not do: each has the factor of its own epsilon.
    Proof: of a part with the slack (2 e, D), d is at most D. The e of `slack` grows no faster than
    ln(1/d), so that with D e^-epsilon in the place of d it is at most e (1 + epsilon / ln(1/D)).
    The sum of all errors exceeds the sum of these e with at most the sum of these probabilities.

    Args:
      parts: slacks, whatever epsilon and delta each of them is for.
      epsilon, delta: numbers, or arrays of one shape; so is what is returned.
    """
    error = missed = 0.0 * epsilon
    if any(part >= 1 for _, part in parts):
        return error + math.inf, missed + 1.0
    for twice, part in parts:
        if part > 0:
            error = error + twice / 2 * (1 + epsilon / -math.log(part))
            missed = missed + part * np.exp(-epsilon) + BEYOND
    return _both_ways(error, missed, epsilon, delta)


def _both_ways(error: Any, missed: Any, epsilon: Any, delta: Any) -> tuple[Any, Any]:
    """(epsilon, delta) to be added, where probabilities with real and ideal noise differ by a
    factor of e^error at most, but for `missed`.

    P(real, D) <= e^e P(ideal, D) + d <= e^e (e^epsilon P(ideal, D') + delta) + d, and P(ideal, D')
    <= e^e P(real, D') + d.
    """
    apart = np.exp(np.minimum(700.0, epsilon + error)) * missed
    return 2 * error, np.minimum(1.0, missed + np.expm1(error) * delta + apart)
