"""What several people together are promised: docs/theory/people.md has the theorem.

A guarantee speaks of one user. k users are one whose sampling units are those of all: the sum lacks
what they add, N(Binomial(k G, p), sigma^2) against N(0, sigma^2). Group privacy gives more.
"""

import dataclasses
import math

import numpy as np

from fedsim.accounting.accountant import epsilon, privacy_curve
from fedsim.accounting.composition import COMPOSED_TAIL_MASS
from fedsim.accounting.events import Event, Events, PureEvent, StepEvent
from fedsim.errors import expect, expect_count

MIN_DELTA = 1000 * COMPOSED_TAIL_MASS
"""The smallest delta of one user that group privacy starts from."""
LEVELS = 256


def for_people(events: Events, people: int) -> list[tuple[Event, int]]:
    """The same releases as they look to `people` users who are compared together.

    Not for correlated noise, whose cyclic steps look like those of independent noise.

    Raises: ConfigError: there is no such event: of random allocation, or of a private selection.

    >>> for_people([(StepEvent(1.0, 0.01), 100)], 5)
    [(StepEvent(noise_multiplier=1.0, sampling_prob=0.01, max_contributions=5, cycle=1, \
max_changed=0, allocated=False), 100)]
    """
    expect_count("people", people, 1)
    return [(_together(event, people), count) for event, count in events]


def _together(event: Event, people: int) -> Event:
    if people == 1:
        return event
    if isinstance(event, PureEvent):
        return PureEvent(people * event.epsilon)
    known = isinstance(event, StepEvent) and not event.allocated
    expected = "1 with random allocation or a private selection, whose loss for more is not known"
    expect("people", people, known, expected)
    assert isinstance(event, StepEvent)
    own, changed = people * event.max_contributions, people * event.max_changed
    return dataclasses.replace(event, max_contributions=own, max_changed=changed)


def group_epsilon(events: Events, delta: float, people: int) -> float:
    """Epsilon of `people` users together by group privacy, which any mechanism has.

    (e, d) for one user is (k e, d (e^(k e) - 1) / (e^e - 1)) for k. The best e of a grid is taken.

    Source: Vadhan 2017, Lemma 2.2.
    Returns: inf where delta would have to be smaller than is resolved.
    """
    expect_count("people", people, 1)
    if people == 1:
        return epsilon(events, delta)
    low, high = epsilon(events, delta), epsilon(events, min(delta, MIN_DELTA))
    if math.isinf(low):
        return low
    levels = np.linspace(low, high if high < math.inf else 2 * low, LEVELS)
    growth = log_group_growth(levels, people)
    holds = np.flatnonzero(np.log(privacy_curve(events, levels)) + growth <= math.log(delta))
    return people * float(levels[holds[0]]) if holds.size else math.inf


def log_group_growth(levels: np.ndarray, people: int) -> np.ndarray:
    """log of (e^(k e) - 1) / (e^e - 1) at each e of `levels`: by which group privacy of `people`
    users multiplies delta. Its limit at 0 is log k."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(-np.expm1(-people * levels) / -np.expm1(-levels))
    return (people - 1) * levels + np.where(levels > 0, ratio, math.log(people))
