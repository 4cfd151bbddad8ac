"""Arguments of the command line: tyro over dataclasses, defaults from TOML, one-line errors."""

import contextlib
import difflib
import io
import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import tyro

from fedsim.config import PretrainConfig, PrivacyConfig, RunConfig, flags_of
from fedsim.errors import ConfigError, expect

# What people look for, and what there is instead.
HINTS = {
    "--delimiter": "; columns are separated by commas, or by tabs in a file named .tsv",
    "--encoding": "; text is UTF-8: iconv -f latin1 -t utf-8 FILE > NEW",
}


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
        raise ConfigError(_unknown(command, args) or _first_fault(shown.getvalue())) from None


def _unknown(command: Any, args: list[str]) -> str:
    """What to say of a command or a flag that there is not; empty if all are known."""
    before: list[str] = []
    for word in args[:2]:  # data has commands of its own
        names = re.search(r"^usage:[^{]*\{([\w,]+)\}", _help(command, before), re.MULTILINE)
        if not names or word.startswith("-") or (before and before != ["data"]):
            break
        if word not in names[1].split(","):
            choices = names[1].split(",")
            return f"command={word}: expected one of {', '.join(choices)}{_meant(word, choices)}"
        before.append(word)
    known = set(re.findall(r"--[a-z][a-z-]*", _help(command, before)))
    for word in args[len(before) :]:
        flag = word.partition("=")[0].replace("_", "-")
        if re.match("--[a-z]", flag) and flag not in known:
            hint = HINTS.get(flag) or _meant(flag, sorted(known))
            return f"{flag}: expected a flag of fedsim {' '.join(before)}".rstrip() + hint
    return ""


def _help(command: Any, words: list[str]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(command, args=[*words, "--help"], prog="fedsim", console_outputs=True)  # pyright: ignore
    return shown.getvalue()


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
