"""What a training released is as long as its noise makes it: right ones are never refuted by it."""

import numpy as np
import pytest
from scipy import stats

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.clipping import Clip
from fedsim.clipping.contribution import lattice_bits
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import Correlated, add_gaussian
from fedsim.noise.correlated import strategy
from fedsim.trust.bounds import ReleasedNoise, audit_noise

WIDTH, STEPS, COUNT, SIGMA, DELTA, SIGNIFICANCE = 400, 12, 4, 1.5, 1e-6, 5e-4
CLAIM = [(StepEvent(SIGMA, 0.1), STEPS)]


def released(trial, *, noise=1.0, bands=1, pull=0.0, heard=True):
    """What an audit saw of a training whose clipped sums are all `pull` clip norms long.

    Args: heard: whether the sums were.
    """
    clip, key, seen = Clip(1.0), SecretKey.create(trial), ReleasedNoise()
    sums = np.full(WIDTH, round(pull / WIDTH**0.5 / clip.unit(WIDTH)), np.int64)
    own, coefficients = {"clip": clip, "count": COUNT, "key": key}, None
    add_noise = Correlated(STEPS, bands) if bands > 1 else add_gaussian
    own["add_noise"] = seen.record_noise(add_noise) if heard else add_noise
    if bands > 1:
        stddev = SIGMA * 2.0 ** lattice_bits(WIDTH)
        coefficients = strategy(STEPS, bands, stddev).coefficients
    for step in range(STEPS):
        found = noisy_mean(sums, noise_multiplier=noise * SIGMA, step=step, **own)
        seen.on_release(found.values(), 1 / COUNT, coefficients)
    return seen


@pytest.mark.privacy
@pytest.mark.parametrize("bands", [1, 4])
def test_the_noise_that_is_claimed_is_never_refuted_and_nine_tenths_are(bands):
    for trial in range(20):
        found = audit_noise(released(trial, bands=bands), CLAIM, DELTA, SIGNIFICANCE)
        assert not found.refuted and found.noise_multiplier > SIGMA
        assert found.numbers == WIDTH * STEPS
    for noise, pull in ((0.0, 0.0), (0.5, 100.0), (0.9, 100.0)):
        seen = released(0, bands=bands, noise=noise, pull=pull)
        found = audit_noise(seen, CLAIM, DELTA, SIGNIFICANCE)
        assert found.refuted and noise * SIGMA <= found.noise_multiplier < SIGMA
        assert found.epsilon > accounting.epsilon(CLAIM, DELTA)


@pytest.mark.parametrize("bands", [1, 4])
def test_the_square_of_released_noise_is_chi_squared(bands):
    """That of all steps together, each with noise of its own, also where it is correlated."""
    seen = [released(trial, bands=bands, pull=50.0) for trial in range(40)]
    levels = [stats.chi2.cdf(each.squares / SIGMA**2, each.numbers) for each in seen]
    assert stats.kstest(levels, "uniform").pvalue > 1e-3


def test_sums_that_are_not_heard_make_what_is_released_longer_only():
    bounds = [
        audit_noise(released(0, pull=pull, heard=heard), CLAIM, DELTA, SIGNIFICANCE)
        for pull, heard in ((50.0, True), (0.0, False), (5.0, False), (50.0, False))
    ]
    found = [bound.noise_multiplier for bound in bounds]
    assert found[0] == pytest.approx(found[1], rel=1e-3) and SIGMA < found[1] < found[2] < found[3]


def test_how_often_what_is_right_is_refuted_is_what_it_may_be(rng, monkeypatch):
    """Against simulated releases: at 10 %, so that there is something to see."""
    monkeypatch.setattr(accounting, "epsilon", lambda *_: 0.0)  # of every one: seconds
    refuted = 0
    for square in rng.chisquare(50, 2000):
        seen = ReleasedNoise()
        seen.squares, seen.numbers = square * SIGMA**2, 50
        refuted += audit_noise(seen, CLAIM, DELTA, 0.1).refuted
    assert stats.binom.sf(refuted - 1, 2000, 0.1) > 1e-3 and refuted > 150
