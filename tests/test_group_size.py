"""The private median: its guarantee on neighbours, and its error on real and made-up sizes."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedsim.sampling.contributions import FAILURE, GRID, private_median, rank_error, utility

SHARED = Path(__file__).parents[2] / "shared" / "data"


def probabilities(sizes, epsilon):
    scores = epsilon * utility(np.asarray(sizes))
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def test_the_grid_is_public_and_fine():
    assert (GRID[0], GRID[-1]) == (1, 2**20)
    assert len(GRID) == len(set(GRID)) and np.all(GRID[1:] / GRID[:-1] <= 2)
    assert np.all((GRID[1:] / GRID[:-1])[GRID[1:] > 30] < 1.22)


@pytest.mark.parametrize("sizes", [[1], [3, 3, 9], [1, 2, 4, 8, 500], [7] * 20])
@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_a_user_more_changes_no_probability_by_more_than_e_to_the_epsilon(sizes, epsilon):
    with_all = probabilities(sizes, epsilon)
    for size in (1, 2, 5, 30, 10**6):
        ratio = np.log(probabilities([*sizes, size], epsilon) / with_all)
        assert np.abs(ratio).max() <= epsilon * (1 + 1e-9)
        change = utility(np.array([*sizes, size])) - utility(np.array(sizes))
        assert np.abs(change).max() <= 0.5


def test_without_noise_to_speak_of_it_is_the_median(rng):
    sizes = rng.choice(GRID[:30], 1001)
    assert private_median(sizes, 1e6, rng) == np.median(sizes)


def fails(sizes, epsilon, draws=1000):
    """Of so many draws, how many miss the stated error."""
    found = utility(sizes)
    scores = dict(zip(GRID.tolist(), found, strict=True))
    allowed = found.max() - rank_error(epsilon)
    rng = np.random.default_rng(5)
    return sum(scores[private_median(sizes, epsilon, rng)] < allowed for _ in range(draws))


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_the_error_is_the_stated_one_on_a_heavy_tail(epsilon, rng):
    sizes = np.maximum(1, rng.lognormal(4, 1.5, 3000).astype(int))
    assert fails(sizes, epsilon) <= 1000 * FAILURE
    near = [private_median(sizes, epsilon, rng) for _ in range(200)]
    assert np.median(near) == pytest.approx(np.median(sizes), rel=0.25)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", ["scotus", "reddit_links", "allsides_news"])
@pytest.mark.parametrize("epsilon", [0.05, 0.5])
def test_the_error_is_the_stated_one_on_real_users(name, epsilon):
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    column = "url" if name == "allsides_news" else "user_id"
    users = pq.read_table(SHARED / f"{name}.parquet", columns=[column])[column]
    if name == "allsides_news":
        from fedsim.data.building.user_ids import registrable_domain

        users = [registrable_domain(url) for url in users.to_pylist()]
        sizes = np.unique([user or "" for user in users], return_counts=True)[1]
    else:
        sizes = pc.value_counts(users).field("counts").to_numpy()
    assert fails(sizes, epsilon) <= 1000 * FAILURE
    assert math.isfinite(rank_error(epsilon))
