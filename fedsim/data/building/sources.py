"""What data is made of: files and globs, saved `datasets` directories, what the Hub sends.

The sources are found, identified by their bytes, cut into parts, and every user id is looked at
before an hour is spent on tokenising: a row without a user is an error, for a row nobody owns is
protected by nothing.
"""

import glob
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.building.columns import Columns, is_blank
from fedsim.data.building.orders import common_kind, kind_of
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import SAVED, SUFFIXES, UTF8, Part, cut, read
from fedsim.data.building.text_format import Form
from fedsim.data.store import fingerprint
from fedsim.errors import DataError
from fedsim.files import expand_home

SHOWN_ROWS = 5


@dataclass(frozen=True)
class Sources:
    """Parts to read, in order, and what their files are."""

    parts: tuple[Part, ...]
    files: tuple[dict[str, Any], ...]
    """name, bytes and sha256 of each."""

    @property
    def num_bytes(self) -> int:
        """Bytes on disk."""
        return sum(file["bytes"] for file in self.files)


def find_files(sources: Sequence[str | Path] | str | Path) -> list[Path]:
    """The files that `sources` (paths or globs) name, in the order given, a glob's sorted.

    Each is there once, whatever paths lead to it.
    A directory stands for the files in it that can be read; one that `datasets.save_to_disk` wrote
    counts as one file.
    Raises: DataError: nothing is there, a file's extension is unknown, or it is there packed, too.
    """
    sources = [sources] if isinstance(sources, str | Path) else sources
    files: dict[Path, Path] = {}
    for source in sources:
        if not str(source).strip():  # as of an unset variable of the shell
            raise DataError.of("data", "", "the name of a file or glob, got an empty one")
        source = expand_home("data", source)
        here = Path(source)
        found = [here] if here.exists() else map(Path, sorted(glob.glob(source)))
        if here.is_dir() and not is_saved(here):
            found = files_in(here)
            if not found:
                kinds = f"{', '.join(SUFFIXES)} (JSON: '{source}/*.json')"
                raise DataError.of("data", source, f"files in it that end in {kinds}")
        found = [file for file in found if file.is_file() or is_saved(file)]
        if not found:
            raise DataError.of("data", source, "a file or glob that exists")
        for file in found:
            files.setdefault(file.resolve(), file)
    for file in files.values():
        if not is_saved(file) and not file.name.endswith(SUFFIXES):
            remedy = "rename one with tabs between its columns to .tsv, one with commas to .csv"
            if file.suffix == ".js":
                remedy = "one of an archive of Twitter is .json without what stands before its ["
            kinds = ", ".join(SUFFIXES)
            raise DataError.of("data", file, f"a file ending in {kinds}; {remedy}")
    for file in files.values():  # rows that are there twice count for their user twice
        if file.suffix == ".gz" and file.with_suffix("").resolve() in files:
            raise DataError.of("data", file, f"it or {file.stem}, got both; rename one of them")
    if not files:
        raise DataError.of("data", "[]", "at least one file")
    return list(files.values())


def files_in(directory: Path) -> list[Path]:
    """The files in a directory that can be read, by name; none that is hidden, as those that macOS
    puts beside others, nor in JSON, in which also settings are kept, those of a built data set
    among them."""
    kinds = tuple(kind for kind in SUFFIXES if not kind.startswith(".json.") and kind != ".json")
    found = (p for p in directory.iterdir() if p.is_file() and p.name.endswith(kinds))
    return sorted(path for path in found if not path.name.startswith("."))


def is_saved(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this directory."""
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def examine(
    files: Sequence[Path], columns: Columns, pool: Pool, split: str | None, form: Form = UTF8
) -> Sources:
    """Identifies the files and cuts them into parts.

    Raises: DataError: a file cannot be read, or lacks a column.
    """
    found = pool.map(partial(_examine, columns=columns, split=split, form=form), list(files))
    parts = tuple(part for parts, _ in found for part in parts)
    return Sources(parts, tuple(about for _, about in found))


def _examine(
    file: Path,
    *,
    columns: Columns,
    split: str | None,
    form: Form,
    report: Callable[[int], None],
) -> tuple[list[Part], dict[str, Any]]:
    return cut(file, columns, split, form), identify(file)


def identify(file: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file, or of all files of a directory."""
    inside = sorted(p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]
    size = sum(path.stat().st_size for path in inside)
    return {"name": file.name, "bytes": size, "sha256": fingerprint(inside)}


def survey(
    parts: Sequence[Part], columns: Columns, pool: Pool, allow_unowned: bool = False
) -> tuple[int, Counter[str], str | None]:
    """Looks at every user id. Returns the number of rows, what was put right (`user_ids`), and of
    which kind the values of an order column are (`orders`).

    Raises: DataError: a file cannot be read, has null, empty or float user ids, or orders of
      several kinds; it has no rows.
    """
    found = pool.map(partial(_survey, columns=columns), parts)
    bad: dict[Path, list[int]] = {}
    counts: dict[Path, int] = {}
    for part, (_, number, rows, *_) in zip(parts, found, strict=True):
        if number and not allow_unowned:
            counts[part.file] = counts.get(part.file, 0) + number
            bad.setdefault(part.file, []).extend(rows)
    for file, rows in bad.items():
        shown = ", ".join(map(str, rows[:SHOWN_ROWS]))
        ids = "id" if counts[file] == 1 else "ids"
        shown += ", ..." if counts[file] > SHOWN_ROWS else ""
        raise DataError(
            f"{columns.blamed}: {counts[file]} null or empty user {ids} in {file} "
            f"(rows {shown}); expected a user for every row, or "
            "`fedsim data build --unowned drop`, which leaves such rows out"
        )
    total = sum(rows for rows, *_ in found)
    if not total:
        raise DataError.of(
            "data", parts[0].file if parts else "", "at least one row, got an empty data set"
        )
    field = f"order_column={columns.order}"
    kind = common_kind(set().union(*(kinds for *_, kinds in found)), field)
    tally = sum((tally for *_, tally, _ in found), Counter())
    return total, tally, kind


def _survey(
    part: Part, *, columns: Columns, report: Callable[[int], None]
) -> tuple[int, int, list[int], Counter[str], set[str | None]]:
    """Rows of a part, how many have no user, the first such rows, counted from 1, what was put
    right of the others, and of which kinds their orders are."""
    if part.kind in ("parquet", "saved"):  # elsewhere all columns are parsed anyway
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
        report(len(batch))
    return rows, bad, first, tally, kinds
