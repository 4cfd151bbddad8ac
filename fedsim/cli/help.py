"""What `--help` shows: the flags that a command needs, then those that people use; `--help-all`
shows the others, too. The page is laid out by argparse, as wide as the terminal."""

import argparse
import inspect
import shutil
import textwrap
from typing import Any

from fedsim.cli.flags import Flag, commands, flags, sentence

COMMON = frozenset(
    "--at-once --batch-size --clip-norm --config --delimiter --delta --dry-run --encoding "
    "--engine --epsilon --gradient-canaries --group-size --json --lora-rank --max-length --model "
    "--no-eval-examples --noise-multiplier --num-workers --owners --resume --run-dir "
    "--sampling-prob --seed --set --text-column --tokenizer --unowned --user-column".split()
)
"""What `--help` shows of a command with many flags."""
FEW = 14  # flags that are shown without a choice
NARROW, WIDE = 70, 100  # columns: below, texts stand under their flags; lines are never longer
ABOUT = "Fine-tune language models on people's texts, with differential privacy for each person."


def page(name: str, kind: Any, *, whole: bool) -> str:
    """The help of a command, or of a name that holds several.

    Args:
      name: as it is typed, with fedsim in front.
      whole: all flags, and not only those that people use.
    """
    if inner := commands(kind):
        about = inspect.getdoc(kind) if isinstance(kind, type) else ABOUT
        parser = _parser(f"{name} COMMAND", [], about)
        _section(parser, "commands", [Flag((), word, sentence(one)) for word, one in inner.items()])
        parser.epilog = f"The flags of a command: {name} COMMAND --help"
        return parser.format_help()
    known = list(flags(kind))
    words = [flag.usage for flag in known if flag.required or not flag.names]
    parser = _parser(name, [*words, "[FLAGS]"], inspect.getdoc(kind))
    _section(parser, "required", [flag for flag in known if flag.required])
    rest = [flag for flag in known if not flag.required]
    if whole:
        for title in dict.fromkeys(flag.group for flag in rest):
            _section(parser, title or "flags", [flag for flag in rest if flag.group == title])
        return parser.format_help()
    few = len(known) <= FEW
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
