"""Messages in Python's names: `--num-steps 3` becomes num_steps=3 where the library is called.

The code that writes messages speaks of flags, as the command line has them. This module translates
them, and errors, for callers of the library.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from fedsim.config import PrivacyConfig, RunConfig, types_of
from fedsim.errors import ConfigError, FedsimError
from fedsim.run import speaking

ARGUMENTS = ("user", "text", "messages")
"""Arguments of `fedsim.train` that name the setting with _column behind it."""
FLAG = re.compile(r"--(no-)?([a-z][a-z-]+)(?:[ =]([\w.-]*[\d:-][\w.:-]*))?")
"""A flag, with a value if the next word has a digit, a hyphen or a colon."""
BUILD = re.compile(r"`fedsim data build((?: --[a-z-]+ [^ `]+)+)`")
TABLE = re.compile(r"[^\s=]*/tables/[0-9a-f]{32}\.parquet")
"""Copy of a table in memory; see `tables`."""


@contextmanager
def to_python(level: str = "normal", given: Set[str] = frozenset()) -> Iterator[None]:
    """Write messages and errors of the block for a caller of the library.

    Args:
      level: quiet, normal or verbose.
      given: names of the settings that the caller gave.
    """
    wording = functools.partial(in_python, given=given)
    with speaking(level, wording):
        try:
            yield
        except FedsimError as error:
            error.args = (wording(str(error)),)
            if isinstance(error, ConfigError):
                error.field = error.field and _argument(error.field, given)
                error.expected = error.expected and wording(error.expected)
            raise


def in_python(text: str, given: Set[str] = frozenset()) -> str:
    """A message with Python's names. Args: given: as for `to_python`."""
    text = TABLE.sub("the table", text).replace("the same command", "the same call")
    text = BUILD.sub(lambda match: f"`fedsim.data.build({_arguments(match[1])})`", text)
    text = re.sub(r"\b\w+_column\b(?==)", lambda match: _argument(match[0], given), text)
    return FLAG.sub(_setting, text)


def _argument(field: str, given: Set[str]) -> str:
    """The argument of `fedsim.train` that stands for a setting."""
    name = field.removesuffix("_column")
    return name if name in ARGUMENTS and not {name, field} & given else field


def _arguments(flags: str) -> str:
    """Keyword arguments for flags that all have a value."""
    words = flags.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return ", ".join(f"{flag[2:].replace('-', '_')}={_value(word)}" for flag, word in pairs)


def _setting(match: re.Match[str]) -> str:
    """The setting of a flag; flags of other programs and commands stay as they are."""
    no, name, value = match[1], match[2].replace("-", "_"), match[3]
    if name not in _types():
        return match[0]
    if _types()[name] is bool:
        return f"{name}={not no}" + (f" {value}" if value else "")
    return f"{name}={_value(value)}" if value else name


def _value(word: str) -> str:
    try:
        float(word)
    except ValueError:
        return json.dumps(word)
    return word


_types: Callable[[], dict[str, object]] = functools.cache(
    lambda: types_of(PrivacyConfig) | types_of(RunConfig)
)
