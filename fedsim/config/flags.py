"""Settings by the names of their flags: from Python, from TOML files, and for config.json."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from fedsim.config.run import DataConfig, EngineConfig, ModelConfig, RunConfig
from fedsim.errors import ConfigError, expect

# The groups of a RunConfig, each with the field whose flag is named like the group.
_GROUPS = {"data": ("source", DataConfig), "model": ("source", ModelConfig)}
_GROUPS |= {"engine": ("kind", EngineConfig)}


RENAMED = {"budget": "batch_size"}
"""Settings that version 0.3 renamed, which 0.3 still takes by their old names."""


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by their present names. Raises: ConfigError: one has both of its names."""
    for old in RENAMED.keys() & settings.keys():
        new = RENAMED[old]
        expect(old, settings[old], new not in settings, f"{new} alone, which is its name now")
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def first_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by the names that they first had: what is derived from names, keys of seeds and
    names of a sweep's runs, stays as it was."""
    first = {new: old for old, new in RENAMED.items()}
    return {first.get(name, name): value for name, value in settings.items()}


def run_config(**settings: Any) -> RunConfig:
    """A RunConfig from settings by the names of their flags: data, run_dir, lora_rank, seed, ...

    Raises: ConfigError: a name is unknown, or data or run_dir is missing.
    """
    flags = flags_of(RunConfig)
    for name in settings.keys() - flags.keys():
        raise ConfigError.of(name, settings[name], "the name of a setting of train")
    for name in {"data", "run_dir"} - settings.keys():
        raise ConfigError.of(name, None, "a value")
    of_run: dict[str, Any] = {}
    of_groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    for name, value in settings.items():
        group, field = flags[name]
        (of_groups[group] if group else of_run)[field.name] = value
    groups = {group: kind(**of_groups[group]) for group, (_, kind) in _GROUPS.items()}
    return RunConfig(**of_run, **groups)


def changed_run(run: RunConfig, **settings: Any) -> RunConfig:
    """The same RunConfig but for some settings, by the names of their flags."""
    return type(run)(**vars(run_config(**{**settings_of(run), **settings})))


def settings_of(config: Any) -> dict[str, Any]:
    """All settings of a config by the names of their flags."""
    return {
        name: getattr(getattr(config, group) if group else config, field.name)
        for name, (group, field) in flags_of(type(config)).items()
    }


EXPECTED = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
}
"""The types of settings in the words of an error."""


def typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as the type of a setting: 1 is 1.0 where a number is asked for, 3 is no text.

    Raises: ConfigError: it is of another type, or none of the choices.
    """
    import pydantic  # takes as long to import as a command takes to say its first line

    kinds = (kind, *typing.get_args(kind))
    if getattr(value, "shape", None) == ():
        value = value.item()  # a scalar of NumPy or JAX
    if isinstance(value, str) and value == "inf" and float in kinds:
        value = math.inf  # as JSON has it
    try:
        return pydantic.TypeAdapter(kind).validate_python(value, strict=Path not in kinds)
    except pydantic.ValidationError:
        choices = [typing.get_args(k) for k in kinds if typing.get_origin(k) is Literal]
    if choices:
        expected = f"one of {', '.join(map(str, choices[0]))}"
    else:
        expected = next(words for type_, words in EXPECTED.items() if type_ in kinds)
    raise ConfigError.of(name, value, "a value" if value is None else expected)


def types_of(kind: type) -> dict[str, Any]:
    """The types of a config's settings by the names of their flags."""
    of_config = typing.get_type_hints(kind)
    of_groups = {name: typing.get_type_hints(group) for name, (_, group) in _GROUPS.items()}
    return {
        name: (of_groups[group] if group else of_config)[field.name]
        for name, (group, field) in flags_of(kind).items()
    }


def flags_of(kind: type) -> dict[str, tuple[str | None, dataclasses.Field[Any]]]:
    """The flags of a config class: the group in which a setting is, or None, and its field."""
    flags: dict[str, tuple[str | None, dataclasses.Field[Any]]] = {}
    for field in fields(kind):
        if field.name not in _GROUPS or not issubclass(kind, RunConfig):
            flags[field.name] = None, field
            continue
        first, group = _GROUPS[field.name]
        for inner in fields(group):
            flags[field.name if inner.name == first else inner.name] = field.name, inner
    return flags


def as_dict(config: Any) -> dict[str, Any]:
    """The settings by the names of their flags, in JSON's types; inf is the string 'inf'."""
    return {name: to_json(value) for name, value in settings_of(config).items()}


def changed(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config, in JSON's types, that are not at their defaults."""
    defaults = {name: field.default for name, (_, field) in flags_of(kind).items()}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def to_json(value: Any) -> Any:
    """Paths and non-finite floats as strings, everything else as it is."""
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
