"""Each guarantee of a sampler has one check."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from problems import users_of_sizes
from scipy import stats

from fedsim.keys import SecretKey
from fedsim.sampling import PADDING, Cyclic, Poisson, draw_groups, limit_contributions, places
from fedsim.sampling.contributions import GRID, utility
from fedsim.sampling.sampler import UNIFORM, _cumulative, binomial

STEPS = 4000


@pytest.fixture(scope="module")
def draws():
    """Membership of 40 units in many steps at p = 1/4, bool [steps, units]."""
    key, sampler = SecretKey.create(seed=1), Poisson(40, 10)
    members = np.zeros((STEPS, 40), bool)
    for step in range(STEPS):
        members[step, sampler.draw(key, step)] = True
    return members


def test_every_unit_is_included_with_the_sampling_probability(draws):
    error = np.sqrt(0.25 * 0.75 / STEPS)
    assert np.abs(draws.mean(axis=0) - 0.25).max() < 5 * error


def test_the_size_of_a_draw_is_binomial(draws):
    sizes = draws.sum(axis=1)
    variance = 40 * 0.25 * 0.75
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(variance / STEPS)
    assert 0.85 < sizes.var() / variance < 1.15  # a fixed-size draw has none


@pytest.mark.parametrize("num_units, prob", [(100, 0.5), (9973, 0.0123457), (9973, 0.7), (50, 1.0)])
def test_the_size_of_a_draw_is_a_sum_of_quantiles(key, num_units, prob):
    """By NumPy's inversion it would be the same number, but for one in 10^13."""
    for step in range(20):
        generators = key.generator("units", step), key.generator("sizes of draws", step)
        found = binomial(num_units, prob, *generators)
        parts = np.array_split(np.arange(num_units), num_units * min(prob, 1 - prob) // 29 + 1)
        uniform, less = key.generator("units", step).random(len(parts)), min(prob, 1 - prob)
        expected = int(stats.binom.ppf(uniform, list(map(len, parts)), less).sum())
        assert found == (expected if prob <= 0.5 else num_units - expected)


@pytest.mark.parametrize("size, prob", [(1, 0.5), (40, 0.25), (300, 0.09), (20, 1e-9)])
def test_sizes_have_the_probabilities_of_a_binomial(size, prob):
    """In exact arithmetic, far out as well: what is off, e^epsilon multiplies in delta."""
    p, exact, left = Fraction(prob), [], Fraction(1)
    mass = (1 - p) ** size
    table = _cumulative(size, prob)
    for k, (before, here) in enumerate(pairwise([0, *table])):
        exact.append(abs(here - before - UNIFORM * mass))
        left -= mass
        mass *= p / (1 - p) * (size - k) / (k + 1)
    assert table[-1] == UNIFORM
    assert sum(exact) + UNIFORM * left < UNIFORM * Fraction(2) ** -300
    found = np.diff([0, *(each / UNIFORM for each in table)])
    np.testing.assert_allclose(
        found[:30], stats.binom.pmf(range(len(table)), size, prob)[:30], 1e-6, 1e-15
    )


def test_units_and_steps_are_independent(draws):
    centred = draws - draws.mean(axis=0)
    pairs = np.corrcoef(draws.T)[np.triu_indices(40, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(STEPS)
    successive = (centred[1:] * centred[:-1]).mean(axis=0) / centred.var(axis=0)
    assert np.abs(successive).max() < 5 / np.sqrt(STEPS)


def test_contributions_are_limited_to_the_group_size(key):
    users = users_of_sizes([1, 0, 7, 2, 3, 4, 20])
    pool = limit_contributions(users.offsets, 3, key)
    assert (np.diff(pool) > 0).all()
    per_user = np.histogram(pool, users.offsets - 0.5)[0]
    np.testing.assert_array_equal(per_user, [1, 0, 3, 2, 3, 3, 3])
    alike = limit_contributions(users_of_sizes([9] * 30).offsets, 3, key).reshape(30, 3) % 9
    assert len(np.unique(alike, axis=0)) > 10  # of 84 that are possible


@pytest.mark.parametrize(
    "draw",
    [
        lambda offsets, n: limit_contributions(offsets, 3, SecretKey.create(seed=n)),
        lambda offsets, n: draw_groups(offsets, [0], 3, SecretKey.create(seed=7), n)[0],
    ],
)
def test_a_pool_and_the_groups_of_steps_are_uniform_over_a_users_examples(draw):
    offsets, counts = users_of_sizes([10]).offsets, np.zeros(10)
    for number in range(2000):
        counts[draw(offsets, number)] += 1
    assert np.abs(counts / 2000 - 0.3).max() < 5 * np.sqrt(0.3 * 0.7 / 2000)


def test_one_users_contributions_do_not_depend_on_the_other_users(key):
    few, many = users_of_sizes([30, 5]).offsets, users_of_sizes([30, 9, 40]).offsets
    first = [pool[pool < 30] for pool in (limit_contributions(o, 4, key) for o in (few, many))]
    np.testing.assert_array_equal(*first)


def test_groups_are_a_users_own_examples_without_repeats(key):
    users = users_of_sizes([2, 9, 4, 0, 3, 5])
    groups = draw_groups(users.offsets, range(6), 4, key, step=3)
    assert groups.shape == (6, 4)
    np.testing.assert_array_equal(groups[0], [0, 1, PADDING, PADDING])
    assert len(set(groups[1])) == 4 and set(groups[1]) <= set(range(2, 11))
    np.testing.assert_array_equal(groups[2], [11, 12, 13, 14])
    np.testing.assert_array_equal(groups[3], [PADDING] * 4)
    np.testing.assert_array_equal(groups[4], [15, 16, 17, PADDING])
    assert len(set(groups[5])) == 4 and set(groups[5]) <= set(range(18, 23))


def test_draws_do_not_change_between_versions():
    """Golden. If this fails, NumPy's streams or the keys changed: a run started before cannot be
    resumed after, so say so in the changelog before updating the numbers."""
    key, offsets = SecretKey.create(seed=0), np.array([0, 9])
    assert Poisson(1000, 5).draw(key, 0).tolist() == [152, 470, 493, 661, 993]
    assert Cyclic(1000, 5, 10).draw(key, 3).tolist() == [315, 596, 784, 875, 940]
    assert limit_contributions(offsets, 3, key).tolist() == [0, 1, 8]
    assert draw_groups(offsets, [0], 3, key, 0).tolist() == [[1, 6, 7]]


def test_places_are_the_pool_with_padding_where_a_user_lacks_examples(key):
    offsets = np.array([0, 2, 2, 7, 8])
    pool = limit_contributions(offsets, 3, key)
    found = places(offsets, pool, 3).reshape(4, 3)
    assert found[0].tolist() == [0, 1, PADDING] and (found[1] == PADDING).all()
    assert (found[2] != PADDING).all() and found[3].tolist() == [7, PADDING, PADDING]
    assert found[found != PADDING].tolist() == pool.tolist()


def test_of_users_of_one_size_this_size_alone_is_the_median():
    assert GRID[utility(np.full(9, 4)) == 0].tolist() == [4]
