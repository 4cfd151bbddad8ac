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
except ModuleNotFoundError:  # then there is no command line
    flag, repeated = dict, None

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
def settings(error: type[ConfigError] = ConfigError, **options: Any) -> Callable[[T], T]:
    """Decorator of a group of settings. Args: error: kind of the errors; options: as of dataclass.

    Raises (where the group is made):
      ConfigError: a value has another type or is out of range, one is missing, or has no field.
    """

    def decorate(kind: T) -> T:
        made: Any = pydantic.dataclasses.dataclass(frozen=True, config=CHECKED, **options)(kind)
        check = made.__init__
        names = [field.name for field in dataclasses.fields(made) if not field.kw_only]

        @functools.wraps(check)
        def init(self: Any, *values: Any, **named: Any) -> None:
            named |= dict(zip(names, values, strict=False))
            try:
                check(self, **{name: _plain(value) for name, value in named.items()})
            except pydantic.ValidationError as found:
                raise fault_of(found, error) from None

        made.__init__ = init
        return made

    return decorate


def _plain(value: Any) -> Any:
    """A scalar of NumPy or JAX as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def fault_of(found: pydantic.ValidationError, error: type[ConfigError]) -> ConfigError:
    """The first fault that pydantic found, as one line: field, value, what was expected."""
    fault = found.errors(include_url=False)[0]
    if isinstance(own := fault.get("ctx", {}).get("error"), ConfigError):
        return (
            own
            if isinstance(own, error)
            else error.of(str(own.field), own.value, str(own.expected))
        )
    field, value = str(fault["loc"][0]), fault["input"]
    if fault["type"] in ("missing", "missing_argument"):
        return error.of(field, None, "a value")
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return error.of(field, value, "the name of a setting")
    return error.of(field, value, fault["msg"].removeprefix("Input should be "))
