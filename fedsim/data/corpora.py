"""Load data from a built directory, files, the Hugging Face Hub, or the corpus that is built in.

Data that is built on the way is kept in the user's cache, under a key of everything it depends on,
and memory-mapped from then on. If two processes want the same data at once, one builds it and the
other waits.

`pydocs` holds docstring paragraphs of Python and of packages that fedsim needs. Its users are
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
from collections.abc import Iterator
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
from fedsim.data.building.sources import HUB, HubSource, find_files
from fedsim.data.chat import RULE, template_of
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
      source: a built directory (opened as it is, without build options), a file, folder or
        glob, hf:NAME[@REVISION][:FILES], or pydocs.
      cache_dir: directory of built data. Default: `files.cache_dir`.
      build_options: keyword arguments of `build`, the fields of `BuildSettings` among them.
    Raises: DataError: the input is invalid, or build options are given for a built directory.
    """
    source, options = files.expand_home("data", source), build_options
    sources: list[str | Path] = [source]
    if source == PYDOCS:
        facts = [PYDOCS, platform.python_version(), *map(metadata.version, PACKAGES)]
    elif source.startswith(HUB):
        pinned = HubSource.parse(source).pinned()
        facts, files_of = [user_ids.RULE, asdict(pinned)], pinned.pattern
        sources = [f"{HUB}{pinned.name}@{pinned.revision}" + (f":{files_of}" if files_of else "")]
    elif is_built(source):
        for name, value in options.items():
            if name != "progress":
                raise DataError.of(
                    name,
                    value,
                    f"no such setting for {source}, which is built already: build it again with it",
                )
        return Dataset.open(source)
    else:
        found = find_files(source)
        about = [(file.resolve(), file.stat()) for file in found]
        facts = [user_ids.RULE, *((str(file), s.st_size, s.st_mtime_ns) for file, s in about)]
        sources = [*found]
    if "tokenizer" in options:
        options["tokenizer"] = file_of(options["tokenizer"])
    cache = files.expand_home("cache_dir", cache_dir) if cache_dir else files.cache_dir()
    # The directory belongs to this user alone: nobody else can replace the text in it.
    out = files.own_directory(Path(cache) / "data") / _key(facts, options)
    if not out.is_dir():
        try:
            with TemporaryDirectory() as scratch:
                if source == PYDOCS:
                    sources = [harvest_pydocs(Path(scratch))]
                return build(sources, out, wait=True, **options)
        except ConfigError:
            if not out.is_dir():  # else another process built it meanwhile
                raise
    return Dataset.open(out)


def is_built(source: str | Path) -> bool:
    """True for a directory whose metadata.json says so, whatever else is in it: it is opened as it
    is instead of being built from."""
    file = Path(files.expand_home("data", source)) / "metadata.json"
    try:
        return files.read_json(file)["kind"] == "dataset"
    except (OSError, FedsimError, KeyError, TypeError):
        return False


def _key(facts: list[Any], options: dict[str, Any]) -> str:
    """The name of the data set that is built from sources with such facts."""
    relevant = {n: v for n, v in options.items() if n not in ("progress", "num_workers")}
    spec = str(options.get("tokenizer", "bytes"))
    tokenizer = Tokenizer.named(spec)
    name = spec if spec.startswith(HUB) else Path(spec).name
    relevant["tokenizer"] = [name, tokenizer.sha256, tokenizer.is_given]
    relevant["template"] = template_of(tokenizer, options.get("chat_template"))
    facts = [FORMAT, RULE, *facts, {name: metadata.version(name) for name in VERSIONS}, relevant]
    key = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def harvest_pydocs(directory: Path) -> Path:
    """Write pydocs.parquet (user_id, text) into `directory`. Returns: the path of the file."""
    roots = {"": sysconfig.get_path("stdlib")}
    for package in PACKAGES:
        spec = find_spec(package)  # finds a top-level package without importing it
        assert spec is not None and spec.submodule_search_locations, "fedsim needs it"
        roots[f"{package}/"] = spec.submodule_search_locations[0]
    users, texts = [], []
    for prefix, root in roots.items():
        for file in sorted(Path(root).rglob("*.py")):
            name = file.relative_to(root)
            if SKIPPED.isdisjoint(name.parts) and not name.name.startswith(("test_", "conftest")):
                found = list(_paragraphs(file))
                users += [prefix + name.as_posix()] * len(found)
                texts += found
    path = directory / "pydocs.parquet"
    pq.write_table(pa.table({"user_id": users, "text": texts}), path)
    return path


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
