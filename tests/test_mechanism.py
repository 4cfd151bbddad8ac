import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedsim.mechanism import noisy_mean
from fedsim.noise.independent import BLOCK

TREE = {"a": jnp.zeros((300, 100)), "b": jnp.zeros(30_000), "c": jnp.zeros((100, 300))}


def test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count(key):
    for stddev, count in ((3.0, 10.0), (0.5, 1000.0)):
        noise = noisy_mean(TREE, stddev=stddev, count=count, key=key, step=0)
        for leaf in jax.tree.leaves(noise):
            measured = np.std(np.asarray(leaf, np.float64)) / (stddev / count)
            assert abs(measured - 1) < 5 / np.sqrt(2 * leaf.size)
            assert abs(np.mean(leaf)) < 5 * stddev / count / np.sqrt(leaf.size)


def test_the_noise_of_leaves_and_steps_is_independent(key):
    steps = [noisy_mean(TREE, stddev=1.0, count=1.0, key=key, step=t) for t in (0, 1)]
    columns = [np.ravel(leaf) for tree in steps for leaf in jax.tree.leaves(tree)]
    correlations = np.corrcoef(columns)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(30_000)


def test_the_same_key_gives_the_same_noise(key):
    twice = [noisy_mean(TREE, stddev=1.0, count=1.0, key=key, step=4) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, twice), strict=True))


def test_the_noise_is_normal_far_into_the_tails(key):
    noise = noisy_mean(np.zeros(2**22), stddev=1.0, count=1.0, key=key, step=0)
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    beyond = (np.abs(noise) > 4.5).sum()
    assert abs(beyond - 2**22 * 2 * stats.norm.sf(4.5)) < 5 * np.sqrt(28.5)


def test_every_block_of_a_leaf_has_noise_of_its_own(key):
    noise = noisy_mean(np.zeros(4 * BLOCK), stddev=1.0, count=1.0, key=key, step=0)
    blocks = noise.reshape(4, BLOCK)
    assert np.abs(np.corrcoef(blocks)[np.triu_indices(4, 1)]).max() < 5 / np.sqrt(BLOCK)


def test_bits_do_not_depend_on_the_number_of_cores(key, monkeypatch):
    tree = {"a": np.ones((300, 1000), np.float32)}
    found = []
    for cores in (1, 7):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found.append(noisy_mean(tree, stddev=2.0, count=3.0, key=key, step=5)["a"])
    np.testing.assert_array_equal(*found)


def test_noise_is_added_in_float64_and_rounded_once(key):
    total = np.linspace(-1, 1, 1000, dtype=np.float32)
    noise = key.generator("noise", 2, 0, 0).standard_normal(1000)
    expected = ((total.astype(np.float64) + 0.7 * noise) / 3).astype(np.float32)
    found = noisy_mean(total, stddev=0.7, count=3.0, key=key, step=2)
    np.testing.assert_array_equal(found, expected)


def test_without_noise_it_is_the_sum_over_the_count(key):
    mean = noisy_mean({"a": jnp.arange(6.0)}, stddev=0.0, count=4.0, key=key, step=0)
    np.testing.assert_allclose(mean["a"], np.arange(6) / 4)


def test_noise_is_float32_whatever_the_sum_is(key):
    sums = {"a": jnp.ones(1000, jnp.bfloat16)}
    noisy = noisy_mean(sums, stddev=1e-3, count=1.0, key=key, step=0)["a"]
    assert noisy.dtype == jnp.float32 and len(set(np.asarray(noisy).tolist())) > 900


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan")])
def test_the_count_must_be_positive(key, count):
    with pytest.raises(ValueError, match="count="):
        noisy_mean(TREE, stddev=1.0, count=count, key=key, step=0)


@pytest.mark.parametrize("stddev", [-1.0, float("nan")])
def test_the_standard_deviation_must_not_be_negative(key, stddev):
    with pytest.raises(ValueError, match="stddev="):
        noisy_mean(TREE, stddev=stddev, count=1.0, key=key, step=0)
