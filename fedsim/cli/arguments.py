"""Arguments of the command line: tyro over dataclasses, defaults from TOML, one-line errors."""

import contextlib
import io
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import tyro

from fedsim.config import PretrainConfig, PrivacyConfig, RunConfig, flags_of
from fedsim.errors import ConfigError, expect


def parse(command: Any, args: list[str]) -> Any:
    """The command of the union `command` that `args` describe.

    Raises: ConfigError: they describe none. SystemExit: after printing help.
    """
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(command, args=_with_file(args), prog="fedsim")  # pyright: ignore
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_first_fault(shown.getvalue())) from None


def _with_file(args: list[str]) -> list[str]:
    """The flags of the TOML file that --config names, before those of the command line."""
    after = itertools.pairwise([*args, ""])
    named = [b if a == "--config" else a[9:] for a, b in after if re.match("--config(=|$)", a)]
    parts = {"train": PrivacyConfig, "pretrain": PretrainConfig}
    if not named or not args or args[0] not in parts:
        return args
    path = Path(named[-1])
    try:
        defaults = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config={path}: expected a TOML file ({error})") from None
    known = flags_of(parts[args[0]]) | flags_of(RunConfig)
    flags = []
    for name, value in defaults.items():
        expect("config", path, name in known, f"names of flags, found {name}")
        expect(name, value, isinstance(value, bool | int | float | str), f"a value in {path}")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return args[:1] + flags + args[1:]


def _first_fault(box: str) -> str:
    """What tyro says in a box (title, fault, hints, with rules between them), as one line."""
    lines = [line.strip("│|╭╰╮╯+ ") for line in box.splitlines()]
    title, *rest = [line if line.strip("─-") else "" for line in lines]
    title = title.strip("─- ")
    fault = " ".join(itertools.takewhile(bool, itertools.dropwhile(lambda line: not line, rest)))
    if title == "Required options":
        names = re.findall(r"(?:^| )(--[a-z][a-z-]*|\{[\w,]+\})", fault)
        return "missing " + ", ".join(dict.fromkeys(names))
    number = re.match(
        r"Error parsing --([\w-]+): (invalid literal for int|could not).* '(.*)'", fault
    )
    if number:
        kind = "a whole number" if "int" in number[2] else "a number"
        return f"{number[1].replace('-', '_')}={number[3]}: expected {kind}"
    choice = re.match(r"invalid choice '(.*)' for argument '--([\w-]+)'\. .*\((.*)\)", fault)
    if choice:
        return f"{choice[2].replace('-', '_')}={choice[1]}: expected one of {choice[3]}".replace(
            "'", ""
        )
    optional = re.match(r"Error parsing --([\w-]+): .*\bINT could be .* \['(.*)'\]", fault)
    if optional:
        return f"{optional[1].replace('-', '_')}={optional[2]}: expected a whole number"
    return re.sub(r"^Error parsing [^:]*: ", "", fault)
