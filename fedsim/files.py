"""Files that are there whole or not at all."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError, FileDamaged, brief, expect

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError
MOST_JSON = 2**26  # bytes of a JSON file that somebody else made: ten times the largest in use
ELSEWHERE = "FEDSIM_CACHE_DIR can name another place"
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # open, or mapped


CACHE, LEDGER = "FEDSIM_CACHE_DIR", "FEDSIM_BUDGET_LEDGER"
_DEFAULT_PLACES = {
    CACHE: ("XDG_CACHE_HOME", "~/.cache", "fedsim"),
    LEDGER: ("XDG_STATE_HOME", "~/.local/state", "fedsim/budget"),
}


def expand_home(field: str, path: str | Path) -> str:
    """`path` with a leading ~ or ~NAME replaced by that home directory, as a shell does it.

    Values from files, environment variables and Python did not pass through a shell. Kept as they
    are, they would name a directory called ~ in each working directory.
    Raises: ConfigError: the home directory is unknown.
    """
    text = str(path)
    if not text.startswith("~"):
        return text
    expanded = os.path.expanduser(text)
    known = os.path.isabs(expanded) and os.environ.get("HOME") != ""
    name = text.partition("/")[0]
    expect(field, text, known, f"a known home directory {name}, or the whole path, from / on")
    return expanded


def cache_dir() -> Path:
    """Where fedsim keeps what it can make again: FEDSIM_CACHE_DIR, or fedsim/ in ~/.cache."""
    return directory_of(CACHE)


def directory_of(variable: str) -> Path:
    """The directory that CACHE or LEDGER names, or its default in the home directory.

    Raises: ConfigError: there is no home directory, and the variable is not set; or the ledger's
      place would depend on the working directory.
    """
    base_variable, base, inside = _DEFAULT_PLACES[variable]
    for name, below in ((variable, ""), (base_variable, inside)):
        if value := os.environ.get(name):
            found = Path(expand_home(name, value)) / below
            # A ledger for each working directory would count a part of the runs.
            expect(name, value, variable != LEDGER or found.is_absolute(), "a path from / or ~ on")
            return found
    try:
        return Path(expand_home("HOME", base)) / inside
    except ConfigError:
        expected = f"a home directory; or set {CACHE} and {LEDGER} to directories to write to"
        raise ConfigError.of("HOME", os.environ.get("HOME"), expected) from None


class NotOurs(ConfigError):
    """A directory into which others could put something, or have."""


def own_directory(path: Path) -> Path:
    """`path` without links, made with mode 0700 if it is not there: a directory into which nobody
    else can put anything, nor another one in its place. Nothing is made safe that was not.

    To be asked each time before something that is there is believed or run: modes change.
    Raises: NotOurs: another user owns it or can write to it, or to a directory that it is in.
    """
    found = Path(os.path.realpath(path))
    try:
        for each in (*reversed(found.parents), found):
            if not each.exists():
                with suppress(FileExistsError):
                    each.mkdir(mode=0o700)  # whatever the umask
            _expect_ours(each, alone=each == found)
    except OSError as error:
        expected = "a directory that can be written to"
        raise NotOurs.of("cache", path, f"{expected} ({error.strerror}); {ELSEWHERE}") from None
    return found


def _expect_ours(directory: Path, *, alone: bool = False) -> None:
    """Raises NotOurs where others could put another directory in the place of one that is in this.

    Args: alone: where they could put anything in it, as they may in /tmp and other sticky ones.
    """
    found = directory.lstat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode):
        why = "is no directory"
    elif found.st_uid not in ({os.getuid()} if alone else {os.getuid(), 0}):
        why = f"belongs to another user, {found.st_uid}"
    elif writable and (alone or not found.st_mode & stat.S_ISVTX):
        why = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise NotOurs(
        f"cache={directory}: {why}; expected a directory of your own, in such directories; "
        f"{ELSEWHERE}",
        field="cache",
    )


def private_directory(field: str, path: Path) -> None:
    """Make `path` with mode 0700. One that is there keeps its mode, which has to be that.

    Raises: ConfigError: it cannot be made, is another user's, or others can look into it.
    """
    try:
        make_directory(path, 0o700)
        found = path.stat()
    except OSError as error:
        raise ConfigError.of(field, path, f"a place to write to ({error})") from None
    mode = stat.S_IMODE(found.st_mode)
    ours = found.st_uid == os.getuid() and not mode & 0o077
    why = f"a new directory, or one of yours with mode 700 (this one: mode {mode:o})"
    expect(field, path, ours, why)


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
        raise ConfigError.of("out", out, f"a place to write to ({error.strerror})") from None


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


def write_with(path: Path, write: Callable[[Path], None], mode: int = 0o644) -> None:
    """The same, by a library that takes the name of the file: `write(name)` writes it.

    It has a directory for that, for whatever else it may leave behind when it is killed.
    """
    directory = path.with_name(path.name + ".tmp")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        temporary = directory / path.name
        write(temporary)
        with named(path), temporary.open("rb") as file:
            os.fchmod(file.fileno(), directory.stat().st_mode & mode)  # of the umask
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
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


def read_object(path: Path, field: str) -> dict[str, Any]:
    """Read the JSON object in a file that somebody else made.

    Args: field: what the user named it by, for errors.
    Raises: ConfigError: it cannot be read, is larger than MOST_JSON, or is no JSON object.
    """
    record = None
    try:
        if path.is_file() and path.stat().st_size <= MOST_JSON:  # a pipe would be waited for
            record = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError.of(field, path, f"a readable file ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(field, path, f"JSON ({brief(str(error), 200)})") from None
    if not isinstance(record, dict):
        expected = f"a JSON object of at most {MOST_JSON} bytes"
        raise ConfigError.of(field, path, expected)
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
