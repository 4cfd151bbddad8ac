"""Private selection: above what attacks and exact examples reach, below what Renyi bounds say."""

import math

import numpy as np
import pytest
from refused import refuses
from scipy import stats

from fedsim import accounting
from fedsim.accounting import SelectionEvent, StepEvent, together
from fedsim.accounting.selection import _trial, draw_trials, mean_of

DELTA = 1e-4
GAUSSIAN = ((StepEvent(1.0, 1.0), 1),)
RUN = ((StepEvent(2.0, 0.1), 200),)
LAWS = [(3, 0.0), (10, 0.0), (10, 1.0), (10, -0.5)]


def selection(mean, shape, *candidates):
    return SelectionEvent(candidates or (GAUSSIAN,), mean, shape)


def exact(event, order):
    """epsilon of best-of-K of N(1, 1) against N(0, 1), outcomes ranked by `order`, integrated."""
    y = np.linspace(-10, 12, 30_001)
    width, places, gamma = y[1] - y[0], np.argsort(order(y)), event.gamma

    def released(mean):
        density = stats.norm.pdf(y - mean)
        ranked = density[places]
        better = np.empty_like(y)
        better[places] = (np.cumsum(ranked[::-1])[::-1] - ranked / 2) * width
        law = gamma + (1 - gamma) * better
        found = density * event.mean * (gamma / law) ** (1 + event.shape)
        assert abs(found.sum() * width - 1) < 1e-3
        return found

    worlds = released(1.0), released(0.0)
    epsilons = np.linspace(0, 10, 501)

    def spent(a, b):
        deltas = [np.maximum(a - math.exp(e) * b, 0).sum() * width for e in epsilons]
        return epsilons[np.argmax(np.array(deltas) <= DELTA)]

    return max(spent(*worlds), spent(*worlds[::-1]))


@pytest.mark.privacy
@pytest.mark.parametrize("mean, shape", LAWS[1:])
def test_no_ranking_of_outcomes_exceeds_the_bound(mean, shape):
    event = selection(mean, shape)
    bound = accounting.epsilon([(event, 1)], DELTA)
    alone = accounting.epsilon([*GAUSSIAN], DELTA / mean)
    ranks = {
        "up": lambda y: y,
        "down": lambda y: -y,
        # Those that are likelier without the user come first, then the surest signs of the user.
        "mixed": lambda y: np.where(y < -0.6, 100 + y, y),
    }
    found = {name: exact(event, order) for name, order in ranks.items()}
    assert max(found.values()) <= bound < 1.5 * max(found.values())
    assert found["mixed"] > 1.05 * alone  # what E[K] delta(epsilon) alone would miss


@pytest.mark.privacy
def test_an_attack_on_many_selections_stays_below_the_bound(rng):
    """Monte Carlo: the attack of likelihood ratios on the program that draws K, with Clopper and
    Pearson's bounds."""
    event, runs = selection(5, 0.0), 60_000
    counts = np.array([draw_trials(event, rng) for _ in range(runs)])
    best = {}
    for mean in (0.0, 1.0):
        scores = np.full(runs, -np.inf)
        for trial in range(counts.max()):
            some = counts > trial
            scores[some] = np.maximum(scores[some], rng.normal(mean, 1, some.sum()))
        best[mean] = scores
    lower = 0.0
    for threshold in np.linspace(2.0, 4.0, 9):
        true, false = (int((best[mean] > threshold).sum()) for mean in (1.0, 0.0))
        least = stats.beta.ppf(0.001, true, runs - true + 1)
        most = stats.beta.ppf(0.999, false + 1, runs - false)
        if least > DELTA:
            lower = max(lower, math.log((least - DELTA) / most))
    assert 1.5 < lower <= accounting.epsilon([(event, 1)], DELTA)


@pytest.mark.parametrize("mean", [3, 10])
def test_the_number_of_trials_has_its_law(mean, rng):
    for shape in (0.0, 1.0, -0.5, 20.0):
        assert mean_of(selection(mean, shape).gamma, shape) == pytest.approx(mean)
    event, size = selection(mean, 0.0), 4000
    counts = np.array([draw_trials(event, rng) for _ in range(size)])
    assert abs(counts.mean() - mean) < 5 * counts.std() / math.sqrt(size)
    assert counts.min() == 1
    for x in (0.3, 0.9):  # the generating function
        expected = math.log1p(-(1 - event.gamma) * x) / math.log(event.gamma)
        seen = x ** counts.astype(float)
        assert abs(seen.mean() - expected) < 5 * seen.std() / math.sqrt(size)


@pytest.mark.privacy
def test_a_shape_next_to_minus_one_costs_no_less_than_its_trials():
    found = accounting.epsilon([(selection(10, -0.995), 1)], DELTA)
    assert accounting.epsilon([*GAUSSIAN], DELTA / 10) < found < math.inf
    for field, value in {"shape": -0.9999, "mean": 0.5, "candidates": ()}.items():
        with refuses(field):
            SelectionEvent(**{"candidates": (RUN,), "mean": 10.0, field: value})


@pytest.mark.parametrize("mean", [1, 1 + 1e-10])
def test_one_trial_costs_what_a_trial_costs(mean):
    event = selection(mean, 0.0, RUN)
    assert draw_trials(event, np.random.default_rng(0)) == 1
    found, alone = accounting.epsilon([(event, 1)], 1e-6), accounting.epsilon(RUN, 1e-6)
    assert alone * (1 - 1e-6) <= found < alone * 1.01


@pytest.mark.privacy
def test_a_trial_has_a_slack_of_its_own_at_every_epsilon():
    """At a large epsilon what is unlikely has to be less likely, so more of epsilon is slack."""
    event = SelectionEvent((RUN,), 5, 0.0, (0.01, 1e-8))
    epsilons, trial = np.array([1.0, 5.0]), accounting.composed_loss(RUN, 1e-9)
    more, missed = together([event.slack], epsilons, 0.0)
    assert (more > 0.01).all() and more[1] > 1.2 * more[0]
    found = _trial(event, [trial], epsilons)
    ideal = accounting.privacy_curve(RUN, epsilons - more)
    assert found == pytest.approx(ideal * np.exp(more / 2) + missed, rel=1e-3)


@pytest.mark.privacy
@pytest.mark.parametrize("slack", [(0.0, 0.0), (1e-9, 1e-13)])
def test_losses_beyond_the_range_of_floats_cost_neither_nothing_nor_everything(slack):
    trial = ((StepEvent(1.0, 0.05), 200),)  # its largest loss times 2 + shape is above log(1e308)
    alone = accounting.epsilon(trial, 1e-6)
    found = [
        accounting.epsilon([(SelectionEvent((trial,), 8, shape, slack), 1)], 1e-6)
        for shape in (1, 50, 100)
    ]
    assert alone < found[0] < found[1] < found[2] < 2 * alone
    strong = ((StepEvent(0.05, 1.0), 1),)
    assert accounting.epsilon(strong, 1e-6) < accounting.epsilon(
        [(SelectionEvent((strong,), 5, 1.0, slack), 1)], 1e-6
    )
