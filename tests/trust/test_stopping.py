"""A run that is stopped by looking at what it released claims no less than what that gives away."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from scipy.signal import fftconvolve
from test_console import PLAN

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.accounting.accountant import _one_direction
from fedsim.accounting.composition import REMOVE
from fedsim.config import Algorithm
from fedsim.plan import SamplingPlan, accounted_events

GRID = 0.005
RUN = dataclasses.replace(
    PLAN,
    algorithm=Algorithm.ULS,
    num_steps=200,
    noise_multiplier=1.07998,
    num_units=10_000,
    sampling=SamplingPlan("poisson", 0.0426098),
    expected_count=426,
)
EVENT = RUN.event()


@functools.cache
def epsilon(phases):
    return accounting.epsilon(phases, RUN.delta)


def worst(claims):
    """delta of {number of steps: epsilon claimed of a run that ended there} against an adversary
    who looks at every release, and may stop the run after any of these numbers of steps.

    Exact dynamic programming over the privacy loss so far: to stop at the loss L is worth
    (1 - e^(epsilon - L))+ of the probability that the claim does not cover.
    """
    pmf = _one_direction(EVENT, GRID, REMOVE)
    size = int((1.4 * epsilon(((EVENT, RUN.num_steps),)) + 4) / GRID)
    losses = np.arange(-size, size + 1) * GRID
    below, above = max(0, -pmf._lower_loss), max(0, pmf._lower_loss + pmf.size - 1)
    start, value = pmf._lower_loss + below, np.zeros(losses.size)
    for step in range(RUN.num_steps, -1, -1):
        if step < RUN.num_steps:
            padded = np.concatenate([np.zeros(below), value, np.full(above, value[-1])])
            further = fftconvolve(padded, pmf._probs[::-1], "valid")
            value = np.clip(further[start : start + losses.size], 0, 1)
        if step in claims:
            value = np.maximum(value, -np.expm1(np.minimum(0.0, claims[step] - losses)))
    return float(value[size])


@pytest.mark.privacy
def test_no_rule_of_stopping_gets_more_than_the_claim():
    ends = [*range(10, 200, 10), 200]
    released = {step: [(EVENT, step)] for step in ends}
    claims = {n: epsilon(tuple(accounted_events(RUN, phases))) for n, phases in released.items()}
    never = worst({RUN.num_steps: epsilon(((EVENT, RUN.num_steps),))})
    assert RUN.delta * 0.99 < never < 1.03 * RUN.delta
    assert worst(claims) <= never * (1 + 1e-6)
    as_if_fixed = {step: epsilon(tuple(phases)) for step, phases in released.items()}
    assert worst(as_if_fixed) > 5 * RUN.delta  # so the search sees what looking is worth


def test_what_is_claimed_is_all_that_was_planned_once_anything_was_released():
    plan = dataclasses.replace(RUN, group_size_epsilon=0.5)
    before, whole = plan.before, (EVENT, 200)
    assert accounted_events(plan, []) == [] and accounted_events(plan, None) is None
    assert accounted_events(plan, before) == [*before, whole]
    assert accounted_events(plan, [*before, (EVENT, 3)]) == [*before, whole]
    assert accounted_events(plan, [*before, whole]) == [*before, whole]
    # What the ledger says is never left out, whatever the plan says.
    other = StepEvent(0.5, 1.0)
    assert accounted_events(RUN, [(EVENT, 201)]) == [(EVENT, 201)]
    assert accounted_events(RUN, [(EVENT, 2), (other, 5)]) == [(EVENT, 2), (other, 5), (EVENT, 193)]


def test_steps_of_a_cycle_that_was_begun_are_not_counted_twice():
    plan = dataclasses.replace(RUN, sampling=SamplingPlan("cyclic", 0.01, 8), num_steps=40)
    event = plan.event()
    assert event.cycle == 8
    stopped = accounting.epsilon(accounted_events(plan, [(event, 3)]), RUN.delta)
    assert stopped == accounting.epsilon([(event, 40)], RUN.delta) < math.inf
