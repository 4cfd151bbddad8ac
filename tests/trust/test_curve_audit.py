"""Audits of whole curves: against jax_privacy, never refuting what is right, refuting mistakes."""

import numpy as np
import pytest
from scipy import stats

from fedsim import accounting
from fedsim.accounting import StepEvent, gaussian_delta, gaussian_epsilon
from fedsim.trust import bounds
from fedsim.trust.bounds import (
    _largest_mu,
    audit_curve,
    curve_claim,
    gaussian_claim,
    refutes,
)

DELTA = 1e-6
EPSILONS = np.linspace(0, 20, 400)


def mu_of(epsilon):
    low, high = 0.01, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_epsilon(middle, DELTA) > epsilon else (middle, high)
    return low


def attack(mu, rng, canaries):
    """(scores, coins) of canaries that a mechanism shows with mu: N(0, 1), or N(mu, 1)."""
    coins = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * coins, coins


@pytest.mark.parametrize("guesses, correct", [(100, 90), (500, 400), (1000, 1000), (300, 160)])
def test_the_bound_of_the_gaussian_family_is_that_of_jax_privacy(guesses, correct):
    auditing = pytest.importorskip("jax_privacy.auditing")
    expected = auditing._epsilon_one_run_fdp(0.0, 1000, guesses, correct, 0.05, DELTA)
    found = gaussian_epsilon(_largest_mu(1000, guesses, correct, 0.05), DELTA)
    assert found == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_a_curve_and_its_formula_are_one_claim():
    mu = 1.5
    curve = curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))
    for y in (1e-4, 0.02, 0.3, 0.8, 0.999):
        assert curve(y) == pytest.approx(gaussian_claim(mu)(y), rel=2e-3)
        assert curve(y) <= gaussian_claim(mu)(y) * (1 + 1e-9)
    assert curve(0.0) == 0.0 and curve_claim(np.array([0.0]), np.array([0.0]))(0.4) == 0.4


def test_epsilon_8_can_be_refuted_with_few_canaries():
    claim = gaussian_claim(mu_of(8.0))
    significance = 0.05 / len(bounds.options_of(250))
    assert refutes(250, 250, 250, claim, significance)
    assert not refutes(8, 8, 8, claim, 0.05)


@pytest.mark.privacy
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_what_is_right_is_not_refuted(epsilon):
    """20 audits each, of the strongest attack that the claim allows."""
    mu = mu_of(epsilon)
    claim = curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))
    found = [
        audit_curve(*attack(mu, np.random.default_rng(seed), 600), claim, DELTA, 0.95)
        for seed in range(20)
    ]
    assert not any(each.refuted for each in found)
    assert all(each.could_refute and each.epsilon <= epsilon for each in found)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "epsilon, mistake", [(8.0, 3.0), (4.0, 2.0), (8.0, 10.0), (2.0, 4.0)], ids=str
)
def test_noise_that_is_too_small_is_refuted(epsilon, mistake):
    """A third of the noise, a half, a tenth, a quarter, with 1,000 canaries."""
    mu = mu_of(epsilon)
    claim = curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))
    canaries = 1000
    scores, coins = attack(mistake * mu, np.random.default_rng(1), canaries)
    assert audit_curve(scores, coins, claim, DELTA, 0.95).refuted


@pytest.mark.privacy
def test_how_often_what_is_right_is_refuted_is_at_most_what_it_may_be(rng):
    """At a confidence of 0.8, of the strongest attack that is claimed, over all numbers of guesses
    that are tried."""
    found = [
        audit_curve(*attack(1.0, rng, 60), gaussian_claim(1.0), DELTA, 0.8).refuted
        for _ in range(200)
    ]
    assert stats.binom.sf(sum(found) - 1, 200, 0.2) > 1e-3


def test_the_curve_of_a_training_is_a_claim():
    phases = [(StepEvent(2.0, 0.2), 30)]
    claim = curve_claim(EPSILONS, accounting.privacy_curve(phases, EPSILONS))
    scores, coins = attack(0.0, np.random.default_rng(0), 400)
    assert not audit_curve(scores, coins, claim, DELTA, 0.95).refuted
    sure = np.where(coins, 1.0, 0.0)
    assert audit_curve(sure, coins, claim, DELTA, 0.95).refuted
