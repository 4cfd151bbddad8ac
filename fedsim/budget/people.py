"""Whose texts a run saw: keyed fingerprints of users' ids, by which data sets are found to overlap.

A data set that was built again, moved, or grew has other bytes and other names, but the same
people. What a person pays is what all runs that saw them cost, so the ledger remembers of each run
who was in its data: 64 bits of a keyed hash of each id. Without the key nobody can try ids on them.
"""

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsim.errors import FileDamaged
from fedsim.files import write_atomically
from fedsim.keys import SecretKey

DIRECTORY = "users"
MOST_PATTERNS = 64


def fingerprints(ids: Iterable[str], key: SecretKey) -> np.ndarray:
    """uint64 [users], ascending: of each id a number that says nothing without the key."""
    secret = bytes.fromhex(key.seal("users"))
    digests = b"".join(
        hashlib.blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8, key=secret).digest()
        for each in ids
    )
    return np.unique(np.frombuffer(digests, np.uint64))


def save(directory: Path, users: np.ndarray, mode: int = 0o600) -> str:
    """Keep a set of fingerprints; returns its name, which is the digest of what it holds."""
    name = _digest(users)
    path = directory / DIRECTORY / f"{name}.npy"
    if not path.exists():
        content = io.BytesIO()
        np.save(content, users, allow_pickle=False)
        write_atomically(path, content.getvalue(), mode=mode)
    return name


def load(directory: Path, name: str) -> np.ndarray:
    """The set of that name. Raises: FileDamaged: it is gone, or another one."""
    path = directory / DIRECTORY / f"{name}.npy"
    try:
        users = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FileDamaged(f"{path}: expected fingerprints of users ({error})") from None
    if users.dtype != np.uint64 or _digest(users) != name:
        raise FileDamaged(f"{path}: was changed")
    return users


def patterns(users: np.ndarray, sets: Mapping[str, np.ndarray]) -> list[frozenset[str]]:
    """In which of the sets people of `users` are: every combination that no other one contains.

    Whoever is in more sets pays more, so that the people who pay most are among these. Where there
    are more than MOST_PATTERNS combinations, one stands for all: all sets that any of them is in.
    """
    names = sorted(sets)
    member = np.stack([np.isin(users, sets[name]) for name in names] or [np.zeros(0, bool)], 1)
    rows = np.unique(member, axis=0) if len(users) and names else np.zeros((0, len(names)), bool)
    found = [frozenset(n for n, there in zip(names, row, strict=True) if there) for row in rows]
    if len(found) > MOST_PATTERNS:
        return [frozenset().union(*found)]
    return [each for each in found if not any(each < other for other in found)]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Everybody who is in one of the sets."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *parts]))


def _digest(users: np.ndarray) -> str:
    return hashlib.sha256(users.astype("<u8").tobytes()).hexdigest()[:32]
