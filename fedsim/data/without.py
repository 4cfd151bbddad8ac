"""Copy a built data set without the texts of some users.

All other texts stay byte for byte, each in the same split and in the same order; so do the
tokenizer, the chat template, the rules and the counts of the build. A text with several owners goes
if any of them does. A user who then owns no text is no user of the copy, and a held-out split
without texts is left out.

The ledger of the data knows users by their ids, so that earlier runs on the users who stay count
for the copy as they do for the original.
"""

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data.dataset import SUMS, Dataset, sums
from fedsim.data.store import SEPARATOR, SETS, TokenWriter, close_store, token_dtype
from fedsim.data.tokenizer import TEMPLATE, TOKENIZER
from fedsim.data.users import UserStore
from fedsim.errors import DataError
from fedsim.files import keep_private, new_directory, write_atomically, write_json


def read_ids(file: Path) -> set[str]:
    """Read the ids of users, one a line; white space around an id is no part of it.

    Raises: DataError: the file cannot be read, or has no ids.
    """
    try:
        ids = {line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")} - {""}
    except (OSError, UnicodeDecodeError):
        ids = set()
    if not ids:
        raise DataError.of("users", file, "a file of UTF-8 text with at least one user id")
    return ids


def without(data: Dataset, users: Set[str], out: Path) -> dict[str, Any]:
    """Write the texts of all other users into a new directory.

    Args:
      users: ids, as the data set has them.
      out: the directory; it appears whole or not at all.
    Returns:
      JSON object: path; users and texts, the numbers that are left out; splits, the number of texts
      that each split of the copy has; not_found, the ids that no user of `data` has, sorted.
    Raises:
      ConfigError: `out` exists, or cannot be written.
      DataError: `data` was changed since it was built; it has none of these users; or it has no
        text to train on without them.
    """
    assert data.path is not None, "of a directory"
    people, stores = set(data.people()), data.splits()
    if not people & users:
        raise DataError.of(
            "users", f"{len(users)} ids", f"the id of at least one user of {data.path}"
        )
    for store in stores.values():
        store.check()
    with new_directory(out) as made:
        left = {name: _copy(store, users, made / name) for name, store in stores.items()}
        splits = {name: number for name, number in left.items() if number}
        if "train" not in splits:
            raise DataError("users: expected to leave texts of somebody to train on", field="users")
        for name in (TOKENIZER, TEMPLATE):
            if (data.path / name).is_file():
                write_atomically(made / name, (data.path / name).read_bytes())
        # A digest of the sources would confirm a guess of the texts that are gone.
        sources = [
            {name: value for name, value in each.items() if name != "sha256"}
            for each in data.metadata.get("sources", ())
        ]
        metadata = {**data.metadata, "splits": [*splits], "sources": sources}
        write_json(made / "metadata.json", metadata, sort_keys=True)
        write_atomically(made / SUMS, sums(made, splits).encode())
        keep_private(made)
    texts = sum(store.num_examples for store in stores.values()) - sum(splits.values())
    about = {"path": str(out.absolute()), "users": len(people & users), "texts": texts}
    return {**about, "splits": splits, "not_found": sorted(users - people)}


def _copy(store: UserStore, users: Set[str], out: Path) -> int:
    """Write a store without the texts of some users; returns the number of texts that are left."""
    sets = store.owner_sets()
    stays = np.array([users.isdisjoint(key.split(SEPARATOR)) for key in sets], bool)
    counts = np.diff(store.offsets)[stays]
    if not counts.any():
        return 0
    out.mkdir()
    edges = np.flatnonzero(np.diff(stays, prepend=False, append=False)).reshape(-1, 2)
    with TokenWriter(out, token_dtype(store.vocab_size), store.is_flagged) as writer:
        for first, end in store.offsets[edges].tolist():
            for lengths, values in store.blocks(first, end):
                writer.write(lengths, values)
    keys = [key for key, kept in zip(sets, stays, strict=True) if kept]
    about = {name: value for name, value in store.metadata.items() if name != SETS}
    close_store(out, keys, counts, about, store.is_flagged)
    return int(counts.sum())
