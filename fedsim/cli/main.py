"""The command line: `fedsim COMMAND`, each command a function whose parameters are its flags.

A mistake in settings or data ends with exit code 2 and one line, `fedsim: error: ...`; a mistake in
the command line itself (a missing flag, not a number) with exit code 2 and tyro's message. There is
no traceback. With `--json`, stdout has one JSON object only; progress goes to stderr.
"""

import contextlib
import difflib
import functools
import inspect
import io
import itertools
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import tyro

from fedsim.cli.account import account, calibrate
from fedsim.cli.data import build, show, stats, without
from fedsim.cli.help import Command, Commands, flags, page
from fedsim.cli.models import evaluate, export, generate, train
from fedsim.cli.trust import audit, budget, publish, report, verify
from fedsim.cli.tuning import recommend, select
from fedsim.config import RunConfig, read, to_json
from fedsim.errors import ConfigError, FedsimError, expect, printable
from fedsim.files import CACHE, DISK_FULL, LEDGER, directory_of, expand_home
from fedsim.installation import optional, version
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
        print("fedsim", version())
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
        with verbosity(level), terminated(end), optional():
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
    """The call of a command, with all its arguments by name, that a command line describes.

    Args: words: those after `fedsim`.

    Raises:
      ConfigError: a setting has no such value, or there is no such flag or command.
      SystemExit: help was printed, or tyro printed what is wrong with the arguments.
    """
    path, command = _named(words)
    name, rest = " ".join(["fedsim", *path]), words[len(path) :]
    if isinstance(command, Mapping) and not HELP.intersection(rest[:1]):
        word, known = (rest or [""])[0], ", ".join(command)
        close = difflib.get_close_matches(word, command, 1)
        hint = f", such as {close[0]}" if close else ""
        raise ConfigError.of("command", word or None, f"one of {known}{hint}")
    if HELP.intersection(rest):
        print(page(name, command, whole="--help-all" in rest), end="")
        raise SystemExit(0)
    assert not isinstance(command, Mapping)
    _expect_known(command, rest)
    rest = _with_file(rest) if command is train else rest
    fancy = sys.stderr.isatty() and all(map(str.isprintable, rest))
    tyro._experimental_options.update(ansi_codes=fancy, utf8_boxes=fancy)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            how = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
            return tyro.cli(_later(command), prog=name, args=rest, config=how)
    except SystemExit as stop:
        if (fault := _fault_of_setting(stop)) is not None:
            raise fault from None
        with contextlib.suppress(OSError):  # stderr is closed or full: the exit code remains
            lines = map(str.rstrip, said.getvalue().rstrip().splitlines())
            print(*(lines if fancy else map(printable, lines)), sep="\n", file=sys.stderr)
        raise


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


def _later(command: Command) -> Any:
    """A function with the command's flags that returns its call, with ~ expanded in paths."""
    names = list(inspect.signature(command).parameters)

    @functools.wraps(command)
    def call(*values: Any, **named: Any) -> functools.partial[dict[str, Any]]:
        named |= dict(zip(names, values, strict=False))
        for name, value in named.items():
            if isinstance(value, Path):  # no shell expands --out=~/x
                named[name] = Path(expand_home(name, value))
        return functools.partial(command, **named)

    return call


def _level_of(words: list[str]) -> tuple[list[str], str]:
    """The words without --quiet and --verbose, and the level that these ask for.

    Raises: ConfigError: both are given.
    """
    levels = {f"--{level}": level for level in ("quiet", "verbose")}
    asked = [levels[word] for word in words if word in levels]
    expect("quiet", True, len(set(asked)) < 2, "it alone, or verbose alone")
    return [word for word in words if word not in levels], asked[0] if asked else "normal"


def _expect_known(command: Command, words: list[str]) -> None:
    """Raise ConfigError for the first flag that a command does not have, with the nearest one."""
    names = {name for flag in flags(command) for name in flag.names}
    known = names | {f"--no-{name[2:]}" for name in names}
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word.startswith("--") and len(flag) > 2 and flag not in known:
            close = difflib.get_close_matches(flag, names, 1, 0.75)
            hint = f"; use {close[0]}" if close else ""
            raise ConfigError(f"{flag}: there is no such flag here{hint}", field=flag[2:])


def _fault_of_setting(error: BaseException | None) -> ConfigError | None:
    """The ConfigError behind an exit of tyro, which would report it as one of a group of flags."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__context__
    return error


def _with_file(words: list[str]) -> list[str]:
    """The words of `train`, with the settings of the file of --config before all other flags."""
    after = itertools.pairwise([*words, ""])
    named = [b if a == "--config" else a[9:] for a, b in after if re.match("--config(=|$)", a)]
    if not named:
        return words
    path, of_file = Path(expand_home("config", named[-1])), []
    known = {flag.names[0]: flag for flag in flags(train) if flag.names}
    for name, value in read(path).items():
        flag = f"--{name.replace('_', '-')}"
        expect("config", path, flag in known, f"names of settings, found {name}")
        if not known[flag].metavar:
            holds = {"true": flag, "false": f"--no-{flag[2:]}"}.get(str(value).lower())
            expect(name, value, holds is not None, f"true or false in {path}")
            of_file.append(holds)
        elif isinstance(value, list) and known[flag].several:
            of_file += [flag, *map(str, value)]
        else:
            single = isinstance(value, int | float | str) and not isinstance(value, bool)
            expect(name, value, single, f"one value in {path}")
            of_file += [flag, str(value)]
    # After the algorithm, which a flag with several values would take for one of them.
    at = next(i for i, word in enumerate(words) if word.startswith("--"))
    return words[:at] + of_file + words[at:]


def _interrupted(command: Command | Commands) -> tuple[str, int]:
    """(how a command that a signal ended can go on, its exit code)."""
    if command is train:  # before a step, or by two signals
        return "interrupted; the same command with --resume goes on", UNFINISHED
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
