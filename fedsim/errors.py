"""Errors that a person sees as one line, and the check that raises most of them."""

import reprlib
from typing import Any, Self

GOES_ON = "the same command goes on where it was"


class FedsimError(Exception):
    """What the command line shows as one line; its exit code."""

    exit_code = 1
    details = ""
    """Shown before that line where the fault is in code: a traceback."""


class ConfigError(FedsimError, ValueError):
    """A user's mistake: one line that names the field, the value and what was expected.

    Attributes:
      field: the setting or column, as a user types it; None: the line is about something else.
      value, expected: of the line, where it has both.
    """

    exit_code = 2

    def __init__(self, line: str, *, field: str | None = None):
        super().__init__(line)
        self.field, self.value, self.expected = field, None, None

    @classmethod
    def of(cls, field: str, value: Any, expected: str) -> Self:
        """The error `field=value: expected ...`."""
        error = cls(f"{field}={value}: expected {expected}", field=field)
        error.value, error.expected = value, expected
        return error


class DataError(ConfigError):
    """A user's mistake about data."""


class MissingColumn(DataError):
    """A source has no column of that name."""


class Interrupted(DataError):
    """What kept data from being read or built may pass. Finished parts are kept."""

    exit_code = 1

    def __init__(self, reason: str):
        super().__init__(reason if GOES_ON in reason else f"{reason}; {GOES_ON}")


class FileDamaged(FedsimError, ValueError):
    """A file that fedsim wrote is not what it was."""


def expect(field: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ConfigError in one line that names field, value and expectation unless `holds`."""
    if not holds:
        raise ConfigError.of(field, value, expected)


def expect_count(field: str, value: Any, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    expect(field, value, whole and value >= least, f"a whole number >= {least}")


def first_fault(error: Any) -> str:
    """The field and the fault of pydantic's ValidationError, the first one, as one line without
    what the file has there."""
    fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    return brief(f"{place}: {fault['msg'].removeprefix('Value error, ')}".removeprefix(": "), 200)


def printable(text: str, kept: str = "\n") -> str:
    """The text with escapes for what would change a terminal's state: names of files, what is in
    them, and what a model has learnt may have such characters.

    Args: kept: of these, what is shown as it is.
    """
    shown = (c if c.isprintable() or c in kept else c.encode("unicode_escape") for c in text)
    return "".join(c if isinstance(c, str) else c.decode() for c in shown)


def brief(value: Any, most: int = 60) -> str:
    """A value of somebody else's file as at most `most` printable characters, for an error."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    shown = printable(text[: most + 1]).replace("\n", " ")
    return shown if len(shown) <= most else shown[: most - 3] + "..."
