"""The rules by which claims are judged: a worse experiment shows less, never more."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.__main__ import names
from experiments.claims import CLAIMS
from experiments.harness.claims import AHEAD, NOT_SHOWN, Claim, at_most, in_share, judge, no_worse
from experiments.harness.rows import Quantity, StandardError, over_seeds
from experiments.quantities import cell_error, losses_by_seed

RULES = {"ahead": AHEAD, "no_worse": no_worse(0.01), "at_most": at_most(0.01)}


def held(rule, values, error):
    """The verdict on values with one error."""
    claim = Claim(lambda rows: Quantity(values, "", [error]), rule)
    (found,) = judge({"that": claim}, [{}])
    return found["held"]


@pytest.mark.parametrize(
    "rule, value, error, says",
    [
        ("ahead", 0.031, 0.01, True),
        ("ahead", 0.029, 0.01, NOT_SHOWN),
        ("ahead", -0.029, 0.01, NOT_SHOWN),
        ("ahead", -0.031, 0.01, False),
        ("ahead", 0.0, 0.0, NOT_SHOWN),
        ("no_worse", -0.007, 0.001, True),
        ("no_worse", -0.009, 0.001, NOT_SHOWN),
        ("no_worse", -0.013, 0.001, False),
        ("no_worse", 1.0, 0.001, True),
        ("at_most", 0.007, 0.001, True),
        ("at_most", 1.0, 0.001, False),
        ("at_most", 0.0, 0.006, NOT_SHOWN),
    ],
)
def test_a_verdict_is_one_of_three(rule, value, error, says):
    assert held(RULES[rule], [value], error) is says
    assert held(RULES[rule], np.array([value]), error) is says


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("value", [-0.05, -0.004, 0.0, 0.004, 0.05])
def test_noisier_seeds_turn_no_verdict_but_to_not_shown(rule, value):
    says = [held(rule, [value], error) for error in np.geomspace(1e-5, 10, 40)]
    shown = [verdict for verdict in says if verdict != NOT_SHOWN]
    assert says == shown + [NOT_SHOWN] * (40 - len(shown)) and len(set(shown)) <= 1
    assert says[-1] == held(rule, [value], math.inf) == NOT_SHOWN


def test_what_is_claimed_of_several_settings():
    assert held(AHEAD, [0.1, 0.1], 0.01) is True and held(AHEAD, [0.1, 0.0], 0.01) == NOT_SHOWN
    assert held(AHEAD, [0.1, -0.1, 0.0], 0.01) is False
    most = in_share(0.5, AHEAD)
    assert held(most, [0.1, 0.0], 0.01) is True and held(most, [-0.1, -0.1, 0.0], 0.01) is False
    assert held(most, [0.1, -0.1, 0.0], 0.01) == NOT_SHOWN


def test_a_statement_that_names_a_column_is_judged_for_each_of_its_values():
    rows = [{"dataset": name, "lead": lead} for name, lead in (("a", 1.0), ("b", -1.0))]
    claim = Claim(lambda rows: Quantity([row["lead"] for row in rows], "{0:g}"), AHEAD)
    none = claim._replace(quantity=lambda rows: Quantity([], ""))
    found = judge({"{dataset}: ahead": claim, "{dataset}: alike": none, "all ahead": claim}, rows)
    found = [tuple(each.values()) for each in found]
    assert found == [("a: ahead", True, "1"), ("b: ahead", False, "-1"), ("all ahead", False, "1")]


def test_every_experiment_has_its_claims():
    assert sorted(CLAIMS) == names()


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
    rng, freedom, wrong = np.random.default_rng(0), set(), 0
    for _ in range(2_000):
        cells = [{"epsilon": 4.0, **over_seeds(rng.normal(size=2))} for _ in range(2)]
        error = math.sqrt(2) * cell_error(cells)
        freedom.add(error.freedom)
        wrong += held(no_worse(0.0), [cells[0]["loss"] - cells[1]["loss"]], error) is True
    assert freedom == {1}
    assert wrong / 2_000 == pytest.approx(stats.norm.sf(2), abs=0.01)
