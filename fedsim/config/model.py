"""Groups of settings: frozen dataclasses that pydantic checks, with docstrings that are the help.

A group is written once. The command line, the files of --config, the library's keyword arguments
and config.json are made from its fields. A fault is a ConfigError in the field's name.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict

from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home

POSITIONAL, REPEATED, HIDDEN = "positional", "repeated", "hidden"
"""Marks in annotations, for the command line: an argument without a flag, a flag that is given once
for each value, a setting of files and the library that is no flag."""

Value = TypeVar("Value")
Positional = Annotated[Value, POSITIONAL]
T = TypeVar("T", bound=type)
CHECKED = ConfigDict(strict=True, use_attribute_docstrings=True, extra="forbid")

APath = Annotated[Path, Strict(False)]
"""A path, or a text that names one."""
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
BOUNDS = {"greater_than": "> {gt:g}", "greater_than_equal": ">= {ge:g}"}
BOUNDS |= {"less_than": "< {lt:g}", "less_than_equal": "<= {le:g}"}
"""Of pydantic's faults, what was expected."""


def _several(value: Any) -> Any:
    """One name or several as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else value


def _split(value: Any) -> Any:
    """Names, which may have commas between them, as a tuple."""
    texts = _is_list(parts := _several(value)) and all(isinstance(part, str) for part in parts)
    return tuple(name.strip() for part in parts for name in part.split(",")) if texts else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


Column = Annotated[tuple[str, ...], BeforeValidator(_several), REPEATED]
"""A column. Given several times, it is refused, where the last one would be taken."""
Names = Annotated[tuple[str, ...], BeforeValidator(_split), REPEATED]
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
        for name, about in made.__pydantic_fields__.items():  # of inherited ones, too
            of_all = (getattr(base, "__pydantic_fields__", {}).get(name) for base in made.__mro__)
            texts = [one.description for one in of_all if one and one.description]
            about.description = texts[0] if texts else ""
        check, fields = made.__init__, dataclasses.fields(made)
        names = [field.name for field in fields if not field.kw_only]
        made.__renamed__ = flags = {fields[0].name: source} if source else {}

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


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of a command or a group, by the name that people give it."""

    name: str
    kind: Any
    """Its annotation."""
    default: Any
    """...: it has none."""
    text: str
    """Its docstring."""
    title: str = ""
    """First words of its group's docstring."""
    field: str = ""
    """Its name in the group."""
    group: str | None = None
    """The field that holds its group, where groups are nested."""

    @property
    def marks(self) -> tuple[Any, ...]:
        """What its annotation says beside the type."""
        return getattr(self.kind, "__metadata__", ())

    @property
    def type(self) -> Any:
        """Its type."""
        return typing.get_args(self.kind)[0] if self.marks else self.kind

    def read(self, value: Any) -> Any:
        """A value that is given as a text, or in a file: of this type, ~ expanded in a path.

        Raises: ConfigError: it is not of this type.
        """
        single = value is not None and (self.type is bool or not isinstance(value, bool))
        expect(self.name, value, single, "a value")
        strict = not isinstance(value, str | list)
        try:
            found = pydantic.TypeAdapter(self.kind).validate_python(value, strict=strict)
        except pydantic.ValidationError as error:
            raise _fault(error, ConfigError, {}, self.name) from None
        return Path(expand_home(self.name, found)) if isinstance(found, Path) else found


@functools.cache
def flags_of(kind: Any) -> dict[str, Setting]:
    """The settings of a group, and of the groups in it, by name."""
    found: dict[str, Setting] = {}
    words = " ".join((kind.__doc__ or "").split()).partition(". ")[0]
    hints = typing.get_type_hints(kind, include_extras=True)
    for field, about in kind.__pydantic_fields__.items():
        if dataclasses.is_dataclass(about.annotation):
            inner = flags_of(about.annotation).items()
            found |= {name: dataclasses.replace(one, group=field) for name, one in inner}
            continue
        name, default = kind.__renamed__.get(field, field), about.default
        default, text = ... if about.is_required() else default, about.description or ""
        title = words.rstrip(".").partition(",")[0]
        found[name] = Setting(name, hints[field], default, text, title, field)
    return found


def _plain(value: Any) -> Any:
    """A scalar of NumPy or JAX as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def _fault(
    found: pydantic.ValidationError,
    kind: type[ConfigError],
    names: Mapping[str, str],
    name: str = "",
) -> ConfigError:
    """The first fault that pydantic found, as one line: field, value, what was expected."""
    fault: Any = found.errors(include_url=False)[0]
    own, context = fault.get("ctx", {}).get("error"), fault.get("ctx", {})
    if isinstance(own, kind):
        return own
    if isinstance(own, ConfigError):
        return kind.of(str(own.field), own.value, str(own.expected))
    field, value, about = str([*fault["loc"], ""][0]), fault["input"], fault["type"]
    expected = fault["msg"].removeprefix("Input should be ").partition(", unable to parse")[0]
    if about in BOUNDS:
        expected = BOUNDS[about].format(**context)
    elif about in ("missing", "missing_argument"):
        value, expected = None, "a value"
    elif about in ("unexpected_keyword_argument", "extra_forbidden"):
        expected = "the name of a setting"
    return kind.of(name or names.get(field, field), value, expected)
