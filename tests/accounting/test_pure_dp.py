"""Pure epsilon-DP events: what follows may depend on their outcome, as noise on a group size."""

import math

import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, composition
from fedsim.accounting.accountant import pure_pmf


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 0.7, 3.0, 800.0, 1e4, 1e12])
def test_alone_it_costs_its_epsilon_or_less(epsilon):
    """Also where exp(epsilon) is no number any more."""
    for delta in (1e-9, 0.01):
        found = accounting.epsilon([(PureEvent(epsilon), 1)], delta)
        exact = max(0.0, epsilon + math.log1p(-delta))
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize("epsilon, times", [(0.1, 1), (0.5, 3), (0.05, 40)])
def test_with_training_it_adds_its_epsilon_to_what_dp_accounting_says(epsilon, times):
    interval, delta = 2.0**-12, 1e-6
    steps = from_gaussian_mechanism(
        2.0, value_discretization_interval=interval, sampling_prob=0.1
    ).self_compose(60)
    expected = times * epsilon + steps.get_epsilon_for_delta(delta)
    found = accounting.epsilon([(PureEvent(epsilon), times), (StepEvent(2.0, 0.1), 60)], delta)
    assert found == pytest.approx(expected, rel=1e-3)


def joint_delta(seed, pure, epsilon=0.25, delta=1e-3, grid=1 / 8):
    """delta of a pure release and a second one, which is another mechanism for each outcome of the
    first, run with the probability with which the bound by the loss `pure` is delta there. All
    events are enumerated."""
    rng, found = np.random.default_rng(seed), 0.0
    level = rng.uniform(0.4, 1.0)
    # Every pure mechanism is a mixture of randomised responses, whose mixing is no secret.
    for share, own in ((0.7, epsilon), (0.3, rng.uniform(0, epsilon))):
        for loss in (own, -own):
            drawn, probs = share / (1 + math.exp(-loss)), rng.dirichlet(np.full(8, 0.3))
            losses = (rng.integers(-4, 16) + np.arange(8)) * grid
            up = max(0, math.ceil(math.log(probs @ np.exp(-losses)) / grid))
            losses += up * grid  # now the other distribution has at most 1 there
            second = DensePLDPmf(grid, round(losses[0] / grid), probs, 0.0, True)
            both = composition.compose_pmfs([(pure, 1), (second, 1)])
            bound = float(composition.deltas_at(both, np.array([level]))[0])
            gained = np.maximum(probs * -np.expm1(level - loss - losses), 0).sum()
            found += min(1.0, delta / bound) * drawn * gained
    return found / delta


@pytest.mark.privacy
def test_no_release_that_depends_on_the_outcome_exceeds_the_bound():
    pure = pure_pmf(PureEvent(0.25), 1 / 8)
    assert 0.9 < max(joint_delta(seed, pure) for seed in range(200)) <= 1
    # Planted mistake: the loss of randomised response, as if the second release were fixed.
    high = 1 / (1 + math.exp(-0.25))
    response = DensePLDPmf(1 / 8, -2, np.array([1 - high, 0, 0, 0, high]), 0.0, True)
    assert max(joint_delta(seed, response) for seed in range(200)) > 1.1


@pytest.mark.privacy
@pytest.mark.parametrize("num_steps, share", [(4, 0.05), (200, 0.05), (4, 0.6)])
def test_a_training_whose_noise_follows_the_drawn_size_keeps_its_delta(num_steps, share):
    """Randomised response draws one of two group sizes; each has the noise calibrated for it."""
    epsilon, drawing, delta = 2.0, 0.2, 1e-5
    target = {"epsilon": epsilon, "delta": delta, "num_steps": num_steps}
    levels, curves = np.array([epsilon - drawing, epsilon + drawing]), []
    for size in (1, 4, 64):
        prob = share / size
        sigma = accounting.noise_multiplier(
            **target, sampling_prob=prob, max_contributions=size, before=[(PureEvent(drawing), 1)]
        )
        event = StepEvent(sigma, prob, size)
        curves.append(accounting.privacy_curve([(event, num_steps)], levels))
    more = math.exp(drawing) / (1 + math.exp(drawing))
    worst = max(more * one[0] + (1 - more) * other[1] for one in curves for other in curves)
    assert 0.3 * delta < worst <= delta


@pytest.mark.parametrize("discretization", [0.5, 0.1, 2.0**-8])
def test_the_discretised_loss_is_an_upper_bound_with_the_masses_of_both_sides(discretization):
    epsilon = 0.37
    pmf = pure_pmf(PureEvent(epsilon), discretization)
    losses = (pmf._lower_loss + np.arange(pmf.size)) * discretization
    assert pmf._probs.sum() == pytest.approx(1, abs=1e-12)
    assert pmf._probs @ np.exp(-losses) == pytest.approx(math.exp(-epsilon))
    for at in (0.0, 0.1, 0.3, 0.36, 0.5):
        assert pmf.get_delta_for_epsilon(at) >= max(0, -math.expm1(at - epsilon)) - 1e-12


@pytest.mark.privacy
def test_a_loss_that_rounding_puts_on_a_grid_point_below_it_is_an_upper_bound():
    epsilon = 0.9000000000000001
    assert epsilon / 0.1 == 9  # in floats, and 9 * 0.1 is below it
    found = accounting.epsilon([(PureEvent(epsilon), 1)], 1e-6, discretization=0.1)
    assert epsilon + math.log1p(-1e-6) <= found < epsilon + 0.1


def test_the_running_epsilon_starts_with_what_was_released_before():
    before = [(PureEvent(0.5), 1)]
    running = accounting.RunningEpsilon(StepEvent(2.0, 0.1), 1e-6, before)
    assert running(0) == accounting.epsilon(before, 1e-6)
    for steps in (1, 10, 15, 60):
        expected = accounting.epsilon([*before, (StepEvent(2.0, 0.1), steps)], 1e-6)
        assert running(steps) == pytest.approx(expected, rel=1e-3)
