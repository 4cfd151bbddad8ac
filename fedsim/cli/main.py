"""The command line: `fedsim COMMAND`, each command a function whose parameters are its flags.

A mistake in settings, data or the command line itself ends with exit code 2 and one line, `fedsim:
error: ...`, without a traceback. With `--json`, stdout has one JSON object only; progress goes to
stderr.
"""

import contextlib
import functools
import inspect
import io
import itertools
import json
import os
import resource
import signal
import sys
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import fedsim
from fedsim.cli.account import account, calibrate
from fedsim.cli.data import build, show, stats, without
from fedsim.cli.help import Command, Commands, flags, page, parse_words, usage_of
from fedsim.cli.models import evaluate, export, generate, train
from fedsim.cli.trust import audit, budget, publish, report, verify
from fedsim.cli.tuning import recommend, select
from fedsim.config import (
    HIDDEN,
    RunConfig,
    Setting,
    config_of,
    flags_of,
    read,
    such_as,
    to_json,
    unknown_setting,
)
from fedsim.errors import ConfigError, FedsimError, optional, printable
from fedsim.files import CACHE, DISK_FULL, LEDGER, directory_of, expand_home
from fedsim.run import verbosity
from fedsim.signals import terminated

UNFINISHED = 75  # EX_TEMPFAIL: a signal stopped the run; the same command with --resume goes on
HELP = {"-h", "--help", "--help-all"}
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
    _open_streams()
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a core dump would hold key and texts
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            _run(list(sys.argv[1:] if args is None else args))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has ended: end silently, as SIGPIPE would
        _drop(1, 2)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:  # the flush failed: stdout is full
        _drop(1)
        _fail(f"stdout: {error.strerror}", 1)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop(2)


def _open_streams() -> None:
    """Open standard streams that were closed.

    Else the next file that is opened would take the number, and receive a library's messages.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))


def _drop(*streams: int) -> None:
    """Discard what is buffered for these file descriptors, and all that follows."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _answer(command: Command | Commands, result: dict[str, Any]) -> None:
    """Print the result as JSON. A training ignores a closed stdout: its result is in the run."""
    try:
        print(json.dumps(_in_json(result), allow_nan=False), flush=True)
    except OSError:
        if command is not train:
            raise
        _drop(1)


def _in_json(value: Any) -> Any:
    """A result with infinite numbers and such as are none as strings, which JSON has not."""
    if isinstance(value, dict):
        return {name: _in_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_in_json, value)]
    return to_json(value)


def _run(words: list[str]) -> None:
    """Run a command line. Raises: SystemExit: unless it succeeds."""
    if words == ["--version"]:
        print("fedsim", fedsim.__version__)
        return
    _, command = _named(words)
    given: dict[str, Any] = {}

    def end() -> None:
        """End at once, from another thread, without what runs at a normal exit."""
        reason, code = _interrupted(command)
        shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
        with contextlib.suppress(OSError):
            os.write(2, f"{shown}fedsim: error: {reason}\n".encode())
        os._exit(code)

    try:
        words, level = _level_of(words)
        call = parse(words)
        given = call.keywords
        with (
            verbosity(level or getattr(given.get("run"), "output", "normal")),
            terminated(end),
            optional(),
        ):
            result = call()
    except FedsimError as error:
        _say(error.details)
        _fail(error, error.exit_code)
    except BrokenPipeError:
        raise
    except (OSError, json.JSONDecodeError) as error:  # a full disk, or a damaged or missing file
        _fail(_next_step(error, given.get("run") if command is train else None), 1)
    except UnicodeEncodeError:
        if not (other := [word for word in words if not word.isprintable()]):
            raise
        _fail(f"{other[0]}: expected UTF-8, got other bytes", 2)
    except (MemoryError, RuntimeError) as error:
        from fedsim.engine import exhausted

        if not (reason := exhausted(error)):
            raise
        _fail(reason, 1)
    except KeyboardInterrupt:
        _fail(*_interrupted(command))
    if given["json"]:
        _answer(command, result)
    if result.get("holds") is False:
        sys.exit(1)
    stopped = "steps_done" in result and result["steps_done"] < result["num_steps"]
    if (stopped and command is train) or result.get("interrupted"):  # --resume continues the run
        sys.exit(UNFINISHED)


def parse(words: list[str]) -> functools.partial[dict[str, Any]]:
    """The call of a command, with its arguments by name, that a command line describes.

    Args: words: those after `fedsim`.

    Raises:
      ConfigError: a setting has no such value, or there is no such flag or command.
      SystemExit: help was printed.
    """
    path, command = _named(words)
    name, rest = " ".join(["fedsim", *path]), words[len(path) :]
    if isinstance(command, Mapping) and rest and not HELP.intersection(rest[:1]):
        known = f"one of {', '.join(command)}{such_as(rest[0], command)}"
        raise ConfigError.of("command", rest[0], known)
    if HELP.intersection(rest) or isinstance(command, Mapping):
        print(page(name, command, whole="--help-all" in rest), end="")
        raise SystemExit(0)
    assert not isinstance(command, Mapping)
    known = flags(command)
    visible = {name: one for name, one in known.items() if HIDDEN not in one.marks}
    typed = parse_words(name, _spelt(rest, visible), visible.values())
    path = typed.pop("config", None) if command is train else None
    of_file = {} if path is None else _values(known, read(Path(expand_home("config", path))))
    settings = of_file | _values(known, typed)
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


def _values(known: Mapping[str, Setting], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file or of the command line, with their types."""
    for name, value in given.items():
        if name not in known:
            raise unknown_setting(name, value, known)
    return {name: known[name].read(value) for name, value in given.items()}


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


def _level_of(words: list[str]) -> tuple[list[str], str]:
    """The words without --quiet, and the level that it asks for, or ""."""
    return [word for word in words if word != "--quiet"], "quiet" if "--quiet" in words else ""


def _spelt(words: list[str], known: Mapping[str, Any]) -> list[str]:
    """The words, each flag with hyphens. Raises: ConfigError: there is no such flag."""
    found = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        flag, equals, value = word.partition("=")
        if word.startswith("--") and len(flag) > 2:
            name = flag[2:].replace("-", "_")
            if name not in known and name.removeprefix("no_") not in known:
                given = value or (None if following.startswith("--") else following)
                raise unknown_setting(name, given, known)
            flag = f"--{name.replace('_', '-')}"
        found.append(f"{flag}{equals}{value}")
    return found


def _interrupted(command: Command | Commands) -> tuple[str, int]:
    """(how a command that a signal ended can go on, its exit code)."""
    if command is train:  # before a step, or by two signals
        return "interrupted; the same command with resume=true goes on", UNFINISHED
    if command is select:
        return "interrupted; the same command goes on", UNFINISHED
    if command is build:
        return "interrupted; the same command starts again", UNFINISHED
    return "interrupted", 130


def _next_step(error: Exception, run: RunConfig | None) -> str:
    """An error of the system with its path and a remedy. Args: run: of a training."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    path = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL and run is not None:
        then = f"; {run.run_dir} is safe up to its last checkpoint"
        then += ": free space, and go on with --resume"
    elif error.filename and (names := _variables_of(Path(error.filename))):
        then = f"; set {' and '.join(names)} to a directory that can be written to"
    else:
        then = ""
    return f"{path}{error.strerror}{then}"


def _variables_of(path: Path) -> list[str]:
    """Environment variables that move a directory which contains `path`, or lies below it."""
    names = []
    for name in (CACHE, LEDGER):
        try:
            place = directory_of(name)
        except ConfigError:  # cannot be what failed
            continue
        if path.is_relative_to(place) or place.is_relative_to(path):
            names.append(name)
    return names


def _fail(reason: Any, code: int) -> NoReturn:
    _say(f"fedsim: error: {printable(' '.join(str(reason).split()))}\n")
    sys.exit(code)


def _say(text: str) -> None:
    """Write to stderr; if that fails, the exit code alone reports the error."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
