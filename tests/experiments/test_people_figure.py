"""Renyi divergences of the figure of several people, against dp_accounting and a closed form."""

import math

import dp_accounting
import numpy as np
import pytest

from experiments.people import ORDERS, group_renyi, renyi
from fedsim import accounting
from fedsim.accounting import StepEvent

WHOLE = np.array([2.0, 3.0, 17.0, 120.0])


def test_divergences_of_one_draw_are_those_of_dp_accounting():
    event = StepEvent(1.3, 0.02)
    accountant = dp_accounting.rdp.RdpAccountant(WHOLE.tolist())
    accountant.compose(event.to_dp_event())
    assert renyi(event, WHOLE) == pytest.approx(accountant._rdp, rel=1e-8)


def test_units_that_are_always_drawn_are_one_that_is_as_many_times_as_large():
    found = renyi(StepEvent(4.0, 1.0, 3), WHOLE)
    assert found == pytest.approx(WHOLE * 9 / (2 * 16), rel=1e-8)


def test_divergences_bound_what_the_curve_bounds():
    event, steps, delta = StepEvent(2.0, 0.01, 4), 100, 1e-6
    divergences = steps * renyi(event, ORDERS)
    for people in (1, 2, 4):
        exact = accounting.epsilon(accounting.for_people([(event, steps)], people), delta)
        assert exact <= group_renyi(divergences, delta, people) < math.inf
