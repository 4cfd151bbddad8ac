"""Checked reading of a config.json: numbers, flags, kinds of layers and rotary positions."""

from collections.abc import Callable, Mapping
from typing import Any

from fedsim.errors import ConfigError, brief
from fedsim.models.rope import SCALINGS, Linear, Llama3, RopeScaling


class UnsupportedArchitecture(ConfigError):
    """A model that `Transformer` cannot represent. The message names the reason."""


Fields = Mapping[str, Any]
NEEDED: Any = object()
TOKENS, LENGTH, WIDTH, LAYERS, HEADS = 2**24, 2**24, 2**20, 2**10, 2**12
"""Bounds of sizes, above those of all models in use. A larger model would be traced for hours
before an array is found to be missing."""
FACTORS = (1 / 1024, 2**20)
BASES = (1.001, 1e15)


def odd(name: str, value: Any, expected: str) -> UnsupportedArchitecture:
    """The error that a field has another value than expected."""
    return UnsupportedArchitecture.of(name, brief(value), expected)


def whole(f: Fields, name: str, most: int, default: Any = NEEDED) -> Any:
    """A whole number in [1, most] of a config.json; `default` if it is absent or null.

    Raises:
      UnsupportedArchitecture: the field has another value, or neither it nor a default is there.
    """
    expected = f"a whole number in [1, {most}]"
    return _field(f, name, default, lambda x: type(x) is int and 1 <= x <= most, expected)


def number(f: Fields, name: str, least: float, most: float, default: Any = NEEDED) -> Any:
    """A number in [least, most] of a config.json; `default` if it is absent or null.

    Raises: as `whole`.
    """
    expected = f"a number in [{least:g}, {most:g}]"
    kinds = (int, float)
    value = _field(f, name, default, lambda x: type(x) in kinds and least <= x <= most, expected)
    return value if value is None else float(value)


def flag(f: Fields, name: str, default: bool = False) -> bool:
    """True or false of a config.json; `default` if it is absent or null. Raises: as `whole`."""
    return _field(f, name, default, lambda x: type(x) is bool, "true or false")


def _field(f: Fields, name: str, default: Any, holds: Callable[[Any], bool], expected: str) -> Any:
    if (value := f.get(name)) is not None and not holds(value):
        raise odd(name, value, expected)
    if value is None and default is NEEDED:
        raise odd(name, None, "a value in config.json")
    return default if value is None else value


def need(name: str, value: Any, *allowed: Any) -> None:
    """Check that a field has one of some values. Raises: UnsupportedArchitecture."""
    if value not in allowed:
        shown = ("null" if value is None else str(value) for value in allowed)
        raise odd(name, value, " or ".join(shown))


FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_flags(f: Fields, name: str, layers: int, yes: Any, no: Any) -> tuple[bool, ...] | None:
    """A list of one of two values for each layer; None if it is absent, null or empty.

    Raises: UnsupportedArchitecture: it is another list, or too short.
    """
    values = f.get(name) or []
    known = isinstance(values, list) and all(value in (yes, no) for value in values)
    if not known or 0 < len(values) < layers:
        raise odd(name, values, f"a list of {no} and {yes}, one for each of {layers} layers")
    return tuple(value == yes for value in values[:layers]) or None


def as_object(f: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of a config.json; empty if it is absent or null. Raises: as `whole`."""
    return _field(f, name, {}, lambda x: isinstance(x, dict), "an object, or null")


def scaling_of(f: Fields, kind: str, rope: Mapping[str, Any]) -> RopeScaling | None:
    """Scaling of rotary positions; None if there is none up to the longest text.

    Args:
      f: the config.json.
      kind: of ROPE_TYPES.
      rope: the object of rotary positions in it.
    Raises: UnsupportedArchitecture: a number of the scaling is missing or invalid.
    """
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return Linear(number(rope, "factor", *FACTORS))
    longest = whole(f, "max_position_embeddings", LENGTH)
    length = whole(rope, ORIGINAL, LENGTH, longest)
    need(ORIGINAL, f.get(ORIGINAL), None, length)
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (number(rope, name, *FACTORS) for name in names)
    if low >= high:
        raise odd("low_freq_factor", low, f"less than high_freq_factor={high}")
    return Llama3(factor, low, high, length)


ROPE_TYPES = ("default", "dynamic", *SCALINGS)
ORIGINAL = "original_max_position_embeddings"
