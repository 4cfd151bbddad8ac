"""Sources of a data set: files and globs, directories saved by `datasets`, files from the Hub.

Sources are found, identified by their bytes and cut into parts, and every user id is checked before
an hour is spent on tokenising. A row without a user is an error, for nothing protects it.
"""

import glob
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.building.columns import Columns, is_blank
from fedsim.data.building.orders import common_kind, kind_of
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import SAVED, SUFFIXES, UTF8, Part, cut, is_known, read
from fedsim.data.building.text_files import PACKED, TextFormat, kind_of as kind_of_file
from fedsim.data.store import fingerprint
from fedsim.errors import DataError
from fedsim.files import expand_home

SHOWN_ROWS = 5


ARCHIVES = (".zip", ".bz2", ".xz", ".7z", ".rar", ".tar", ".tgz")


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
            remedy = "rename one with tabs between its columns to .tsv, one with commas to .csv"
            if file.suffix.lower() in ARCHIVES:
                remedy = "unpack it first"
            elif file.suffix.lower() in (".xls", ".xlsx", ".ods", ".numbers"):
                remedy = "save the sheet as CSV in UTF-8 first"
            elif file.suffix == ".js":
                remedy = "one of an archive of Twitter is .json without what stands before its ["
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
    readable = (path for path in directory.iterdir() if path.is_file() and is_known(path))
    readable = (path for path in readable if kind_of_file(path) != "json")
    return sorted(path for path in readable if not path.name.startswith("."))


def left_out(sources: Iterable[str | Path], found: Collection[Path]) -> str | None:
    """Line about what is in the folders among the sources and is not read; None if all is.

    Args:
      found: the files that are read.
    """
    folders = (Path(expand_home("data", source)) for source in sources)
    folders = [folder for folder in folders if folder.is_dir() and not is_saved(folder)]
    read = {file.resolve() for file in found}
    inside = (path for folder in folders for path in folder.iterdir() if path.name[0] != ".")
    rest = [path for path in inside if path.resolve() not in read]
    kinds = Counter("folders" if path.is_dir() else _kind(path) for path in rest)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    hint = " (a glob such as '**/*.json' names them)"
    return f"of what is in the folder, this is not read: {listed}{hint}" if rest else None


def _kind(path: Path) -> str:
    """A file's suffix, if it says what it is and not whose."""
    return path.suffix if re.fullmatch(r"\.[A-Za-z0-9]{1,8}", path.suffix) else "others"


def size_of(files: Iterable[Path]) -> int:
    """Bytes of files, and of all that is in directories among them."""
    whole = (path.rglob("*") if path.is_dir() else [path] for path in files)
    return sum(file.stat().st_size for each in whole for file in each if file.is_file())


def is_saved(path: Path) -> bool:
    """True if `datasets.save_to_disk` wrote this directory."""
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def parts_of(
    files: Sequence[Path],
    columns: Columns,
    pool: Pool,
    scratch: Path,
    split: str | None = None,
    text_format: TextFormat = UTF8,
) -> tuple[Part, ...]:
    """Cut files into parts, in order. Args: scratch: a directory for the rows of text files.

    Raises:
      DataError: a file cannot be read, or lacks a column.
    """
    call = partial(_cut, columns=columns, scratch=scratch, split=split, text_format=text_format)
    return tuple(part for parts in pool.map(call, list(enumerate(files))) for part in parts)


def _cut(
    item: tuple[int, Path],
    *,
    columns: Columns,
    scratch: Path,
    split: str | None,
    text_format: TextFormat,
) -> list[Part]:
    number, file = item
    return cut(file, columns, scratch / f"{number:06d}", split, text_format)


def identities(files: Sequence[Path], pool: Pool) -> list[dict[str, Any]]:
    """Name, bytes and sha256 of each file."""
    return pool.map(identify, list(files))


def identify(file: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file, or of all files of a directory."""
    inside = sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]
    size = sum(path.stat().st_size for path in inside)
    return {"name": file.name, "bytes": size, "sha256": fingerprint(inside)}


def survey(
    parts: Sequence[Part], columns: Columns, pool: Pool, allow_unowned: bool = False
) -> tuple[int, Counter[str], int | None]:
    """Check every user id and order.

    Args:
      allow_unowned: allow rows without a user.
    Returns:
      (number of rows, counts of corrected user ids, kind of the order column; see `orders`).
    Raises:
      DataError: a file cannot be read, has user ids that are null, empty or no whole numbers, or
        orders of several kinds; or there are no rows.
    """
    surveys = pool.map(partial(_survey, columns=columns), parts)
    bad: dict[Path, list[int]] = {}
    counts: dict[Path, int] = {}
    for part, (_, number, rows, *_) in zip(parts, surveys, strict=True):
        if number and not allow_unowned:
            counts[part.source] = counts.get(part.source, 0) + number
            bad.setdefault(part.source, []).extend(rows)
    for file, rows in bad.items():
        shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
        ids = "id" if counts[file] == 1 else "ids"
        shown += ", ..." if counts[file] > SHOWN_ROWS else ""
        raise DataError(
            f"{columns.blamed}: {counts[file]} null or empty user {ids} in {file} "
            f"(rows {shown}); expected a user for every row, or "
            "`fedsim data build --rows-without-user drop`, which leaves such rows out"
        )
    total = sum(rows for rows, *_ in surveys)
    if not total:
        raise DataError.of(
            "data", parts[0].source if parts else "", "at least one row, got an empty data set"
        )
    field = f"order_column={columns.order}"
    kind = common_kind(set().union(*(kinds for *_, kinds in surveys)), field)
    tally = sum((tally for *_, tally, _ in surveys), Counter())
    return total, tally, kind


def _survey(
    part: Part, *, columns: Columns
) -> tuple[int, int, list[int], Counter[str], set[int | None]]:
    """Survey a part.

    Returns:
      (number of rows, number of rows without a user, the first of these counted from 1, counts of
      corrected user ids, kinds of orders).
    """
    if columns.owner_key is None:
        columns = replace(columns, text=())
    rows, bad, first, kinds = 0, 0, [], set()
    tally: Counter[str] = Counter()
    for before, batch in read(part, columns, tally):
        where = np.flatnonzero(is_blank(batch["user_id"]))
        bad += len(where)
        first += [before + i + 1 for i in where[: SHOWN_ROWS - len(first)].tolist()]
        if columns.order is not None:
            kinds.add(kind_of(batch["order"]))
        rows += len(batch)
    return rows, bad, first, tally, kinds
