"""mu-GDP of steps: never too small, and a sound currency where runs are chosen by looking."""

import math

import numpy as np
import pytest
from scipy import stats

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent, gaussian_delta, gaussian_epsilon, gaussian_mu

TAIL = 1e-9


@pytest.mark.parametrize("sigma", [0.7, 1.0, 3.0])
def test_a_gaussian_mechanism_is_what_it_is_called(sigma):
    mu = gaussian_mu([(StepEvent(sigma, 1.0), 4)], TAIL)
    assert 2 / sigma <= mu < 2 / sigma * 1.002
    assert gaussian_epsilon(2 / sigma, 1e-6) == pytest.approx(
        accounting.epsilon([(StepEvent(sigma, 1.0), 4)], 1e-6), rel=2e-4
    )


def test_pure_dp_has_a_closed_form():
    # Dong et al. 2022: the trade-off of randomised response lies above G_mu for this mu.
    expected = 2 * stats.norm.ppf(math.e / (1 + math.e))
    assert gaussian_mu([(PureEvent(1.0), 1)], TAIL) == pytest.approx(expected, rel=1e-12)
    step = (StepEvent(1.0, 0.3), 3)
    both = gaussian_mu([(PureEvent(1.0), 2), step, (PureEvent(800.0), 0)], TAIL)
    assert both**2 == pytest.approx(2 * expected**2 + gaussian_mu([step], TAIL) ** 2, rel=1e-12)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "phases, tail",
    [
        ([(StepEvent(0.8, 0.05), 50)], TAIL),
        ([(StepEvent(2.0, 0.02, 8), 40)], TAIL),
        ([(StepEvent(1.0, 0.3), 3)], 0.05),
    ],
)
def test_the_curve_lies_below_that_of_the_gaussian(phases, tail):
    mu = gaussian_mu(phases, tail)
    epsilons = np.linspace(0, 12, 60)
    curve = accounting.privacy_curve(phases, epsilons)
    assert np.all(curve <= (1 - tail) * gaussian_delta(epsilons, mu) + tail + 1e-14)
    less = (1 - tail) * gaussian_delta(epsilons, 0.98 * mu) + tail  # and not of a smaller one
    assert np.any(curve > less)


@pytest.mark.privacy
def test_an_adversary_who_chooses_by_looking_stays_within_mu():
    """The second run is chosen by what the first one released, to make delta as large as can be.

    The composition of losses, which takes the second run as fixed, is exceeded; mu is not.
    """
    epsilon, first, size = 1.0, StepEvent(1.0, 0.2), 0.004
    second = [[(StepEvent(0.6, 0.02), 1)], [(StepEvent(4.0, 0.5), 1)], [(StepEvent(3.0, 1.0), 1)]]
    one = accounting.composed_loss([(first, 1)], 1e-9)._pmf_remove.to_dense_pmf()
    losses = (one._lower_loss + np.arange(one.size)) * one._discretization
    grid = np.arange(-6, 8, size)
    choices = np.array([_hockey_stick(phases, grid) for phases in second])

    def exceeded(which):  # delta(epsilon) = E_P1[ H_{e^(epsilon - L)}(second) ]
        reached = np.array([np.interp(epsilon - losses, grid, each) for each in which])
        return float(one._infinity_mass + one._probs @ reached.max(0))

    adaptive, fixed = exceeded(choices), max(exceeded([each]) for each in choices)
    assert adaptive > 1.01 * fixed
    most = max(gaussian_mu(phases, TAIL) for phases in second)
    bound = accounting.delta([(first, 1), (StepEvent(1 / most, 1.0), 1)], epsilon) + TAIL
    assert adaptive <= bound
    # Neither does one who looks at a pure release, such as the draw of a group size.
    pure = math.hypot(most, gaussian_mu([(PureEvent(0.3), 1)], TAIL))
    losses, high = np.array([0.3, -0.3]), 1 / (1 + math.exp(-0.3))
    reached = np.array([np.interp(epsilon - losses, grid, each) for each in choices]).max(0)
    assert reached @ [high, 1 - high] <= gaussian_delta(epsilon, pure) + TAIL


def _hockey_stick(phases, grid):
    """H_{e^x}(P||Q) at each x of a grid, negative ones too: by 1 - e^x + e^x H_{e^-x}(Q||P)."""
    loss = accounting.composed_loss(phases, 1e-9)
    remove, add = loss._pmf_remove, loss._pmf_add
    above = [float(remove.get_delta_for_epsilon(float(x))) for x in grid[grid >= 0]]
    below = [
        1 - math.exp(x) + math.exp(x) * float(add.get_delta_for_epsilon(float(-x)))
        for x in grid[grid < 0]
    ]
    return np.concatenate([below, above])
