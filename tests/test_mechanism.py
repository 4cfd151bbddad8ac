import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.mechanism import noisy_mean

TREE = {"a": jnp.zeros((300, 100)), "b": jnp.zeros(30_000), "c": jnp.zeros((100, 300))}


def test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count(key):
    for stddev, count in ((3.0, 10.0), (0.5, 1000.0)):
        noise = noisy_mean(TREE, stddev=stddev, count=count, key=key.jax_key("noise", 0))
        for leaf in jax.tree.leaves(noise):
            measured = np.std(np.asarray(leaf, np.float64)) / (stddev / count)
            assert abs(measured - 1) < 5 / np.sqrt(2 * leaf.size)
            assert abs(np.mean(leaf)) < 5 * stddev / count / np.sqrt(leaf.size)


def test_the_noise_of_leaves_and_steps_is_independent(key):
    steps = [noisy_mean(TREE, stddev=1.0, count=1.0, key=key.jax_key("noise", t)) for t in (0, 1)]
    columns = [np.ravel(leaf) for tree in steps for leaf in jax.tree.leaves(tree)]
    correlations = np.corrcoef(columns)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(30_000)


def test_the_same_key_gives_the_same_noise(key):
    twice = [noisy_mean(TREE, stddev=1.0, count=1.0, key=key.jax_key("noise", 4)) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, twice), strict=True))


def test_without_noise_it_is_the_sum_over_the_count(key):
    mean = noisy_mean({"a": jnp.arange(6.0)}, stddev=0.0, count=4.0, key=key.jax_key("noise", 0))
    np.testing.assert_allclose(mean["a"], np.arange(6) / 4)


def test_noise_is_float32_whatever_the_sum_is(key):
    sums = {"a": jnp.ones(1000, jnp.bfloat16)}
    noisy = noisy_mean(sums, stddev=1e-3, count=1.0, key=key.jax_key("noise", 0))["a"]
    assert noisy.dtype == jnp.float32 and len(set(np.asarray(noisy).tolist())) > 900


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan")])
def test_the_count_must_be_positive(key, count):
    with pytest.raises(ValueError, match="count="):
        noisy_mean(TREE, stddev=1.0, count=count, key=key.jax_key("noise", 0))


@pytest.mark.parametrize("stddev", [-1.0, float("nan")])
def test_the_standard_deviation_must_not_be_negative(key, stddev):
    with pytest.raises(ValueError, match="stddev="):
        noisy_mean(TREE, stddev=stddev, count=1.0, key=key.jax_key("noise", 0))
