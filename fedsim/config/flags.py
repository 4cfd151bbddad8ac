"""Settings by the names of their flags: from Python and TOML files, and to config.json."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from fedsim.config.run import DataConfig, EngineConfig, ModelConfig, RunConfig
from fedsim.errors import ConfigError, expect

# The groups of a RunConfig, each with the field whose flag is named like the group.
_GROUPS = {"data": ("source", DataConfig), "model": ("source", ModelConfig)}
_GROUPS |= {"engine": ("kind", EngineConfig)}


RENAMED = {"budget": "batch_size", "lora_layers": "lora_modules"}
"""Settings that were renamed, and are still accepted by their old names."""


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their current names.

    Raises: ConfigError: a setting is given under both of its names.
    """
    for old in RENAMED.keys() & settings.keys():
        new = RENAMED[old]
        expect(old, settings[old], new not in settings, f"{new} alone, which is its name now")
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def first_named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their original names.

    Keys of seeds and names of candidates are derived from names, and must stay the same when a
    setting is renamed.
    """
    first = {new: old for old, new in RENAMED.items()}
    return {first.get(name, name): value for name, value in settings.items()}


OTHER_NAMES = {
    **dict.fromkeys(("eps", "target_epsilon", "privacy_budget"), "epsilon"),
    **dict.fromkeys(("lr", "rate"), "learning_rate"),
    **dict.fromkeys(("batch", "bs", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("steps", "max_steps", "iterations", "rounds"), "num_steps"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "num_steps"),
    **dict.fromkeys(("max_grad_norm", "clip", "clipping_norm", "l2_norm_clip"), "clip_norm"),
    **dict.fromkeys(("noise_multiplier", "sigma"), "epsilon"),
    **dict.fromkeys(("workers", "num_processes"), "num_workers"),
    **dict.fromkeys(("output_dir", "out", "dir", "logdir"), "run_dir"),
    **dict.fromkeys(("user", "user_id", "users"), "user_column"),
    **dict.fromkeys(("text", "column"), "text_column"),
    **dict.fromkeys(("messages", "dataset", "train_file"), "data"),
    **dict.fromkeys(("seq_length", "max_seq_length", "block_size"), "max_length"),
    **dict.fromkeys(("lora_r", "rank", "r", "use_dora"), "lora_rank"),
    **dict.fromkeys(("target_modules", "modules"), "lora_modules"),
    **dict.fromkeys(("use_rslora", "rslora"), "lora_scaling"),
    **dict.fromkeys(("adapters", "peft", "adapter_path"), "adapter"),
}
"""Names that other libraries have for settings."""
REASONS = {
    "epochs": "training counts steps: epochs x examples / batch_size",
    "noise_multiplier": "the noise is computed from it",
    "use_dora": "DoRA is not built: its magnitudes are more parameters than LoRA's",
    "use_rslora": "--lora-scaling rslora",
}
REASONS |= {name: REASONS["epochs"] for name in ("num_epochs", "num_train_epochs")}
REASONS["sigma"] = REASONS["noise_multiplier"]


def meant(name: str, known: Iterable[str]) -> tuple[str, str]:
    """The setting that an unknown name probably stands for, and a reason; both may be empty.

    Args:
      name: with underscores.
      known: names of settings that exist, with underscores.
    """
    known = list(known)
    if (other := OTHER_NAMES.get(name)) in known:
        return other, REASONS.get(name, "")
    close = difflib.get_close_matches(name, known, 1, 0.75)
    return (close[0] if close else ""), ""


def unknown_setting(name: str, value: Any, known: Iterable[str]) -> ConfigError:
    """The error of a setting that does not exist, with the one that was probably meant."""
    other, reason = meant(name, known)
    hint = f", such as {other}" if other else " of train"
    return ConfigError.of(
        name, value, f"the name of a setting{hint}{f' ({reason})' if reason else ''}"
    )


def run_config(**settings: Any) -> RunConfig:
    """Make a RunConfig from settings by flag name: data, run_dir, lora_rank, seed, ...

    Raises: ConfigError: a name is unknown, or data or run_dir is missing.
    """
    flags = flags_of(RunConfig)
    for name in settings.keys() - flags.keys():
        raise unknown_setting(name, settings[name], flags)
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
    """A copy of a RunConfig with some settings replaced, by flag name."""
    return type(run)(**vars(run_config(**{**settings_of(run), **settings})))


def computed_by(run: RunConfig, engine: str = "local", **settings: Any) -> RunConfig:
    """The settings of a run for computing with its model, on an engine and whatever devices there
    are here."""
    return changed_run(run, engine=engine, accelerator="auto", **settings)


def settings_of(config: Any) -> dict[str, Any]:
    """All settings of a config by flag name."""
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
"""Names of the types of settings in error messages."""


def typed(name: str, value: Any, kind: Any) -> Any:
    """Convert `value` to the type of a setting.

    Whole numbers become floats where a float is expected; a number is no text.
    Raises: ConfigError: the value has another type, or is none of the choices.
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
        many = "a list of " if typing.get_origin(kind) is Sequence else "one of "
        expected = many + ", ".join(map(str, choices[0]))
    else:
        expected = next(words for type_, words in EXPECTED.items() if type_ in kinds)
    raise ConfigError.of(name, value, "a value" if value is None else expected)


def types_of(kind: type) -> dict[str, Any]:
    """Types of the settings of a config class by flag name."""
    of_config = typing.get_type_hints(kind)
    of_groups = {name: typing.get_type_hints(group) for name, (_, group) in _GROUPS.items()}
    return {
        name: (of_groups[group] if group else of_config)[field.name]
        for name, (group, field) in flags_of(kind).items()
    }


def flags_of(kind: type) -> dict[str, tuple[str | None, dataclasses.Field[Any]]]:
    """Flags of a config class: name -> (group, field).

    The group is the nested config (`data`, `model` or `engine`) that has the field; None: the class
    itself.
    """
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
    """Settings by flag name in JSON's types; infinity is the string 'inf'."""
    return {name: to_json(value) for name, value in settings_of(config).items()}


def changed(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, in JSON's types, that differ from their defaults."""
    defaults = {name: field.default for name, (_, field) in flags_of(kind).items()}
    return {name: value for name, value in settings.items() if value != defaults[name]}


def to_json(value: Any) -> Any:
    """Convert paths and non-finite floats to strings, and tuples to lists; return other values
    unchanged."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value
