"""Formulas of the paper's figures without training, by hand and against the accountant."""

import math

import pytest

from experiments.fig01_accounting import black_box_epsilon
from experiments.fig02_variance import Settings, els_variance, uls_variance
from fedsim import accounting
from fedsim.accounting import StepEvent

FEW = Settings(num_users=64, num_steps=20, delta=1e-5)


def sigma(prob, group):
    return accounting.noise_multiplier(
        epsilon=2.0, delta=1e-5, num_steps=20, sampling_prob=prob, max_contributions=group
    )


def test_noise_variances_are_those_of_equation_7():
    els = els_variance(FEW, 2.0, budget=32, group=4)
    assert els == pytest.approx((sigma(32 / (4 * 64), 4) * 10 / 32) ** 2)
    uls = uls_variance(FEW, 2.0, budget=32, group=4, user_grad_norm=3.0)
    assert uls == pytest.approx((sigma(8 / 64, 1) * 3 / 8) ** 2)
    assert els_variance(FEW, 2.0, 16, 1) == uls_variance(FEW, 2.0, 16, 1, 10.0)


@pytest.mark.slow
def test_black_box_group_privacy_meets_its_formula_and_is_looser():
    single = StepEvent(2.0, 0.01)
    alone = accounting.epsilon([(single, 2000)], 1e-6)
    assert black_box_epsilon(single, 2000, 1e-6) == pytest.approx(alone)
    for group in (2, 8):
        event = StepEvent(2.0, 0.01, group)
        found = black_box_epsilon(event, 2000, 1e-6)
        level = found / group
        delta = accounting.delta([(single, 2000)], level)
        assert delta * math.expm1(found) / math.expm1(level) == pytest.approx(1e-6, rel=5e-2)
        assert found > accounting.epsilon([(event, 2000)], 1e-6)


@pytest.mark.privacy
def test_where_the_least_level_is_enough_it_is_the_bound():
    event = StepEvent(1e6, 0.01, 2)
    found = black_box_epsilon(event, 1, 1e-2)
    assert 0 < found < 1e-5
    delta = accounting.delta([(StepEvent(1e6, 0.01), 1)], found / 2)
    assert delta * math.expm1(found) / math.expm1(found / 2) <= 1e-2
    assert accounting.epsilon([(event, 1)], 1e-2) <= found
