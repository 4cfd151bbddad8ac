"""The command line: `fedsim COMMAND`, each command a frozen dataclass whose fields are its flags.

A mistake in settings or data ends with exit code 2 and one line, `fedsim: error: ...`; a mistake in
the command line itself (a missing flag, not a number) with exit code 2 and tyro's message. There is
no traceback. With `--json`, stdout has one JSON object only; progress goes to stderr.
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from fedsim.cli.account import Account, Calibrate
from fedsim.cli.arguments import level_of, parse
from fedsim.cli.data import Data, DataBuild
from fedsim.cli.models import (
    Evaluate,
    Export,
    Generate,
    Train,
)
from fedsim.cli.trust import Audit, Budget, Publish, Report, Verify
from fedsim.cli.tuning import Recommend, Select
from fedsim.config import to_json
from fedsim.errors import ConfigError, FedsimError, printable
from fedsim.files import CACHE, DISK_FULL, LEDGER, directory_of
from fedsim.installation import optional, version
from fedsim.run import Terminal, speaking
from fedsim.signals import terminated

UNFINISHED = 75  # EX_TEMPFAIL: a signal stopped the run; the same command with --resume goes on

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Audit, tyro.conf.subcommand("audit")]
    | Annotated[Budget, tyro.conf.subcommand("budget")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Publish, tyro.conf.subcommand("publish")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Account, tyro.conf.subcommand("account")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Recommend, tyro.conf.subcommand("recommend")]
    | Annotated[Select, tyro.conf.subcommand("select")]
    | Annotated[Data, tyro.conf.subcommand("data")]
)


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


def _answer(command: Any, result: dict[str, Any]) -> None:
    """Print the result as JSON. A training ignores a closed stdout: its result is in the run."""
    try:
        print(json.dumps(_in_json(result), allow_nan=False), flush=True)
    except OSError:
        if not isinstance(command, Train):
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
    command = None

    def end() -> None:
        """End at once, from another thread, without what runs at a normal exit."""
        reason, code = _interrupted(command)
        shown = "\x1b[?25h\n" if sys.stderr.isatty() else ""  # a progress bar hides the cursor
        with contextlib.suppress(OSError):
            os.write(2, f"{shown}fedsim: error: {reason}\n".encode())
        os._exit(code)

    try:
        words, level = level_of(words)
        command = parse(Command, words)
        run = getattr(command, "run", None)
        with speaking(level or getattr(run, "output", "normal")), terminated(end), optional():
            if doing := getattr(command, "doing", ""):  # printed before imports that take seconds
                Terminal().note(doing)
            result = command()
    except FedsimError as error:
        _say(error.details)
        _fail(error, error.exit_code)
    except BrokenPipeError:
        raise
    except (OSError, json.JSONDecodeError) as error:  # a full disk, or a damaged or missing file
        _fail(_next_step(error, command), 1)
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
    if command.json:
        _answer(command, result)
    if result.get("holds") is False:
        sys.exit(1)
    stopped = "steps_done" in result and result["steps_done"] < result["num_steps"]
    if stopped and isinstance(command, Train):  # which --resume continues
        sys.exit(UNFINISHED)
    if result.get("interrupted"):
        sys.exit(UNFINISHED)


def _interrupted(command: Any) -> tuple[str, int]:
    """(how a command that a signal ended can go on, its exit code)."""
    command = getattr(command, "command", command)
    if isinstance(command, Train):  # before a step, or by two signals
        return "interrupted; the same command with --resume goes on", UNFINISHED
    if isinstance(command, Select | DataBuild):
        return "interrupted; the same command goes on", UNFINISHED
    return "interrupted", 130


def _next_step(error: Exception, command: Any) -> str:
    """An error of the system with its path and a remedy."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    path = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL and isinstance(command, Train):
        then = f"; {command.run.run_dir} is safe up to its last checkpoint"
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
