"""The three tests of an audit: tight, never refuting what is right, and refuting mistakes."""

import numpy as np
import pytest
from scipy import special, stats

from fedsim.accounting import StepEvent, gaussian_delta, gaussian_epsilon
from fedsim.clipping import Clip
from fedsim.clipping.contribution import lattice_bits
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import Correlated, add_gaussian
from fedsim.noise.correlated import strategy
from fedsim.trust.bounds import (
    ReleasedNoise,
    audit_curve,
    audit_guesses,
    audit_noise,
    curve_claim,
    refutes,
)

DELTA, ERROR = 1e-6, 1e-3 / 3
EPSILONS = np.linspace(0, 20, 400)


def gaussian_claim(mu):
    """The claim that a mechanism is mu-GDP."""
    return lambda y: float(special.ndtr(special.ndtri(min(max(y, 0.0), 1.0)) - mu))


def mu_of(epsilon):
    low, high = 0.01, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_epsilon(middle, DELTA) > epsilon else (middle, high)
    return low


def curve_of(mu):
    return curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))


def attack(mu, rng, canaries):
    """(scores, coins) of canaries that a mechanism shows with mu: N(0, 1), or N(mu, 1)."""
    coins = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * coins, coins


@pytest.mark.parametrize("audit, epsilon, least", [("guesses", 8.0, 32), ("curve", 4.0, 131)])
def test_how_many_canaries_an_epsilon_takes(audit, epsilon, least):
    claim = gaussian_claim(mu_of(epsilon))
    for canaries in (least - 1, least):
        coins = np.arange(canaries) < canaries / 2
        if audit == "curve":
            found = audit_curve(coins * 1.0, coins, claim, ERROR)
        else:
            found = audit_guesses(coins * 1.0, coins, claim, DELTA, ERROR)
        assert found.refuted == found.could_refute == (canaries == least)


@pytest.mark.privacy
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_what_is_right_is_not_refuted_and_less_noise_is(epsilon):
    """20 audits each, of the strongest attack that the claim allows."""
    mu = mu_of(epsilon)
    claim = curve_of(mu)
    for seed in range(20):
        scores, coins = attack(mu, np.random.default_rng(seed), 1000)
        found = audit_guesses(scores, coins, claim, DELTA, ERROR)
        assert not found.refuted and found.could_refute and found.epsilon <= epsilon
    scores, coins = attack(mu / (0.3 if epsilon == 1.0 else 0.6), np.random.default_rng(0), 1000)
    found = audit_guesses(scores, coins, claim, DELTA, ERROR)
    assert found.refuted and found.epsilon > epsilon


@pytest.mark.privacy
@pytest.mark.parametrize("epsilon, mistake", [(1.0, 5.0), (2.0, 4.0), (4.0, 3.0)])
def test_the_curve_refutes_noise_that_is_too_small_alone(epsilon, mistake):
    """20 audits of the strongest attack that the claim allows, and one with less noise."""
    mu = mu_of(epsilon)
    claim = curve_of(mu)
    for seed in range(20):
        found = audit_curve(*attack(mu, np.random.default_rng(seed), 1000), claim, ERROR)
        assert found.could_refute and not found.refuted
    found = audit_curve(*attack(mistake * mu, np.random.default_rng(0), 1000), claim, ERROR)
    assert found.refuted


@pytest.mark.privacy
def test_guesses_refute_what_is_right_as_often_as_they_may(rng):
    """Of the strongest attack that is claimed, at an error that can be seen."""
    claim = gaussian_claim(1.0)
    audits = [audit_guesses(*attack(1.0, rng, 300), claim, DELTA, 0.1) for _ in range(1000)]
    refuted = sum(each.refuted for each in audits)
    assert 50 < refuted and stats.binom.sf(refuted - 1, 1000, 0.1) > 1e-3


@pytest.mark.parametrize("guesses, correct", [(100, 90), (500, 400), (1000, 1000), (300, 180)])
def test_the_curves_that_guesses_refute_are_those_of_jax_privacy(guesses, correct):
    auditing = pytest.importorskip("jax_privacy.auditing")
    epsilon = auditing._epsilon_one_run_fdp(0.0, 1000, guesses, correct, 0.05, DELTA)
    for share, refuted in ((0.99, True), (1.01, False)):
        claim = gaussian_claim(mu_of(share * epsilon))
        assert refutes(1000, guesses, correct, claim, 0.05) is refuted


@pytest.mark.privacy
def test_the_curve_refutes_what_is_right_at_most_as_often_as_it_may(rng):
    """Of a mechanism that gives away all coins in a fifth of the runs: it is (0, 0.2)-DP."""
    often, error, trials = 0.2, 0.1, 500
    right, wrong = (curve_claim(np.zeros(1), np.full(1, x)) for x in (often, often / 50))
    refuted = np.zeros(3)
    for _ in range(trials):
        coins = rng.random(60) < 0.5
        scores = coins * 1.0 if rng.random() < often else rng.random(60)
        found = [audit_curve(scores, coins, claim, error) for claim in (right, wrong)]
        found.append(audit_guesses(scores, coins, right, DELTA, error))
        refuted += [each.refuted for each in found]
    by_curve, by_curve_of_wrong, by_guesses = refuted
    assert stats.binom.sf(by_curve - 1, trials, error) > 1e-3
    assert by_curve_of_wrong > 0.7 * often * trials
    assert stats.binom.sf(by_guesses - 1, trials, error) < 1e-3  # as they assume independence


WIDTH, STEPS, COUNT, SIGMA = 400, 12, 4, 1.5
CLAIM = [(StepEvent(SIGMA, 0.1), STEPS)]


def released(trial, *, noise=1.0, bands=1, pull=0.0):
    """What an audit saw of a training whose clipped sums are all `pull` clip norms long."""
    clip, key, seen = Clip(1.0), SecretKey.create(trial), ReleasedNoise()
    sums = np.full(WIDTH, round(pull / WIDTH**0.5 / clip.unit(WIDTH)), np.int64)
    own, coefficients = {"clip": clip, "count": COUNT, "key": key}, None
    add_noise = Correlated(STEPS, bands) if bands > 1 else add_gaussian
    own["add_noise"] = seen.record_noise(add_noise)
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
    levels = []
    for trial in range(40):
        seen = released(trial, bands=bands, pull=50.0 * (trial % 2))
        found = audit_noise(seen, CLAIM, ERROR)
        assert not found.refuted and found.noise_multiplier > SIGMA
        levels.append(stats.chi2.cdf(seen.squares / SIGMA**2, found.numbers))
        assert found.numbers == WIDTH * STEPS
    # The squares of all steps together are chi-squared, also where noise is correlated.
    assert stats.kstest(levels, "uniform").pvalue > 1e-3
    for noise, pull in ((0.0, 0.0), (0.5, 100.0), (0.9, 100.0)):
        found = audit_noise(released(0, bands=bands, noise=noise, pull=pull), CLAIM, ERROR)
        assert found.refuted and noise * SIGMA <= found.noise_multiplier < SIGMA
