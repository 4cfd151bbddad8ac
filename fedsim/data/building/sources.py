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
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.data.building.columns import (
    Columns,
    ids_of,
    is_blank,
    is_list,
    is_string,
    normalise,
    plain,
)
from fedsim.data.building.orders import common_kind, keys_of, kind_of
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import SAVED, SUFFIXES, UTF8, Part, complaints, cut, raw, read
from fedsim.data.building.text_files import TextFormat
from fedsim.data.building.user_ids import refused
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
    files: Sequence[Path],
    columns: Columns,
    pool: Pool,
    split: str | None,
    text_format: TextFormat = UTF8,
) -> Sources:
    """Identifies the files and cuts them into parts.

    Raises: DataError: a file cannot be read, or lacks a column.
    """
    found = pool.map(
        partial(_examine, columns=columns, split=split, text_format=text_format), list(files)
    )
    parts = tuple(part for parts, _ in found for part in parts)
    return Sources(parts, tuple(about for _, about in found))


def _examine(
    file: Path,
    *,
    columns: Columns,
    split: str | None,
    text_format: TextFormat,
    report: Callable[[int], None],
) -> tuple[list[Part], dict[str, Any]]:
    return cut(file, columns, split, text_format), identify(file)


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


ROWS_AT_ONCE = 65_536
# No column of a source is called so.
SPEAKER, SPOKEN_TO, WHERE, ORDER = (
    f"\x1f{name}" for name in ("speaker", "spoken to", "conversation", "order")
)


def conversation_columns(columns: Columns) -> Columns:
    """The columns of what `write` wrote."""
    order = None if columns.order is None else ORDER
    found = replace(columns, owners=(SPEAKER, SPOKEN_TO), conversation=None, turn=None)
    return replace(found, order=order)


def write_conversations(parts: Sequence[Part], columns: Columns, file: Path) -> None:
    """Writes the rows of all parts as Parquet, by conversation and turn, with both owners of each.

    All rows are in memory meanwhile. Rows of one turn stay in the order of the sources.
    Args: columns: of the parts; their user column has the speaker.
    Raises: DataError: a row has no turn, turns are of several kinds, or conversations have no ids.
    """
    assert columns.conversation is not None and columns.turn is not None, "of conversations"
    tables, turns = [], []
    for part in parts:
        for first_row, batch in raw(part, columns):
            if len(columns.user) == 1 and is_list(batch[columns.user[0]].type):
                raise refused(columns.blamed, "one speaker, got a list")
            speaking = replace(columns, text=())
            where, rows = batch[columns.conversation], range(first_row, first_row + len(batch))
            field = f"conversation_column={columns.conversation}"
            with complaints(part):
                said = normalise(batch, speaking, first_row)
                found: dict[str, Any] = {
                    SPEAKER: said["user_id"],
                    WHERE: ids_of(where, field, rows, Counter(), columns.normalise_ids),
                }
                if len(batch):
                    turns.append(_turns(plain(batch[columns.turn]), columns, first_row))
            if columns.order is not None:
                found[ORDER] = said["order"]
            tables.append(pa.table(found | {name: plain(batch[name]) for name in columns.text}))
    common_kind(map(kind_of, turns), f"turn_column={columns.turn}")
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        shown = ",".join(columns.text)
        raise DataError.of("text_column", shown, "one type in all files") from None
    turn = pa.concat_arrays(turns).flatten()
    keys = {"where": table[WHERE]} | {str(i): key for i, key in enumerate(turn)}
    keys["row"] = pa.array(np.arange(len(table)))
    by = [(name, "ascending") for name in keys]
    table = _wide(table).take(pc.sort_indices(pa.table(keys), sort_keys=by))  # pyright: ignore
    speakers = table[SPEAKER].combine_chunks().dictionary_encode()
    number = last_other_speaker(_codes(table[WHERE]), _codes(table[SPEAKER]))
    spoken_to = speakers.dictionary.take(pa.array(number, mask=number < 0))
    table = table.drop_columns([WHERE]).append_column(SPOKEN_TO, spoken_to)
    pq.write_table(table, file, row_group_size=ROWS_AT_ONCE)


def _wide(table: pa.Table) -> pa.Table:
    """The table with columns that may take more than the 2 GiB which an array of strings can."""
    kinds = {}
    for field in table.schema:
        kinds[field.name] = kind = field.type
        if is_string(kind):
            kinds[field.name] = pa.large_string()
        elif pa.types.is_list(kind):
            kinds[field.name] = pa.large_list(kind.value_type)  # pyright: ignore
    return table.cast(pa.schema(kinds.items()))


def last_other_speaker(where: np.ndarray, speaker: np.ndarray) -> np.ndarray:
    """Who spoke before, in the same conversation, and is not the speaker; -1: nobody.

    Args: where, speaker: int [rows], in the order in which it was said; -1 is none.
    """
    fresh = np.diff(where, prepend=-2) != 0
    begins = fresh | (np.diff(speaker, prepend=-2) != 0)  # of a stretch of one speaker
    first = np.flatnonzero(begins)
    before = np.append(-1, speaker[first][:-1])
    before[fresh[first]] = -1
    found = before[np.cumsum(begins) - 1]
    return np.where((speaker >= 0) & (where >= 0), found, -1)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each different value, -1 for none."""
    indices = column.combine_chunks().dictionary_encode().indices
    return indices.fill_null(-1).to_numpy().astype(np.int64)


def _turns(turn: pa.Array, columns: Columns, first_row: int) -> pa.Array:
    """The keys of turns; see `orders`. Raises: DataError: one is missing, or has no order."""
    field = f"turn_column={columns.turn}"
    keys = keys_of(turn, field, first_row, columns.turn_format)
    if keys.null_count:
        row = first_row + keys.is_null().index(True).as_py() + 1
        raise refused(field, f"a turn in every row, got none in row {row}")
    return keys
