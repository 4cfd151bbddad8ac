"""Where data comes from: a built directory, files, the Hub, or the embedded corpus `pydocs`.

What is built on the way is kept in the user's cache, under a key of everything it depends on, and
memory-mapped from then on. Of two processes that want the same thing at once, one builds it and the
other waits for it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import unidata_version

from fedsim import files
from fedsim.data import pydocs
from fedsim.data.building import domains, hub, user_ids
from fedsim.data.building.build import build
from fedsim.data.building.sources import files_in, find_files, is_saved
from fedsim.data.dataset import Dataset
from fedsim.data.store import FORMAT
from fedsim.data.text import Tokenizer, file_of
from fedsim.errors import DataError, FedsimError


def load(source: str | Path, *, cache_dir: str | Path | None = None, **build_options) -> Dataset:
    """The data set that `source` names, built first if need be.

    Args:
      source: a built directory (opened as it is, no build options), a file or glob, a saved data
        set, hf:NAME[:CONFIG], or "pydocs".
      cache_dir: where builds are kept; see `files.cache_dir`.
      build_options: as for `build`.
    Raises: DataError: bad input, as `build` raises it.
    """
    source = files.expand_home("data", source)
    if "tokenizer" in build_options:
        build_options["tokenizer"] = file_of(build_options["tokenizer"])
    if source == "pydocs":
        return _load_pydocs(cache_dir, build_options)
    if source.startswith(hub.PREFIX):
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
    """Whether a source is a directory that `build` made, to be opened as it is: one that says so,
    whatever lies in it beside, or one that holds no files to be read, which is told what it lacks.
    """
    path = Path(files.expand_home("data", source))
    named = bool(str(source).strip())  # Path("") is the current directory
    if not named or not path.is_dir() or is_saved(path):
        return False
    return _is_data_set(path) or not files_in(path)


def _is_data_set(path: Path) -> bool:
    try:
        return files.read_json(path / "metadata.json")["kind"] == "dataset"
    except (OSError, FedsimError, KeyError):
        return False


def _facts(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of a file, or of all files of a directory."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def _facts_of_hub(source: hub.HubSource) -> list[Any]:
    local = Path(source.name)
    return [asdict(source), *(_facts(local) if local.exists() else [])]


def _load_hub(source: str, cache_dir: str | Path | None, options: dict[str, Any]) -> Dataset:
    found = hub.HubSource.parse(source, options.get("split"), options.get("revision")).pinned()
    facts = [user_ids.RULE, *_facts_of_hub(found)]
    options = {**options, "revision": found.revision}
    return _cached(facts, cache_dir, options, lambda out: build(source, out, wait=True, **options))


def _load_pydocs(cache_dir: str | Path | None, options: dict[str, Any]) -> Dataset:
    versions = pydocs.made_of()

    def harvest_and_build(out: Path) -> Dataset:
        if progress := options.get("progress"):
            progress(f"reading the docstrings of Python, {', '.join(pydocs.PACKAGES)} (once)")
        with TemporaryDirectory() as scratch:
            file = pydocs.harvest(Path(scratch))
            return build([file], out, provenance={"packages": versions}, wait=True, **options)

    return _cached(["pydocs", versions], cache_dir, options, harvest_and_build)


def _cached(
    facts: list[Any],
    cache_dir: str | Path | None,
    options: dict[str, Any],
    make: Callable[[Path], Dataset],
) -> Dataset:
    """The data set under the key of `facts` and `options`, made if it is not there."""
    relevant = {n: v for n, v in options.items() if n not in ("progress", "num_workers")}
    spec = str(options.get("tokenizer", ""))
    tokenizer = Path(spec)
    if tokenizer.is_file():
        relevant["tokenizer"] = [tokenizer.name, Tokenizer.load(tokenizer).sha256]
    elif spec.startswith("hf:"):
        relevant["tokenizer"] = [spec, Tokenizer.from_spec(spec).sha256]
    if options.get("normalise_ids"):
        relevant["unicode"] = unidata_version
    if options.get("url_column") is not None:
        relevant["public_suffix_list"] = domains.list_version()  # says whose a text is
    key = json.dumps([FORMAT, facts, relevant], sort_keys=True, default=str)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    cache = files.expand_home("cache_dir", cache_dir) if cache_dir else files.cache_dir()
    # Text of people: nobody else can have put it there, nor put other text in its place.
    out = files.own_directory(Path(cache) / "data") / name
    if not out.is_dir():
        try:
            return make(out)
        except DataError:
            if not out.is_dir():  # else another process built it meanwhile
                raise
    return Dataset.open(out)
