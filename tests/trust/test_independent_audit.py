"""Audits that take canaries to be independent: tight, and never refuting what is right."""

import numpy as np
import pytest
from scipy import special, stats
from test_curve_audit import DELTA, EPSILONS, attack, mu_of

from fedsim.accounting import gaussian_delta
from fedsim.trust.bounds import (
    advantage,
    audit_curve,
    audit_independent,
    curve_claim,
    gaussian_claim,
)

SIGNIFICANCE = 5e-4


@pytest.mark.parametrize("mu", [0.01, 0.5, 2.0, 6.0])
def test_the_advantage_is_the_total_variation_distance(mu):
    exact = 2 * special.ndtr(mu / 2) - 1
    assert advantage(gaussian_claim(mu)) == pytest.approx(exact, abs=1e-8)
    assert advantage(gaussian_claim(mu)) >= exact
    curve = curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))
    assert exact <= advantage(curve) <= exact + 1e-3


def test_epsilon_8_can_be_refuted_with_31_canaries():
    claim = gaussian_claim(mu_of(8.0))
    for canaries in (30, 31):
        coins = np.arange(canaries) < canaries / 2
        scores = np.where(coins, 1.0, 0.0)
        found = audit_independent(scores, coins, claim, DELTA, SIGNIFICANCE)
        assert found.correct == canaries and found.refuted == found.could_refute == (canaries > 30)


@pytest.mark.privacy
@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_what_is_right_is_not_refuted_and_less_noise_is(epsilon):
    mu = mu_of(epsilon)
    claim = curve_claim(EPSILONS, gaussian_delta(EPSILONS, mu))
    for seed in range(20):
        scores, coins = attack(mu, np.random.default_rng(seed), 1000)
        found = audit_independent(scores, coins, claim, DELTA, SIGNIFICANCE)
        assert not found.refuted and found.could_refute and found.epsilon <= epsilon
    share = 0.3 if epsilon == 1.0 else 0.6
    scores, coins = attack(mu / share, np.random.default_rng(0), 1000)
    found = audit_independent(scores, coins, claim, DELTA, SIGNIFICANCE)
    assert found.refuted and found.epsilon > epsilon
    if epsilon == 8.0:  # which guesses that may hang together do not show
        assert not audit_curve(scores, coins, claim, DELTA, 0.95).refuted


def test_how_often_what_is_right_is_refuted_is_what_it_may_be(rng):
    """At 10 %, so that there is something to see, and of the strongest attack that is claimed."""
    claim = gaussian_claim(1.0)
    found = [
        audit_independent(*attack(1.0, rng, 300), claim, DELTA, 0.1).refuted for _ in range(1000)
    ]
    assert 50 < sum(found) and stats.binom.sf(sum(found) - 1, 1000, 0.1) > 1e-3
