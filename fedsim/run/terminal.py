"""Warnings, notes and progress on stderr.

At the level `quiet` there are warnings only. Where stderr is no terminal, progress is plain lines.
Imports nothing slow, so that the first line of a command appears at once.
"""

import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from fedsim.errors import printable
from fedsim.signals import raise_if_stopped

BAR = 10  # columns of the bar
SILENT_S = 30.0  # without a line of progress in a log

_LEVEL: ContextVar[str] = ContextVar("level", default="normal")


@contextmanager
def verbosity(level: str) -> Iterator[None]:
    """Set the level of the terminals that are made in the block: quiet or normal."""
    before = _LEVEL.set(level)
    try:
        yield
    finally:
        _LEVEL.reset(before)


class _Stderr:
    """The current sys.stderr; a closed pipe or a full disk must not end a run."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # none, or closed
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError, AttributeError):
            return sys.stderr.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


class Terminal:
    """Warnings, notes and phases on stderr, at the level of the enclosing `verbosity`."""

    def __init__(self):
        # rich would make a separate output of every line in a notebook, which sets FORCE_COLOR.
        file = cast(TextIO, _Stderr())
        where: dict[str, Any] = {"force_jupyter": False, "force_terminal": file.isatty()}
        self._out = RichConsole(file=file, highlight=False, emoji=False, **where)
        self._level = _LEVEL.get()
        self._bar: Progress | None = None

    @property
    def has_bars(self) -> bool:
        """True if progress is a line that is overwritten; else it is lines of a log, or none."""
        return self._out.is_terminal and self._level != "quiet"

    def warn(self, text: str) -> None:
        """Write a warning, at every level."""
        self._write(f"warning: {text}")

    def note(self, text: str) -> None:
        """Write a line, unless the level is quiet."""
        if self._level != "quiet":
            self._write(text)

    def _write(self, text: str) -> None:
        """Write a line; control characters are escaped."""
        self._out.print(printable(text), markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, first: int = 0, last: int | None = None) -> Iterator[Callable]:
        """Show a line of progress on a terminal; yield `rich.progress.Progress.update` for it."""
        outer, of_text = self._bar, Column(no_wrap=True, overflow="ellipsis")
        self._bar = outer or Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}", markup=False, table_column=of_text),
            console=self._out,
            transient=True,
        )
        with nullcontext() if outer else self._bar:
            task = self._bar.add_task(what, total=last, completed=first, text="")
            try:
                yield functools.partial(self._bar.update, task)
            finally:
                self._bar.remove_task(task)
                self._bar = outer

    @contextmanager
    def phase(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show an operation on a terminal while the block runs, and its progress in a log.

        Yields:
          (done, of) -> None; reports progress. Raises KeyboardInterrupt if a stop signal came.
        """
        what = printable(what)
        with self.bar(what) if self.has_bars else nullcontext() as update:
            said = began = time.monotonic()

            def at(done: int, of: int) -> None:
                nonlocal said
                raise_if_stopped()
                line, now = f"{what}: {done} done", time.monotonic()
                if of and done:
                    left = time_in_words((now - began) / done * (of - done))
                    line = f"{what}: {done} of {of} done, {left} left"
                if update is not None:
                    update(completed=done, total=of or None, description=line)
                elif done != of and now > said + SILENT_S:
                    said = now
                    self.note(line)

            yield at


def time_in_words(seconds: float) -> str:
    """A time that is left, roughly."""
    units = ("s", 1), ("minutes", 60), ("hours", 3600)
    name, size = next((each for each in units if seconds < 100 * each[1]), units[-1])
    return f"about {math.ceil(seconds / size):,} {name}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; control characters are escaped."""
    shown = [[printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in shown
    ]
