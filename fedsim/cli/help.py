"""Flags of the commands, and their help pages.

A command is a function. Its parameters are flags, documented in its docstring; a parameter that is
a group of settings stands for its fields.
"""

import argparse
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import docstring_parser

from fedsim.cli import Answer
from fedsim.config import HIDDEN, POSITIONAL, REPEATED, Setting, flags_of
from fedsim.errors import ConfigError

METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}
EVERYWHERE = "With every command: --json (one object on stdout), --quiet (warnings)."
ABOUT = "Fine-tune language models on people's texts, with differential privacy for each person."
ABOUT_DATA = "Build data sets, count and see what is in them, copy them without some users."
Command = Callable[..., Answer]
Commands = Mapping[str, "Command | Commands"]


def flags(command: Command) -> dict[str, Setting]:
    """The settings of a command by name, those that are no flags, too."""
    parsed = docstring_parser.parse(command.__doc__ or "")
    texts = {part.arg_name: part.description or "" for part in parsed.params}
    hints = typing.get_type_hints(command, include_extras=True)
    found: dict[str, Setting] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(kind := hints[name]):
            found |= flags_of(kind)
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            found[name] = Setting(name, kind, default, texts.get(name, ""), "flags")
    return found


def words_of(flag: Setting) -> list[str]:
    """A flag as it is typed, such as --no-remat; none for a positional argument."""
    if POSITIONAL in flag.marks:
        return []
    name = flag.name.replace("_", "-")
    return [f"--{name}", f"--no-{name}"] if flag.default is True else [f"--{name}"]


def usage_of(flag: Setting) -> str:
    """A flag with the placeholder of its value."""
    return " ".join([*words_of(flag)[:1], _metavar(flag)])


def sentence(command: Any) -> str:
    """The first sentence of a command's docstring."""
    return " ".join(_about(command).partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def page(name: str, command: "Command | Commands") -> str:
    """Help page of a command or a group of commands. Args: name: as typed, with fedsim in front."""
    sections: dict[str, list[Setting]] = {}
    if isinstance(command, Mapping):
        usage, about = f"{name} COMMAND", ABOUT_DATA if name == "fedsim data" else ABOUT
    else:
        every = [flag for flag in flags(command).values() if HIDDEN not in flag.marks]
        named = [usage_of(flag) for flag in every if flag.default is ... or not words_of(flag)]
        usage, about = " ".join([name, *named, "[FLAGS]"]), _about(command)
        for flag in sorted(every, key=lambda flag: flag.default is not ...):
            title = "required" if flag.default is ... else flag.title
            sections.setdefault(title, []).append(flag)
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=usage, description=about, epilog=EVERYWHERE, formatter_class=layout, add_help=False
    )
    for title, inside in sections.items():
        _add(parser.add_argument_group(title), inside)
    if isinstance(command, Mapping):
        section = parser.add_argument_group("commands (their flags: COMMAND --help)")
        for word, one in command.items():
            section.add_argument(word, help=ABOUT_DATA if word == "data" else sentence(one))
    return parser.format_help()


def parse_words(name: str, words: Sequence[str], known: Iterable[Setting]) -> dict[str, Any]:
    """The values that a command line gives, as typed, by the names of flags.

    Raises: ConfigError: a flag has no value, or there is a word too many.
    """
    parser = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; its flags: {name} --help")

    parser.error = refuse
    _add(parser, known)
    return vars(parser.parse_intermixed_args(words))


def _add(section: Any, inside: Iterable[Setting]) -> None:
    """Add flags to a parser or a section of one. What is not given has no value."""
    for flag in inside:
        words, metavar, several = words_of(flag), _metavar(flag), _takes_several(flag)
        how: dict[str, Any] = {"help": _text(flag), "default": argparse.SUPPRESS}
        if not words:
            nargs = "*" if several else "?"
            section.add_argument(flag.name, metavar=metavar, nargs=nargs, **how)
        elif metavar:
            one = {"action": "append"} if REPEATED in flag.marks else {}
            many = {"nargs": "+"} if several else {}
            section.add_argument(*words, dest=flag.name, metavar=metavar, **one, **many, **how)
        else:  # --no-resume is there against resume = true in a file
            section.add_argument(words[0], action=argparse.BooleanOptionalAction, **how)


def _about(command: Any) -> str:
    """A command's docstring without the description of its arguments."""
    return (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]


def _takes_several(flag: Setting) -> bool:
    kinds = map(typing.get_origin, (flag.type, *typing.get_args(flag.type)))
    return REPEATED not in flag.marks and any(kind in (tuple, Sequence) for kind in kinds)


def _metavar(flag: Setting) -> str:
    """Placeholder of the value; empty for a switch."""
    if POSITIONAL not in flag.marks or typing.get_origin(flag.type) is Literal:
        return _placeholder(flag.type)
    return flag.name.replace("_", "-").upper()


def _placeholder(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    return _placeholder(inner[0]) if inner else METAVARS.get(kind, "")


def _text(flag: Setting) -> str:
    text, default = " ".join(flag.text.split()).replace("%", "%%"), flag.default
    if default in (..., False, None, "", ()) or "efault: " in text or not _metavar(flag):
        return text
    values = default if isinstance(default, tuple) else (default,)
    return f"{text} Default: {' '.join(map(str, values))}."
