"""Defaults of flags from the file of --config, in TOML or YAML.

The flags of a command are words, so a value of YAML is taken as the word that stands in the file:
1e-6, which YAML calls a text, is a number here, and 007 keeps its zeros. Only a switch has to be
true or false; for YAML, on, yes and the country code no are the same.
"""

import tomllib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.config import PrivacyConfig, RunConfig, renamed, types_of
from fedsim.errors import ConfigError, expect

YAML = (".yaml", ".yml")
NOTHING = "tag:yaml.org,2002:null"


def flags_in(path: Path) -> list[str]:
    """The flags of `fedsim train` that a file gives, as words of a command line.

    Raises:
      ConfigError: it cannot be read, or has another setting or value.
    """
    kind, read = ("YAML", _of_yaml) if path.suffix in YAML else ("TOML", tomllib.loads)
    try:
        found = renamed(read(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError.of("config", path, f"a {kind} file ({reason})") from None
    types = types_of(PrivacyConfig) | types_of(RunConfig)
    words: list[str] = []
    for name, value in found.items():
        expect("config", path, name in types, f"names of flags, found {name}")
        flag = name.replace("_", "-")
        if types[name] is bool:
            switch = {"true": flag, "false": f"no-{flag}"}.get(str(value).lower())
            expect(name, value, switch is not None, f"true or false in {path}")
            words.append(f"--{switch}")
        elif _is_list(types[name], value):
            expect(name, value, isinstance(value, list), f"a list of values in {path}")
            words += [f"--{flag}", *map(str, value)]
        else:
            single = isinstance(value, int | float | str) and not isinstance(value, bool)
            expect(name, value, single, f"one value in {path}")
            words += [f"--{flag}", str(value)]
    return words


def _is_list(kind: Any, value: Any) -> bool:
    """True if a setting takes a list, or may take one and is given one."""
    if typing.get_origin(kind) is Sequence:
        return True
    possible = any(typing.get_origin(each) is Sequence for each in typing.get_args(kind))
    return possible and isinstance(value, list)


def _of_yaml(text: str) -> dict[str, Any]:
    """Settings by name, each value as it is written.

    Raises: ValueError: it is no mapping, or has a name twice.
    """
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("expected lines such as `num_steps: 200`")
    names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
    if len(set(names)) < len(node.value):
        twice = next((name for name in names if names.count(name) > 1), "a name that is none")
        raise ValueError(f"{twice} is there twice")
    return {name.value: _of_node(value) for name, value in node.value}


def _of_node(node: Any) -> Any:
    """A text, or a list of values; None for anything else."""
    if isinstance(node.value, str):
        return None if node.tag == NOTHING else node.value
    return [_of_node(each) for each in node.value] if node.id == "sequence" else None
