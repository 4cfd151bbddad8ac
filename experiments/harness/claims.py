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
of the rival's; others are their claims' own. `claims.toml` has the claims of the studies, and of
all records what earlier tests said.

Seeds share draws and noise with all cells, so they are compared in pairs where rows have the losses
by seed (`by_seed`): the variance is what is left of losses without the means of their cells and of
their seeds. Where a record has means and deviations alone, cells count as independent, which is the
larger error where seeds move cells alike. Either variance is pooled over the cells of a data set,
since two seeds alone say little; cells without noise, which may diverge, and cells with it are
pooled apart. One seed alone shows nothing.
"""

import dataclasses
import functools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.rows import ERRORS, Row, Rows, StandardError, by, seed_error

FILE = Path(__file__).parents[1] / "claims.toml"
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
Numbers = float | Sequence[float] | np.ndarray
Errors = Numbers | StandardError | Sequence[StandardError]


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What claims are about: values by what they are of, and one error of all or one of each; or
    the ends of the interval of each."""

    values: Mapping[str, float]
    errors: Errors = 0.0
    ends: Sequence[tuple[float, float]] | None = None

    def intervals(self, count: float) -> tuple[np.ndarray, np.ndarray]:
        """(Lower, upper) ends. Args: count: of standard errors to either side."""
        if self.ends is not None:
            low, high = np.transpose(self.ends)
            return low, high
        middle = np.array([*self.values.values()])
        room = _room(self.errors, count)
        return middle - room, middle + room

    def text(self, count: float) -> str:
        """The values with their intervals, where these have a width."""
        low, high = (np.broadcast_to(end, len(self.values)) for end in self.intervals(count))
        said = [
            f"{label}: {value:.4g}"[2 * (not label) :] + f" ({a:.3g} to {b:.3g})" * bool(a < b)
            for (label, value), a, b in zip(self.values.items(), low, high, strict=True)
        ]
        return "; ".join(said)


@functools.cache
def claims_file() -> dict[str, Any]:
    """What claims.toml says."""
    return tomllib.loads(FILE.read_text())


def judged(record: str, quantities: Mapping[str, Quantity]) -> Claims:
    """The claims of a record, by its quantities. One whose quantity is missing is not judged: not
    all of its trainings are there."""
    found = []
    for claim in claims_file()[record]:
        quantity = quantities.get(claim["of"])
        if quantity is None:
            found.append((claim["claim"], None, "not all of its trainings are there"))
        else:
            numbers = quantity.text(claim.get("errors", 0))
            found.append((claim["claim"], verdict_on(claim, quantity), numbers))
    return found


def verdict_on(claim: Mapping[str, Any], quantity: Quantity) -> Verdict:
    """By the claim's `at_least` and `at_most`; None without either. With `some` one value is
    enough. `unless_below` and `unless_above` are bounds of a "no" other than those of a yes."""
    low, high = quantity.intervals(claim.get("errors", 0))
    parts = []
    if (bound := claim.get("at_least")) is not None:
        parts.append((low >= bound, high < claim.get("unless_below", bound)))
    if (bound := claim.get("at_most")) is not None:
        parts.append((high <= bound, low > claim.get("unless_above", bound)))
    if claim.get("some"):
        held = [True if yes.any() else False if no.all() else NOT_SHOWN for yes, no in parts]
    else:
        held = [False if no.any() else True if yes.all() else NOT_SHOWN for yes, no in parts]
    return both(*held) if held else None


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
