"""Checked reading of a config.json: numbers, flags, kinds of layers and rotary positions."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from fedsim.errors import ConfigError, brief
from fedsim.models.rope import SCALINGS, Linear, Llama3, LongRope, RopeScaling, Yarn


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
      KeyError: the field is absent, and there is no default.
      UnsupportedArchitecture: the field has another value.
    """
    if (value := f.get(name)) is None:
        return _default(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise odd(name, value, f"a whole number in [1, {most}]")
    return value


def number(f: Fields, name: str, least: float, most: float, default: Any = NEEDED) -> Any:
    """A number in [least, most] of a config.json; `default` if it is absent or null.

    Raises: as `whole`.
    """
    if (value := f.get(name)) is None:
        return _default(name, default)
    if type(value) not in (int, float) or not least <= value <= most:
        raise odd(name, value, f"a number in [{least:g}, {most:g}]")
    return float(value)


def flag(f: Fields, name: str, default: bool = False) -> bool:
    """True or false of a config.json; `default` if it is absent or null. Raises: as `whole`."""
    if (value := f.get(name)) is None:
        return default
    if type(value) is not bool:
        raise odd(name, value, "true or false")
    return value


def need(name: str, value: Any, *allowed: Any) -> None:
    """Check that a field has one of some values. Raises: UnsupportedArchitecture."""
    if value not in allowed:
        shown = ("null" if value is None else str(value) for value in allowed)
        raise odd(name, value, " or ".join(shown))


def _default(name: str, default: Any) -> Any:
    if default is NEEDED:
        raise KeyError(name)
    return default


FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_flags(f: Fields, name: str, layers: int, yes: Any, no: Any) -> tuple[bool, ...] | None:
    """A list of one of two values for each layer; None if it is absent, null or empty.

    Raises:
      UnsupportedArchitecture: it is another list, or too short.
    """
    values = f.get(name) or []
    known = isinstance(values, list) and all(value in (yes, no) for value in values)
    if not known or 0 < len(values) < layers:
        raise odd(name, values, f"a list of {no} and {yes}, one for each of {layers} layers")
    return tuple(value == yes for value in values[:layers]) or None


def rotary(f: Fields, *names: str) -> dict[str, Any]:
    """The objects of rotary positions of these names in one.

    Raises:
      UnsupportedArchitecture: one is no object.
    """
    rope: dict[str, Any] = {}
    for name in names:
        if (value := f.get(name)) is not None:
            if not isinstance(value, dict):
                raise odd(name, value, "an object, or null")
            rope |= value
    return rope


def scaling_of(f: Fields, rope: Mapping[str, Any], width: int) -> RopeScaling | None:
    """Scaling of rotary positions; None if there is none up to the longest text.

    Args:
      f: the config.json.
      rope: its object of rotary positions.
      width: number of features that rotate.
    Raises:
      UnsupportedArchitecture: the scaling is unknown, or a number of it is missing or invalid.
    """
    need("rope_type", kind := rope.get("rope_type"), "default", "dynamic", *SCALINGS)
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return Linear(number(rope, "factor", *FACTORS))
    longest = whole(f, "max_position_embeddings", LENGTH)
    beside = f.get(ORIGINAL)  # which `transformers` prefers
    length = whole(rope if beside is None else f, ORIGINAL, LENGTH, longest)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (number(rope, name, *FACTORS) for name in names)
        if low >= high:
            raise odd("low_freq_factor", low, f"less than high_freq_factor={high}")
        return Llama3(factor, low, high, length)
    factor = number(rope, "factor", *FACTORS, longest / length)
    if kind == "yarn":
        fast, slow = (
            number(rope, name, *FACTORS, default)
            for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
        )
        sharper = number(rope, "attention_factor", *FACTORS, _of_yarn(rope, factor))
        return Yarn(factor, sharper, fast, slow, flag(rope, "truncate", True), length)
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != width // 2:
        raise odd("short_factor", factors, f"a list of {width // 2} numbers")
    numbers = tuple(number({"short_factor": x}, "short_factor", *FACTORS) for x in factors)
    usual = math.sqrt(1 + math.log(max(factor, 1)) / math.log(max(length, 2)))
    return LongRope(numbers, number(rope, "attention_factor", *FACTORS, usual), length)


ORIGINAL = "original_max_position_embeddings"


def _of_yarn(rope: Mapping[str, Any], factor: float) -> float:
    """attention_factor of YaRN where it is not given."""
    scales = [number(rope, name, *FACTORS, None) for name in ("mscale", "mscale_all_dim")]
    above, below = scales if all(scales) else (1.0, 0.0)
    log = math.log(max(factor, 1))
    return (0.1 * above * log + 1) / (0.1 * below * log + 1)


def rope_fields(scaling: RopeScaling | None) -> dict[str, Any]:
    """The object of rotary positions for a scaling, without its base."""
    if scaling is None:
        return {"rope_type": "default"}
    fields = {"rope_type": scaling.kind, **dataclasses.asdict(scaling)}
    del fields["kind"]
    if "original_length" in fields:
        fields[ORIGINAL] = fields.pop("original_length")
    if isinstance(scaling, LongRope):  # no text is so long that the other factors apply
        fields["short_factor"] = fields["long_factor"] = list(scaling.short_factor)
    return fields
