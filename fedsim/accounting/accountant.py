"""The one accountant: user-level (epsilon, delta) of DP-SGD-ELS and DP-SGD-ULS.

Source: Charles et al. 2024, Theorems 1 and 2. Adjacency is add-or-remove one user, both directions,
with Poisson sampling, of all users or of a group of them in turn.

Every epsilon and delta is an upper bound, on any grid of the privacy loss. The grid is refined
until the answer is predicted to lie within RELATIVE_ACCURACY of the exact one, or until it is as
fine as refinement allows. One-step losses are cached, so further questions about a step are cheap.
"""

import functools
import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedsim.accounting import allocation, composition, mixture
from fedsim.accounting.composition import Query, together
from fedsim.accounting.events import Event, Events, PureEvent, StepEvent, merge
from fedsim.accounting.selection import SelectionEvent, loss_range as selection_range, selection_pmf
from fedsim.errors import expect, expect_count

RELATIVE_ACCURACY = 1e-4
"""Predicted relative distance of an adaptive answer above the exact value; mostly less."""

_FIRST_GRID = 1024  # points of the coarsest one-step grid
_TRIAL_DELTA = 1e-9  # the delta for which the grid of a trial's loss is chosen
_DIRECTIONS = composition.REMOVE, composition.ADD
_SMALLEST_DELTA = composition.COMPOSED_TAIL_MASS  # nothing below is resolved


def epsilon(
    events: Events,
    delta: float,
    *,
    discretization: float | None = None,
) -> float:
    """The smallest epsilon for which the events together are (epsilon, delta)-DP, from above.

    Args:
      events: each with its number of successive steps.
      discretization: grid of the privacy loss; None chooses it by RELATIVE_ACCURACY.
    Returns: inf where delta is too small to be resolved (1e-15, and 4e-19 per step).
    Raises: ConfigError: delta outside (0, 1), a negative count, or a grid beyond the memory cap.
    >>> round(epsilon([(StepEvent(noise_multiplier=1.0, sampling_prob=0.01), 100)], 1e-6), 3)
    0.954
    """
    expect("delta", delta, 0 < delta < 1, "in (0, 1)")
    return float(_answer(events, _epsilon_query(delta), 1, discretization)[0])


def epsilon_with(
    parts: Sequence[tuple[float, float]], events: Events, delta: float, aside: float = 0.0
) -> float:
    """Epsilon of several mechanisms together, with the slack of each.

    Args:
      parts: (epsilon, delta) slack of each mechanism.
      aside: part of delta that is reserved for something else.
    Returns: inf where the slacks and `aside` leave nothing of delta.
    """
    left = delta - 2 * sum(part for _, part in parts)
    while left > aside:
        ideal = epsilon(events, left - aside)
        more, missed = together(parts, ideal, left)
        if left + missed <= delta:
            return float(ideal + more)
        # 1 % more than was missed, because epsilon grows; doubled at least, so that the loop ends.
        left = delta - max(1.01 * missed, 2 * (delta - left))
    return math.inf


def delta(events: Events, epsilon: float, *, discretization: float | None = None) -> float:
    """The smallest delta for which the events together are (epsilon, delta)-DP, from above.

    Args: as for `epsilon`.
    """
    return float(privacy_curve(events, [epsilon], discretization=discretization)[0])


def privacy_curve(
    events: Events,
    epsilons: Sequence[float] | np.ndarray,
    *,
    discretization: float | None = None,
) -> np.ndarray:
    """delta at each epsilon: the privacy curve of the events, from above. Shape [epsilons].

    Raises: ConfigError: an epsilon is negative.
    """
    for value in epsilons:
        expect("epsilon", value, 0 <= value < math.inf, ">= 0 and finite")

    def query(pmf: DensePLDPmf) -> np.ndarray:
        deltas = [float(pmf.get_delta_for_epsilon(float(value))) for value in epsilons]
        return np.clip(deltas, _SMALLEST_DELTA, 1.0)

    return _answer(events, query, len(epsilons), discretization)


def composed_loss(events: Events, delta: float) -> PrivacyLossDistribution:
    """The composed privacy loss of the events, on the grid that epsilon() needs at this delta."""
    grid = _refine(events, _epsilon_query(delta))[1]
    return PrivacyLossDistribution(*(_compose(merge(events), way, grid) for way in _DIRECTIONS))


class RunningEpsilon:
    """epsilon after `before` and t steps of one event, cheap enough to call while training.

    Guarantees: every answer is an upper bound, within about RELATIVE_ACCURACY of epsilon().
    The grid is chosen anew when t has doubled; in between, a call is one composition.
    """

    def __init__(self, event: StepEvent, delta: float, before: Events = ()) -> None:
        expect("delta", delta, 0 < delta < 1, "in (0, 1)")
        self._event, self._delta, self._before = event, delta, before
        self._chosen_at, self._discretization = 0, 0.0

    def __call__(self, num_steps: int) -> float:
        expect_count("num_steps", num_steps, 0)
        events = [*self._before, (self._event, num_steps)]
        if 0 < self._chosen_at <= num_steps < 2 * self._chosen_at:
            return epsilon(events, self._delta, discretization=self._discretization)
        if num_steps == 0:
            return epsilon(self._before, self._delta)
        answer, self._discretization = _refine(events, _epsilon_query(self._delta))
        self._chosen_at = num_steps
        return float(answer[0])


def spent(events: Events, delta: float, accuracy: float) -> float:
    """epsilon() to this relative accuracy; inf where no grid can hold the loss."""
    try:
        return float(_refine(events, _epsilon_query(delta), accuracy)[0][0])
    except composition.GridTooLargeError:
        return math.inf


def _epsilon_query(delta: float) -> Query:
    return lambda pmf: np.array([composition.pmf_epsilon_at(pmf, delta)])


def _answer(events: Events, query: Query, size: int, discretization: float | None) -> np.ndarray:
    merged = merge(events)
    if not merged or size == 0:
        return np.zeros(size)
    if discretization is None:
        return _refine(events, query)[0]
    expect("discretization", discretization, 0 < discretization <= 1, "in (0, 1]")
    return np.maximum(*(query(_compose(merged, way, discretization)) for way in _DIRECTIONS))


def _refine(
    events: Events, query: Query, accuracy: float = RELATIVE_ACCURACY
) -> tuple[np.ndarray, float]:
    """The query's answer on an adaptive grid, and the grid that was fine enough for it."""
    merged = merge(events)
    widest = max(_loss_range(event) for event, _ in merged)
    coarsest = min(1.0, 2.0 ** math.floor(math.log2(widest / _FIRST_GRID)))
    answer, finest = None, coarsest
    for direction in _DIRECTIONS:  # one whose bound is below the other's needs no finer grid
        compose = functools.partial(_compose, merged, direction)
        value, grid = composition.refine(compose, query, coarsest, accuracy, answer)
        answer = value if answer is None else np.maximum(value, answer)
        finest = min(finest, grid)
    assert answer is not None
    return answer, finest


def _compose(events: Events, direction: int, discretization: float) -> DensePLDPmf:
    steps = [(_one_direction(event, discretization, direction), count) for event, count in events]
    return composition.compose_pmfs(steps)


@functools.lru_cache(maxsize=16)
def _one_direction(event: Event, discretization: float, direction: int) -> DensePLDPmf:
    if isinstance(event, PureEvent):
        return pure_pmf(event, discretization)
    if isinstance(event, SelectionEvent):
        return selection_pmf(event, _trials(event), discretization)
    if event.allocated:
        noise, steps = event.noise_multiplier, event.cycle
        return allocation.one_window_pmf(noise, steps, discretization, direction)
    return mixture.one_step_pmf(_mixture(event), discretization, direction)


def pure_pmf(event: PureEvent, discretization: float) -> DensePLDPmf:
    """The discretised loss of pure epsilon-DP, an upper bound in both directions: always epsilon.

    Randomised response has less, but is a bound only where all that is composed with it was fixed
    beforehand. The noise of a run depends on the group size that was drawn.

    Theorem: let the outcome g of the release have the probabilities p_g and p'_g on neighbouring
    data, with p_g <= e^epsilon p'_g, and let all that follows g have the privacy curve d_g. For any
    levels x_g, also those that depend on g, and every event E,
    P(E) <= sum_g e^x_g P'(E and g) + sum_g p_g d_g(x_g - epsilon).
    Proof: P(E and g) - e^x_g P'(E and g) = p_g (P(E | g) - e^(x_g - l) P'(E | g)) with
    l = log(p_g / p'_g) <= epsilon. That is at most p_g d_g(x_g - l), and d_g does not rise.
    So each outcome may be priced by its own x_g with d_g(x_g - epsilon) = delta, and where no x_g
    is above x, the whole is (x, delta)-DP.

    Connect the dots, as for `mixture`: the atom is split between the grid points next to it such
    that the masses under both distributions stay the same.
    """
    low = math.floor(event.epsilon / discretization)
    above = max(0.0, event.epsilon - low * discretization)
    raised = min(1.0, math.expm1(-above) / math.expm1(-discretization))
    return DensePLDPmf(discretization, low, np.array([1 - raised, raised]), 0.0, True)


def _loss_range(event: Event) -> float:
    if isinstance(event, PureEvent):
        return event.epsilon
    if isinstance(event, SelectionEvent):
        return selection_range(event, _trials(event))
    if event.allocated:
        lowest, highest = allocation.loss_range(event.noise_multiplier, event.cycle)
        return highest - lowest
    lowest, highest = mixture.loss_range(_mixture(event))
    return highest - lowest


@functools.lru_cache(maxsize=16)
def _trials(event: SelectionEvent) -> list[PrivacyLossDistribution]:
    """The privacy loss of one trial of each candidate."""
    return [composed_loss(candidate, _TRIAL_DELTA) for candidate in event.candidates]


def _mixture(event: StepEvent) -> mixture.Mixture:
    noise, most, prob = event.noise_multiplier, event.max_contributions, event.sampling_prob
    if event.max_changed:
        return mixture.changing_mixture(noise, most, event.max_changed, prob)
    return mixture.binomial_mixture(noise, most, prob)


def at_most(value: float, form: str) -> str:
    """Format a bound for display with its last digit rounded up, as for epsilon, delta and noise.

    A displayed bound is never below the one that holds.
    Args: form: a format such as ".2e".
    >>> at_most(2.3412e-6, ".2e"), at_most(0.12301, ".1%"), at_most(4.0, ".4f")
    ('2.35e-6', '12.4%', '4.0000')
    """
    if math.isinf(value):
        return str(value)
    with localcontext(rounding=ROUND_CEILING):
        return format(Decimal(repr(float(value))), form)


def at_least(value: float, form: str) -> str:
    """Format a bound for display with its last digit rounded down, as for sampling probabilities.

    Args: form: a format such as ".3g".
    >>> at_least(0.25599, ".3g"), at_least(0.25, ".3g")
    ('0.255', '0.25')
    """
    with localcontext(rounding=ROUND_FLOOR):
        return format(Decimal(repr(float(value))), form)
