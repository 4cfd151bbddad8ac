"""What noise that is not ideal adds: the theorem, on noise that is as wrong as it may be."""

import math

import numpy as np
import pytest

from fedsim import accounting
from fedsim.accounting import StepEvent, together
from fedsim.noise import CELL_ERRORS

RUN = [(StepEvent(1.0, 0.1), 20)]
DELTA = 1e-6


def test_a_large_epsilon_leaves_almost_all_of_delta():
    """The paper's largest is 64; a bound on how far out numbers may lie takes its factor."""
    for epsilon in (16.0, 64.0, 128.0):
        assert accounting.slack(350e6 * 2000, epsilon, DELTA, CELL_ERRORS).delta < 1e-4 * DELTA


def sums(parts, eta, count):
    """(Logarithms in etas, their probabilities as drawn, ideally) of the sum of so many numbers:
    with each probability one of two things, off by e^(+-multiple eta)."""
    widest = max(multiple for _, multiple in parts)
    drawn = np.zeros(2 * widest + 1)
    for probability, multiple in parts:
        up = probability / (1 + math.exp(multiple * eta))
        drawn[widest + multiple] += up * math.exp(multiple * eta)
        drawn[widest - multiple] += (probability - up) * math.exp(-multiple * eta)
    all_of_them = np.ones(1)
    for _ in range(count):
        all_of_them = np.convolve(all_of_them, drawn)
    logarithms = np.arange(-widest * count, widest * count + 1) * eta
    return all_of_them, all_of_them * np.exp(-logarithms)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "parts, eta, count",
    [
        ([(1.0, 1)], 0.02, 400),
        ([(1.0, 1)], 0.1, 50),
        ([(0.98, 1), (0.02, 16)], 0.01, 400),
        ([(0.5, 1), (0.4, 2), (0.1, 5)], 0.02, 200),
    ],
)
def test_the_theorem_holds_for_noise_that_is_as_wrong_as_it_may_be(parts, eta, count):
    """The exact privacy loss of many numbers is within the bound."""
    drawn, ideal = sums(parts, eta, count)
    errors = [(probability, multiple * eta) for probability, multiple in parts]
    for delta in (1e-3, 1e-6):
        found = accounting.slack(count, 0.0, delta, errors)
        error, missed = found.epsilon / 2, delta * 1e-6
        for p, q in ((drawn, ideal), (ideal, drawn)):
            assert np.maximum(p - math.exp(error) * q, 0).sum() <= missed
        assert found.delta >= 2 * missed


@pytest.mark.privacy
@pytest.mark.parametrize(
    "count, errors", [(1e3, [(1.0, 1e-3), (0.01, 0.02)]), (1e6, [(1.0, 0.01)])]
)
def test_the_bound_is_that_of_the_theorem(count, errors):
    """Exact laws are below it: Bernstein's inequality is not tight for a few large errors."""
    delta, b = 1e-5, max(eta for _, eta in errors)
    v, log = sum(share * eta**2 for share, eta in errors), -math.log(delta * 1e-6 * math.exp(-2.0))
    e = count * v * math.exp(b) / 2 + b * log / 3
    e += math.sqrt((b * log / 3) ** 2 + 2 * count * v * log)
    assert accounting.slack(count, 2.0, delta, errors).epsilon == pytest.approx(2 * e, rel=1e-12)


@pytest.mark.privacy
def test_rare_numbers_that_are_far_off_count():
    parts, eta, count, delta = [(0.98, 1), (0.02, 16)], 0.01, 400, 1e-6
    drawn, ideal = sums(parts, eta, count)
    error = accounting.slack(count, 0.0, delta, [(1.0, eta)]).epsilon / 2
    assert np.maximum(drawn - math.exp(error) * ideal, 0).sum() > delta * 1e-6


@pytest.mark.privacy
def test_slacks_of_several_runs_are_of_their_epsilon_together():
    """Each e with a probability that is as small as all of them together need."""
    runs, epsilon = [(1e7, 1.0), (2e8, 6.0)], 7.0
    parts = [accounting.slack(count, own, DELTA, CELL_ERRORS) for count, own in runs]
    more, missed = together(parts, epsilon, DELTA)
    needed = 0.0
    for (count, _), part in zip(runs, parts, strict=True):
        probability = part.delta * math.exp(-epsilon)
        needed += accounting.slack(count, 0.0, probability * 1e6, CELL_ERRORS).epsilon
    direct = accounting.slack(sum(count for count, _ in runs), epsilon, DELTA, CELL_ERRORS)
    assert direct.epsilon < needed <= more < 2 * needed
    assert direct.delta > math.expm1(direct.epsilon / 2) * DELTA
    assert sum(part.delta for part in parts) < missed < 1e-4 * DELTA
    assert together([(0.0, 0.0)], epsilon, DELTA) == (0.0, 0.0)
    assert together([*parts, (0.0, 1.0)], epsilon, DELTA) == (math.inf, 1.0)


@pytest.mark.privacy
def test_epsilon_of_runs_with_slacks_leaves_room_for_them_in_delta():
    for parts in ([(0.02, DELTA / 10**6)], [(1e-3, DELTA / 50), (1e-3, DELTA / 50)]):
        found = accounting.epsilon_with(parts, RUN, DELTA)
        more, missed = together(parts, found, DELTA)
        assert accounting.delta(RUN, found - more) + missed <= DELTA
    assert found < accounting.epsilon(RUN, 0.8 * DELTA) + 0.01
    tiny = [(1e-3, DELTA / 10**6)]  # what does not fit at once needs a little room, not a half
    ideal = accounting.epsilon(RUN, DELTA)
    assert ideal < accounting.epsilon_with(tiny, RUN, DELTA) < ideal * 1.002
    aside = accounting.epsilon_with(parts, RUN, DELTA, DELTA / 2)
    assert aside > accounting.epsilon(RUN, DELTA / 2)
    assert accounting.epsilon_with([], RUN, DELTA) == accounting.epsilon(RUN, DELTA)
    assert accounting.epsilon_with([(0.1, DELTA)], RUN, DELTA) == math.inf
    assert accounting.epsilon_with([], RUN, DELTA, DELTA) == math.inf
