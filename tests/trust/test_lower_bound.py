"""The bound from one run: against its authors' other implementation, and against the truth."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax_privacy import auditing as oracle

from fedsim.trust import bounds


@given(
    st.integers(1, 300),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 6.0),
    st.sampled_from([0.0, 1e-6, 1e-3]),
)
@settings(max_examples=60, deadline=None)
def test_the_p_value_is_jax_privacys(canaries, guessed, right, epsilon, delta):
    guesses = max(1, round(guessed * canaries))
    correct = round(right * guesses)
    found = bounds.p_value(canaries, guesses, correct, epsilon, delta)
    expected = oracle._one_run_p_value(canaries, guesses, correct, epsilon, delta)
    assert found == pytest.approx(min(1.0, expected), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("correct", [50, 60, 75, 90, 99, 100])
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_the_bound_is_jax_privacys(correct, delta):
    found = bounds.lower_bound(150, 100, correct, delta, 0.05)
    expected = oracle._epsilon_one_run(0.0, 150, 100, correct, 0.05, delta)
    assert found == pytest.approx(expected, abs=1e-5)
    assert (found > 0) == (correct >= 60)


def test_all_right_has_a_closed_form():
    """Every coin of r: p^r = significance, with p = e^epsilon / (1 + e^epsilon)."""
    for guesses in (10, 100, 1000):
        right = 0.05 ** (1 / guesses)
        expected = np.log(right / (1 - right))
        assert bounds.lower_bound(1000, guesses, guesses, 0.0, 0.05) == pytest.approx(expected)


def test_guessing_is_refuted_no_more_often_than_the_confidence_allows():
    rng = np.random.default_rng(0)
    found = [
        bounds.audit(rng.normal(size=200), rng.random(200) < 0.5, 1e-5, 0.9).epsilon
        for _ in range(200)
    ]
    assert np.mean(np.array(found) > 0) <= 0.1 + 3 * np.sqrt(0.09 / 200)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_bounded_from_below_and_not_refuted(epsilon):
    rng = np.random.default_rng(1)
    included = rng.random(4000) < 0.5
    told = np.where(rng.random(4000) < 1 / (1 + np.exp(-epsilon)), included, ~included)
    found = bounds.audit(told + 0.0, included, 0.0, 0.95)
    assert 0.7 * epsilon < found.epsilon <= epsilon


def test_what_is_told_apart_perfectly_is_guessed_perfectly():
    included = np.arange(100) % 3 == 0
    found = bounds.audit(included * 1.0, included, 1e-6, 0.95)
    assert found.correct == found.guesses and found.included == 34 and found.epsilon > 2
    assert bounds.area(included[included] * 1.0, included[~included] * 1.0) == 1.0


def test_the_curve_is_that_of_all_thresholds():
    rng = np.random.default_rng(2)
    inside, outside = rng.integers(0, 5, 40) + 1.0, rng.integers(0, 5, 60) * 1.0
    false, true = bounds.roc(inside, outside)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    expected = {(np.mean(outside >= t), np.mean(inside >= t)) for t in range(7)}
    assert set(zip(false, true, strict=True)) == expected
    assert np.trapezoid(true, false) == pytest.approx(bounds.area(inside, outside))
