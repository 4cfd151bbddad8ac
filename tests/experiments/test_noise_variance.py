"""Section 3: the formulas by hand, and the paper's findings on a few cells of its grid."""

import math

import pytest
from refused import refuses

from experiments.harness.noise_variance import (
    Setting,
    aligned_grad_norm,
    els_noise_variance,
    orthogonal_grad_norm,
    uls_noise_variance,
)
from fedsim import accounting
from fedsim.tuning.estimates import noise_stddev

SETTING = Setting(num_users=64, num_steps=20, epsilon=2.0, delta=1e-5)


def sigma(prob, group):
    return accounting.noise_multiplier(
        epsilon=2.0, delta=1e-5, num_steps=20, sampling_prob=prob, max_contributions=group
    )


def test_formulas():
    els = els_noise_variance(SETTING, batch_size=32, group_size=4)
    assert els == pytest.approx((sigma(32 / (4 * 64), 4) * 10 / 32) ** 2)
    uls = uls_noise_variance(SETTING, batch_size=32, group_size=4, user_grad_norm=3.0)
    assert uls == pytest.approx((sigma(8 / 64, 1) * 3 / 8) ** 2)


def test_equal_where_every_group_is_one_example():
    els = els_noise_variance(SETTING, batch_size=16, group_size=1)
    uls = uls_noise_variance(SETTING, batch_size=16, group_size=1, user_grad_norm=10.0)
    assert els == uls


def test_gradient_norms_of_both_extremes():
    assert aligned_grad_norm(10.0, 16) == 10.0
    assert orthogonal_grad_norm(10.0, 16) == 2.5


def test_group_size_of_els_hardly_matters():
    """Figure 2a, on a smaller budget of steps."""
    values = [els_noise_variance(SETTING, batch_size=32, group_size=group) for group in (1, 4, 32)]
    assert max(values) < 1.25 * min(values)


def test_els_is_better_when_gradients_agree_and_uls_when_they_are_orthogonal():
    """Figure 2b at its largest budget: all of a user's examples, small epsilon."""
    setting = Setting(num_users=64, num_steps=20, epsilon=1.0, delta=1e-5)
    els = els_noise_variance(setting, batch_size=128, group_size=16)
    aligned, orthogonal = (
        uls_noise_variance(setting, batch_size=128, group_size=16, user_grad_norm=norm)
        for norm in (10.0, 10.0 / math.sqrt(16))
    )
    assert orthogonal < els < aligned


def test_budgets_beyond_the_data_are_refused():
    with refuses("sampling_prob=2.0"):
        els_noise_variance(SETTING, batch_size=256, group_size=2)
    with refuses("sampling_prob=4.0"):
        uls_noise_variance(SETTING, batch_size=256, group_size=1, user_grad_norm=1.0)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_equation_5_compares_the_noise_of_equal_budgets(group):
    """sigma_ELS 2, sigma_ULS 1.5, L_ELS 10, L_ULS 6: ELS has less noise where G >= 20 / 9."""
    els = noise_stddev(10.0, 2.0, 64)
    uls = noise_stddev(6.0, 1.5, 64 / group)
    assert (els <= uls) == (10 * 2 <= group * 6 * 1.5) == (group >= 3)
