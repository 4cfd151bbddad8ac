"""The embedded corpus: docstring paragraphs of packages that are installed beside fedsim.

Users are module files, such as numpy/linalg/_linalg.py. Nothing is downloaded or redistributed, and
nothing is imported: sources are parsed. The same package versions give the same corpus.
"""

import ast
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.errors import DataError

PACKAGES = ("numpy", "scipy", "jax")
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
MIN_WORDS = 5
BLOCKS = ("body", "handlers", "orelse", "finalbody")  # where definitions are found
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def made_of() -> dict[str, str]:
    """What the corpus depends on: the versions of the packages and of Python."""
    found = {name: metadata.version(name) for name in PACKAGES}
    return {**found, "python": platform.python_version()}


def harvest(directory: Path) -> Path:
    """Writes pydocs.parquet (user_id, text) into `directory` and returns its path."""
    rows = [
        (user, paragraph)
        for prefix, root in _roots()
        for user, file in _modules(prefix, root)
        for paragraph in _paragraphs(file)
    ]
    users, texts = zip(*rows, strict=True)
    path = directory / "pydocs.parquet"
    pq.write_table(pa.table({"user_id": users, "text": texts}), path)
    return path


def _roots() -> Iterator[tuple[str, Path]]:
    yield "", Path(sysconfig.get_path("stdlib"))
    for name in PACKAGES:
        spec = find_spec(name)  # finds a top-level package without importing it
        if spec is None or not spec.submodule_search_locations:
            raise DataError.of("data", "pydocs", f"the package {name} to be installed")
        yield f"{name}/", Path(spec.submodule_search_locations[0])


def _modules(prefix: str, root: Path) -> Iterator[tuple[str, Path]]:
    """(user id, file) of each module below `root` that is no test, in a fixed order."""
    relative = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    for name in sorted(relative):
        *folders, module = name.split("/")
        if SKIPPED.isdisjoint(folders) and not module.startswith(("test_", "conftest")):
            yield prefix + name, relative[name]


def _paragraphs(file: Path) -> Iterator[str]:
    """Paragraphs of at least MIN_WORDS words of the docstrings, in the order of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and files for other versions of Python
        return
    for docstring in _docstrings(tree):
        for paragraph in re.split(r"\n\s*\n", docstring):
            if len(paragraph.split()) >= MIN_WORDS:
                yield paragraph.strip()


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
        yield docstring
    for block in BLOCKS:
        for child in getattr(node, block, ()):
            yield from _docstrings(child)
