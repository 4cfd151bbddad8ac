"""Files that are there whole or not at all."""

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError, FileDamaged

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # open, or mapped


def cache_dir() -> Path:
    """Where fedsim keeps what it can make again: FEDSIM_CACHE_DIR, or fedsim/ in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FEDSIM_CACHE_DIR") or Path(base) / "fedsim")


def is_own_directory(path: Path) -> bool:
    """Whether nobody else can put anything into `path`, which is made so if it is not there.

    Whoever can write to the directory that it is in could put another one in its place: if that is
    our own, others lose the right to.
    """
    others = stat.S_IWGRP | stat.S_IWOTH
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        above, found = path.parent.stat(), path.stat()
        if above.st_uid == os.getuid() and above.st_mode & others:
            path.parent.chmod(stat.S_IMODE(above.st_mode) & ~others)
    except OSError:
        return False
    return {above.st_uid, found.st_uid} == {os.getuid()} and not found.st_mode & others


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of the system in here says which file it is about: that of a write does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def make_place(out: Path) -> None:
    """The directory `out`, made if need be. Raises: ConfigError: it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: expected a place to write to ({error.strerror})") from None


def write_atomically(path: Path, *parts: bytes, mode: int = 0o644) -> None:
    """Write `path` so that a crash at any moment leaves the old file or the new one."""
    write_pieces(path, parts, mode)


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview], mode: int = 0o644) -> None:
    """The same, of pieces that are made while it is written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with named(path), os.fdopen(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory, and those above it, unless it exists; its name is durable on return."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Make the names of new files in it durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(
    path: Path, record: dict[str, Any], mode: int = 0o644, *, sort_keys: bool = False
) -> None:
    """Write a JSON object, indented, atomically."""
    text = json.dumps(record, indent=2, sort_keys=sort_keys) + "\n"
    write_atomically(path, text.encode(), mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """The object that `write_json` wrote. Raises: FileDamaged: it is none, or not JSON."""
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileDamaged(f"{path}: expected JSON, cut or changed since ({error})") from None
    if not isinstance(record, dict):
        raise FileDamaged(f"{path}: expected a JSON object")
    return record


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file, without a last line that is cut off or still being written.

    Raises: FileDamaged: a line is no JSON object.
    """
    if not path.exists():
        return []
    try:
        records = [json.loads(line) for line in _whole(path.read_bytes()).splitlines()]
    except (ValueError, RecursionError) as error:
        raise FileDamaged(f"{path}: expected JSON in every line ({error})") from None
    if not all(isinstance(record, dict) for record in records):
        raise FileDamaged(f"{path}: expected a JSON object in every line")
    return records


def remove_cut_off_line(path: Path) -> None:
    """Remove what a crash left of a last line; for the one who is about to append."""
    if path.exists():
        os.truncate(path, len(_whole(path.read_bytes())))


def _whole(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]
