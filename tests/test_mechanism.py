import decimal
import math
from decimal import Decimal

import jax
import numpy as np
import pytest
from refused import refuses
from scipy import stats

from fedsim.clipping import Clip
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import Correlated, independent, noisy_number, release_shift
from fedsim.noise.correlated import MIDDLE, rounding, strategy
from fedsim.noise.independent import (
    BLOCK,
    CELL_ERRORS,
    CELLS_BITS,
    FARTHEST,
    OUTSIDE,
    TAIL,
    add_gaussian,
    gaussian,
)

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
    raw = np.random.default_rng(1).standard_normal(10**6)
    np.testing.assert_array_equal(numbers == raw, np.abs(raw) <= TAIL)


def test_a_coin_that_shows_63_heads_goes_on():
    """A word of 64 tosses does not end the tail at 15 standard deviations."""

    class Heads:
        words = iter([np.array([0, 8, 0], np.uint64), np.array([0, 1], np.uint64), [np.uint64(4)]])

        def integers(self, low, high, count, dtype, endpoint):
            found = np.array(next(self.words))
            assert len(found) == count
            return found

    assert independent._tosses(Heads(), 3).tolist() == [128, 3, 63]


@pytest.mark.privacy
def test_numbers_far_out_are_as_exact_as_the_slack_says(monkeypatch, rng):
    """All that float64 rounds beyond TAIL, and by what that moves the probability of a cell."""
    count = 2_000
    tosses = rng.integers(0, 87, count)
    monkeypatch.setattr(independent, "_tosses", lambda rng, count: tosses)
    exponential = independent._exponential(np.random.default_rng(5), count)
    drawn = iter([exponential, np.full(count, 1e9)])
    monkeypatch.setattr(independent, "_exponential", lambda rng, count: next(drawn))
    found = independent._tail(rng, count)
    rest, moved, moved_by_stddev, stddev = np.random.default_rng(5).random(count), [], [], 1.37e6
    with decimal.localcontext(prec=60):
        for number, heads, u in zip(found, tosses.tolist(), rest.tolist(), strict=True):
            above = heads * Decimal(2).ln() - (1 - Decimal(u) / 2).ln()
            exact = Decimal(TAIL) + above / Decimal(TAIL)
            if exact <= FARTHEST:
                moved.append(abs(float(Decimal(number) - exact)))
                product = Decimal(number * stddev) / Decimal(stddev)
                moved_by_stddev.append(abs(float(product - exact)))
    assert len(moved) > 1_500
    cell = 2.0 ** -(CELLS_BITS + 1)
    error = 2 * max(moved_by_stddev) / cell * math.exp(FARTHEST * 2 * cell)
    (_, near), (outside, far) = CELL_ERRORS
    assert near < error < far and outside == OUTSIDE
    assert 2 * stats.norm.sf(TAIL - 2 * cell) < OUTSIDE
    plan = strategy(100, 8, 1.37 * 2**20)
    *_, (outside, far) = plan.cell_errors
    assert 2 * max(moved) * plan.stddev + 2 * rounding(FARTHEST * plan.stddev) < far
    assert outside == OUTSIDE


@pytest.mark.privacy
def test_points_of_the_ziggurat_in_a_cell_are_as_many_as_the_slack_says():
    """NumPy's 256 layers of one area: each has points of a grid of its own, x 2^-52 apart for a
    layer that ends at x, rounded to float64: in a cell one more or fewer, and what the rounding
    moves over its ends."""
    area, ends = 0.00492867323399, [TAIL]
    while (height := area / ends[-1] + math.exp(-(ends[-1] ** 2) / 2)) < 1:
        ends.append(math.sqrt(-2 * math.log(height)))
    assert len(ends) == 255
    widest = area / math.exp(-(TAIL**2) / 2)  # of the layer at the bottom, with the tail in it
    assert 3.9107 < widest < 3.911
    ends, plan, worst = np.array([widest, *ends]), strategy(100, 8, 1.37 * 2**20), []
    (_, near), (beyond_two, middle), _ = plan.cell_errors
    for at in [*np.arange(0.0, TAIL, 0.01), TAIL]:
        half_an_ulp = np.spacing(at) / 2
        # Of the shortest layer's points here some are rejected, from none to all.
        for layers in (ends[ends >= at], ends[ends >= at][:-1]):
            points = (1 / layers).sum() * 2.0**52
            more = (1 + 2 * half_an_ulp / layers * 2**52).sum()
            error = plan.stddev * more / points + 2 * rounding(FARTHEST * plan.stddev)
            assert error < (near if at < 2 else middle)
            worst.append(error / near)
            wide = 2.0 ** (CELLS_BITS + 1)  # and the product with the standard deviation is rounded
            assert wide * (more / points + 2 * at * 2.0**-53) + 2.0**-44 < CELL_ERRORS[0][1]
    assert 1.6 < max(worst) < MIDDLE  # near has a hundredth more than it needs, for the slope
    assert 2 * stats.norm.sf(2 - 1e-5) < beyond_two


@pytest.mark.privacy
@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_every_number_of_every_block_leaf_and_step_has_noise_of_its_own(size, bands, key):
    add_noise, stddev, total = Correlated(3, bands), 2.0**30, 2**40
    drawn = []
    for step in range(3):
        sums = [np.full(size, total), np.full(size, total)]
        for leaf in add_noise(sums, stddev=stddev, key=key, step=step):
            noise = (leaf.astype(np.float64) * 2.0 ** release_shift(stddev) - total) / stddev
            assert noise.shape == (size,) and np.abs(noise).max() < 12
            drawn += np.split(noise, range(BLOCK, size, BLOCK))
    for number, one in enumerate(drawn):
        for other in drawn[:number]:
            both = min(len(one), len(other))  # one number in 400 is equal by chance
            assert np.mean(one[:both] == other[:both]) < 0.01 or both < 9
    last = np.array([one[-1] for one in drawn])
    assert len(np.unique(last)) == len(last)


@pytest.mark.privacy
@pytest.mark.parametrize("stddev", [0.3, 700.0, 3.7e6])
def test_a_noisy_number_is_that_of_add_gaussian(stddev, key):
    """On its lattice: a multiple of the cell, a function of the sum and whole noise alone."""
    cell = 2 ** release_shift(stddev)
    for step in range(50):
        total = 10**9 + 12345 * step
        (expected,) = add_gaussian([np.array([total])], stddev=stddev, key=key, step=step)
        found = noisy_number(total, stddev, key.generator("noise", step, 0, 0))
        assert found == int(expected[0]) * cell


@pytest.mark.parametrize("count, stddev", [(1000, 12345.6), (1000, 7e6), (BLOCK, 500.0)])
def test_what_is_released_is_a_rounding_of_the_sum_plus_whole_noise(key, count, stddev):
    """So it is computed from sum + noise alone: rounding a whole sum's noise first changes
    nothing, and no digit of the sum shows beside the noise. Of as many numbers as a block has, some
    would be others if noise were rounded to float32."""
    sums = (np.arange(count) - count // 2) * 1_000_003
    numbers = gaussian(key.generator("noise", 2, 0, 0), np.empty(count))
    assert (numbers.astype(np.float32) != numbers).mean() > 0.99
    noise = np.rint(numbers * stddev)
    shift = release_shift(stddev)
    assert 2**8 <= stddev / 2**shift < 2**9
    expected = np.rint((sums + noise) / 2**shift)
    found = add_gaussian([sums], stddev=stddev, key=key, step=2)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_count_and_noise_that_are_no_numbers_of_either_are_refused(key, value):
    for field, own in {"count": {"count": value}, "noise_multiplier": {"stddev": value}}.items():
        with refuses(field):
            noise_of(TREE, key, **own)
    with refuses("count"):
        noise_of(TREE, key, count=0.0)


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
