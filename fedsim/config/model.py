"""Groups of settings: frozen dataclasses that pydantic checks, with docstrings that are the help.

A group is written once. The command line, the files of --config, the library's keyword arguments,
config.json and its JSON Schema are made from its fields. A fault is a ConfigError in the field's
name.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Strict

from fedsim.errors import ConfigError

try:
    import tyro.conf

    flag: Any = tyro.conf.arg  # what the command line calls a setting
    repeated: Any = tyro.conf.UseAppendAction  # a flag that is given once for each value
    hidden: Any = tyro.conf.Suppress  # a setting of files and the library that is no flag
except ModuleNotFoundError:  # then there is no command line
    flag, repeated, hidden = dict, None, None

T = TypeVar("T", bound=type)
CHECKED = ConfigDict(strict=True, use_attribute_docstrings=True, extra="forbid")

APath = Annotated[Path, Strict(False)]
"""A path, or a text that names one."""


def _several(value: Any) -> Any:
    """One name or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else value


def _split(value: Any) -> Any:
    """Names, which may have commas between them, as a tuple."""
    texts = _is_list(parts := _several(value)) and all(isinstance(part, str) for part in parts)
    return tuple(name.strip() for part in parts for name in part.split(",")) if texts else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


Column = Annotated[tuple[str, ...], BeforeValidator(_several), repeated]
"""A column, or several that make one value together."""
Names = Annotated[tuple[str, ...], BeforeValidator(_split), repeated]
"""Names, in a sequence or with commas between them."""


@dataclass_transform(frozen_default=True)
def group(
    *, source: str = "", error: type[ConfigError] = ConfigError, kw_only: bool = False
) -> Callable[[T], T]:
    """Decorator of a group of settings. To make one raises ConfigError.

    Args:
      source: flag of the first field, if it has another name.
      error: kind of the errors.
      kw_only: as of `dataclasses.dataclass`.
    """

    def decorate(kind: T) -> T:
        made: Any = pydantic.dataclasses.dataclass(frozen=True, config=CHECKED, kw_only=kw_only)(
            kind
        )
        _describe(made)
        check, fields = made.__init__, dataclasses.fields(made)
        names = [field.name for field in fields if not field.kw_only]
        flags = {fields[0].name: source} if source else {}

        @functools.wraps(check)
        def init(self: Any, *values: Any, **named: Any) -> None:
            named |= dict(zip(names, values, strict=False))
            try:
                check(self, **{name: _plain(value) for name, value in named.items()})
            except pydantic.ValidationError as found:
                raise _fault(found, error, flags) from None

        made.__init__ = init
        return made

    return decorate


def _describe(kind: Any) -> None:
    """Give inherited fields their docstrings, which pydantic takes from one class alone."""
    for name, about in kind.__pydantic_fields__.items():
        of_all = (getattr(base, "__pydantic_fields__", {}).get(name) for base in kind.__mro__)
        about.description = next((one.description for one in of_all if one and one.description), "")


def _plain(value: Any) -> Any:
    """A scalar of NumPy or JAX as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def _fault(
    found: pydantic.ValidationError, error: type[ConfigError], flags: dict[str, str]
) -> ConfigError:
    """The first fault that pydantic found, as one line: field, value, what was expected."""
    fault = found.errors(include_url=False)[0]
    if isinstance(own := fault.get("ctx", {}).get("error"), ConfigError):
        return (
            own
            if isinstance(own, error)
            else error.of(str(own.field), own.value, str(own.expected))
        )
    field, value = str(fault["loc"][0]), fault["input"]
    field = flags.get(field, field)
    if fault["type"] in ("missing", "missing_argument"):
        return error.of(field, None, "a value")
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return error.of(field, value, "the name of a setting")
    return error.of(field, value, fault["msg"].removeprefix("Input should be "))
