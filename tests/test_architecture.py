"""The drawing of the architecture stays true: who imports whom, where Ray is, the two twins."""

import ast
import difflib
import graphlib
import importlib
import sys
from pathlib import Path

import pytest

import fedsim

ROOT = Path(fedsim.__file__).parent
LEVELS = (
    "errors files signals",
    "config keys accounting",
    "sampling mechanism noise clipping models data",
    "els uls shared_uls plan evaluate run engine budget",
    "trust tuning training generate export",
    "library cli",
)
FOUNDATION = {f"fedsim.{name}" for name in "errors files signals".split()}
FREE_OF_RAY = "engine preflight worker task programs environment"
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names.split()}


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {module: ast.parse(path.read_text()) for module, path in SOURCES.items()}


def exported(stub):
    """{name: the module that has it, or (that is) the module} of a folder's door, its stub."""
    folder = module_name(stub.parent / "__init__.py")
    return {
        alias.name: f"{folder}.{node.module or alias.name}"
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


DOORS = {
    module_name(stub.with_suffix(".py")): exported(stub) for stub in ROOT.rglob("__init__.pyi")
}


def imported(module):
    """Absolute names a module imports anywhere, inside functions too, and where they are from."""
    names = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            door = DOORS.get(node.module, {})
            names |= {door[alias.name] for alias in node.names if alias.name in door}
    return names


def packages(module):
    """Top-level packages a module imports."""
    return {name.partition(".")[0] for name in imported(module)}


# Modules of fedsim that a module names in its imports; `from fedsim import x` is of x.
IMPORTS = {
    module: {name for name in imported(module) if name in SOURCES and name != "fedsim"} - {module}
    for module in SOURCES
}


def level(module):
    return LEVEL[module.split(".")[1]]


def inside(module, package):
    return module == package or module.startswith(package + ".")


def reached(module):
    """Modules of fedsim that importing `module` may import, itself included."""
    found, left = set(), [module]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += IMPORTS[module]
    return found


def test_every_module_has_its_level():
    names = {module.split(".")[1] for module in SOURCES if module != "fedsim"}
    assert names == LEVEL.keys()


def test_a_module_imports_only_from_its_own_level_and_below():
    upward = {
        f"{module} imports {other}"
        for module in SOURCES.keys() - {"fedsim"}  # the door, which imports when it is asked
        for other in IMPORTS[module]
        if level(other) > level(module)
    }
    assert upward == set()


def test_a_folder_is_entered_through_its_door_alone():
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module.startswith("fedsim."):
                continue
            package, folder, *room = node.module.split(".")
            if not inside(module, f"{package}.{folder}"):
                assert not room, f"{module} imports from {node.module}"


@pytest.mark.parametrize("folder", sorted(DOORS.keys()))
def test_what_a_door_offers_is_there_and_is_what_it_names(folder):
    door = importlib.import_module(folder)
    assert sorted(door.__all__) == sorted(DOORS[folder])
    for name, home in DOORS[folder].items():
        module = importlib.import_module(home)
        assert getattr(door, name) in (module, getattr(module, name, None))


def test_no_module_imports_itself_through_others():
    # A package may collect what its own modules define; that is no cycle.
    graph = {
        module: {other for other in others if not inside(module, other)}
        for module, others in IMPORTS.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_no_package_imports_another_in_a_circle():
    graph = {}
    for module in SOURCES.keys() - {"fedsim"}:
        others = {other.split(".")[1] for other in IMPORTS[module]}
        graph.setdefault(module.split(".")[1], set()).update(others - {module.split(".")[1]})
    graphlib.TopologicalSorter(graph).prepare()


def test_ray_is_imported_only_where_engines_meet_it():
    users_of_ray = {module for module in SOURCES if "ray" in packages(module)}
    assert all(inside(module, "fedsim.engine") for module in users_of_ray)
    free = {"fedsim.engine." + name for name in FREE_OF_RAY.split()}
    assert free <= SOURCES.keys() and not free & users_of_ray
    for module in free:  # nor through another module
        assert not reached(module) & users_of_ray


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if inside(m, "fedsim.accounting")))
def test_the_accountant_needs_nothing_else_of_fedsim(module):
    others = {name for name in IMPORTS[module] if not inside(name, "fedsim.accounting")}
    assert others <= FOUNDATION


def test_the_foundation_needs_nothing_but_python():
    own = {name for module in FOUNDATION for name in IMPORTS[module]}
    assert own <= FOUNDATION
    assert set().union(*map(packages, FOUNDATION)) <= {*sys.stdlib_module_names, "fedsim"}


def test_data_is_read_without_jax_and_ray():
    needed = set().union(*(reached(m) for m in SOURCES if inside(m, "fedsim.data")))
    assert {"fedsim.data.users", "fedsim.data.building.build"} <= needed
    assert {m for m in needed if packages(m) & {"jax", "jaxlib", "flax", "optax", "ray"}} == set()


def test_the_two_algorithms_differ_in_few_lines():
    els, uls = ((ROOT / name).read_text().splitlines() for name in ("els.py", "uls.py"))
    matcher = difflib.SequenceMatcher(None, els, uls, autojunk=False)
    changes = [change[1:] for change in matcher.get_opcodes() if change[0] != "equal"]
    changed = sum(max(b - a, d - c) for a, b, c, d in changes)  # an altered line counts once
    assert changed <= 20, "read `diff fedsim/els.py fedsim/uls.py`: what differs beyond the paper?"
