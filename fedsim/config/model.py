"""Groups of settings: frozen dataclasses that pydantic checks, with docstrings that are the help.

A group is written once. The command line, the files of --config, the library's keyword arguments
and config.json are made from its fields. A fault is a ConfigError in the field's name.
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict

from fedsim.errors import ConfigError, brief
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
Length = Annotated[int, Field(ge=2)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _split(value: Any) -> Any:
    """Names, which may have commas between them, as a tuple."""
    parts = (value,) if isinstance(value, str) else value
    texts = isinstance(parts, list | tuple) and all(isinstance(part, str) for part in parts)
    return tuple(name for part in parts for name in part.split(",")) if texts else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split), REPEATED]
"""Names, in a sequence or with commas between them; given twice, both, and not the last one."""


@dataclass_transform(frozen_default=True)
def group(*, source: str = "", kw_only: bool = False) -> Callable[[T], T]:
    """Decorator of a group of settings. To make one raises ConfigError.

    Args:
      source: flag of the first field, if it has another name.
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
                check(self, **named)
            except pydantic.ValidationError as found:
                raise _fault(found, flags) from None

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
        """A value that is given as a text, or in a file: of this type, ~ expanded in a path."""
        strict = not isinstance(value, str | list)
        try:
            found = pydantic.TypeAdapter(self.kind).validate_python(value, strict=strict)
        except pydantic.ValidationError as error:
            raise _fault(error, {}, self.name) from None
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


def _fault(
    found: pydantic.ValidationError, names: Mapping[str, str], name: str = ""
) -> ConfigError:
    """The first fault that pydantic found, as one line: field, value, what was expected."""
    fault: Any = found.errors(include_url=False)[0]
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, ConfigError):
        return own
    field, value, about = str([*fault["loc"], ""][0]), fault["input"], fault["type"]
    expected = fault["msg"].removeprefix("Input should be ").partition(", unable to parse")[0]
    field = name or names.get(field, field)
    if about in ("missing", "missing_argument"):
        return ConfigError(f"{field}: missing, expected a value", field=field)
    if about.endswith("_type") and isinstance(value, str):
        value = repr(value)  # '8' is no number
    elif about == "unexpected_keyword_argument":
        expected = "the name of a setting"
    return ConfigError.of(field, value, expected)


adapter_of = functools.cache(pydantic.TypeAdapter[Any])
"""How pydantic reads and writes a type in JSON."""


def expect_format(kind: type[Value], record: Any) -> Value:
    """A record of JSON as a value of a type.

    Raises: ValueError: it is of another type. The message names field and fault, without the value.
    """
    try:
        return adapter_of(kind).validate_json(json.dumps(record))
    except pydantic.ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place, why = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        raise ValueError(brief(f"{place}: {why}".removeprefix(": "), 200)) from None
