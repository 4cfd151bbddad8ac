"""Warnings, notes and progress on stderr, in three levels; text and tables that fit the terminal.

`quiet` shows warnings only, `normal` what a person decides on, `verbose` technical details as well.
Where stderr is no terminal, progress is plain lines. Imports nothing slow, so that the first line
of a command appears at once.
"""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.text import Text

from fedsim.errors import printable
from fedsim.signals import raise_if_stopped

REFRESH_S = 0.5  # between two updates of a progress line
FIRST_LINE_S = 3.0  # a log gets a line about a phase after this time, and after each doubling of it

_LEVEL: ContextVar[str] = ContextVar("level", default="normal")
_WORDING: ContextVar[Callable[[str], str]] = ContextVar("wording", default=str)


@contextmanager
def verbosity(level: str, wording: Callable[[str], str] = str) -> Iterator[None]:
    """Set the level and the wording of the terminals that are made in the block.

    Args:
      level: quiet, normal or verbose.
      wording: applied to every line, such as to name settings as the caller knows them.
    """
    levels, wordings = _LEVEL.set(level), _WORDING.set(wording)
    try:
        yield
    finally:
        _LEVEL.reset(levels)
        _WORDING.reset(wordings)


class _Stderr:
    """The current sys.stderr. Failed writes are ignored: a closed pipe or a full disk must not end
    a run."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # none, or closed
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class Phase:
    """Progress of an operation that takes long."""

    def __init__(self, what: str, show: Callable[[str], None], first_s: float, factor: float):
        """Show `what` after `first_s` seconds, and again after `factor` times as many each time."""
        self.what, self._show, self._factor = what, show, factor
        self._done, self._of, self._began = 0, 0, time.monotonic()
        self._next, self._pause = self._began + first_s, first_s

    def at(self, done: int, of: int) -> None:
        """Report progress. A count that restarts also restarts the clock.

        Raises: KeyboardInterrupt: a stop signal came.
        """
        raise_if_stopped()
        now = time.monotonic()
        if done < self._done or of != self._of:
            self._began = now
        self._done, self._of = done, of
        if now >= self._next:
            self._pause *= self._factor
            self._next = now + self._pause
            self._show(self.line())

    def line(self) -> str:
        """Progress and remaining time in one line."""
        seconds, done, of = time.monotonic() - self._began, self._done, self._of
        counted = f"{done} of {of} done, " if of else ""
        left = f", {duration(max(1.0, seconds / done * (of - done)))} left" if done else ""
        return f"{self.what}: {counted}{duration(max(1.0, seconds))}{left}"


class Terminal:
    """Warnings, notes and phases on stderr, at the level of the enclosing `verbosity`."""

    def __init__(self):
        # rich would make a separate output of every line in a notebook.
        file = cast(TextIO, _Stderr())
        self._out = RichConsole(file=file, highlight=False, emoji=False, force_jupyter=False)
        self._level, self._wording = _LEVEL.get(), _WORDING.get()
        self._show: Callable[[str], None] | None = None
        """Shows a phase in the progress bar of the steps, while there is one."""

    @property
    def verbose(self) -> bool:
        """True if technical details are shown."""
        return self._level == "verbose"

    def warn(self, text: str) -> None:
        """Write a warning, at every level."""
        self._write(f"warning: {text}")

    def note(self, text: str, *, indent: int = 0) -> None:
        """Write a line, unless the level is quiet; `indent` is that of its later lines."""
        if self._level != "quiet":
            self._write(text, indent)

    def detail(self, text: str) -> None:
        """Write a technical line, if the level is verbose."""
        if self.verbose:
            self._write(text)

    def _write(self, text: str, indent: int = 0) -> None:
        """Write a line, wrapped on a terminal. Words stay whole; control characters are escaped."""
        text = printable(self._wording(text))
        if self._out.is_terminal:
            text = _fill(text, self._out.width, indent)
        self._out.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, what: str) -> Iterator[Phase]:
        """Show an operation and its progress while the block runs: one line that is overwritten.

        A log gets lines only if the block takes long.
        """
        if self._level == "quiet":
            yield Phase(what, lambda line: None, FIRST_LINE_S, 2)
        elif self._show is not None:
            yield Phase(what, self._show, REFRESH_S, 1)
        elif self._out.is_terminal:
            with self._out.status(Text(what)) as status:
                phase = Phase(what, lambda line: status.update(Text(line)), REFRESH_S, 1)
                yield phase
            self.detail(phase.line())
        else:
            yield Phase(what, self.note, FIRST_LINE_S, 2)


UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))


def duration(seconds: float) -> str:
    """A duration in one unit, to two digits, such as 12 s, 4.2 min or 3 h."""
    name, unit = next((each for each in UNITS if seconds >= each[1]), UNITS[-1])
    count = seconds / unit
    return f"{count:.2g} {name}" if count < 9.95 else f"{count:,.0f} {name}"


def columns() -> int:
    """Width of a line on stdout; unlimited where stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def wrapped(text: str) -> str:
    """Sentences broken between words to fit stdout; tables and commands to be copied stay whole."""
    lines = text.splitlines()
    return "\n".join(x if "  " in x or "fedsim " in x else _fill(x, columns()) for x in lines)


def hanging_indent(start: str, text: str) -> str:
    """A line, broken between words to fit stdout, with its later lines indented below `text`."""
    return _fill(start + text, columns(), len(start))


def _fill(text: str, width: int, indent: int = 0) -> str:
    """Break a line between words; later lines are indented."""
    filler = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    filler.subsequent_indent = " " * indent
    return filler.fill(text)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; control characters are escaped."""
    shown = [[printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in shown
    ]
