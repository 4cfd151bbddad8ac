"""Settings by the names of their flags: from Python and files, and to config.json."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fedsim.config.model import flags_of
from fedsim.config.settings import BuildConfig, RunConfig
from fedsim.errors import ConfigError, expect, such_as

T = TypeVar("T")

FIRST_NAMES = {
    "batch_size": "budget",
    "lora_modules": "lora_layers",
    "max_shared_groups": "max_changed",
    "tuned_on_data": "chosen_on_data",
}


def original_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their original names, of which keys of seeds and names of runs are made: they
    stay the same when a setting is renamed."""
    return {FIRST_NAMES.get(name, name): value for name, value in settings.items()}


def unknown_setting(name: str, value: Any, known: Iterable[str]) -> ConfigError:
    """The error of a setting that does not exist, with the nearest name."""
    return ConfigError.of(name, value, f"the name of a setting{hint_of(name, known)}")


def hint_of(name: str, known: Iterable[str], typed: Callable[[str], str] = str) -> str:
    """What an error says of an unknown name. Args: typed: how a known one is typed."""
    if name in flags_of(BuildConfig):
        return "; this one is of `fedsim data build`, whose directory `data` takes"
    return such_as(name, known, typed)


def config_of(kind: type[T], settings: Mapping[str, Any]) -> T:
    """Make a config from settings by name: data, run_dir, lora_rank, seed, ...

    Raises: ConfigError: a name is unknown, a setting is missing, or a value is wrong.
    """
    flags = flags_of(kind)
    groups: dict[str | None, dict[str, Any]] = {None: {}}
    for name, value in settings.items():
        if name not in flags:
            raise unknown_setting(name, value, flags)
        groups.setdefault(flags[name].group, {})[flags[name].field] = value
    values, hints = groups.pop(None), get_type_hints(kind)
    return kind(**values, **{name: hints[name](**inner) for name, inner in groups.items() if name})


def run_config(**settings: Any) -> RunConfig:
    """Make a RunConfig from settings by flag name; see `config_of`."""
    return config_of(RunConfig, settings)


def changed_run(run: RunConfig, **settings: Any) -> RunConfig:
    """A copy of a RunConfig with some settings replaced, by flag name."""
    usual = {name: one.default for name, one in flags_of(RunConfig).items()}
    given = {n: value for n, value in settings_of(run).items() if value is not usual[n]}
    return run_config(**{**given, **settings})


def settings_of(config: Any) -> dict[str, Any]:
    """All settings of a config by name."""
    return {
        name: getattr(getattr(config, one.group) if one.group else config, one.field)
        for name, one in flags_of(type(config)).items()
    }


def as_dict(config: Any) -> dict[str, Any]:
    """Settings by flag name in JSON's types; infinity is the string 'inf'."""
    return to_json(settings_of(config))


def changed(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, in JSON's types, that differ from their defaults."""
    flags = flags_of(kind)
    return {name: x for name, x in settings.items() if x != to_json(flags[name].default)}


def to_json(value: Any) -> Any:
    """A value in JSON's types: paths and non-finite floats as strings, tuples as lists."""
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def read(path: Path) -> dict[str, Any]:
    """Settings by name from a TOML, YAML or JSON file; those of the last two are texts, as they are
    written: 007 keeps its zeros, and no is a word.

    Raises: ConfigError: it cannot be read, or holds something else.
    """
    import yaml

    try:
        text = path.read_text()
        if path.suffix in (".yaml", ".yml", ".json"):
            found = yaml.load(text, Loader=yaml.BaseLoader) or {}
        else:
            found = tomllib.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError.of("config", path, f"a TOML, YAML or JSON file ({reason})") from None
    expect("config", path, isinstance(found, dict), "lines such as num_steps = 200")
    return found
