"""Arguments of the command line: tyro over dataclasses, defaults from TOML, one-line errors."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import tyro

from fedsim.cli.flags import commands, flags, named
from fedsim.cli.help import page
from fedsim.config import PretrainConfig, PrivacyConfig, RunConfig, flags_of, renamed
from fedsim.config.flags import RENAMED
from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home

HELP = {"-h", "--help", "--help-all"}
# What people look for, and what there is instead.
HINTS = {
    "--delimiter": "; `fedsim data build` has it, and what it builds is read by all commands",
    "--encoding": "; `fedsim data build` has it, and what it builds is read by all commands",
    "--user": "; did you mean --user-column?",
    "--text": "; did you mean --text-column?",
}


def parse(command: Any, args: list[str]) -> Any:
    """The command of the union `command` that `args` describe.

    Raises: ConfigError: they describe none. SystemExit: after printing help.
    """
    args = _with_new_names(args)
    path, kind = named(command, args)
    name, rest = " ".join(["fedsim", *path]), args[len(path) :]
    if HELP.intersection(rest):
        if fault := _unknown(name, kind, rest):
            raise ConfigError(fault)
        print(page(name, kind, whole="--help-all" in rest), end="")
        raise SystemExit(0)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            how = {"prog": "fedsim", "config": (tyro.conf.DisallowNone,)}
            made = tyro.cli(command, args=_with_file(args), **how)
        return _in_home(made)
    except SystemExit:
        fault = _unknown(name, kind, rest) or _first_fault(shown.getvalue(), name, kind)
    raise ConfigError(fault)


def _with_new_names(args: list[str]) -> list[str]:
    """The arguments with settings that were renamed by their present names."""
    if args[:1] not in (["train"], ["recommend"], ["audit"]):
        return args
    flags = {f"--{old}": f"--{new.replace('_', '-')}" for old, new in RENAMED.items()}
    found = []
    for word in args:
        flag, equals, value = word.partition("=")
        found.append(flags.get(flag, flag) + equals + value)
    return found


def _in_home(command: Any) -> Any:
    """The command with ~ expanded in each path: `--out=~/x` is one that no shell expands, and
    values of a TOML file did not pass through one. Paths that are texts (data, models) are expanded
    where they are read."""
    changes = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, Path):
            changes[field.name] = Path(expand_home(field.name, value))
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _in_home(value)
    return dataclasses.replace(command, **changes)


def _unknown(name: str, kind: Any, rest: list[str]) -> str:
    """What to say of a command or a flag that there is not; empty if all are known."""
    if choices := list(commands(kind)):
        word = rest[0] if rest else ""
        if word in HELP:
            return ""
        return f"command={word}: expected one of {', '.join(choices)}{_meant(word, choices)}"
    known = {each for flag in flags(kind) for each in flag.names} | HELP
    for word in rest:
        flag = word.partition("=")[0].replace("_", "-")
        if re.match("--[a-z]", flag) and not {flag, flag.replace("--no-", "--")} & known:
            hint = HINTS.get(flag) or _meant(flag, sorted(known))
            return f"{flag}: expected a flag of {name}{hint}"
    return ""


def _meant(word: str, names: list[str]) -> str:
    near = difflib.get_close_matches(word, names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _with_file(args: list[str]) -> list[str]:
    """The flags of the TOML file that --config names, before those of the command line."""
    after = itertools.pairwise([*args, ""])
    named = [b if a == "--config" else a[9:] for a, b in after if re.match("--config(=|$)", a)]
    parts = {"train": PrivacyConfig, "pretrain": PretrainConfig}
    if not named or not args or args[0] not in parts:
        return args
    path = Path(expand_home("config", named[-1]))
    try:
        defaults = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.of("config", path, f"a TOML file ({error})") from None
    defaults = renamed(defaults) if args[0] == "train" else defaults
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


def _first_fault(box: str, name: str, kind: Any) -> str:
    """What tyro says in a box (title, fault, help, with rules between them), as one line."""
    lines = [line.strip("│|╭╰╮╯─ ") for line in box.splitlines()]
    fault = " ".join(" ".join(line for line in lines if re.search(r"\w", line)).split())
    known = {each: flag.metavar for flag in flags(kind) for each in flag.names or ("",)}
    if found := re.search(r"Missing value for argument '(--[\w-]+)'", fault):
        return f"{found[1]}: expected {_expected(known.get(found[1], ''))} after it"
    value = re.search(r"Error parsing --([\w-]+): .*?'(.*?)'\]?[. ]", fault)
    choice = re.search(r"invalid choice '(.*)' for argument '(?:--)?([\w-]+)'", fault)
    if value or choice:
        flag, given = (value[1], value[2]) if value else (choice[2], choice[1]) if choice else ""
        metavar = known.get(f"--{flag}", known.get("", ""))
        return f"{flag.replace('-', '_')}={given}: expected {_expected(metavar)}"
    if found := re.search("Unrecognized options: (.*?) For full", fault):
        return f"{found[1]}: expected no more arguments of {name}"
    missing = re.findall(r"^\W {5}(\S+)", box.partition("For full")[0], re.MULTILINE)
    if missing:  # an argument that is known by its place is shown by its type
        return "missing " + ", ".join(m if m in known else known[""] for m in missing)
    return re.sub("^.*?Error parsing .*?: | For full helptext.*", "", fault)  # a config's own words


def _expected(metavar: str) -> str:
    """What a value is to be, in words."""
    if metavar.startswith("{"):
        return f"one of {', '.join(metavar.strip('{}').split(','))}"
    return {"INT": "a whole number", "FLOAT": "a number"}.get(metavar, "a value")
