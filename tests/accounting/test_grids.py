"""Refinement stops where it should, on errors whose law is known."""

import types

import numpy as np
import pytest

from fedsim.accounting import composition


def refined(law, accuracy=1e-4, enough=None, range_=1.0):
    """(answer, grid, grids tried) of an exact answer 2.0 plus law(grid)."""
    tried = []

    def compose(grid):
        tried.append(grid)
        return types.SimpleNamespace(size=int(range_ / grid), grid=grid)

    answer, grid = composition.refine(
        compose, lambda pmf: np.array([2.0 + law(pmf.grid)]), 2**-10, accuracy, enough
    )
    assert grid == tried[-1]
    assert answer[0] == 2.0 + law(grid)
    return answer[0], grid, tried


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("accuracy", [1e-2, 1e-4])
def test_quadratic_errors_end_within_the_accuracy_and_not_far_below(size, accuracy):
    answer, _, tried = refined(lambda grid: size * grid**2, accuracy)
    assert answer <= 2 * (1 + accuracy)
    assert len(tried) == 2 or answer >= 2 * (1 + accuracy / 200)


@pytest.mark.parametrize(
    "law",
    [
        lambda grid: 0.1 * grid,
        lambda grid: 10 * grid,
        # The second grid happens to be nearly exact; from there on errors fall with the width.
        lambda grid: 0.5 if grid == 2**-10 else 16 * grid,
    ],
)
def test_linear_errors_end_within_the_accuracy(law):
    assert refined(law)[0] <= 2 * (1 + 1e-4)


def test_refinement_ends_at_the_largest_grid_allowed():
    _, grid, tried = refined(lambda grid: grid**0.1)
    assert 2**-18 <= grid < 2**-16
    assert all(coarse / fine >= 2 for coarse, fine in zip(tried[:-1], tried[1:], strict=True))


def test_what_is_low_enough_or_infinite_or_zero_is_not_refined():
    assert len(refined(lambda grid: grid, enough=np.array([2.1]))[2]) == 1
    assert len(refined(lambda grid: 400 * grid, enough=np.array([2.2]))[2]) == 2
    assert len(refined(lambda grid: np.inf)[2]) == len(refined(lambda grid: -2.0)[2]) == 1
