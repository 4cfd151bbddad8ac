"""The checker: whether the rows of a record show the claims of `experiments/claims.py`.

A quantity has values and, for each, an interval. A rule says on which side of a bound they are to
be: yes where the intervals lie on that side altogether, no where one of them lies on the other,
else not shown. Intervals are three standard errors to either side where a difference is claimed
(`above`, `AHEAD`), and two where equivalence is (`no_worse`, `at_least`, `at_most`). Where the
variance was estimated with few degrees of freedom, so many standard errors are as many as have the
same probability by Student's t: with 2 degrees 4.5 for 2, and 19 for 3. So fewer seeds, or noisier
ones, lead to "not shown": no rule is easier to meet with a worse experiment.
"""

import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.harness.rows import EQUAL_ERRORS, ERRORS, Quantity, Rows, by

NOT_SHOWN = "not shown"
Verdict = bool | str
SAYS = {True: "yes", False: "no", NOT_SHOWN: NOT_SHOWN, None: "not judged"}


class Rule(NamedTuple):
    """On which side of a bound values are to be."""

    sides: Callable[..., tuple[Any, Any]]
    """(on the claim's side, on the other): by values, rooms to either side, and bounds."""
    bound: float | Sequence[float]
    errors: float = EQUAL_ERRORS
    share: float = 1.0
    """Of the settings, at least, in which it is to hold."""

    def verdicts(self, quantity: Quantity) -> list[Verdict]:
        """One for each value. Of errors that are plain numbers the variance counts as known."""
        count, bounds = self.errors, np.multiply(self.bound, quantity.unit)
        room = [e.times(count) if hasattr(e, "times") else count * e for e in quantity.errors]
        sides = self.sides(np.array(quantity.values), np.array(room), bounds)
        return [bool(yes) or (False if no else NOT_SHOWN) for yes, no in zip(*sides, strict=True)]


def above(bound: float | Sequence[float]) -> Rule:
    """For differences."""
    return Rule(lambda v, room, least: (v - room > least, v + room < least), bound, ERRORS)


def at_least(bound: float | Sequence[float]) -> Rule:
    """For equivalence, and exact values."""
    return Rule(lambda v, room, least: (v - room >= least, v + room < least), bound)


def at_most(bound: float | Sequence[float]) -> Rule:
    """For equivalence, and exact values."""
    return Rule(lambda v, room, most: (v + room <= most, v - room > most), bound)


def no_worse(margin: float) -> Rule:
    """For leads."""
    return at_least(-margin)


def in_share(share: float, rule: Rule) -> Rule:
    """A rule for this share of the settings at least."""
    return rule._replace(share=share)


AHEAD = above(0)


class Claim(NamedTuple):
    """What a statement is about, and the rule by which it shows it."""

    quantity: Callable[[Rows], Quantity]
    rule: Rule


def judge(claims: Mapping[str, Claim], rows: Rows) -> list[dict[str, Any]]:
    """Statements, verdicts and numbers, as a record has them. A statement with a column as a field
    is judged for each of its values, together with neighbours that have the same."""

    def column(statement: str) -> str:
        names = (name for _, name, *_ in string.Formatter().parse(statement))
        return next((name for name in names if name in rows[0]), "")

    found = []
    for name, neighbours in itertools.groupby(claims, column):
        own = list(neighbours)
        for value, block in by(rows, lambda row, name=name: row.get(name)).items():
            each = [(what, claims[what].quantity(block), claims[what].rule) for what in own]
            found += [judged(*claim, {name: value}) for claim in each if len(claim[1].values)]
    return found


def judged(
    statement: str, quantity: Quantity, rule: Rule, where: Mapping[str, Any]
) -> dict[str, Any]:
    """One of them: no, where so many settings say no that the others are too few."""
    values, verdicts = np.array(quantity.values), rule.verdicts(quantity)
    count, yes, no = len(values), verdicts.count(True), verdicts.count(False)
    enough = rule.share * count
    verdict = yes >= enough or (False if count - no < enough else NOT_SHOWN)
    fields = {**where, "count": count, "yes": yes, "no": no, "positive": (values > 0).sum()}
    fields |= {"least": values.min(), "mean": values.mean(), "most": values.max()}
    fields |= {"error": max(quantity.errors), **quantity.fields}
    numbers = quantity.numbers.format(*quantity.values, **fields)
    return {"claim": statement.format(**fields), "held": verdict, "numbers": numbers}
