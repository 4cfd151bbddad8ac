"""Flags of the commands, read from their dataclasses as tyro reads them, and the help pages.

`--help` shows required and common flags, `--help-all` all. argparse lays a page out, as wide as the
terminal.
"""

import argparse
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag or a positional argument."""

    names: tuple[str, ...]
    """As typed, such as --no-remat; empty for a positional argument."""
    metavar: str
    """Placeholder of the value; empty for a switch."""
    text: str
    required: bool = False
    group: str = ""
    """Summary of the class that it is a field of: the title of its section in --help-all."""

    @property
    def usage(self) -> str:
        """The flag with the placeholder of its value."""
        return " ".join(filter(None, [*self.names[:1], self.metavar]))


def commands(kind: Any) -> dict[str, Any]:
    """Commands by name, of a union of commands or a class with such a union as `command`."""
    if dataclasses.is_dataclass(kind):
        held = typing.get_type_hints(kind, include_extras=True).get("command")
        return commands(typing.get_args(held)[0]) if held else {}
    marked = (typing.get_args(each) for each in typing.get_args(kind))
    return {mark.name: command for command, mark in marked}


def leaves(kind: Any, path: str = "fedsim") -> Iterator[tuple[str, Any]]:
    """All commands of a union, also those of groups, each with its name as typed."""
    for name, inner in commands(kind).items():
        if commands(inner):
            yield from leaves(inner, f"{path} {name}")
        else:
            yield f"{path} {name}", inner


def named(kind: Any, words: list[str]) -> tuple[list[str], Any]:
    """The leading words that name a command, and the command (or union) that they name."""
    path: list[str] = []
    for word in words:
        if word not in (inner := commands(kind)):
            break
        path.append(word)
        kind = inner[word]
    return path, kind


def flags(kind: Any, group: str = "") -> Iterator[Flag]:
    """The flags of a command."""
    about = StructTypeInfo.make(kind, tyro.MISSING_NONPROP, in_union_context=False)
    spec = ConstructorRegistry().get_struct_spec(about)
    assert isinstance(spec, StructConstructorSpec), "commands are dataclasses"
    for field in spec.fields:
        marked = typing.get_origin(field.type) is typing.Annotated
        plain, *marks = typing.get_args(field.type) if marked else (field.type,)
        if dataclasses.is_dataclass(plain):
            yield from flags(plain, sentence(plain).partition(",")[0])
        else:
            yield _flag(field, plain, marks, group)


def _flag(field: StructFieldSpec, kind: Any, marks: list[Any], group: str) -> Flag:
    given = (getattr(mark, "name", None) for mark in marks)
    name = next(filter(None, given), field.name).replace("_", "-")
    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    required, metavar = field.default is tyro.MISSING_NONPROP, _metavar(kind)
    if tyro.conf.Positional in marks:
        metavar = metavar if metavar.startswith("{") else name.upper()
        metavar += " ..." if typing.get_origin(kind) is tuple else ""
        return Flag((), metavar if required else f"[{metavar}]", text, required, group)
    names = (f"--{name}", f"--no-{name}") if field.default is True else (f"--{name}",)
    if metavar and field.default and not required and "efault: " not in text:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        text += f" Default: {' '.join(map(str, values))}."
    return Flag(names, metavar, text, required, group)


def _metavar(kind: Any) -> str:
    """Placeholder for a value of a type; empty for a switch."""
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    return _metavar(inner[0]) if inner else METAVARS.get(kind, "")


def sentence(kind: Any) -> str:
    """The first sentence of a class's docstring."""
    first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".")


COMMON = frozenset(
    "--batch-size --clip-norm --config --delimiter --delta --dry-run --encoding "
    "--engine --epsilon --gradient-canaries --group-size --json --lora-rank --max-length "
    "--messages-column --model --no-eval-examples --noise-multiplier --num-texts --num-tokens "
    "--num-workers --out --owners --prompt --prompts --resume --run-dir --sampling-prob --seed "
    "--set --text-column --tokenizer --unowned --user-column".split()
)
"""Flags that `--help` shows for a command with many flags."""
FEW = 14  # a command with at most so many flags shows all of them
NARROW = 70  # columns of a terminal below which texts stand under their flags
WIDE = 100  # longest line
EVERYWHERE = "With every command: --quiet (warnings and errors only), --verbose (all details)."
ABOUT = "Fine-tune language models on people's texts, with differential privacy for each person."


def page(name: str, kind: Any, *, whole: bool) -> str:
    """Help page of a command or a group of commands.

    Args:
      name: as typed, with fedsim in front.
      kind: the dataclass of the command, or a union of them.
      whole: show all flags instead of the required and common ones.
    """
    if inner := commands(kind):
        about = inspect.getdoc(kind) if isinstance(kind, type) else ABOUT
        parser = _parser(f"{name} COMMAND", [], about)
        _section(parser, "commands", [Flag((), word, sentence(one)) for word, one in inner.items()])
        parser.epilog = f"The flags of a command: {name} COMMAND --help\n{EVERYWHERE}"
        return parser.format_help()
    every = list(flags(kind))
    words = [flag.usage for flag in every if flag.required or not flag.names]
    parser = _parser(name, [*words, "[FLAGS]"], inspect.getdoc(kind))
    _section(parser, "required", [flag for flag in every if flag.required])
    rest = [flag for flag in every if not flag.required]
    if whole:
        for title in dict.fromkeys(flag.group for flag in rest):
            _section(parser, title or "flags", [flag for flag in rest if flag.group == title])
        return parser.format_help()
    few = len(every) <= FEW
    shown = [flag for flag in rest if few or COMMON & set(flag.names) or not flag.names]
    _section(parser, "flags" if few else "common flags", shown)
    if len(shown) < len(rest):
        parser.epilog = f"{len(rest) - len(shown)} more flags: {name} --help-all"
    return parser.format_help()


def _parser(name: str, words: list[str], about: str | None) -> argparse.ArgumentParser:
    usage = " ".join([name, *(word.replace(" ", "\0") for word in words)])  # a flag with its value
    usage = _filled(usage, _width() - len("usage: "), subsequent_indent=" " * 4)
    return argparse.ArgumentParser(
        usage=usage.replace("\0", " "),
        description="\n\n".join(_filled(part, _width()) for part in (about or "").split("\n\n")),
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
