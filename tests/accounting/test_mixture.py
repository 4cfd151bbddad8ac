"""The privacy loss of one step against numerical integration and closed forms."""

import math

import numpy as np
import pytest
from losses import one_step
from scipy import integrate, stats

from fedsim.accounting import composition, mixture

SETTINGS = [
    (1.0, 1, 0.01),
    (0.5, 4, 0.001),
    (2.0, 16, 0.1),
    (4.0, 128, 0.5),
    (0.7, 128, 5e-5),
    (3.0, 5, 1.0),
    (10.0, 1, 1e-5),
]


def exact_deltas(stddev, max_contributions, sampling_prob, epsilon):
    """H(P, Q) and H(Q, P) with every count of the binomial, by quadrature and nothing of fedsim.

    The integrands are q (D - (e^eps - 1)) and q (-(e^eps - 1) - e^eps D), with D = p/q - 1 summed
    so that nothing cancels.
    """
    counts = np.arange(max_contributions + 1)
    probs = stats.binom.pmf(counts, max_contributions, sampling_prob)

    def difference(y):
        return float(probs @ np.expm1((counts * y - counts**2 / 2) / stddev**2))

    def remove(y):
        return stats.norm.pdf(y, 0, stddev) * (difference(y) - math.expm1(epsilon))

    def add(y):
        gap = -math.expm1(epsilon) - math.exp(epsilon) * difference(y)
        return stats.norm.pdf(y, 0, stddev) * gap

    low, high = -12 * stddev, max_contributions + 12 * stddev
    start = _crossing(lambda y: difference(y) - math.expm1(epsilon), low, high)
    stop = _crossing(lambda y: difference(y) - math.expm1(-epsilon), low, high)
    return _integral(remove, start, high, stddev), _integral(add, low, stop, stddev)


def _crossing(increasing, low, high):
    if increasing(low) >= 0:
        return low
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0 else (low, middle)
    return low


def _integral(function, start, stop, stddev):
    points = np.linspace(start, stop, max(2, int((stop - start) / stddev) + 2))
    pieces = zip(points[:-1], points[1:], strict=True)
    return sum(integrate.quad(function, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in pieces)


def test_log_ratio_is_the_ratio_of_the_densities():
    mix = mixture.binomial_mixture(1.5, 6, 0.3)
    y = np.linspace(-5, 12, 50)
    p = sum(w * stats.norm.pdf(y, k, 1.5) for k, w in zip(mix.counts, mix.probs, strict=True))
    value, slope = mixture.log_ratio(mix, y)
    np.testing.assert_allclose(value, np.log(p / stats.norm.pdf(y, 0, 1.5)), atol=1e-12)
    step = 1e-5
    numeric = (mixture.log_ratio(mix, y + step)[0] - mixture.log_ratio(mix, y - step)[0]) / step / 2
    np.testing.assert_allclose(slope, numeric, rtol=1e-7)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s[1] <= 16])
def test_one_step_is_the_integral_at_grid_points_and_above_it_between(setting):
    mix = mixture.binomial_mixture(*setting)
    lowest, highest = mixture.loss_range(mix)
    grid = 2.0 ** math.floor(math.log2((highest - lowest) / 2000))
    remove, add = composition.directions(one_step(mix, grid))
    for index in (0, 3, 40, 300):
        for pmf, at_point, between in zip(
            (remove, add),
            exact_deltas(*setting, index * grid),
            exact_deltas(*setting, (index + 0.5) * grid),
            strict=True,
        ):
            bound = float(pmf.get_delta_for_epsilon(index * grid))
            assert at_point * (1 - 1e-12) <= bound <= at_point * (1 + 1e-9) + 1e-19
            assert between <= float(pmf.get_delta_for_epsilon((index + 0.5) * grid)) <= bound


@pytest.mark.parametrize(
    "group, prob", [(1, 0.3), (128, 5e-5), (4096, 0.5), (4096, 1e-4), (7, 1.0)]
)
def test_counts_left_out_are_all_accounted_for(group, prob):
    mix = mixture.binomial_mixture(1.0, group, prob)
    kept = np.isin(np.arange(group + 1), mix.counts)
    left_out = stats.binom.pmf(np.arange(group + 1), group, prob)[~kept].sum()
    assert left_out <= mix.tail * (1 + 1e-9) <= mixture.TAIL_MASS
    assert mix.probs.sum() == pytest.approx(1, abs=1e-12)


def test_dropping_likely_counts_costs_delta_in_both_directions(monkeypatch):
    """With a tail too large to overlook, both directions must stay above the full mixture."""
    setting = (1.0, 4, 0.1)
    monkeypatch.setattr(mixture, "TAIL_MASS", 2e-2)
    mix = mixture.binomial_mixture(*setting)
    assert mix.counts.size < 5
    monkeypatch.undo()
    remove, add = composition.directions(one_step(mix, 2**-9))
    for epsilon in (0.0, 0.25, 0.375):
        exact_remove, exact_add = exact_deltas(*setting, epsilon)
        assert float(remove.get_delta_for_epsilon(epsilon)) >= exact_remove
        assert float(add.get_delta_for_epsilon(epsilon)) >= exact_add
    assert remove._infinity_mass >= mix.tail


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_probability_is_lost(setting):
    mix = mixture.binomial_mixture(*setting)
    lowest, highest = mixture.loss_range(mix)
    for pmf in composition.directions(one_step(mix, (highest - lowest) / 3000)):
        assert pmf._probs.sum() + pmf._infinity_mass >= 1 - 1e-13
        assert pmf._probs.sum() + pmf._infinity_mass <= 1 + 1e-9
        assert pmf._infinity_mass >= mixture.TAIL_MASS  # what lies beyond the ends of the grid
