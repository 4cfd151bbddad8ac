"""Lines for a terminal: notes and phases, which go to stderr, and tables.

Imports nothing that takes time: the first line of a command is there at once.
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

REFRESH_S = 0.5  # of a line that is written over
LINES_S = (3.0, 10.0, 30.0)  # in a log: a line after each of these, and then every thirty seconds


class _Stderr:
    """The stderr of the moment. What cannot be written there is lost: that nobody reads any more,
    or that a log is full, ends no run."""

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
    """Something that takes its time."""

    def __init__(self, what: str):
        self.what = what
        self._done, self._of, self._began = 0, 0, time.monotonic()

    def at(self, done: int, of: int) -> None:
        """So much is done. A count that begins again counts something else: time does, too."""
        if done < self._done or of != self._of:
            self._began = time.monotonic()
        self._done, self._of = done, of

    def line(self) -> str:
        """How far it has come, and how long it will take."""
        seconds, done, of = time.monotonic() - self._began, self._done, self._of
        if not of:
            return f"{self.what}: {seconds:.0f} s"
        left = f", {seconds / done * (of - done):.0f} s left" if done else ""
        return f"{self.what}: {done} of {of}, {seconds:.0f} s{left}"


class Terminal:
    """Writes to stderr."""

    def __init__(self):
        # In a notebook rich would make a display of every line.
        file = cast(TextIO, _Stderr())
        self._out = RichConsole(file=file, highlight=False, emoji=False, force_jupyter=False)
        self._show: Callable[[str], None] | None = None
        """What writes a phase over the line in which steps are shown, where there is one."""

    def note(self, text: str, *, indent: int = 0) -> None:
        """One line; on a terminal as many as it takes, the others `indent` columns from the left.
        What has no spaces stays whole; control characters are escaped."""
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
        """Say what is done, and from time to time how far it has come.

        Args: late: say nothing in a log of what takes less than the first of LINES_S.
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
    """A table for the terminal, a line for each row. Control characters in names are escaped."""
    shown = [[printable(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in shown
    ]
