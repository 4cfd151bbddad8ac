"""Choosing a grid fine enough for what is asked of a composed privacy loss.

Knows nothing of mechanisms: `accountant` says how to compose on a grid, and what is asked.
"""

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf

_LARGEST = 2**18  # composed points: half a second or so

Query = Callable[[DensePLDPmf], np.ndarray]
"""What is asked of a composed loss, in one direction: the larger answer counts."""


def refine(
    compose: Callable[[float], DensePLDPmf],
    query: Query,
    grid: float,
    accuracy: float,
    enough: np.ndarray | None,
    report: Callable[[str], None],
) -> tuple[np.ndarray, float]:
    """The query's answer, and the grid that was fine enough for it, from `grid` on.

    Guarantees: with upper bounds from every grid, an upper bound: one that is predicted to lie
      within `accuracy` of the exact answer, relatively, or is nowhere above `enough`, or comes from
      a loss of about 2^18 points.
    """
    composed = compose(grid)
    answer, factor = query(composed), 4
    falls: list[tuple[int, np.ndarray]] = []
    while np.isfinite(answer).all() and answer.any():
        factor = min(factor, _LARGEST // composed.size)
        if factor < 2 or (enough is not None and np.all(answer <= enough)):
            break
        grid /= factor
        composed = compose(grid)
        before, answer = answer, query(composed)
        report(f"discretization {grid:.1e}: {answer[-1]:.6g}")
        falls.append((factor, (before - answer) / np.maximum(answer, 1e-300)))
        error = _error_left(falls)
        if error <= accuracy:
            break
        factor = int(np.clip(math.ceil(math.sqrt(error / accuracy)), 2, 8))
    return answer, grid


def _error_left(falls: list[tuple[int, np.ndarray]]) -> float:
    """How far the last answer is above the exact one, relatively, judging by how answers fell.

    Connecting the dots errs in proportion to the grid's width or mostly to its square. Two grids
    alone do not tell: then in proportion. A third tells the order, unless by accident a grid point
    fell on the answer, which shows as an order that cannot be.
    """
    factor, fall = falls[-1]
    order = np.ones_like(fall)
    if len(falls) > 1:
        factor_before, fall_before = falls[-2]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = fall_before / fall * (1 - 1 / factor) / (1 - 1 / factor_before)
            seen = np.log(ratio) / math.log(factor_before)
        order = np.where((seen > 1) & (seen < 2.3), np.minimum(seen, 2), 1)
    return float(np.max(fall / (factor**order - 1)))
