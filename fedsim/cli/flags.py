"""The commands and their flags, read off the dataclasses as tyro reads them."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag, or an argument that is known by its place."""

    names: tuple[str, ...]
    """As they are typed; empty for an argument that is known by its place."""
    metavar: str
    """What stands for the value; empty where there is none."""
    text: str
    required: bool = False
    group: str = ""
    """What the class that it is a field of says of itself."""

    @property
    def usage(self) -> str:
        """The flag as it is typed, with a word for its value."""
        return " ".join(filter(None, [*self.names[:1], self.metavar]))


def commands(kind: Any) -> dict[str, Any]:
    """The commands of a union of them, or of a class that holds such a union, by their names."""
    if dataclasses.is_dataclass(kind):
        held = typing.get_type_hints(kind, include_extras=True).get("command")
        return commands(typing.get_args(held)[0]) if held else {}
    marked = (typing.get_args(each) for each in typing.get_args(kind))
    return {mark.name: command for command, mark in marked}


def named(kind: Any, words: list[str]) -> tuple[list[str], Any]:
    """The words in front that name a command, and what they name."""
    path: list[str] = []
    for word in words:
        if word not in (inner := commands(kind)):
            break
        path.append(word)
        kind = inner[word]
    return path, kind


def flags(kind: Any, group: str = "") -> Iterator[Flag]:
    """The flags of a command."""
    about = StructTypeInfo.make(kind, tyro.MISSING_NONPROP, in_union_context=False)
    spec = ConstructorRegistry().get_struct_spec(about)
    assert isinstance(spec, StructConstructorSpec), "commands are dataclasses"
    for field in spec.fields:
        marked = typing.get_origin(field.type) is typing.Annotated
        plain, *marks = typing.get_args(field.type) if marked else (field.type,)
        if dataclasses.is_dataclass(plain):
            yield from flags(plain, sentence(plain).partition(",")[0])
        else:
            yield _flag(field, plain, marks, group)


def _flag(field: StructFieldSpec, kind: Any, marks: list[Any], group: str) -> Flag:
    given = (getattr(mark, "name", None) for mark in marks)
    name = next(filter(None, given), field.name).replace("_", "-")
    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    required, metavar = field.default is tyro.MISSING_NONPROP, _metavar(kind)
    if tyro.conf.Positional in marks:
        metavar = metavar if metavar.startswith("{") else name.upper()
        metavar += " ..." if typing.get_origin(kind) is tuple else ""
        return Flag((), metavar if required else f"[{metavar}]", text, required, group)
    names = (f"--{name}", f"--no-{name}") if field.default is True else (f"--{name}",)
    if metavar and field.default and not required and "efault: " not in text:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        text += f" Default: {' '.join(map(str, values))}."
    return Flag(names, metavar, text, required, group)


def _metavar(kind: Any) -> str:
    """What stands for a value of a type; empty for a flag without one."""
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    inner = [each for each in typing.get_args(kind) if each not in (type(None), ...)]
    return _metavar(inner[0]) if inner else METAVARS.get(kind, "")


def sentence(kind: Any) -> str:
    """The first sentence of a class's docstring."""
    first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return first.partition(". ")[0].rstrip(".")
