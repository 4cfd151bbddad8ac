"""The command line: `fedsim COMMAND`, each command a function whose parameters are its flags.

A mistake in settings, data or the command line itself ends with exit code 2 and one line, `fedsim:
error: ...`, without a traceback. With `--json`, stdout has one JSON object only; progress goes to
stderr.
"""

import contextlib
import difflib
import functools
import inspect
import json
import os
import re
import resource
import signal
import sys
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import fedsim
from fedsim.cli import Answer
from fedsim.cli.account import account, calibrate
from fedsim.cli.data import build, show, stats, without
from fedsim.cli.help import Command, Commands, flags, page, parse_words, usage_of
from fedsim.cli.models import evaluate, export, generate, train
from fedsim.cli.trust import audit, budget, publish, report, verify
from fedsim.cli.tuning import recommend, select
from fedsim.config import HIDDEN, config_of, flags_of, read, to_json, unknown_setting
from fedsim.errors import ConfigError, FedsimError, optional, printable
from fedsim.files import expand_home
from fedsim.run import verbosity
from fedsim.signals import terminated

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
        names = difflib.get_close_matches(rest[0], command) or command
        raise ConfigError.of("command", rest[0], f"one of {', '.join(names)}")
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


def _spelt(word: str, known: Mapping[str, Any]) -> str:
    """A word, its flag with hyphens. Raises: ConfigError: there is no such flag."""
    if not re.match("--.", word):
        return word
    flag, equals, value = word.partition("=")
    name = flag[2:].replace("-", "_")
    if name not in known and name.removeprefix("no_") not in known:
        raise unknown_setting(name, value or None, known)
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
    how = " with resume=true" * (command is train)  # before a step, or by two signals
    return f"interrupted; the same command{how} goes on", UNFINISHED


def _fail(reason: Any, code: int) -> NoReturn:
    _say(f"fedsim: error: {printable(' '.join(str(reason).split()))}\n")
    sys.exit(code)


def _say(text: str) -> None:
    """Write to stderr; if that fails, the exit code alone reports the error."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
