"""Errors that a person sees as one line, and the checks that raise most of them."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

EXTRAS = {
    "train": "duckdb flax huggingface_hub jax jaxlib jinja2 markupsafe optax pyarrow "
    "safetensors tokenizers yaml",
    "ray": "grpc ray",
    "report": "markdown_it matplotlib",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "alembic mlflow sqlalchemy",
    "trackio": "trackio",
}
"""Import names of the packages of each extra of pyproject.toml."""

AGAIN = "if that passes, run the same command again"


class FedsimError(Exception):
    """An error that the command line shows as one line."""

    exit_code = 1
    details = ""
    """A traceback, shown before that line if the fault is in code."""


class ConfigError(FedsimError, ValueError):
    """A user's mistake: one line that names the field, the value and what was expected.

    Settings are named as in Python and files; the command line shows those between backticks, such
    as `rows_without_user='drop'`, as flags.

    Attributes:
      field: the setting or column, as a user types it; None: the line is about something else.
      value, expected: value and expectation of the line; None: it has none.
    """

    exit_code = 2

    def __init__(self, line: str, *, field: str | None = None):
        super().__init__(line)
        self.field, self.value, self.expected = field, None, None

    @classmethod
    def of(cls, field: str, value: Any, expected: str) -> Self:
        """Make the error `field=value: expected ...`."""
        error = cls(f"{field}={value}: expected {expected}", field=field)
        error.value, error.expected = value, expected
        return error


class DataError(ConfigError):
    """A user's mistake about data."""


class MissingColumn(DataError):
    """A source has no column of the requested name."""


class BadChat(Exception):
    """A chat that cannot be encoded. Its text says why, in words that name no person's text."""


class SlowTemplate(BadChat):
    """A chat template takes too long or too much memory. The row is never skipped: another machine
    might be faster."""


class Interrupted(DataError):
    """A fault that may pass kept data from being read or built."""

    exit_code = 1

    def __init__(self, reason: str):
        super().__init__(reason if AGAIN in reason else f"{reason}; {AGAIN}")


class FileDamaged(FedsimError, ValueError):
    """A file that fedsim wrote was changed or truncated."""


@contextmanager
def optional() -> Iterator[None]:
    """Turn the failed import of an optional package in this block into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = next((each for each, names in EXTRAS.items() if package in names.split()), None)
        if extra is None:
            raise
        # Not by the distribution's name: whoever registered that on the index would be installed.
        remedy = f"pip install -e '.[{extra}]' in a clone of fedsim"
        raise ConfigError(f"the package {package} is not installed: {remedy}") from None


def expect(field: str, value: Any, holds: bool, expected: str) -> None:
    """Raise ConfigError in one line that names field, value and expectation unless `holds`."""
    if not holds:
        raise ConfigError.of(field, value, expected)


def expect_count(field: str, value: Any, least: int) -> None:
    """Raise ConfigError unless `value` is a whole number of at least `least`."""
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    expect(field, value, whole and value >= least, f"a whole number >= {least}")


def such_as(
    name: str, known: Iterable[str], typed: Callable[[str], object] = str, cutoff: float = 0.75
) -> str:
    """End of the error of an unknown name: the nearest known one, if there is one.

    Args: typed: how a known name is typed; cutoff: as of `difflib.get_close_matches`.
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, cutoff)
    close += [each for each in known if each.startswith(f"{name}_")]
    return f", such as {typed(close[0])}" if close else ""


def may_pass(error: BaseException | None) -> bool:
    """True if an error, or a cause of it, is the network's or a server's: a retry may succeed."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, ConnectionError | TimeoutError) or library in ("httpx", "httpx2"):
            return True
        error = error.__cause__ or error.__context__
    return False


def printable(text: str, kept: str = "\n") -> str:
    """Escape characters that would change a terminal's state.

    Names and contents of files and generated text may have such characters.
    Args:
      text: any text.
      kept: unprintable characters that are not escaped.
    """
    shown = (c if c.isprintable() or c in kept else c.encode("unicode_escape") for c in text)
    return "".join(c if isinstance(c, str) else c.decode() for c in shown)


def brief(value: Any, most: int = 60) -> str:
    """Shorten a value of a user's file to at most `most` printable characters, for an error."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    shown = printable(text[: most + 1]).replace("\n", " ")
    return shown if len(shown) <= most else shown[: most - 3] + "..."
