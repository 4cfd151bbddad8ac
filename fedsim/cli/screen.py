"""The first line of a command, and answers that fit the terminal; a file or a pipe gets lines as
they are."""

import shutil
import sys
import textwrap

from fedsim.config import RunConfig


def columns() -> int:
    """How many a line of an answer may have."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def wrapped(text: str) -> str:
    """Sentences with line ends between words; lines of tables, and commands to be copied, stay."""
    fitted = textwrap.TextWrapper(columns(), break_on_hyphens=False)
    return "\n".join(
        line if "  " in line or "fedsim " in line else fitted.fill(line)
        for line in text.splitlines()
    )


class ReadsSources:
    """A command with the settings of a run."""

    run: RunConfig

    @property
    def doing(self) -> str:
        """The command's first line."""
        return f"reading data={self.run.data.source}, model={self.run.model.source}"
