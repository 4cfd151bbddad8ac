"""Pure epsilon-DP events against dp_accounting, alone and composed with steps of training."""

import math

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import (
    from_gaussian_mechanism,
    from_randomized_response,
)

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent
from fedsim.accounting.accountant import pure_pmf
from fedsim.errors import ConfigError


def library(epsilon, interval):
    """Randomised response with this epsilon, in dp_accounting's words."""
    noise = 2 / (1 + math.exp(epsilon))
    return from_randomized_response(noise, 2, value_discretization_interval=interval)


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 3.0])
def test_alone_it_costs_its_epsilon_or_less(epsilon):
    for delta in (1e-9, 0.01):
        found = accounting.epsilon([(PureEvent(epsilon), 1)], delta)
        # Of randomised response: e^epsilon - delta (1 + e^epsilon), hence a little less.
        exact = math.log(math.exp(epsilon) - delta * (1 + math.exp(epsilon)))
        assert exact <= found <= exact * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize("epsilon, times", [(0.1, 1), (0.5, 3), (0.05, 40)])
def test_composed_with_training_it_costs_what_dp_accounting_says(epsilon, times):
    """The library rounds losses up to its grid, so its answer is an upper bound of ours."""
    interval, delta = 2.0**-14, 1e-6
    step = StepEvent(2.0, 0.1)
    steps = from_gaussian_mechanism(
        2.0, value_discretization_interval=interval, sampling_prob=0.1
    ).self_compose(60)
    theirs = steps.compose(library(epsilon, interval).self_compose(times))
    expected = theirs.get_epsilon_for_delta(delta)
    found = accounting.epsilon([(PureEvent(epsilon), times), (step, 60)], delta)
    assert found == pytest.approx(expected, rel=2e-3)
    assert found <= expected * (1 + 1e-4)
    apart = accounting.epsilon([(step, 60)], delta)
    assert apart < found < apart + times * epsilon  # composition beats addition


@pytest.mark.parametrize("discretization", [0.5, 0.1, 2.0**-8])
def test_the_discretised_loss_is_an_upper_bound_with_the_masses_of_both_sides(discretization):
    epsilon = 0.37
    pmf = pure_pmf(PureEvent(epsilon), discretization)
    first, probs = pmf._lower_loss, pmf._probs
    losses = (first + np.arange(len(probs))) * discretization
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    assert (probs * np.exp(-losses)).sum() == pytest.approx(1)
    high, low = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    for at in (0.0, 0.1, 0.3, 0.36, 0.5):
        exact = max(0, high - math.exp(at) * low)
        assert pmf.get_delta_for_epsilon(at) >= exact - 1e-12


@pytest.mark.privacy
def test_a_loss_that_rounding_puts_on_a_grid_point_below_it_is_an_upper_bound():
    epsilon = 0.9000000000000001
    assert epsilon / 0.1 == 9  # in floats, and 9 * 0.1 is below it
    found = accounting.epsilon([(PureEvent(epsilon), 1)], 1e-6, discretization=0.1)
    high, low = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    assert math.log((high - 1e-6) / low) <= found < epsilon + 0.1


@pytest.mark.parametrize("epsilon", [800.0, 1e4])
def test_a_release_that_protects_nobody_costs_its_epsilon(epsilon):
    """Where exp(epsilon) is no number any more."""
    assert accounting.epsilon([(PureEvent(epsilon), 1)], 1e-6) == pytest.approx(epsilon, rel=1e-3)
    with pytest.raises(ConfigError, match=r"^before=1000000000000.0: expected less"):
        accounting.epsilon([(PureEvent(1e12), 1)], 1e-6)


def test_calibration_leaves_room_for_what_is_released_before():
    target = {"epsilon": 2.0, "delta": 1e-6, "num_steps": 60, "sampling_prob": 0.1}
    before = [(PureEvent(0.5), 1)]
    sigma = accounting.noise_multiplier(**target, before=before)
    assert sigma > accounting.noise_multiplier(**target)
    spent = accounting.epsilon([*before, (StepEvent(sigma, 0.1), 60)], 1e-6)
    assert 1.999 < spent <= 2.0


def test_the_running_epsilon_starts_with_what_was_released_before():
    before = [(PureEvent(0.5), 1)]
    running = accounting.RunningEpsilon(StepEvent(2.0, 0.1), 1e-6, before)
    assert running(0) == accounting.epsilon(before, 1e-6)
    for steps in (1, 10, 15, 60):
        expected = accounting.epsilon([*before, (StepEvent(2.0, 0.1), steps)], 1e-6)
        assert running(steps) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_a_bad_epsilon_is_named(epsilon):
    with pytest.raises(ValueError, match=f"epsilon={epsilon}: expected > 0"):
        PureEvent(epsilon)
