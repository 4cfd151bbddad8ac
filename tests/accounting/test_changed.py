"""Units that change instead of being gone: N(Bin(m + k, q)) and N(-Bin(k, q)), held against
integrals, dp_accounting, draws, and vectors that a search finds."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.privacy_accountant import NeighboringRelation
from losses import compose, one_step
from scipy import stats

from fedsim import accounting
from fedsim.accounting import StepEvent, composition, mixture

SETTINGS = [
    (1.0, 1, 1, 0.3),
    (1.0, 1, 3, 0.01),
    (2.0, 1, 10, 0.1),
    (0.6, 4, 2, 1e-3),
    (3.0, 0, 5, 1.0),
]
GRID_ERROR = 5e-4  # of integrals over the plane on 121 x 121 points; a quarter with twice as many


def densities(stddev, most, changed, prob):
    """The two densities on a fine line, and its step, by nothing of fedsim."""
    y = np.linspace(-changed - 12 * stddev, most + changed + 12 * stddev, 400_001)

    def mixed(count, sign):
        weights = stats.binom.pmf(np.arange(count + 1), count, prob)
        return sum(w * stats.norm.pdf(y, sign * n, stddev) for n, w in enumerate(weights))

    return mixed(most + changed, 1), mixed(changed, -1), y[1] - y[0]


@pytest.mark.privacy
@pytest.mark.parametrize("setting", SETTINGS)
def test_one_step_is_the_integral_at_grid_points(setting):
    p, q, step = densities(*setting)
    mix = mixture.changing_mixture(*setting)
    lowest, highest = mixture.loss_range(mix)
    grid = 2.0 ** math.floor(math.log2((highest - lowest) / 2000))
    directions = composition.directions(one_step(mix, grid))
    for epsilon in (0.0, 5 * grid, 100 * grid, 400 * grid):
        for pmf, (one, other) in zip(directions, ((p, q), (q, p)), strict=True):
            exact = np.maximum(one - math.exp(epsilon) * other, 0).sum() * step
            bound = float(pmf.get_delta_for_epsilon(epsilon))
            assert exact * (1 - 1e-8) - 1e-14 <= bound <= exact * (1 + 1e-6) + 1e-14
    stddev, most, changed, prob = setting
    if most:
        found = accounting.delta([(StepEvent(stddev, prob, most, 1, changed), 1)], 0.25)
        ways = (p - math.exp(0.25) * q, q - math.exp(0.25) * p)
        exact = max(np.maximum(way, 0).sum() * step for way in ways)
        assert exact * (1 - 1e-8) - 1e-14 <= found <= exact * (1 + 1e-2) + 1e-14


@pytest.mark.parametrize(
    "stddev, prob, steps", [(1.0, 0.01, 100), (2.0, 0.1, 50), (0.8, 1e-3, 1000)]
)
def test_one_unit_that_changes_is_dp_accountings_replacement(stddev, prob, steps):
    grid = 1e-3
    one = one_step(mixture.changing_mixture(stddev, 0, 1, prob), grid)
    ours = compose([(one, steps)])
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        stddev,
        value_discretization_interval=grid,
        sampling_prob=prob,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    ).self_compose(steps)
    for delta in (1e-3, 1e-6):
        found = ours.get_epsilon_for_delta(delta)
        assert found == pytest.approx(theirs.get_epsilon_for_delta(delta), rel=1e-6)


@pytest.mark.privacy
def test_counts_left_out_of_either_side_cost_delta(monkeypatch):
    setting = (1.0, 1, 3, 0.1)
    monkeypatch.setattr(mixture, "TAIL_MASS", 2e-2)
    mix = mixture.changing_mixture(*setting)
    monkeypatch.undo()
    p, q, step = densities(*setting)
    for pmf, (one, other) in zip(
        composition.directions(one_step(mix, 2**-9)), ((p, q), (q, p)), strict=True
    ):
        for epsilon in (0.0, 0.25, 1.0):
            exact = np.maximum(one - math.exp(epsilon) * other, 0).sum() * step
            assert exact <= float(pmf.get_delta_for_epsilon(epsilon))


def hockey_stick(stddev, shifts, others, probs, alpha, points):
    """H_alpha of two mixtures in the plane, by their densities on a grid."""
    axis = np.linspace(-9, 9, points)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)

    def mixed(centres):
        squares = ((grid[:, None] - centres[None]) ** 2).sum(axis=2)
        return np.exp(-squares / (2 * stddev**2)) @ probs / (2 * math.pi * stddev**2)

    difference = mixed(shifts) - alpha * mixed(others)
    return np.maximum(difference, 0).sum() * (axis[1] - axis[0]) ** 2


@pytest.mark.privacy
def test_no_vectors_that_a_search_finds_exceed_the_pair_on_a_line(rng):
    """The lemma: own and touched groups with any contributions of norm at most 1, in the plane."""
    stddev, changed = 1.0, 2
    draws = np.array(
        [[(n >> i) & 1 for i in range(1 + changed)] for n in range(2 ** (1 + changed))]
    )
    for trial in range(6):
        prob = (0.1, 0.5)[trial % 2]
        probs = np.prod(np.where(draws, prob, 1 - prob), axis=1)
        with_texts, without = (
            vectors / np.maximum(1, np.linalg.norm(vectors, axis=1, keepdims=True))
            for vectors in rng.normal(scale=2.0, size=(2, 1 + changed, 2))
        )
        if trial % 4 == 0:  # the worst there is: turned round, along a line
            with_texts, without = np.array([[1.0, 0.0]] * 3), np.array([[-1.0, 0.0]] * 3)
        without[0] = 0  # the own group is empty
        p, q, step = densities(stddev, 1, changed, prob)
        for alpha in (0.7, 1.0, 1.5):
            for sign in (1, -1):
                pair = (p, q) if sign == 1 else (q, p)
                most = np.maximum(pair[0] - alpha * pair[1], 0).sum() * step
                sums = (draws @ with_texts, draws @ without)[::sign]
                found = hockey_stick(stddev, *sums, probs, alpha, 121)
                assert found <= most + GRID_ERROR
                if trial % 4 == 0:
                    assert found == pytest.approx(most, abs=GRID_ERROR)


def test_without_units_that_change_it_is_theorem_2():
    plain, none = StepEvent(1.0, 0.01), StepEvent(1.0, 0.01, 1, 1, 0)
    assert plain == none and accounting.event_fields(none) == {
        "noise_multiplier": 1.0,
        "sampling_prob": 0.01,
        "max_contributions": 1,
    }
    event = StepEvent(1.0, 0.01, 1, 1, 3)
    assert StepEvent(**accounting.event_fields(event)) == event
