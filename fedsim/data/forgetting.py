"""Rebuild a data set without the texts of some users, whose places stay.

A user's place is a row of the table of users. It stays, without texts and with another name, so
that the number of users and the numbers of all others are as before, and with them what a key draws
from users with one owner per text. All else is byte for byte as it was: the order, the splits, the
tokens of all others, and the tokenizer. If texts have several owners, a text goes if any of them is
forgotten. Who owned a text with whom stays, as numbers of places: it is taken as public.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from fedsim.data.building.user_ids import as_ids, look_alike_keys, registrable_domain
from fedsim.data.dataset import SUMS, Dataset, sums
from fedsim.data.store import SEPARATOR, TokenWriter, close_store
from fedsim.data.tokenizer import PROVENANCE, TEMPLATE, TOKENIZER
from fedsim.data.users import Block, UserStore
from fedsim.errors import DataError
from fedsim.files import write_atomically, write_json

FORGOTTEN = "forgotten"
"""Entry of a data set's metadata with the number of users who were forgotten."""
PLACE = "forgotten-"
"""Start of the name of the place of a user who was forgotten."""
MOST_LINES = 20  # that are named
KEPT = (TOKENIZER, Path(TOKENIZER).stem + PROVENANCE, TEMPLATE)


def read_users(file: Path, data: Dataset, column: str | None = None) -> dict[str, int]:
    """Read the ids of users of a data set; see `read_ids`.

    Raises:
      DataError: the file has no ids, or a line names no user of the data. No id is shown.
    """
    found = read_ids(file, data, column)
    people = set(data.people())
    if FORGOTTEN in data.metadata:
        people = {each for each in people if not each.startswith(PLACE)}
    if len(found) > len(people):
        raise DataError.of("users", file, f"at most the {len(people)} users there are")
    if unknown := sorted(line for each, line in found.items() if each not in people):
        lines = ", ".join(map(str, unknown[:MOST_LINES]))
        more = f" and {len(unknown) - MOST_LINES:,} more" if len(unknown) > MOST_LINES else ""
        where = f"line{'s' * (len(unknown) > 1)} {lines}{more}"
        raise DataError.of("users", file, f"a user of {data.path} in {where}")
    return found


def look_alikes(data: Dataset, users: Collection[str]) -> int:
    """Count the other users of a data set whose ids look like one of these; see `user_ids`."""
    ids = [each for each in data.people() if not each.startswith(PLACE)]
    keys = look_alike_keys(pa.array(ids, pa.string())).to_pylist()
    theirs = {key for each, key in zip(ids, keys, strict=True) if each in users}
    return sum(each not in users and key in theirs for each, key in zip(ids, keys, strict=True))


def read_ids(file: Path, data: Dataset, column: str | None = None) -> dict[str, int]:
    """Read ids, corrected by the rules of the build of a data set.

    Args:
      file: one id a line, or rows of CSV (.csv, .tsv) or JSON (.jsonl) with a column of ids.
      column: that column. Default: the user column of the build.
    Returns:
      The line number of each id.
    Raises:
      DataError: the file has no ids.
    """
    columns = data.metadata.get("columns", {})
    names = columns.get("user") or ["user_id"]
    try:
        pairs = list(_rows(file, column or (names[0] if len(names) == 1 else "user_id")))
    except OSError as error:
        raise DataError.of("users", file, f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError.of("users", file, "text in UTF-8") from None
    if not pairs:
        raise DataError.of("users", file, "at least one user id, got none")
    lines, given = zip(*pairs, strict=True)
    if columns.get("url"):
        ids = [registrable_domain(each) or each for each in given]
    else:
        how = columns.get("normalise_ids") or ()
        rows = [line - 1 for line in lines]
        texts = pa.array(given, pa.string())
        ids = as_ids(texts, f"users={file}", rows, Counter(), how).to_pylist()
    return dict(reversed(list(zip(ids, lines, strict=True))))  # the first line of each


def _rows(file: Path, column: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, cell) of each row of a file of users."""
    kind = file.suffix.lower()
    with file.open(encoding="utf-8-sig", newline="") as opened:
        if kind in (".csv", ".tsv"):
            reader = csv.DictReader(opened, delimiter="\t" if kind == ".tsv" else ",")
            try:
                if column not in (reader.fieldnames or ()):
                    hint = "" if kind == ".tsv" else ", whose columns are separated by commas"
                    raise DataError.of("column", column, f"a column of {file}{hint}")
                yield from ((reader.line_num, row[column] or "") for row in reader)
            except csv.Error as error:
                expected = f"readable CSV in line {reader.line_num} ({error})"
                raise DataError.of("users", file, expected) from None
            return
        for line, text in enumerate(opened, 1):
            if not text.strip():
                continue
            if kind in (".jsonl", ".ndjson"):
                try:
                    value = json.loads(text)[column]
                except (ValueError, KeyError, TypeError, RecursionError):
                    expected = f"a JSON object with the key {column} in line {line}"
                    raise DataError.of("users", file, expected) from None
                if type(value) not in (str, int, float):
                    raise DataError.of("users", file, f"a text or a number in line {line}")
                text = str(value)
            yield line, text.rstrip("\r\n")


def entries(data: Dataset) -> set[str]:
    """Names of all that a build writes into its directory."""
    return {*KEPT, "metadata.json", SUMS, *data.splits()}


def without(data: Dataset, users: Collection[str], out: Path, named: Callable[[str], str]) -> None:
    """Write a data set into the empty directory `out`, without the texts of some users.

    A held-out split without texts is left out, as a build would.

    Args:
      users: their ids.
      named: the name of the place of a user, which takes the place of the id.
    Raises:
      DataError: no text would be left to train on.
    """
    assert data.path is not None, "of a directory"
    for name in KEPT:
        if (data.path / name).is_file():
            write_atomically(out / name, (data.path / name).read_bytes())
    splits = [
        name
        for name, store in data.splits().items()
        if _write_store(store, users, out / name, named)
    ]
    if "train" not in splits:
        raise DataError("users: expected to leave texts of somebody to train on", field="users")
    number = data.metadata.get(FORGOTTEN, 0) + len(users)
    # A digest of the sources would confirm a guess of the texts that are gone.
    sources = [
        {name: value for name, value in each.items() if name != "sha256"}
        for each in data.metadata.get("sources", ())
    ]
    metadata = {**data.metadata, "splits": splits, "sources": sources, FORGOTTEN: number}
    write_json(out / "metadata.json", metadata, sort_keys=True)
    write_atomically(out / SUMS, sums(out, splits).encode())


def _write_store(
    store: UserStore, users: Collection[str], out: Path, named: Callable[[str], str]
) -> bool:
    """Write a store without the texts of some users. Returns: False if no text is left."""
    sets = store.owner_sets()
    gone = _theirs(sets, users)
    counts = np.where(gone, 0, np.diff(store.offsets))
    if not counts.any():
        return False
    out.mkdir()
    dtype = np.dtype(store.metadata["dtype"]).newbyteorder("<")
    with TokenWriter(out, dtype, store.is_flagged) as writer:
        for block in blocks(store, users, theirs=False):
            writer.write(block.lengths, block.values if block.flags is None else block.marked)

    def renamed(each: str) -> str:
        return named(each) if each in users else each

    keys = [SEPARATOR.join(map(renamed, key.split(SEPARATOR))) for key in sets]
    owners = store.owners_file()
    graph = None if owners is None else (owners, [*map(renamed, store.user_ids())])
    close_store(out, keys, counts, store.metadata, store.is_flagged, graph)
    return True


def blocks(store: UserStore, users: Collection[str], *, theirs: bool) -> Iterator[Block]:
    """Yield the rows of some users, or those of all others, in order.

    Args:
      users: ids of the users.
      theirs: True for rows that any of them owns.
    """
    chosen = _theirs(store.owner_sets(), users) == theirs
    edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
    for first, end in edges.reshape(-1, 2):
        yield from store.blocks(int(store.offsets[first]), int(store.offsets[end]))


def _theirs(sets: list[str], users: Collection[str]) -> np.ndarray:
    """True for each owner set with any of the users, bool [sets]."""
    found = (any(each in users for each in key.split(SEPARATOR)) for key in sets)
    return np.fromiter(found, bool, len(sets))
