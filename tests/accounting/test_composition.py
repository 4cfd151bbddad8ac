"""Composed losses against closed forms, dp_accounting and each other; what is truncated is paid."""

import math

import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import DensePLDPmf
from losses import compose, epsilon_at, one_step
from scipy import stats

from fedsim.accounting import composition, mixture


@pytest.mark.parametrize("delta", [0.5, 1e-2, 1e-6, 1e-10])
def test_epsilon_at_is_the_search_of_dp_accounting(delta):
    one = one_step(mixture.binomial_mixture(1.0, 4, 0.1), 2**-9)
    for steps in (1, 30):
        composed = compose([(one, steps)])
        expected = composed.get_epsilon_for_delta(delta)
        assert epsilon_at(composed, delta) == pytest.approx(expected, rel=1e-9)
    assert epsilon_at(composed, 1e-17) == math.inf


def test_deltas_of_huge_epsilons_are_not_too_small():
    one = one_step(mixture.binomial_mixture(1.0, 40, 1.0), 2**-7)
    epsilons = np.array([600.0, 690.0, 900.0, 2000.0])
    found = composition.deltas_at(one._pmf_remove, epsilons)
    exact = [one.get_delta_for_epsilon(epsilon) for epsilon in epsilons]
    assert found[:2] == pytest.approx(exact[:2], rel=1e-6) and (found[2:] >= exact[2:]).all()
    epsilon = epsilon_at(one, 1e-6)
    upper, lower = (stats.norm.logsf(epsilon / 40 + shift) for shift in (-20, 20))
    assert math.exp(upper) - math.exp(epsilon + lower) == pytest.approx(1e-6, rel=1e-4)


def test_three_different_losses_in_one_go_are_the_same_one_by_one():
    """With counts of one, and sizes that differ, against plain convolution."""
    grid = 2**-6
    steps = [
        (mixture.one_step_pmf(mixture.binomial_mixture(*setting), grid, composition.REMOVE), count)
        for setting, count in (((1.0, 2, 0.1), 1), ((2.0, 1, 0.3), 3), ((0.8, 1, 1.0), 1))
    ]
    composed = composition.compose_pmfs(steps)
    probs, lower = np.ones(1), 0
    for pmf, count in steps:
        for _ in range(count):
            probs, lower = np.convolve(probs, pmf._probs), lower + pmf._lower_loss
    start = composed._lower_loss - lower
    within = probs[start : start + composed.size]
    np.testing.assert_allclose(composed._probs, within, atol=1e-15)
    left_out = probs.sum() - within.sum()
    assert left_out <= composed._infinity_mass <= 1e-14


@pytest.mark.privacy
def test_infinite_losses_of_all_steps_are_infinite_in_the_composition():
    masses, counts = (0.01, 0.2, 0.0), (3, 1, 2)
    steps = [
        (DensePLDPmf(0.5, -1, (1 - mass) * np.array([0.25, 0.5, 0.25]), mass, True), count)
        for mass, count in zip(masses, counts, strict=True)
    ]
    levels = np.array([0.1, 0.3, 0.45])  # below the largest loss
    expected = [steps[0][0].get_delta_for_epsilon(each) for each in levels]
    assert composition.deltas_at(steps[0][0], levels) == pytest.approx(expected)
    composed, mass = composition.compose_pmfs(steps), 1 - 0.99**3 * 0.8
    assert mass <= composed._infinity_mass <= mass + 1e-14
    assert composed._probs.sum() == pytest.approx(1 - mass)
    for pmf, lost in ((composed, mass), (composition.compose_pmfs(steps[:1]), 1 - 0.99**3)):
        assert composition.pmf_epsilon_at(pmf, 0.99 * lost) == math.inf
        assert composition.pmf_epsilon_at(pmf, 1.01 * lost) < math.inf
        assert composition.deltas_at(pmf, np.array([0.1, 600.0])).min() >= lost
    whole = DensePLDPmf(0.5, -1, np.array([0.0]), 1.0, True)
    assert composition.compose_pmfs([*steps, (whole, 1)])._infinity_mass == 1


@pytest.mark.parametrize("steps", [10, 10_000])
def test_truncated_mass_is_below_what_is_paid_for_it(steps):
    pmf = mixture.one_step_pmf(mixture.binomial_mixture(1.0, 1, 0.01), 2**-6, composition.REMOVE)
    wide = np.full(4 * pmf.size * (1 if steps == 10 else 50), 0.0)
    wide[: pmf.size] = pmf._probs
    whole = np.fft.irfft(np.fft.rfft(wide) ** steps, wide.size)
    low, high = composition._composed_range([(pmf, steps)])
    outside = np.concatenate([whole[:low], whole[high + 1 :]])
    assert high - low < 0.8 * wide.size
    assert abs(outside.sum()) <= composition.COMPOSED_TAIL_MASS + 1e-15 * steps


def test_a_composed_grid_beyond_the_memory_cap_is_refused():
    one = one_step(mixture.binomial_mixture(1.0, 4, 0.5), 1e-3)
    with pytest.raises(ValueError, match="expected .* grid points, got"):
        compose([(one, 10**5)])
