"""The command line: `fedsim COMMAND`, each command a function whose parameters are its flags.

A mistake in settings, data or the command line itself ends with exit code 2 and one line, `fedsim:
error: ...`, without a traceback. With `--json`, stdout has one JSON object only; progress goes to
stderr.

The help of a command is written from the docstrings of its settings.
"""

import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import resource
import signal
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import docstring_parser

import fedsim
from fedsim.cli import Answer
from fedsim.cli.account import account, calibrate
from fedsim.cli.data import build, show, stats, without
from fedsim.cli.models import evaluate, export, generate, train
from fedsim.cli.trust import audit, budget, publish, report, verify
from fedsim.cli.tuning import recommend, select
from fedsim.config import (
    HIDDEN,
    POSITIONAL,
    REPEATED,
    Setting,
    config_of,
    flags_of,
    hint_of,
    read,
    to_json,
    unknown_setting,
)
from fedsim.errors import ConfigError, FedsimError, optional, printable, such_as
from fedsim.files import expand_home
from fedsim.run import verbosity
from fedsim.signals import terminated

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


SETTING = re.compile("`([a-z_]+)='?([^`']*)'?`")
UNFINISHED = 75  # EX_TEMPFAIL: a signal stopped the run; the same command with --resume goes on
COMMANDS: Commands = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "export": export,
    "audit": audit,
    "budget": budget,
    "report": report,
    "publish": publish,
    "verify": verify,
    "account": account,
    "calibrate": calibrate,
    "recommend": recommend,
    "select": select,
    "data": {"build": build, "stats": stats, "show": show, "without": without},
}


def main(args: list[str] | None = None) -> None:
    """Entry point of the command `fedsim`."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would get a library's messages
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a core dump would hold key and texts
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # of what the terminal cannot encode
    try:
        try:
            _run(list(sys.argv[1:] if args is None else args))
        finally:
            sys.stdout.flush()
    except OSError as error:  # stdout is full, or `| head` has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # takes what is buffered
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        _fail(f"stdout: {error.strerror}", 1)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _run(words: list[str]) -> None:
    """Run a command line. Raises: SystemExit: unless it succeeds."""
    if words == ["--version"]:
        print("fedsim", fedsim.__version__)
        return
    _, command = _named(words)
    as_json, quiet = "--json" in words, "--quiet" in words

    def end() -> None:
        """End at once, from another thread, without what runs at a normal exit."""
        reason, code = _interrupted(command)
        shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
        with contextlib.suppress(OSError):
            os.write(2, f"{shown}fedsim: error: {reason}\n".encode())
        os._exit(code)

    try:
        call = parse(words)
        level = getattr(call.keywords.get("run"), "output", "normal")
        with verbosity("quiet" if quiet else level), terminated(end), optional():
            result, lines = call()
        if as_json:
            lines = [json.dumps(to_json(result), allow_nan=False)]
    except FedsimError as error:
        _say(error.details)
        _fail(error, error.exit_code)
    except BrokenPipeError:
        raise
    except (OSError, json.JSONDecodeError) as error:  # a full disk, or a damaged or missing file
        _fail(error, 1)
    except (MemoryError, RuntimeError) as error:
        from fedsim.engine import exhausted

        if not (reason := exhausted(error)):
            raise
        _fail(reason, 1)
    except KeyboardInterrupt:
        _fail(*_interrupted(command))
    print(*lines, sep="\n", end="\n" if lines else "")
    if result.get("holds") is False or (command is export and result["guarantee"] is False):
        sys.exit(1)
    stopped = "steps_done" in result and result["steps_done"] < result["num_steps"]
    if (stopped and command is train) or result.get("interrupted"):  # --resume continues the run
        sys.exit(UNFINISHED)


def parse(words: list[str]) -> functools.partial[Answer]:
    """The call of a command, with its arguments by name, that a command line describes.

    Args: words: those after `fedsim`.

    Raises:
      ConfigError: a setting has no such value, or there is no such flag or command.
      SystemExit: help was printed.
    """
    words = [word for word in words if word not in ("--json", "--quiet")]
    path, command = _named(words)
    name, rest = " ".join(["fedsim", *path]), words[len(path) :]
    if isinstance(command, Mapping) and rest and rest[0] not in ("-h", "--help"):
        near = such_as(rest[0], command, cutoff=0.6)
        expected = f"a command{near}" if near else f"one of {', '.join(command)}"
        raise ConfigError.of("command", rest[0], expected)
    if isinstance(command, Mapping) or {"-h", "--help"}.intersection(rest):
        print(page(name, command), end="")
        raise SystemExit(0)
    known = flags(command)
    visible = {name: one for name, one in known.items() if HIDDEN not in one.marks}
    typed = parse_words(name, [_spelt(word, visible) for word in rest], visible.values())
    if command is train and "config" in typed:
        typed = read(Path(expand_home("config", typed.pop("config")))) | typed
    for setting in typed.keys() - known.keys():
        raise unknown_setting(setting, typed[setting], known)
    settings = {name: known[name].read(value) for name, value in typed.items()}
    needed = [one for one in known.values() if one.default is ... and one.name not in settings]
    if needed:
        raise ConfigError(f"expected {', '.join(map(usage_of, needed))}; all flags: {name} --help")
    return functools.partial(command, **_arguments(command, settings))


def _named(words: list[str]) -> tuple[list[str], Command | Commands]:
    """The leading words that name a command or a group of them, and what they name."""
    path: list[str] = []
    command: Command | Commands = COMMANDS
    for word in words:
        if not isinstance(command, Mapping) or word not in command:
            break
        path.append(word)
        command = command[word]
    return path, command


def _spelt(word: str, known: Mapping[str, Setting]) -> str:
    """A word, its flag with hyphens. Raises: ConfigError: there is no such flag."""
    if not re.match("--.", word):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    if name not in known and name.removeprefix("no_") not in known:
        hint = hint_of(name, known, lambda close: words_of(known[close])[0])
        raise ConfigError(f"{flag}: expected the name of a flag{hint}", field=name)
    return f"--{name.replace('_', '-')}{equals}{value}"


def _arguments(command: Command, settings: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command, with its groups of settings."""
    hints: dict[str, Any] = typing.get_type_hints(command)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            inside = {n: settings[n] for n in flags_of(hints[name]) if n in settings}
            found[name] = config_of(hints[name], inside)
        else:
            found[name] = settings.get(name, parameter.default)
    return found


def _interrupted(command: Command | Commands) -> tuple[str, int]:
    """(how a command that a signal ended can go on, its exit code)."""
    if command not in (train, select, build):
        return "interrupted", 130
    how = " with --resume" * (command is train)  # before a step, or by two signals
    return f"interrupted; the same command{how} goes on", UNFINISHED


def _fail(reason: Any, code: int) -> NoReturn:
    line = " ".join(str(reason).split()).replace("`fedsim.data.build`", "`fedsim data build`")
    line = SETTING.sub(_as_flag, line)
    _say(f"fedsim: error: {printable(line)}\n")
    sys.exit(code)


def _as_flag(setting: re.Match[str]) -> str:
    """A setting in an error, `name=value`, as the command line has it."""
    value = "" if setting[2] == "True" else f" {setting[2]}"
    return f"`--{setting[1].replace('_', '-')}{value}`"


def _say(text: str) -> None:
    """Write to stderr; if that fails, the exit code alone reports the error."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
