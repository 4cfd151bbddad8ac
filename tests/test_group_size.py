"""The private median: its guarantee on neighbours, and its error on made-up sizes."""

import math

import numpy as np
import pytest
from problems import users_of_sizes

from fedsim.config import PrivacyConfig
from fedsim.keys import SecretKey
from fedsim.plan.defaults import private_group_size
from fedsim.sampling.contributions import (
    FAILURE,
    GRID,
    law_of_median,
    private_median,
    rank_error,
    utility,
)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_user_more_changes_no_probability_by_more_than_e_to_the_epsilon(epsilon):
    most = 0.0
    for sizes in ([1], [3, 3, 9], [1, 2, 4, 8, 500], [7] * 20):
        values, without = law_of_median(np.array(sizes), epsilon)
        np.testing.assert_array_equal(values, GRID)
        for size in (1, 2, 5, 30, 10**6):
            ratio = np.log(law_of_median(np.array([*sizes, size]), epsilon)[1] / without)
            most = max(most, np.abs(ratio).max() / epsilon)
        np.testing.assert_array_equal(law_of_median(np.array([0, *sizes]), epsilon)[1], without)
    assert 0.51 < most <= 1 + 1e-9  # twice the epsilon would be more


@pytest.mark.privacy
def test_the_group_size_of_a_run_is_drawn_with_the_epsilon_that_is_paid():
    sizes, draws = np.array([1, 2, 2, 4, 4, 16]), 4000
    users = users_of_sizes(sizes)
    for epsilon in (0.5, 2.0):
        privacy = PrivacyConfig(4.0, 1, batch_size=1, group_size_epsilon=epsilon)
        found = [private_group_size(privacy, users, SecretKey.create(n)) for n in range(draws)]
        values, probs = law_of_median(sizes, epsilon)
        for most in (1, 2, 4, 10):
            error = np.mean(np.array(found) <= most) - probs[values <= most].sum()
            assert abs(error) < 5 * math.sqrt(0.25 / draws)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_error_is_the_stated_one_on_a_heavy_tail(epsilon, rng):
    sizes = np.maximum(1, rng.lognormal(4, 1.5, 3000).astype(int))
    scores = dict(zip(GRID.tolist(), utility(sizes), strict=True))
    allowed = max(scores.values()) - rank_error(epsilon)
    found = [private_median(sizes, epsilon, rng) for _ in range(1000)]
    assert sum(scores[each] < allowed for each in found) <= 1000 * FAILURE
    assert np.median(found) == pytest.approx(np.median(sizes), rel=0.25)
