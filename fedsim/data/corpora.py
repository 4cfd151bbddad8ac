"""Load data from a built directory, files, the Hugging Face Hub, or the corpus that is built in.

Data that is built on the way is kept in the user's cache, under a key of everything it depends on,
and memory-mapped from then on. If two processes want the same data at once, one builds it and the
other waits.

`pydocs` holds docstring paragraphs of packages that are installed beside fedsim. Its users are
module files, such as numpy/linalg/_linalg.py. Nothing is downloaded, redistributed or imported:
sources are parsed. The same package versions give the same corpus.
"""

import ast
import hashlib
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim import files
from fedsim.data.building import user_ids
from fedsim.data.building.build import build
from fedsim.data.building.sources import HUB, HubSource, files_in, find_files, is_saved
from fedsim.data.chat import RULE, source_of
from fedsim.data.dataset import Dataset
from fedsim.data.store import FORMAT
from fedsim.data.tokenizer import Tokenizer, file_of
from fedsim.errors import ConfigError, DataError, FedsimError

PYDOCS = "pydocs"
# Packages that read or encode.
VERSIONS = ("fedsim-dp", "duckdb", "numpy", "pyarrow", "tokenizers")
PACKAGES = ("numpy", "scipy", "jax")  # of pydocs, beside the standard library
SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
MIN_WORDS = 5  # of a paragraph of pydocs
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def load(source: str | Path, *, cache_dir: str | Path | None = None, **build_options) -> Dataset:
    """Load the data set that `source` names, and build it first if necessary.

    Args:
      source: a built directory (opened as it is, without build options), a file or glob, a
        directory saved by `datasets`, hf:NAME[:CONFIG], or pydocs.
      cache_dir: directory of built data. Default: `files.cache_dir`.
      build_options: keyword arguments of `build`, the fields of `BuildSettings` among them.
    Raises:
      DataError: the input is invalid, or build options are given for a built directory.
    """
    source = files.expand_home("data", source)
    if "tokenizer" in build_options:
        build_options["tokenizer"] = file_of(build_options["tokenizer"])
    if source == PYDOCS:
        return _load_pydocs(cache_dir, build_options)
    if source.startswith(HUB):
        return _load_hub(source, cache_dir, build_options)
    if is_built(source):
        for name, value in build_options.items():
            if name != "progress":
                raise DataError.of(name, value, f"nothing, {source} is built already")
        return Dataset.open(source)
    sources = find_files(source)
    facts = [user_ids.RULE, *(fact for file in sources for fact in _facts(file))]
    return _cached(
        facts, cache_dir, build_options, lambda out: build(sources, out, wait=True, **build_options)
    )


def is_built(source: str | Path) -> bool:
    """True for a directory that is opened as it is instead of being built from.

    That is a directory whose metadata.json says so, whatever else is in it, and a directory without
    files to build from: opening it raises an error that names the missing files.
    """
    path = Path(files.expand_home("data", source))
    named = bool(str(source).strip())  # Path("") is the current directory
    if not named or not path.is_dir() or is_saved(path):
        return False
    try:
        return files.read_json(path / "metadata.json")["kind"] == "dataset" or not files_in(path)
    except (OSError, FedsimError, KeyError):
        return not files_in(path)


def _facts(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of all files of a directory."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _load_hub(source: str, cache_dir: str | Path | None, options: dict[str, Any]) -> Dataset:
    pinned = HubSource.parse(source, options.get("split"), options.get("revision")).pinned()
    facts = [user_ids.RULE, asdict(pinned)]
    options = {**options, "revision": pinned.revision}
    return _cached(facts, cache_dir, options, lambda out: build(source, out, wait=True, **options))


def _load_pydocs(cache_dir: str | Path | None, options: dict[str, Any]) -> Dataset:
    versions = pydocs_versions()

    def harvest_and_build(out: Path) -> Dataset:
        if progress := options.get("progress"):
            progress(f"reading the docstrings of Python, {', '.join(PACKAGES)} (once)")
        with TemporaryDirectory() as scratch:
            file = harvest_pydocs(Path(scratch))
            return build([file], out, provenance={"packages": versions}, wait=True, **options)

    return _cached([PYDOCS, versions], cache_dir, options, harvest_and_build)


def _cached(
    facts: list[Any],
    cache_dir: str | Path | None,
    options: dict[str, Any],
    make: Callable[[Path], Dataset],
) -> Dataset:
    """Open the data set under the key of `facts` and `options`, and make it if it is absent."""
    relevant = {n: v for n, v in options.items() if n not in ("progress", "num_workers")}
    spec = str(options.get("tokenizer", "bytes"))
    tokenizer = Tokenizer.named(spec)
    name = spec if spec.startswith(HUB) else Path(spec).name
    relevant["tokenizer"] = [name, tokenizer.sha256, tokenizer.is_given]
    relevant["template"] = source_of(tokenizer, options.get("chat_template"))
    facts = [FORMAT, RULE, *facts, {name: metadata.version(name) for name in VERSIONS}, relevant]
    key = json.dumps(facts, sort_keys=True, default=str)
    cache = files.expand_home("cache_dir", cache_dir) if cache_dir else files.cache_dir()
    # The directory belongs to this user alone: nobody else can replace the text in it.
    directory = files.own_directory(Path(cache) / "data")
    out = directory / hashlib.sha256(key.encode()).hexdigest()[:32]
    if not out.is_dir():
        try:
            return make(out)
        except ConfigError:
            if not out.is_dir():  # else another process built it meanwhile
                raise
    return Dataset.open(out)


def pydocs_versions() -> dict[str, str]:
    """Versions of the packages and of Python, which determine the corpus."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {**versions, "python": platform.python_version()}


def harvest_pydocs(directory: Path) -> Path:
    """Write pydocs.parquet (user_id, text) into `directory`. Returns: the path of the file.

    Raises:
      DataError: a package of PACKAGES is not installed.
    """
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
    """Yield (user id, file) of each module below `root` that is no test, in a fixed order."""
    relative = {file.relative_to(root).as_posix(): file for file in root.rglob("*.py")}
    for name in sorted(relative):
        *folders, module = name.split("/")
        if SKIPPED.isdisjoint(folders) and not module.startswith(("test_", "conftest")):
            yield prefix + name, relative[name]


def _paragraphs(file: Path) -> Iterator[str]:
    """Yield docstring paragraphs of at least MIN_WORDS words, in the order of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # templates and files for other versions of Python
        return
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
            if len(paragraph.split()) >= MIN_WORDS:
                yield paragraph.strip()


def is_table(source: str) -> bool:
    """True for the file of a table from memory."""
    path = Path(source)
    return path.parent.name == files.TABLES and path.suffix == ".parquet"
