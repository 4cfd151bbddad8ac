"""Events in JSON's words, for ledgers: the name of the event's class, and its fields.

Whatever belongs to `Event` can be written and read; nothing here knows what kinds there are.
"""

import dataclasses
from typing import Any, get_args

from fedsim.accounting.events import Event, Phases

KIND = "kind"
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def to_words(phases: Phases) -> list[list[Any]]:
    """Events, each with its number of times, as JSON has them.

    >>> from fedsim.accounting import PureEvent
    >>> to_words([(PureEvent(epsilon=0.5), 2)])
    [[{'kind': 'PureEvent', 'epsilon': 0.5}, 2]]
    """
    return [[_to_words(event), int(count)] for event, count in phases]


def of_words(words: Any) -> list[tuple[Event, int]]:
    """What `to_words` wrote. Raises: KeyError, TypeError, ValueError: it is something else."""
    phases = [(_of_words(event), count) for event, count in words]
    for _, count in phases:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"count={count}: expected a whole number >= 0")
    return phases


def _to_words(value: Any) -> Any:
    """An event as a dict, also inside of another one; tuples as lists."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: _to_words(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {KIND: type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [_to_words(each) for each in value]
    return value


def _of_words(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _of_words(each) for name, each in value.items() if name != KIND}
        return _KINDS[value[KIND]](**fields)
    if isinstance(value, list):
        return tuple(_of_words(each) for each in value)
    return value
