"""Notes and progress of long phases on stderr; text and tables that fit the terminal.

Imports nothing slow, so that the first line of a command appears at once.
"""

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console as RichConsole

from fedsim.errors import printable

REFRESH_S = 0.5  # between two updates of a progress line
LINES_S = (3.0, 10.0, 30.0)  # a log gets a line after these times, then every thirty seconds


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

    def __init__(self, what: str):
        self.what = what
        self._done, self._of, self._began = 0, 0, time.monotonic()

    def at(self, done: int, of: int) -> None:
        """Report progress. A count that restarts also restarts the clock."""
        if done < self._done or of != self._of:
            self._began = time.monotonic()
        self._done, self._of = done, of

    def line(self) -> str:
        """Progress and remaining time in one line."""
        seconds, done, of = time.monotonic() - self._began, self._done, self._of
        if not of:
            return f"{self.what}: {seconds:.0f} s"
        left = f", {seconds / done * (of - done):.0f} s left" if done else ""
        return f"{self.what}: {done} of {of}, {seconds:.0f} s{left}"


class Terminal:
    """Notes and phases on stderr."""

    def __init__(self, *, quiet: bool = False):
        """Args: quiet: write nothing."""
        # rich would make a separate output of every line in a notebook.
        file = cast(TextIO, _Stderr())
        self._out = RichConsole(
            file=file, highlight=False, emoji=False, force_jupyter=False, quiet=quiet
        )
        self._show: Callable[[str], None] | None = None
        """Shows a phase in the progress bar of the steps, while there is one."""

    def note(self, text: str, *, indent: int = 0) -> None:
        """Write a line, wrapped on a terminal.

        Words stay whole; control characters are escaped.

        Args:
          indent: columns before the second and later lines.
        """
        text = printable(text)
        if self._out.is_terminal:
            text = textwrap.fill(
                text,
                self._out.width,
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        self._out.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, what: str, *, late: bool = False) -> Iterator[Phase]:
        """Show an operation and its progress while the block runs.

        Args:
          late: write nothing to a log if the block takes less than the first of LINES_S.
        """
        phase, over = Phase(what), threading.Event()
        if self._show is not None:
            how, arguments = self._over_a_bar, (phase, over, self._show)
        elif self._out.is_terminal:
            how, arguments = self._over_a_line, (phase, over)
        else:
            if not late:
                self.note(what)
            how, arguments = self._in_lines, (phase, over)
        thread = threading.Thread(target=how, args=arguments, daemon=True)
        thread.start()
        try:
            yield phase
        finally:
            over.set()
            thread.join()

    def _in_lines(self, phase: Phase, over: threading.Event) -> None:
        waits = iter(b - a for a, b in zip((0.0, *LINES_S), LINES_S, strict=False))
        while not over.wait(next(waits, LINES_S[-1])):
            self.note(phase.line())

    def _over_a_line(self, phase: Phase, over: threading.Event) -> None:
        with self._out.status(phase.what) as status:
            while not over.wait(REFRESH_S):
                status.update(phase.line())
        self.note(phase.line())

    @staticmethod
    def _over_a_bar(phase: Phase, over: threading.Event, show: Callable[[str], None]) -> None:
        while not over.wait(REFRESH_S):
            show(phase.line())


def columns() -> int:
    """Width of a line on stdout; unlimited where stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def wrapped(text: str) -> str:
    """Sentences broken between words to fit stdout; tables and commands to be copied stay whole."""
    fitted = textwrap.TextWrapper(columns(), break_on_hyphens=False)
    return "\n".join(
        line if "  " in line or "fedsim " in line else fitted.fill(line)
        for line in text.splitlines()
    )


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with aligned columns; control characters are escaped."""
    shown = [[printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in shown
    ]
