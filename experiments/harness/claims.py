"""The rule by which claims are judged: no test is easier to pass with a worse experiment.

A quantity has values and, for each, an interval. A claim says that all of them are at least, or at
most, a bound: yes where the intervals lie on that side altogether, no where one of them lies on the
other, else not shown. Intervals are three standard errors to either side where a difference is
claimed ("better", "more", "ahead"), and two where equivalence is ("at least as good", "within").
Where the variance was estimated with few degrees of freedom, so many standard errors are as many as
have the same probability by Student's t: with 2 degrees 4.5 for 2, and 19 for 3. So fewer seeds, or
noisier ones, lead to "not shown".

Margins are fixed before records are judged by them: held-out losses of trainings `MARGIN`; losses
of SmolLM2, and gains by personalization, `GAIN_SHARE` of the gain; the loss of mean estimation 5 %
of the rival's; others are their claims' own. `results/earlier.toml` has what earlier tests said.

Seeds share draws and noise with all cells, so they are compared in pairs where rows have the losses
by seed (`by_seed`): the variance is what is left of losses without the means of their cells and of
their seeds. Where a record has means and deviations alone, cells count as independent, which is the
larger error where seeds move cells alike. Either variance is pooled over the cells of a data set,
since two seeds alone say little; cells without noise, which may diverge, and cells with it are
pooled apart. One seed alone shows nothing.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from experiments.harness.rows import ERRORS, Row, Rows, StandardError, by, seed_error

MARGIN = 0.01
"""Nats."""
GAIN_SHARE = 0.05
EQUAL_ERRORS = 2.0
"""Standard errors of tests of equivalence; of differences there are `rows.ERRORS`."""
NOT_SHOWN = "not shown"
Verdict = bool | str | None
"""Whether a claim holds, or NOT_SHOWN. None: not judged."""
Claims = Sequence[tuple[str, Verdict, str]]
"""What is claimed, whether it held, and the numbers."""
SAYS = {True: "yes", False: "no", NOT_SHOWN: NOT_SHOWN, None: "not judged"}
Numbers = float | Sequence[float] | np.ndarray
Errors = Numbers | StandardError | Sequence[StandardError]


def ahead(leads: Numbers, errors: Errors) -> Verdict:
    """Whether all leads are differences.

    Args:
      leads: above 0: the claim's way.
      errors: a standard error for each, or for all.
    """
    return _judged(leads, _room(errors, ERRORS), 0.0)


def no_worse(leads: Numbers, errors: Errors, margin: Numbers = MARGIN) -> Verdict:
    """Whether no lead is below -margin. Args: as of `ahead`."""
    return _judged(leads, _room(errors, EQUAL_ERRORS), -np.asarray(margin))


def alike(differences: Numbers, errors: Errors, margin: Numbers = MARGIN) -> Verdict:
    """Whether all differences are within the margin, either way. Args: as of `ahead`."""
    return no_worse(-np.abs(differences), errors, margin)


def verdict(held: Verdict, judged: bool = True) -> Verdict:
    """In JSON's types: whether a claim held, that this is not shown, or None."""
    if held is None or not judged:
        return None
    return NOT_SHOWN if held == NOT_SHOWN else bool(held)


def _room(errors: Errors, count: float) -> np.ndarray:
    """So many standard errors; of plain numbers the variance counts as known."""
    each = errors if isinstance(errors, Sequence | np.ndarray) else [errors]
    return np.array([e.times(count) if isinstance(e, StandardError) else count * e for e in each])


def _judged(leads: Numbers, room: np.ndarray, least: Numbers) -> Verdict:
    least = np.asarray(least)
    above, below = leads - room > least, leads + room < least
    return False if np.any(below) else True if np.all(above) else NOT_SHOWN


def both(*verdicts: Verdict) -> Verdict:
    """The verdict on a claim of several parts."""
    return False if False in verdicts else True if set(verdicts) == {True} else NOT_SHOWN


def most(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim of at least half of the settings: no, where so many say no that the
    others are fewer."""
    each = list(verdicts)
    if 2 * each.count(True) >= len(each):
        return True
    return False if 2 * each.count(False) > len(each) else NOT_SHOWN


UNKNOWN = StandardError(math.inf, 0)


def mean_error(rows: Sequence[Row]) -> StandardError:
    """Standard error of the mean loss of one of these cells, for what has no seeds of its own, such
    as the loss before; infinite for one seed."""
    return seed_error(rows) if min(row["seeds"] for row in rows) > 1 else UNKNOWN


def cell_error(rows: Sequence[Row], block: Sequence[str] = ("dataset", "epsilon")) -> StandardError:
    """Standard error of the mean loss of one of these cells, for differences between cells of one
    block; of k cells it is sqrt(k) times as much. Infinite for one seed; cells that came to
    no number are left out.

    Args:
      rows: the cells whose variance is pooled.
      block: columns; cells that are alike in these have the same seeds.
    """
    rows = [row for row in rows if math.isfinite(row["loss"])]
    if not rows or min(row["seeds"] for row in rows) < 2:
        return UNKNOWN
    if not all(row.get("by_seed") for row in rows):
        return seed_error(rows)
    squares, freedom = 0.0, 0
    blocks = by(rows, lambda row: tuple(row.get(name) for name in block)).values()
    for table in map(losses_by_seed, blocks):
        cells, seeds = table.shape
        left = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
        squares += float((left**2).sum())
        freedom += (cells - 1) * (seeds - 1)
    least = min(row["seeds"] for row in rows)
    if not freedom:
        return seed_error(rows)
    return StandardError(math.sqrt(squares / freedom / least), freedom)


def losses_by_seed(rows: Rows) -> np.ndarray:
    """[cells, seeds] of the cells of a block, which have the same seeds in the same order."""
    return np.array([[float(loss) for loss in str(row["by_seed"]).split()] for row in rows])
