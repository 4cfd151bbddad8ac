"""Flags of the commands, and the help pages: `--help` has required and common flags, `--help-all`
all.

A command is a function. Its parameters are flags, documented in its docstring; a parameter that is
a group of settings stands for its fields. argparse lays a page out, as wide as the terminal.
"""

import argparse
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import docstring_parser
import tyro

METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}
Command = Callable[..., dict[str, Any]]
Commands = Mapping[str, "Command | Commands"]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag or a positional argument."""

    names: tuple[str, ...]
    """As typed, such as --no-remat; empty for a positional argument."""
    metavar: str
    """Placeholder of the value; empty for a switch."""
    text: str
    required: bool
    group: str
    """The title of its section in --help-all."""
    several: bool = False
    """True if it takes several values."""

    @property
    def usage(self) -> str:
        """The flag with the placeholder of its value."""
        return " ".join(filter(None, [*self.names[:1], self.metavar]))


def flags(command: Command) -> Iterator[Flag]:
    """The flags of a command."""
    parsed = docstring_parser.parse(command.__doc__ or "")
    texts = {part.arg_name: part.description or "" for part in parsed.params}
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        marked = typing.get_origin(hints[name]) is typing.Annotated
        kind, *marks = typing.get_args(hints[name]) if marked else (hints[name],)
        if dataclasses.is_dataclass(kind):
            yield from _of_group(kind)
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            positional, text = tyro.conf.Positional in marks, texts.get(name, "")
            yield _flag(name, kind, default, positional, text, "flags")


def _of_group(kind: Any) -> Iterator[Flag]:
    """The flags of a group of settings, and of the groups in it."""
    for name, about in kind.__pydantic_fields__.items():
        if dataclasses.is_dataclass(about.annotation):
            yield from _of_group(about.annotation)
        elif tyro.conf.Suppress not in about.metadata:
            named = (getattr(mark, "name", None) for mark in about.metadata)
            flag = next(filter(None, named), name)
            positional = tyro.conf.Positional in about.metadata
            default, title = about.default, sentence(kind).partition(",")[0]
            default = ... if about.is_required() else default
            text = about.description or ""
            yield _flag(flag, about.annotation, default, positional, text, title)


def _flag(name: str, kind: Any, default: Any, positional: bool, text: str, group: str) -> Flag:
    """A flag. Args: default: ... if it is required."""
    name, text = name.replace("_", "-"), " ".join(text.split())
    required, metavar = default is ..., _metavar(kind)
    if positional:
        metavar = metavar if metavar.startswith("{") else name.upper()
        metavar += " ..." if typing.get_origin(kind) is tuple else ""
        return Flag((), metavar if required else f"[{metavar}]", text, required, group)
    names = (f"--{name}", f"--no-{name}") if default is True else (f"--{name}",)
    if metavar and default and not required and "efault: " not in text:
        values = default if isinstance(default, tuple) else (default,)
        text += f" Default: {' '.join(map(str, values))}."
    origins = map(typing.get_origin, (kind, *typing.get_args(kind)))
    several = any(origin in (tuple, Sequence) for origin in origins)
    return Flag(names, metavar, text, required, group, several)


def _metavar(kind: Any) -> str:
    """Placeholder for a value of a type; empty for a switch."""
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    return _metavar(inner[0]) if inner else METAVARS.get(kind, "")


def about(command: Any) -> str:
    """A command's docstring without the description of its arguments."""
    return (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]


def sentence(kind: Any) -> str:
    """The first sentence of a docstring."""
    first = " ".join(about(kind).partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".")


COMMON = frozenset(
    "--batch-size --clip-norm --config --delimiter --delta --dry-run --encoding "
    "--engine --epsilon --gradient-canaries --group-size --json --lora-rank --max-length "
    "--messages-column --model --no-eval-examples --noise-multiplier --num-texts --num-tokens "
    "--num-workers --out --owners --prompt --prompts --resume --run-dir --sampling-prob --seed "
    "--set --rows-without-user --text-column --tokenizer --user-column".split()
)
"""Flags that `--help` shows for a command with many flags."""
FEW = 14  # a command with at most so many flags shows all of them
NARROW = 70  # columns of a terminal below which texts stand under their flags
WIDE = 100  # longest line
EVERYWHERE = "With every command: --quiet (warnings and errors only), --verbose (all details)."
GROUPS = {
    "fedsim data": "Build data sets, count and see what is in them, copy them without some users."
}
ABOUT = "Fine-tune language models on people's texts, with differential privacy for each person."


def page(name: str, command: "Command | Commands", *, whole: bool) -> str:
    """Help page of a command or a group of commands.

    Args:
      name: as typed, with fedsim in front.
      command: its function, or the commands of a group.
      whole: show all flags instead of the required and common ones.
    """
    if isinstance(command, Mapping):
        parser = _parser(f"{name} COMMAND", [], GROUPS.get(name, ABOUT))
        rows = {
            word: GROUPS.get(f"{name} {word}") or sentence(one) for word, one in command.items()
        }
        inside = [Flag((), word, text, False, "") for word, text in rows.items()]
        _section(parser, "commands", inside)
        parser.epilog = f"The flags of a command: {name} COMMAND --help\n{EVERYWHERE}"
        return parser.format_help()
    every = list(flags(command))
    words = [flag.usage for flag in every if flag.required or not flag.names]
    parser = _parser(name, [*words, "[FLAGS]"], about(command))
    _section(parser, "required", [flag for flag in every if flag.required])
    rest = [flag for flag in every if not flag.required]
    if whole:
        for title in dict.fromkeys(flag.group for flag in rest):
            _section(parser, title, [flag for flag in rest if flag.group == title])
        return parser.format_help()
    few = len(every) <= FEW
    shown = [flag for flag in rest if few or COMMON & set(flag.names) or not flag.names]
    _section(parser, "flags" if few else "common flags", shown)
    if len(shown) < len(rest):
        parser.epilog = f"{len(rest) - len(shown)} more flags: {name} --help-all"
    return parser.format_help()


def _parser(name: str, words: list[str], text: str) -> argparse.ArgumentParser:
    usage = " ".join([name, *(word.replace(" ", "\0") for word in words)])  # a flag with its value
    usage = _filled(usage, _width() - len("usage: "), subsequent_indent=" " * 4)
    return argparse.ArgumentParser(
        usage=usage.replace("\0", " "),
        description="\n\n".join(_filled(part, _width()) for part in text.split("\n\n")),
        formatter_class=_Layout,
        add_help=False,
    )


def _section(parser: argparse.ArgumentParser, title: str, inside: list[Flag]) -> None:
    section = parser.add_argument_group(title)
    for flag in inside:
        text = flag.text.replace("%", "%%")
        if not flag.names:
            section.add_argument(flag.metavar, help=text)
        elif flag.metavar:
            section.add_argument(*flag.names, metavar=flag.metavar, help=text)
        else:
            section.add_argument(*flag.names, action="store_true", help=text)


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        width = _width()
        super().__init__(prog, max_help_position=24 if width >= NARROW else 6, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(text, width).splitlines()


def _filled(text: str, width: int, **options: Any) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False, **options)


def _width() -> int:
    return min(WIDE, shutil.get_terminal_size().columns)
