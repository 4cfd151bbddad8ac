"""Sources of a data set: files and globs, directories saved by `datasets`, files from the Hub.

Sources are found, identified by their bytes and cut into parts.
"""

import glob
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.config import BuildConfig
from fedsim.data.building.columns import Columns
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import (
    DEFAULTS,
    SPLITS,
    SUFFIXES,
    Part,
    cut,
    is_known,
    is_saved,
    kind_of,
    splits_of,
)
from fedsim.data.building.text_files import PACKED
from fedsim.data.store import fingerprint
from fedsim.errors import DataError, FedsimError
from fedsim.files import expand_home

REMEDIES = {  # of files of other kinds
    **dict.fromkeys((".zip", ".bz2", ".xz", ".7z", ".rar", ".tar", ".tgz"), "unpack it first"),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".numbers"), "save the sheet as CSV in UTF-8 first"),
    **dict.fromkeys(
        (".arrow", ".feather", ".ipc"),
        "read it with pyarrow.feather.read_table and write it with pyarrow.parquet.write_table",
    ),
    ".js": "one of an archive of Twitter is .json without what stands before its [",
}


def find_files(sources: Sequence[str | Path] | str | Path) -> list[Path]:
    """Find the files of paths and globs, in the given order; files of a glob are sorted.

    Each file is there once, whatever paths lead to it. A directory stands for its files that can be
    read; one that `datasets.save_to_disk` wrote counts as one file.

    Raises:
      DataError: there is no such file, its extension is unknown, or it is there compressed, too.
    """
    sources = [sources] if isinstance(sources, str | Path) else sources
    files: dict[Path, Path] = {}
    for source in sources:
        if not str(source).strip():  # such as an unset variable of the shell
            raise DataError.of("data", "", "the name of a file or glob, got an empty one")
        source = expand_home("data", source)
        here = Path(source)
        matched = [here] if here.exists() else map(Path, sorted(glob.glob(source, recursive=True)))
        found: list[Path] = []
        for path in matched:
            found += files_in(path) if path.is_dir() and not is_saved(path) else [path]
        if not found and here.is_dir():
            kinds = f"{', '.join(SUFFIXES)} (JSON: '{source}/*.json')"
            raise DataError.of("data", source, f"files in it that end in {kinds}")
        found = [file for file in found if file.is_file() or is_saved(file)]
        if not found:
            raise DataError.of("data", source, "a file or glob that exists")
        for file in found:
            files.setdefault(file.resolve(), file)
    for file in files.values():
        if not is_saved(file) and not is_known(file):
            other = "rename one with tabs between its columns to .tsv, one with commas to .csv"
            remedy = REMEDIES.get(file.suffix.lower(), other)
            kinds = ", ".join(SUFFIXES)
            raise DataError.of("data", file, f"a file ending in {kinds}; {remedy}")
    for file in files.values():  # duplicate rows would count twice for their user
        if file.suffix in PACKED and file.with_suffix("").resolve() in files:
            raise DataError.of("data", file, f"it or {file.stem}, got both; rename one of them")
    if not files:
        raise DataError.of("data", "[]", "at least one file")
    return list(files.values())


def files_in(directory: Path) -> list[Path]:
    """Files of a directory that can be read, by name.

    Hidden files are skipped, such as those that macOS puts beside others, and .json files, which
    also hold settings, those of built data sets among them.
    """
    files = sorted(path for path in directory.iterdir() if path.is_file() and is_known(path))
    return [path for path in files if path.name[0] != "." and kind_of(path) != "json"]


def left_out(
    sources: Iterable[str | Path], found: Collection[Path], split: str | None = None
) -> str | None:
    """Line about what is in the folders among the sources and is not read; None if all is, or if a
    split was asked for.

    Args:
      found: the files that are read.
    """
    saved = [file for file in found if split is None and (file / SPLITS).is_file()]
    with suppress(FedsimError, LookupError, TypeError):  # damaged: readers say so
        if others := [name for file in saved for name in splits_of(file) if name != "train"]:
            return f"of what is saved, these splits are not read: {', '.join(others)} (see split)"
    folders = (Path(expand_home("data", source)) for source in sources)
    folders = [folder for folder in folders if folder.is_dir() and not is_saved(folder)]
    read = {file.resolve() for file in found}
    inside = (path for folder in folders for path in folder.iterdir() if path.name[0] != ".")
    rest = [path for path in inside if path.resolve() not in read]

    def kind(path: Path) -> str:  # a suffix, if it says what the file is and not whose
        suffix = path.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,8}", path.suffix) else "others"
        return "folders" if path.is_dir() else suffix

    listed = ", ".join(
        f"{count} {name}" for name, count in sorted(Counter(map(kind, rest)).items())
    )
    hint = " (a glob such as '**/*.json' names them)"
    return f"of what is in the folder, this is not read: {listed}{hint}" if rest else None


def size_of(files: Iterable[Path]) -> int:
    """Bytes of files, and of all that is in directories among them."""
    whole = (path.rglob("*") if path.is_dir() else [path] for path in files)
    return sum(file.stat().st_size for each in whole for file in each if file.is_file())


def parts_of(
    files: Sequence[Path],
    columns: Columns,
    pool: Pool,
    scratch: Path,
    split: str | None = None,
    settings: BuildConfig = DEFAULTS,
) -> list[Part]:
    """Cut files into parts, in order. Args: as of `readers.cut`.

    Raises:
      DataError: a file cannot be read, or lacks a column.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    call = partial(cut, columns=columns, scratch=scratch, split=split, settings=settings)
    return [part for parts in pool.map(call, files) for part in parts]


def identify(file: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file, or of all files of a directory."""
    inside = sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]
    size = sum(path.stat().st_size for path in inside)
    return {"name": file.name, "bytes": size, "sha256": fingerprint(inside)}
