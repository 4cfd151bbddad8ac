"""Events: descriptions of releases for the accountant, each with a number of successive steps."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from fedsim.accounting.selection import SelectionEvent
from fedsim.errors import expect, expect_count

# Beyond these limits the accountant has no answers or wrong ones, and they have no use.
MAX_STEPS = MAX_CONTRIBUTIONS = 10**7
MIN_NOISE, MAX_NOISE = 1e-10, 1e10
MIN_PROB = 1e-12
MIN_MEAN = 1e-13
"""Least sampling_prob / noise_multiplier: a smaller loss is lost in floating-point rounding."""


@dataclasses.dataclass(frozen=True)
class StepEvent:
    """One released step: N(Binomial(max_contributions, sampling_prob), noise_multiplier^2).

    ELS: max_contributions = G_ELS, the cap that D_sub enforces. ULS: always 1, since a user's
    gradient is clipped as a whole; its group size never reaches the accountant. Where texts have
    several owners, a user also has texts in the groups of others, max_changed of them at most:
    without the user these do not disappear, but change. The loss is then that of
    N(Binomial(max_contributions + max_changed, q), sigma^2) against
    N(-Binomial(max_changed, q), sigma^2); docs/theory/owners.md.

    Raises: ConfigError: a field is out of range.
    """

    noise_multiplier: float
    """sigma: standard deviation of the noise on the sum, in units of the sensitivity. In
    [1e-10, 1e10], and at most 1e13 times sampling_prob."""
    sampling_prob: float
    """p or q: probability that a sampling unit takes part in a step. In [1e-12, 1]."""
    max_contributions: int = 1
    """Largest number of sampling units of one user in a step. A whole number in [1, 10^7]."""
    cycle: int = 1
    """Number of successive steps of which a user can take part in one, the same in every cycle; a
    user's contribution stays within one cycle. A whole number >= 1."""
    max_changed: int = 0
    """Largest number of other users' units that one user can change. A whole number in [0,
    10^7]."""
    allocated: bool = False
    """Random allocation: a user takes part in exactly one, uniformly random step of a cycle;
    sampling_prob is then 1, and a user is one unit."""

    def __post_init__(self) -> None:
        noise, prob = self.noise_multiplier, self.sampling_prob
        within = f"in [{MIN_NOISE:g}, {MAX_NOISE:g}]"
        expect("noise_multiplier", noise, MIN_NOISE <= noise <= MAX_NOISE, within)
        expect("sampling_prob", prob, 0 < prob <= 1, "in (0, 1]")
        expect("sampling_prob", prob, prob >= MIN_PROB, f"at least {MIN_PROB:g}")
        most = prob / MIN_MEAN
        holds = noise <= most * (1 + 1e-9)
        expect("noise_multiplier", noise, holds, f"at most {most:g} with sampling_prob={prob:g}")
        expect_count("max_contributions", self.max_contributions, 1)
        expect_count("cycle", self.cycle, 1)
        expect_count("max_changed", self.max_changed, 0)
        for name in ("max_contributions", "max_changed"):
            value = getattr(self, name)
            expect(name, value, value <= MAX_CONTRIBUTIONS, f"at most {MAX_CONTRIBUTIONS}")
        if self.allocated:
            expect("sampling_prob", prob, prob == 1, "1 with random allocation")
            one = self.max_contributions == 1 and not self.max_changed
            expect("max_contributions", self.max_contributions, one, "1, and no others")


@dataclasses.dataclass(frozen=True)
class PureEvent:
    """A release with (epsilon, 0)-DP, such as the exponential mechanism's.

    Raises: ConfigError: epsilon is not positive and finite.
    """

    epsilon: float

    def __post_init__(self) -> None:
        expect("epsilon", self.epsilon, 0 < self.epsilon < math.inf, "> 0 and finite")


Event = StepEvent | PureEvent | SelectionEvent
Events = Sequence[tuple[Event, int]]
"""Releases: events, each with its number of successive steps, composed."""


def cyclic_event(
    noise_multiplier: float,
    sampling_prob: float,
    max_contributions: int,
    bands: int,
    max_changed: int = 0,
) -> StepEvent:
    """A step of cyclic Poisson sampling of an expected fraction `sampling_prob` of all users.

    Only the users of one of `bands` groups can take part, with `bands` times the probability.
    """
    expect("sampling_prob", sampling_prob, sampling_prob > 0, "in (0, 1]")  # nan is not
    prob = min(max(1.0, sampling_prob), sampling_prob * bands)  # above 1 only what was given so
    return StepEvent(noise_multiplier, prob, max_contributions, bands, max_changed)


def allocated_event(noise_multiplier: float, window: int) -> StepEvent:
    """A step of random allocation, in which a user takes part once in every `window` steps."""
    return StepEvent(noise_multiplier, 1.0, 1, window, allocated=True)


def event_fields(event: Event) -> dict[str, Any]:
    """The fields of an event in JSON's types."""
    fields = dataclasses.asdict(event)
    # Left out at their defaults, as in ledgers of versions without these fields.
    for name, usual in (("cycle", 1), ("max_changed", 0), ("allocated", False)):
        if fields.get(name) == usual:
            del fields[name]
    return fields


def merge(events: Events) -> list[tuple[Event, int]]:
    """Add up equal events, and leave out those without a step.

    In a cycle, the steps after a user's own release nothing more of that user, whichever these are.
    So one event is composed for every cycle that was started.
    """
    counts: dict[Event, int] = {}
    for event, count in events:
        expect_count("num_steps", count, 0)
        expect("num_steps", count, count <= MAX_STEPS, f"at most {MAX_STEPS}")
        count = int(count)
        if isinstance(event, StepEvent):
            blocks = -(-count // event.cycle)
            event, count = event if event.allocated else dataclasses.replace(event, cycle=1), blocks
        counts[event] = counts.get(event, 0) + count
    return [(event, count) for event, count in counts.items() if count > 0]


KIND = "kind"
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def to_words(events: Events) -> list[list[Any]]:
    """Events, each with its number of steps, as JSON.

    >>> from fedsim.accounting import PureEvent
    >>> to_words([(PureEvent(epsilon=0.5), 2)])
    [[{'kind': 'PureEvent', 'epsilon': 0.5}, 2]]
    """
    return [[_to_words(event), int(count)] for event, count in events]


def of_words(words: Any) -> list[tuple[Event, int]]:
    """Events that `to_words` wrote.

    Raises: KeyError, TypeError, ValueError: the input is something else.
    """
    events = [(_of_words(event), count) for event, count in words]
    for _, count in events:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count={count}: expected a whole number >= 0")
    return events


def _to_words(value: Any) -> Any:
    """An event as a dict, also within another one; tuples as lists."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: _to_words(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {KIND: type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [_to_words(part) for part in value]
    return value


def _of_words(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _of_words(part) for name, part in value.items() if name != KIND}
        return _KINDS[value[KIND]](**fields)
    if isinstance(value, list):
        return tuple(_of_words(part) for part in value)
    return value
