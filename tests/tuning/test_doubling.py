"""Algorithm 3 against exhaustive search on objectives that are known, and its competitors."""

import itertools
import math

import pytest

from fedsim import accounting
from fedsim.tuning import doubling
from fedsim.tuning.doubling import Configuration, Limits, estimate_and_double

GRID = [Configuration(2**i, 2**j) for i, j in itertools.product(range(9), range(5, 13))]


def sigma(cohort):
    """Like a real one: falls no faster than 1/M, and levels off."""
    return 0.5 + 60 / cohort


def norms_with(shared):
    """L(G) of users whose gradients share a part of this squared size; the rest is orthogonal."""
    return lambda group: math.sqrt(shared + (1 - shared) / group)


@pytest.mark.parametrize("shared", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("power", range(5, 13))
def test_it_finds_the_optimum_of_known_norms_and_noise(shared, power):
    """Both factors are log-convex, so a local choice is a global one; it starts at (1, 32)."""
    norm, limits = norms_with(shared), Limits(2**8, 2**12)
    fitting = [at for at in GRID if at.batch_size == 2**power]
    best = min(fitting, key=lambda at: norm(at.group_size) * sigma(at.cohort_size))
    assert estimate_and_double(2**power, norm, sigma, limits=limits) == best


def test_it_doubles_the_group_exactly_where_that_shrinks_the_noise_more():
    """And asks only for what it needs, up to twice what it chooses."""
    chosen = estimate_and_double(256, {1: 8, 2: 5, 4: 4.6}.get, {32: 4, 64: 3, 128: 2}.get)
    assert chosen == Configuration(2, 128)
    tie = estimate_and_double(64, lambda group: 1 / group, lambda cohort: 1 / cohort)
    assert tie == Configuration(1, 64)


def test_a_budget_that_is_no_power_of_two_is_reached_from_below():
    assert estimate_and_double(100, norms_with(0.1), sigma).batch_size == 128


def test_limits_are_never_left():
    """64 users: the cohort cannot grow beyond them, however much it would help."""
    flat = norms_with(1.0)
    for budget, limits, chosen in (
        (512, Limits(cohort_size=64), Configuration(8, 64)),
        (10**9, Limits(4, 64), Configuration(4, 64)),
    ):
        assert estimate_and_double(budget, flat, sigma, limits=limits) == chosen


def test_the_noise_of_uls_is_theorem_2s_multiplier_over_the_cohort():
    noise = doubling.uls_noise(3.0, 1e-5, 10, 400)
    target = {"epsilon": 3.0, "delta": 1e-5, "num_steps": 10}
    assert noise(40) == accounting.noise_multiplier(**target, sampling_prob=0.1) / 40
