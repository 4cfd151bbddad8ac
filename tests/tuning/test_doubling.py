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


def optimum(grad_norm, noise, budget):
    fitting = [at for at in GRID if at.batch_size == budget]
    return min(fitting, key=lambda at: grad_norm(at.group_size) * noise(at.cohort_size))


def test_it_starts_with_one_example_of_32_users():
    assert Configuration(1, 32) == doubling.START
    chosen, turns = estimate_and_double(32, norms_with(0.1), sigma)
    assert chosen == doubling.START and turns == []


@pytest.mark.parametrize("shared", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("power", range(6, 13))
def test_it_finds_the_optimum_of_known_norms_and_noise(shared, power):
    """Both factors are log-convex, so a local choice is a global one."""
    limits = Limits(2**8, 2**12)
    chosen, _ = estimate_and_double(2**power, norms_with(shared), sigma, limits=limits)
    assert chosen == optimum(norms_with(shared), sigma, 2**power)


def test_it_doubles_the_group_exactly_where_that_shrinks_the_noise_more():
    chosen, turns = estimate_and_double(256, {1: 8, 2: 5, 4: 4.6}.get, {32: 4, 64: 3, 128: 2}.get)
    assert [(turn.at.group_size, turn.at.cohort_size) for turn in turns] == [
        (1, 32),
        (2, 32),
        (2, 64),
    ]
    assert [turn.tau_group for turn in turns] == [5 / 8, 4.6 / 5, 4.6 / 5]
    assert [turn.tau_cohort for turn in turns] == [3 / 4, 3 / 4, 2 / 3]
    assert chosen == Configuration(2, 128)


def test_a_tie_doubles_the_cohort():
    chosen, _ = estimate_and_double(64, lambda group: 1 / group, lambda cohort: 1 / cohort)
    assert chosen == Configuration(1, 64)


def test_it_asks_only_for_what_it_needs_and_budgets_share_their_path():
    asked = []

    def grad_norm(group):
        asked.append(group)
        return norms_with(0.05)(group)

    small, turns = estimate_and_double(256, grad_norm, sigma)
    assert max(asked) <= 2 * small.group_size
    large, more = estimate_and_double(2048, grad_norm, sigma)
    assert more[: len(turns)] == turns and large.batch_size == 2048


def test_a_budget_that_is_no_power_of_two_is_reached_from_below():
    chosen, _ = estimate_and_double(100, norms_with(0.1), sigma)
    assert chosen.batch_size == 128


def test_limits_are_never_left():
    """64 users: the cohort cannot grow beyond them, however much it would help."""
    limits = Limits(cohort_size=64)
    chosen, turns = estimate_and_double(512, norms_with(1.0), sigma, limits=limits)
    assert chosen == Configuration(8, 64)
    assert turns[-1].tau_cohort == math.inf and turns[-1].tau_group == 1
    chosen, _ = estimate_and_double(10**9, norms_with(1.0), sigma, limits=Limits(4, 64))
    assert chosen == Configuration(4, 64)


def test_the_noise_of_uls_is_theorem_2s_multiplier_over_the_cohort():
    noise = doubling.uls_noise(3.0, 1e-5, 10, 400)
    target = {"epsilon": 3.0, "delta": 1e-5, "num_steps": 10}
    assert noise(40) == accounting.noise_multiplier(**target, sampling_prob=0.1) / 40
