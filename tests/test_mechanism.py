import math

import jax
import numpy as np
import pytest
from scipy import stats

from fedsim.clipping import Clip
from fedsim.clipping.clip import lattice_bits
from fedsim.errors import ConfigError
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import independent, release_shift, slack
from fedsim.noise.independent import BLOCK, TAIL, add_gaussian, gaussian

ONE = Clip(1.0)
TREE = {name: np.zeros(shape, np.int32) for name, shape in
        {"a": (300, 100), "b": 30_000, "c": (100, 300)}.items()}  # fmt: skip


def noise_of(tree, key, *, stddev=1.0, count=1.0, step=0, clip=ONE):
    """Noise of standard deviation stddev x C / count, as float32."""
    how = {"clip": clip, "noise_multiplier": stddev, "count": count}
    return noisy_mean(tree, **how, key=key, step=step).values()


def test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count(key):
    clips = Clip(0.25), Clip(0.25, normalised=True)
    for sigma, count, clip in ((3.0, 10.0, clips[0]), (0.5, 1000.0, clips[1])):
        noise = noise_of(TREE, key, stddev=sigma, count=count, clip=clip)
        stddev = sigma * clip.sensitivity / count
        for leaf in jax.tree.leaves(noise):
            measured = np.std(np.asarray(leaf, np.float64)) / stddev
            assert abs(measured - 1) < 5 / np.sqrt(2 * leaf.size)
            assert abs(np.mean(leaf)) < 5 * stddev / np.sqrt(leaf.size)


def test_the_noise_of_leaves_and_steps_is_independent(key):
    steps = [noise_of(TREE, key, step=t) for t in (0, 1)]
    columns = [np.ravel(leaf) for tree in steps for leaf in jax.tree.leaves(tree)]
    correlations = np.corrcoef(columns)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(30_000)


def test_the_same_key_gives_the_same_noise(key):
    twice = [noise_of(TREE, key, step=4) for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, twice), strict=True))


def test_the_noise_is_normal_far_into_the_tails(key):
    noise = noise_of(np.zeros(2**22, np.int32), key)
    cell = np.diff(np.unique(noise)).min()  # what was rounded away is put back, for the comparison
    noise = noise + cell * np.random.default_rng(0).uniform(-0.5, 0.5, noise.shape)
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    beyond = (np.abs(noise) > 4.5).sum()
    assert abs(beyond - 2**22 * 2 * stats.norm.sf(4.5)) < 5 * np.sqrt(28.5)


def test_the_tail_is_drawn_again_and_is_the_normal_tail():
    rng = np.random.default_rng(0)
    tail = independent._tail(rng, 200_000)
    assert tail.min() > TAIL
    above = stats.norm.sf(tail) / stats.norm.sf(TAIL)  # uniform if the tail is the normal one
    assert stats.kstest(above, "uniform").pvalue > 1e-4
    numbers = gaussian(np.random.default_rng(1), np.empty(10**6))
    assert (numbers > TAIL).sum() > 50 and (numbers < -TAIL).sum() > 50


def test_exponentials_are_fine_grained_far_out():
    """Of `-log(1 - u)` with u of 53 bits, neighbours at 30 would be a tenth apart."""
    found = independent._exponential(np.random.default_rng(0), 4_000_000)
    assert stats.kstest(found, "expon").pvalue > 1e-4
    assert len(np.unique(found)) == len(found)


def test_every_block_of_a_leaf_has_noise_of_its_own(key):
    noise = noise_of(np.zeros(4 * BLOCK, np.int32), key)
    blocks = noise.reshape(4, BLOCK)
    assert np.abs(np.corrcoef(blocks)[np.triu_indices(4, 1)]).max() < 5 / np.sqrt(BLOCK)


def test_bits_do_not_depend_on_the_number_of_cores(key, monkeypatch):
    tree = {"a": np.ones((3, BLOCK), np.int32)}
    found = []
    for cores in (1, 7):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        found.append(noise_of(tree, key, stddev=2.0, count=3.0, step=5)["a"])
    np.testing.assert_array_equal(*found)


def test_what_is_released_is_a_rounding_of_the_sum_plus_whole_noise(key):
    """So it is computed from sum + noise alone: rounding a whole sum's noise first changes
    nothing, and no digit of the sum shows beside the noise."""
    sums, stddev = np.arange(-500, 500) * 1_000_003, 12345.6
    noise = np.rint(gaussian(key.generator("noise", 2, 0, 0), np.empty(1000)) * stddev)
    shift = release_shift(stddev)
    assert 2**8 <= stddev / 2**shift < 2**9
    expected = np.rint((sums + noise) / 2**shift)
    found = add_gaussian([sums], stddev=stddev, key=key, step=2)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("stddev, dtype", [(2.0**20, np.int32), (3.0, np.int64)])
def test_the_type_of_what_is_released_does_not_depend_on_the_sum(key, stddev, dtype):
    for sums in (np.zeros(5, np.int32), np.full(5, 2**45), np.full(5, -(2**45))):
        assert add_gaussian([sums], stddev=stddev, key=key, step=0)[0].dtype == dtype


def test_neighbours_differ_by_whole_contributions_before_rounding(key):
    """With the same noise, sums that differ by 2^shift k give releases that differ by k; of even k,
    for halves are rounded to even numbers."""
    stddev = 2.0**20
    shift = release_shift(stddev)
    first, second = (
        add_gaussian([np.full(1000, value)], stddev=stddev, key=key, step=0)[0]
        for value in (7, 7 + 4 * 2**shift)
    )
    np.testing.assert_array_equal(second - first, 4)


def test_without_noise_it_is_the_sum_over_the_count(key):
    mean = noise_of({"a": np.arange(6, dtype=np.int32)}, key, stddev=0.0, count=4.0)
    np.testing.assert_allclose(mean["a"], np.arange(6) / 4 * 2.0 ** -lattice_bits(6))
    sums, clip = {"a": np.arange(6, dtype=np.float32)}, Clip(1.0, in_float32=True)
    mean = noise_of(sums, key, stddev=0.0, count=4.0, clip=clip)
    np.testing.assert_allclose(mean["a"], np.arange(6) / 4)
    with pytest.raises(ConfigError, match="noise_multiplier=1.0: expected 0 for float32 sums"):
        noise_of(sums, key, clip=clip)


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan")])
def test_the_count_must_be_positive(key, count):
    with pytest.raises(ValueError, match="count="):
        noise_of(TREE, key, count=count)


@pytest.mark.parametrize("sigma", [-1.0, float("nan")])
def test_the_noise_multiplier_must_not_be_negative(key, sigma):
    with pytest.raises(ValueError, match="noise_multiplier="):
        noise_of(TREE, key, stddev=sigma)


# ---- How far the noise is from the ideal ------------------------------------------------------


def test_the_slack_is_small_where_it_should_be_and_grows_with_the_run():
    small = slack(124_000 * 100, 4.0, 1e-6)
    large = slack(350e6 * 2000, 4.0, 1e-6)
    assert 0 < small.epsilon < 1e-6 < large.epsilon < 1e-4
    assert 0 < small.delta < 1e-8 and large.delta < 1e-8
    assert slack(1e7, math.inf, 1e-6) == (0.0, 0.0)


@pytest.mark.parametrize("eta, count", [(0.02, 400), (0.1, 50)])
def test_the_theorem_holds_for_noise_that_is_as_wrong_as_it_may_be(eta, count, monkeypatch):
    """Coins whose probabilities are off by e^eta: the exact privacy loss of many of them is within
    the bound that `slack` gives for that eta."""
    monkeypatch.setattr(independent, "BEYOND", 0.0)
    ideal = 0.5
    real = ideal * math.exp(eta)
    real = min(real, 1 - ideal * math.exp(-eta))  # both sides of the coin within e^(+-eta)
    heads = np.arange(count + 1)
    ps, qs = stats.binom.pmf(heads, count, real), stats.binom.pmf(heads, count, ideal)
    for delta in (1e-3, 1e-6):
        found = slack(count, 0.0, delta, eta)
        error, missed = found.epsilon / 2, delta * 1e-3
        for p, q in ((ps, qs), (qs, ps)):
            assert np.maximum(p - math.exp(error) * q, 0).sum() <= missed
        assert found.delta >= 2 * missed


def test_streams_are_aes_in_counter_mode_keyed_by_hkdf():
    """Against another implementation of AES and of HKDF (RFC 5869, expand)."""
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = SecretKey(bytes(range(32)))
    derived = hmac.new(bytes(range(32)), b"noise/3/1\x01", hashlib.sha256).digest()[:16]
    encrypt = Cipher(algorithms.AES(derived), modes.ECB()).encryptor()
    for index in (0, 1, 2**40):
        blocks = [(i + (index << 64)).to_bytes(16, "little") for i in range(8)]
        expected = np.frombuffer(b"".join(map(encrypt.update, blocks)), np.uint64)
        found = key.streams("noise", 3, 1).at(index).bit_generator.random_raw(16)
        np.testing.assert_array_equal(found, expected)
