"""The rule by which claims are judged: a worse experiment shows less, never more."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.harness.claims import (
    NOT_SHOWN,
    ahead,
    alike,
    both,
    cell_error,
    losses_by_seed,
    most,
    no_worse,
)
from experiments.harness.rows import StandardError, over_seeds

JUDGES = {"ahead": ahead, "no_worse": no_worse, "alike": alike}


@pytest.mark.parametrize(
    "judge, difference, error, says",
    [
        ("ahead", 0.031, 0.01, True),
        ("ahead", 0.029, 0.01, NOT_SHOWN),
        ("ahead", -0.029, 0.01, NOT_SHOWN),
        ("ahead", -0.031, 0.01, False),
        ("no_worse", -0.007, 0.001, True),
        ("no_worse", -0.009, 0.001, NOT_SHOWN),
        ("no_worse", -0.013, 0.001, False),
        ("no_worse", 1.0, 0.001, True),
        ("alike", 0.007, 0.001, True),
        ("alike", 1.0, 0.001, False),
        ("alike", 0.0, 0.006, NOT_SHOWN),
    ],
)
def test_a_verdict_is_one_of_three(judge, difference, error, says):
    assert JUDGES[judge](difference, error) == says
    assert JUDGES[judge]([difference], [error]) == says


@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("difference", [-0.05, -0.004, 0.0, 0.004, 0.05])
def test_noisier_seeds_turn_no_verdict_but_to_not_shown(judge, difference):
    says = [JUDGES[judge](difference, error) for error in np.geomspace(1e-5, 10, 40)]
    shown = [verdict for verdict in says if verdict != NOT_SHOWN]
    assert says == shown + [NOT_SHOWN] * (40 - len(shown)) and len(set(shown)) <= 1
    assert says[-1] == JUDGES[judge](difference, math.inf) == NOT_SHOWN


def test_what_is_claimed_of_several_settings():
    assert ahead([0.1, 0.1], 0.01) is True and ahead([0.1, 0.0], 0.01) == NOT_SHOWN
    assert ahead([0.1, -0.1], 0.01) is False
    assert both(True, NOT_SHOWN) == NOT_SHOWN and both(True, False, NOT_SHOWN) is False
    assert most([True, NOT_SHOWN]) is True and most([False, False, NOT_SHOWN]) is False
    assert most([True, False, NOT_SHOWN]) == NOT_SHOWN


def test_what_moves_all_cells_of_a_seed_is_in_no_error_of_pairs():
    seeds = np.array([0.0, 0.3, -0.2, 0.1])
    own = np.array([[0.001, 0.0, 0.0, 0.0], [0.0, 0.002, 0.0, 0.0]])
    cells = [{"epsilon": 4.0, **over_seeds(4 + seeds + each)} for each in own]
    less = losses_by_seed(cells)[0] - losses_by_seed(cells)[1]
    expected = less.std(ddof=1) / math.sqrt(len(seeds))
    error = cell_error(cells)
    assert (float(error * math.sqrt(2)), error.freedom) == (pytest.approx(expected), 3)
    assert float(cell_error([{**row, "by_seed": None} for row in cells])) > 0.1
    assert float(cell_error([{**row, "seeds": 1} for row in cells])) == math.inf


def test_few_degrees_of_freedom_take_more_standard_errors():
    """A verdict of nothing but noise is as rare as with a variance that is known."""
    assert StandardError(1.0, 2).times(2) == pytest.approx(4.5265, abs=1e-4)
    assert StandardError(1.0, 2).times(3) == pytest.approx(19.2067, abs=1e-4)  # Student's tables
    assert StandardError(1.0, 10**9).times(3) == pytest.approx(3)
    assert StandardError(0.0, 0).times(3) == 0
    rng, errors, wrong = np.random.default_rng(0), [], 0
    for _ in range(2_000):
        cells = [{"epsilon": 4.0, **over_seeds(rng.normal(size=2))} for _ in range(2)]
        errors.append(math.sqrt(2) * cell_error(cells))
        wrong += no_worse(cells[0]["loss"] - cells[1]["loss"], errors[-1], 0.0) is True
    assert errors[0].freedom == 1
    assert wrong / 2_000 == pytest.approx(stats.norm.sf(2), abs=0.01)
