"""Parsing of the command line: tyro over dataclasses, its errors, and defaults from a file."""

import contextlib
import dataclasses
import io
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import tyro

from fedsim.cli.config_file import flags_in
from fedsim.cli.help import commands, flags, leaves, named, page
from fedsim.config import (
    RENAMED,
    RunConfig,
    meant,
)
from fedsim.errors import ConfigError, expect, printable
from fedsim.files import expand_home

HELP = {"-h", "--help", "--help-all"}
Flat = tyro.conf.OmitArgPrefixes  # flags of a nested config without its name in front


class ReadsSources:
    """Mixin: a command with the settings of a run."""

    run: RunConfig

    @property
    def doing(self) -> str:
        """The command's first line."""
        return f"reading data={self.run.data.source}, model={self.run.model.source}"


class ReadsRun:
    """Mixin: a command on the directory of a run."""

    run_dir: Path

    @property
    def doing(self) -> str:
        """The command's first line."""
        return f"reading run={self.run_dir}"


class ReadsModel:
    """Mixin: a command on a model, of a run or pretrained."""

    model: str

    @property
    def doing(self) -> str:
        """The command's first line."""
        return f"reading model={self.model}"


def parse(command: Any, args: list[str]) -> Any:
    """Parse a command line.

    Args:
      command: the union of all commands.
      args: the words after `fedsim`.

    Returns:
      The command that they describe.

    Raises:
      ConfigError: a setting has no such value.
      SystemExit: help was printed, or tyro printed what is wrong with the arguments.
    """
    path, kind = named(command, args)
    rest = args[len(path) :]
    if HELP.intersection(rest) and (rest[0] in HELP or not commands(kind)):
        print(page(" ".join(["fedsim", *path]), kind, whole="--help-all" in rest), end="")
        raise SystemExit(0)
    args = _with_file(_with_new_names([word for word in args if word not in HELP]))
    if not commands(kind):
        _expect_known(kind, args, command)
    fancy = sys.stderr.isatty() and all(map(str.isprintable, args))
    tyro._experimental_options.update(ansi_codes=fancy, utf8_boxes=fancy)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(command, prog="fedsim", args=args, config=(tyro.conf.DisallowNone,))
    except SystemExit as stop:
        if (fault := _fault_of_setting(stop)) is not None:
            raise fault from None
        with contextlib.suppress(OSError):  # stderr is closed or full: the exit code remains
            lines = map(str.rstrip, said.getvalue().rstrip().splitlines())
            print(*(lines if fancy else map(printable, lines)), sep="\n", file=sys.stderr)
        raise
    return _in_home(parsed)


def level_of(args: list[str]) -> tuple[list[str], str]:
    """The arguments without --quiet and --verbose, and the level that these ask for, or "".

    Raises:
      ConfigError: both are given.
    """
    levels = {f"--{level}": level for level in ("quiet", "verbose")}
    asked = [levels[word] for word in args if word in levels]
    expect("quiet", True, len(set(asked)) < 2, "it alone, or --verbose alone")
    return [word for word in args if word not in levels], asked[0] if asked else ""


def _expect_known(kind: Any, args: list[str], every: Any) -> None:
    """Raise ConfigError for the first flag that a command does not have, with the one meant.

    Args:
      kind: the command.
      every: the union of all commands.
    """
    known = _names_of(kind)
    for word in args:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and len(flag) > 2 and flag not in known:
            settings = (name[2:].replace("-", "_") for name in known)
            other, reason = meant(flag[2:].replace("-", "_"), settings)
            owners = [name for name, each in leaves(every) if flag in _names_of(each)]
            hint = f"; {owners[0]} has it" if owners else ""
            if other:
                hint = f"; use --{other.replace('_', '-')}{f' ({reason})' if reason else ''}"
            raise ConfigError(f"{flag}: there is no such flag here{hint}", field=flag[2:])


def _names_of(kind: Any) -> set[str]:
    """Flags of a command as typed, switches also with --no- in front."""
    names = {name for flag in flags(kind) for name in flag.names}
    return names | {f"--no-{name[2:]}" for name in names}


def _fault_of_setting(error: BaseException | None) -> ConfigError | None:
    """The ConfigError behind an exit of tyro, which would report it as one of a group of flags."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def _with_new_names(args: list[str]) -> list[str]:
    """The arguments with the present names of flags that were renamed."""
    if args[:1] not in (["train"], ["recommend"], ["audit"]):
        return args
    dashed = (f"{old} {new}".replace("_", "-").split() for old, new in RENAMED.items())
    flags = {f"--{old}": f"--{new}" for old, new in dashed}
    parts = (word.partition("=") for word in args)
    return [flags.get(flag.replace("_", "-"), flag) + sign + value for flag, sign, value in parts]


def _in_home(command: Any) -> Any:
    """The command with ~ expanded in each path.

    No shell expands `--out=~/x`, nor the values of a file of settings. Sources of data and models,
    which may be no paths, are expanded where they are read.
    """
    changes = {}
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if isinstance(value, Path):
            changes[field.name] = Path(expand_home(field.name, value))
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _in_home(value)
    return dataclasses.replace(command, **changes)


def _with_file(args: list[str]) -> list[str]:
    """The arguments, with the flags of the file that --config names before all other flags."""
    after = itertools.pairwise([*args, ""])
    named = [b if a == "--config" else a[9:] for a, b in after if re.match("--config(=|$)", a)]
    if not named or args[:1] != ["train"]:
        return args
    path = Path(expand_home("config", named[-1]))
    # After the algorithm, which a flag with several values would take for one of them.
    at = next(i for i, word in enumerate(args) if word.startswith("--"))
    return args[:at] + flags_in(path) + args[at:]
