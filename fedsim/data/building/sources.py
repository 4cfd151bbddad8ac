"""Sources of a data set: files and globs, directories saved by `datasets`, files from the Hub.

Sources are found, identified by their bytes and cut into parts, and every user id is checked before
an hour is spent on tokenising. A row without a user is an error, for nothing protects it.

Rows of conversations are rewritten with their owners. Transcripts, chats and forums name the
speaker of a text, but not the listener. The listener is taken to be the last other speaker in the
same conversation. The first speaker of a conversation has no listener in the data.
"""

import glob
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
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
from fedsim.data.building.readers import (
    SAVED,
    SUFFIXES,
    UTF8,
    Part,
    complaints,
    cut,
    is_known,
    raw,
    read,
)
from fedsim.data.building.text_files import TextFormat
from fedsim.data.building.user_ids import look_alikes, refused
from fedsim.data.store import fingerprint
from fedsim.errors import DataError
from fedsim.files import expand_home

SHOWN_ROWS = 5


@dataclass(frozen=True)
class Sources:
    """Parts to read, in order, and the identity of their files."""

    parts: tuple[Part, ...]
    files: tuple[dict[str, Any], ...]
    """name, bytes and sha256 of each file."""


PACKED = (".zip", ".zst", ".bz2", ".xz", ".7z", ".rar", ".tar", ".tgz")


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
            if file.suffix.lower() in PACKED:
                remedy = "unpack it first"
            elif file.suffix.lower() in (".xls", ".xlsx", ".ods", ".numbers"):
                remedy = "save the sheet as CSV in UTF-8 first"
            elif file.suffix == ".js":
                remedy = "one of an archive of Twitter is .json without what stands before its ["
            kinds = ", ".join(SUFFIXES)
            raise DataError.of("data", file, f"a file ending in {kinds}; {remedy}")
    for file in files.values():  # duplicate rows would count twice for their user
        if file.suffix == ".gz" and file.with_suffix("").resolve() in files:
            raise DataError.of("data", file, f"it or {file.stem}, got both; rename one of them")
    if not files:
        raise DataError.of("data", "[]", "at least one file")
    return list(files.values())


def files_in(directory: Path) -> list[Path]:
    """Files of a directory that can be read, by name.

    Hidden files are skipped, such as those that macOS puts beside others, and .json files, which
    also hold settings, those of built data sets among them.
    """
    settings = (".json", ".json.gz")
    readable = (path for path in directory.iterdir() if path.is_file() and is_known(path))
    readable = (path for path in readable if not path.name.lower().endswith(settings))
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


def examine(
    files: Sequence[Path],
    columns: Columns,
    pool: Pool,
    split: str | None,
    text_format: TextFormat = UTF8,
) -> Sources:
    """Identify files and cut them into parts.

    Raises:
      DataError: a file cannot be read, or lacks a column.
    """
    examined = pool.map(
        partial(_examine, columns=columns, split=split, text_format=text_format), list(files)
    )
    parts = tuple(part for parts, _ in examined for part in parts)
    return Sources(parts, tuple(about for _, about in examined))


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
    total = sum(rows for rows, *_ in surveys)
    if not total:
        raise DataError.of(
            "data", parts[0].file if parts else "", "at least one row, got an empty data set"
        )
    field = f"order_column={columns.order}"
    kind = common_kind(set().union(*(kinds for *_, kinds in surveys)), field)
    tally = sum((tally for *_, tally, _ in surveys), Counter())
    return total, tally, kind


def _survey(
    part: Part, *, columns: Columns, report: Callable[[int], None]
) -> tuple[int, int, list[int], Counter[str], set[str | None]]:
    """Survey a part.

    Returns:
      (number of rows, number of rows without a user, the first of these counted from 1, counts of
      corrected user ids, kinds of orders).
    """
    # In other formats all columns are parsed anyway.
    if part.kind in ("parquet", "saved") and columns.owner_key is None:
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
# Names that no column of a source has.
SPEAKER, SPOKEN_TO, WHERE, ORDER = (
    f"\x1f{name}" for name in ("speaker", "spoken to", "conversation", "order")
)


def conversation_columns(columns: Columns) -> Columns:
    """Columns of the file that `write_conversations` writes."""
    order = None if columns.order is None else ORDER
    owned = replace(columns, owners=(SPEAKER, SPOKEN_TO), conversation=None, turn=None)
    return replace(owned, order=order)


def write_conversations(
    parts: Sequence[Part], columns: Columns, file: Path
) -> tuple[int, tuple[int, list[str]]]:
    """Write the rows of all parts as Parquet, by conversation and turn, with both owners of each.

    All rows are in memory at once. Rows of one turn keep the order of the sources.

    Args:
      columns: columns of the parts. The user column has the speaker.
    Returns:
      (number of rows without a conversation, `look_alikes` of the conversations).
    Raises:
      DataError: a row has no turn, turns are of several kinds, or conversations have no ids.
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
                where = ids_of(where, field, rows, Counter(), columns.normalise_ids)
                found: dict[str, Any] = {SPEAKER: said["user_id"], WHERE: where}
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
    nowhere = table[WHERE].null_count
    alike = look_alikes(table[WHERE].unique().drop_null().cast(pa.string()))
    table = table.drop_columns([WHERE]).append_column(SPOKEN_TO, spoken_to)
    pq.write_table(table, file, row_group_size=ROWS_AT_ONCE)
    return nowhere, alike


def _wide(table: pa.Table) -> pa.Table:
    """Cast columns to types that hold more than 2 GiB of strings."""
    kinds = {}
    for field in table.schema:
        kinds[field.name] = kind = field.type
        if is_string(kind):
            kinds[field.name] = pa.large_string()
        elif pa.types.is_list(kind):
            kinds[field.name] = pa.large_list(kind.value_type)  # pyright: ignore
    return table.cast(pa.schema(kinds.items()))


def last_other_speaker(where: np.ndarray, speaker: np.ndarray) -> np.ndarray:
    """The last speaker before, in the same conversation, who is not the speaker; -1 if none.

    Rows without a speaker are left out: they are nobody's turn.
    Args:
      where: int64 [rows], conversations; -1 if none. Rows are in order of conversation and turn.
      speaker: int64 [rows], speakers; -1 if none.
    Returns:
      int64 [rows].
    """
    found, known = np.full(len(speaker), -1), np.flatnonzero((speaker >= 0) & (where >= 0))
    where, speaker = where[known], speaker[known]
    fresh = np.diff(where, prepend=-2) != 0
    begins = fresh | (np.diff(speaker, prepend=-2) != 0)  # a sequence of texts of one speaker
    first = np.flatnonzero(begins)
    before = np.append(-1, speaker[first])[: len(first)]
    before[fresh[first]] = -1
    found[known] = before[np.cumsum(begins) - 1]
    return found


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each different value, int64 [rows]; -1 for null."""
    indices = column.combine_chunks().dictionary_encode().indices
    return indices.fill_null(-1).to_numpy().astype(np.int64)


def _turns(turn: pa.Array, columns: Columns, first_row: int) -> pa.Array:
    """Keys of turns; see `orders`. Raises: DataError: a turn is missing, or has no order."""
    field = f"turn_column={columns.turn}"
    keys = keys_of(turn, field, first_row, columns.turn_format)
    if keys.null_count:
        row = first_row + keys.is_null().index(True).as_py() + 1
        raise refused(field, f"a turn in every row, got none in row {row}")
    return keys
