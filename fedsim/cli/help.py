"""Flags of the commands, and the help pages: `--help` has required and common flags, `--help-all`
all.

A command is a function. Its parameters are flags, documented in its docstring; a parameter that is
a group of settings stands for its fields.
"""

import argparse
import functools
import inspect
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import docstring_parser

from fedsim.config import HIDDEN, POSITIONAL, REPEATED, Setting, flags_of
from fedsim.errors import ConfigError

METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}
Command = Callable[..., dict[str, Any]]
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
    return " ".join(filter(None, [*words_of(flag)[:1], _metavar(flag)]))


def takes_several(flag: Setting) -> bool:
    """True if several values may follow the flag."""
    kinds = map(typing.get_origin, (flag.type, *typing.get_args(flag.type)))
    return REPEATED not in flag.marks and any(kind in (tuple, Sequence) for kind in kinds)


def _metavar(flag: Setting) -> str:
    """Placeholder of the value; empty for a switch."""
    metavar = _placeholder(flag.type)
    if POSITIONAL not in flag.marks:
        return metavar
    metavar = metavar if metavar.startswith("{") else flag.name.replace("_", "-").upper()
    metavar += " ..." if takes_several(flag) else ""
    return metavar if flag.default is ... else f"[{metavar}]"


def _placeholder(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    return _placeholder(inner[0]) if inner else METAVARS.get(kind, "")


def _text(flag: Setting) -> str:
    text, default = " ".join(flag.text.split()).replace("%", "%%"), flag.default
    named = default not in (..., False, None, "", ()) and "efault: " not in text
    if POSITIONAL in flag.marks or not named or not _placeholder(flag.type):
        return text
    values = default if isinstance(default, tuple) else (default,)
    return f"{text} Default: {' '.join(map(str, values))}."


def about(command: Any) -> str:
    """A command's docstring without the description of its arguments."""
    return (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]


def sentence(command: Any) -> str:
    """The first sentence of a command's docstring."""
    return " ".join(about(command).partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")


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
EVERYWHERE = "With every command: --quiet (warnings and errors only)."
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
        section = parser.add_argument_group("commands")
        for word, one in command.items():
            section.add_argument(word, help=GROUPS.get(f"{name} {word}") or sentence(one))
        parser.epilog = f"The flags of a command: {name} COMMAND --help\n{EVERYWHERE}"
        return parser.format_help()
    every = [x for x in flags(command).values() if HIDDEN not in x.marks]
    needed, rest = ([x for x in every if (x.default is ...) == needed] for needed in (True, False))
    named = [usage_of(x) for x in every if x.default is ... or not words_of(x)]
    parser = _parser(name, [*named, "[FLAGS]"], about(command))
    few = len(every) <= FEW
    shown = [x for x in rest if few or COMMON & {*words_of(x)} or not words_of(x)]
    sections = {"required": needed, "flags" if few else "common flags": shown}
    if whole:
        titles = dict.fromkeys(x.title for x in rest)
        sections = {title: [x for x in rest if x.title == title] for title in titles}
        sections = {"required": needed, **sections}
    elif len(shown) < len(rest):
        parser.epilog = f"{len(rest) - len(shown)} more flags: {name} --help-all"
    for title, inside in sections.items():
        _add(parser.add_argument_group(title), inside)
    return parser.format_help()


def parse_words(name: str, words: Sequence[str], known: Iterable[Setting]) -> dict[str, Any]:
    """The values that a command line gives, as typed, by the names of flags.

    Raises: ConfigError: a flag has no value, or there is a word too many.
    """
    parser = argparse.ArgumentParser(prog=name, add_help=False, allow_abbrev=False)
    parser.error = functools.partial(_refuse, name)
    _add(parser, known)
    return vars(parser.parse_intermixed_args(words))


def _refuse(name: str, message: str) -> NoReturn:
    raise ConfigError(f"{message}; its flags: {name} --help")


def _add(section: Any, inside: Iterable[Setting]) -> None:
    """Add flags to a parser or a section of one. What is not given has no value."""
    for flag in inside:
        words, metavar, several = words_of(flag), _metavar(flag), takes_several(flag)
        how: dict[str, Any] = {"help": _text(flag), "default": argparse.SUPPRESS}
        if not words:
            nargs = "*" if several else "?"
            section.add_argument(flag.name, metavar=metavar, nargs=nargs, **how)
        elif metavar:
            one = {"action": "append"} if REPEATED in flag.marks else {}
            many = {"nargs": "+"} if several else {}
            section.add_argument(*words, dest=flag.name, metavar=metavar, **one, **many, **how)
        elif flag.default:
            section.add_argument(*words[:1], action=argparse.BooleanOptionalAction, **how)
        else:
            section.add_argument(*words, dest=flag.name, action="store_true", **how)
            how["help"] = argparse.SUPPRESS  # --no-resume, against resume = true in a file
            word = words[0].replace("--", "--no-", 1)
            section.add_argument(word, dest=flag.name, action="store_false", **how)


def _parser(name: str, words: list[str], text: str) -> argparse.ArgumentParser:
    usage = " ".join([name, *(word.replace(" ", "\0") for word in words)])  # a flag with its value
    usage = _filled(usage, _width() - len("usage: "), subsequent_indent=" " * 4)
    return argparse.ArgumentParser(
        usage=usage.replace("\0", " "),
        description="\n\n".join(_filled(part, _width()) for part in text.split("\n\n")),
        formatter_class=_Layout,
        add_help=False,
    )


class _Layout(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        width = _width()
        super().__init__(prog, max_help_position=24 if width >= NARROW else 6, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")  # as often as it may be given, says the text

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(text, width).splitlines()


def _filled(text: str, width: int, **options: Any) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False, **options)


def _width() -> int:
    return min(WIDE, shutil.get_terminal_size().columns)
