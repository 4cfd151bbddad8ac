"""Planting a mistake in fedsim: functions are replaced where they are defined, at their import.

`watch` is called when an interpreter starts, by a `sitecustomize.py` that `hook` makes, in a test
and in all processes that it starts. It replaces a function directly after its module was executed,
hence before another module can take its name from there. It imports nothing but Python's own, for
what JAX heeds is set later.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Patch:
    """A function, method or property of fedsim, or a constant, and what takes its place."""

    module: str
    """Where it is defined, or the one module in which another one's function is replaced."""
    name: str
    """Of it in the module: `f` or `Class.f`."""
    change: Callable[..., Any]
    """change(right, *args, **kwargs) instead of right(*args, **kwargs); of a constant,
    change(right)."""

    def target(self) -> tuple[Any, str, Any]:
        """(what holds it, its name there, it). Raises: AttributeError: it is not there."""
        *outer, name = self.name.split(".")
        place = functools.reduce(getattr, outer, import_module(self.module))
        return place, name, inspect.getattr_static(place, name)

    def expect_callable(self) -> None:
        """Raises: TypeError: the change cannot take the arguments of what it replaces."""
        right = _function(self.target()[2])
        if not callable(right):
            return
        kinds = inspect.Parameter
        of_right = [*inspect.signature(right).parameters.values()]
        own = [*inspect.signature(self.change).parameters.values()][1:]
        named = {p.name for p in own if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
        if other := named - {p.name for p in of_right}:
            raise TypeError(f"{self.module}.{self.name} has no {', '.join(sorted(other))}")
        by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        args = [p for p in of_right if p.kind in by_place]
        options = {p.name: p for p in of_right if p.kind is kinds.KEYWORD_ONLY}
        inspect.signature(self.change).bind(right, *args, **options)

    def plant(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        """Replace it. Args: put: what sets an attribute, and may take it back."""
        place, name, whole = self.target()
        right = _function(whole)
        if not callable(right):
            put(place, name, self.change(right))
            return

        @functools.wraps(right)
        def wrong(*args: Any, **kwargs: Any) -> Any:
            return self.change(right, *args, **kwargs)

        put(place, name, wrong if whole is right else type(whole)(wrong))


def _function(whole: Any) -> Any:
    """Of a property or a static method: its function; else the same."""
    return whole.fget if isinstance(whole, property) else getattr(whole, "__func__", whole)


HOOK = """from experiments.planting import watch

def patches():
    from experiments.mistakes import MISTAKES  # not before: it imports JAX

    return next(each for each in MISTAKES if each.name == {name!r}).patches

watch(patches, {modules!r})
"""


class Mistake:
    """A mistake: the patches that make it, and the test under tests/ that should notice."""

    def __init__(self, name: str, test: str, *patches: Patch):
        self.name, self.test, self.patches = name, test, patches

    def hook(self) -> str:
        """The text of a sitecustomize.py that plants it in every Python with that on its path."""
        modules = sorted({patch.module for patch in self.patches})
        return HOOK.format(name=self.name, modules=modules)


def watch(patches: Callable[[], Sequence[Patch]], modules: Sequence[str]) -> None:
    """Plant the patches of a mistake in its modules, when they are imported."""
    sys.meta_path.insert(0, _Planter(patches, modules))


class _Planter(MetaPathFinder):
    def __init__(self, patches: Callable[[], Sequence[Patch]], modules: Sequence[str]):
        self.patches, self.modules = patches, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as it is found without, to be changed after it was executed."""
        if fullname not in self.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.loader is not None, fullname
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._plant(fullname)

        spec.loader.exec_module = exec_module
        return spec

    def _plant(self, module: str) -> None:
        for patch in self.patches():
            if patch.module == module:
                patch.plant()
