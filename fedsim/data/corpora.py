"""Where data comes from: a built directory, files, or the embedded corpus `pydocs`.

What is built on the way is kept in the user's cache, under a key of everything it depends on, and
memory-mapped from then on. Two processes may build the same thing at once: each works in a
directory of its own, the first to finish wins, the other takes what is there.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedsim import files
from fedsim.data import pydocs
from fedsim.data.build import build
from fedsim.data.dataset import Dataset
from fedsim.data.shards import FORMAT, DataError
from fedsim.data.sources import find_files


def load(source: str | Path, *, cache_dir: str | Path | None = None, **build_options) -> Dataset:
    """The data set that `source` names, built first if need be.

    Args:
      source: a built directory (opened as it is, no build options), a file or glob, or "pydocs".
      cache_dir: where builds are kept; see `files.cache_dir`.
      build_options: as for `build`.
    Raises: DataError: bad input, as `build` raises it.
    """
    source = str(source)
    if source.startswith("hf:"):
        raise DataError(
            f"data={source}: hf: is not available in this version, expected a built directory, "
            "files, or pydocs"
        )
    if source == "pydocs":
        return _load_pydocs(cache_dir, build_options)
    if Path(source).is_dir():
        for name, value in build_options.items():
            if name != "progress":
                raise DataError(f"{name}={value}: expected nothing, {source} is built already")
        return Dataset.open(source)
    sources = find_files(source)
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in sources]
    return _cached(
        facts, cache_dir, build_options, lambda out: build(sources, out, **build_options)
    )


def _load_pydocs(cache_dir: str | Path | None, options: dict[str, Any]) -> Dataset:
    versions = pydocs.versions()

    def harvest_and_build(out: Path) -> Dataset:
        if progress := options.get("progress"):
            progress(f"reading the docstrings of Python, {', '.join(pydocs.PACKAGES)} (once)")
        with TemporaryDirectory() as scratch:
            file = pydocs.harvest(Path(scratch))
            return build([file], out, provenance={"packages": versions}, **options)

    return _cached(["pydocs", versions], cache_dir, options, harvest_and_build)


def _cached(
    facts: list[Any],
    cache_dir: str | Path | None,
    options: dict[str, Any],
    make: Callable[[Path], Dataset],
) -> Dataset:
    """The data set under the key of `facts` and `options`, made if it is not there."""
    relevant = {name: value for name, value in options.items() if name != "progress"}
    tokenizer = Path(str(options.get("tokenizer", "")))
    if tokenizer.is_file():
        relevant["tokenizer"] = [tokenizer.name, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    key = json.dumps([FORMAT, facts, relevant], sort_keys=True, default=str)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    out = Path(cache_dir or files.cache_dir()) / "data" / name
    if not out.is_dir():
        try:
            return make(out)
        except DataError:
            if not out.is_dir():  # else another process built it meanwhile
                raise
    return Dataset.open(out)
