"""Groups of settings: frozen dataclasses that pydantic checks, with docstrings that are the help.

A group is written once. The command line, the files of --config, the library's keyword arguments,
config.json and its JSON Schema are made from its fields. A fault is a ConfigError in the field's
name.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Strict

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
        _describe(made)
        check, fields = made.__init__, dataclasses.fields(made)
        names = [field.name for field in fields if not field.kw_only]
        made.__renamed__ = flags = {fields[0].name: source} if source else {}

        @functools.wraps(check)
        def init(self: Any, *values: Any, **named: Any) -> None:
            named |= dict(zip(names, values, strict=False))
            try:
                check(self, **{name: _plain(value) for name, value in named.items()})
            except pydantic.ValidationError as found:
                raise _fault(found, error, lambda field: flags.get(field, field)) from None

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
        switch = self.type is bool
        single = value is not None and (switch or not isinstance(value, bool))
        expect(self.name, value, single, "a value")
        if switch:
            value = {"true": True, "false": False}.get(str(value).lower(), value)
        strict = switch or not isinstance(value, str | list)
        try:
            found = pydantic.TypeAdapter(self.kind).validate_python(value, strict=strict)
        except pydantic.ValidationError as error:
            raise _fault(error, ConfigError, lambda _: self.name) from None
        return Path(expand_home(self.name, found)) if isinstance(found, Path) else found


@functools.cache
def flags_of(kind: Any) -> dict[str, Setting]:
    """The settings of a group, and of the groups in it, by name."""
    found: dict[str, Setting] = {}
    hints, title = typing.get_type_hints(kind, include_extras=True), first_words(kind)
    for field, about in kind.__pydantic_fields__.items():
        if dataclasses.is_dataclass(about.annotation):
            inner = flags_of(about.annotation).items()
            found |= {name: dataclasses.replace(one, group=field) for name, one in inner}
            continue
        name, default = kind.__renamed__.get(field, field), about.default
        default, text = ... if about.is_required() else default, about.description or ""
        found[name] = Setting(name, hints[field], default, text, title, field)
    return found


def first_words(kind: Any) -> str:
    """The beginning of a docstring, up to its first comma or the end of its first sentence."""
    return " ".join((kind.__doc__ or "").split()).partition(". ")[0].rstrip(".").partition(",")[0]


def _describe(kind: Any) -> None:
    """Give inherited fields their docstrings, which pydantic takes from one class alone."""
    for name, about in kind.__pydantic_fields__.items():
        of_all = (getattr(base, "__pydantic_fields__", {}).get(name) for base in kind.__mro__)
        about.description = next((one.description for one in of_all if one and one.description), "")


def _plain(value: Any) -> Any:
    """A scalar of NumPy or JAX as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def _fault(
    found: pydantic.ValidationError, error: type[ConfigError], name_of: Callable[[str], str]
) -> ConfigError:
    """The first fault that pydantic found, as one line: field, value, what was expected."""
    fault = found.errors(include_url=False)[0]
    if isinstance(own := fault.get("ctx", {}).get("error"), ConfigError):
        return (
            own
            if isinstance(own, error)
            else error.of(str(own.field), own.value, str(own.expected))
        )
    field, value = name_of(str([*fault["loc"], ""][0])), fault["input"]
    if fault["type"] in ("missing", "missing_argument"):
        return error.of(field, None, "a value")
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return error.of(field, value, "the name of a setting")
    expected = fault["msg"].removeprefix("Input should be ").partition(", unable to parse")[0]
    return error.of(field, value, expected)
