"""Estimates of gradient norms where they are known: f(theta, z) = |theta - z|^2 / 2 at 0."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from problems import users_of_sizes

from experiments.mean_task import MeanTask
from fedsim.engine.worker import LocalEngine
from fedsim.tuning.estimates import GradientNorms

WIDTH = 40


def users_sharing(share, num_users=30, size=32, scale=3.0):
    """(task, offsets): a user's examples share a part; what is left of them is orthogonal."""
    points = np.zeros((num_users * size, WIDTH))
    points[:, 0] = math.sqrt(share)
    points[np.arange(len(points)), 1 + np.arange(len(points)) % size] = math.sqrt(1 - share)
    return MeanTask(scale * points), users_of_sizes([size] * num_users).offsets


def norms_of(task, offsets, key, **options):
    engine = LocalEngine(task, num_lanes=4)
    return GradientNorms(engine, jnp.zeros(WIDTH), offsets, key, **options)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_norm_of_a_users_mean_gradient(share, key):
    norms = norms_of(*users_sharing(share), key, num_users=16, max_group_size=8)
    for group in (1, 2, 4, 8, 32):
        expected = 3 * math.sqrt(share + (1 - share) / group)
        assert norms.user_norm(group) == pytest.approx(expected, rel=1e-6)


def test_the_median_is_over_users(key):
    points = np.zeros((50, WIDTH))
    points[:, 0] = np.arange(50)  # user u's one example has norm u
    offsets = users_of_sizes([1] * 50).offsets
    norms = norms_of(MeanTask(points), offsets, key)
    assert norms.user_norm(1) == norms.example_norm(np.arange(50)) == pytest.approx(24.5)
    assert norms_of(MeanTask(points), offsets, key, num_users=7).user_norm(1) != 24.5


def test_short_users_and_users_without_examples(key):
    """A user with fewer than G examples uses all; one with none is not asked."""
    points = np.zeros((5, WIDTH))
    points[np.arange(5), np.arange(5)] = 6.0
    offsets = users_of_sizes([0, 2, 0, 3]).offsets
    norms = norms_of(MeanTask(points), offsets, key, max_group_size=64)
    assert norms.user_norm(64) == pytest.approx(np.median([6 / math.sqrt(2), 6 / math.sqrt(3)]))
