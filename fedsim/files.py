"""Files that are written whole or not at all, private directories, places from variables, and
values of the kernel for this process."""

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fedsim.errors import ConfigError, FileDamaged, brief, expect, such_as
from fedsim.signals import removed_at_end

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError
MAX_JSON = 2**26  # bytes of a user's JSON file: ten times the largest in use

HIDDEN, MADE = ".unfinished", "made"  # end of a hidden directory's name; a directory in it
RANDOM = "[0-9a-f]" * 16  # before that end: `out.part` is another name than `out`
TEMPORARY = ".tmp"  # end of the name of a file that is being written

CGROUP = Path("/sys/fs/cgroup")
TABLES = "tables"  # in the cache: copies of tables from memory
CACHE, LEDGER = "FEDSIM_CACHE_DIR", "FEDSIM_BUDGET_LEDGER"
_DEFAULT_PLACES = {
    CACHE: ("XDG_CACHE_HOME", "~/.cache", "fedsim"),
    LEDGER: ("XDG_STATE_HOME", "~/.local/state", "fedsim/budget"),
}


def near(missing: Path, pattern: str = "*") -> str:
    """End of a line about a path that does not exist: the nearest name beside it, if there is one,
    of those with the pattern, such as */config.json for directories with this file."""
    beside = (Path(found).parts[0] for found in glob.glob(pattern, root_dir=missing.parent))
    return such_as(missing.name, beside, missing.parent.joinpath)


def expand_home(field: str, path: str | Path) -> str:
    """Replace a leading ~ or ~NAME by that home directory, as a shell does.

    Values from files, environment variables and Python did not pass through a shell.
    Args: field: the setting, for errors.
    Raises: ConfigError: the home directory is unknown.
    """
    text = str(path)
    expanded = os.path.expanduser(text)
    if text.startswith("~"):
        known = os.path.isabs(expanded) and os.environ.get("HOME") != ""
        expect(field, text, known, "a known home directory, or the whole path, from / on")
    return expanded


def cache_dir() -> Path:
    """Return the directory of caches: FEDSIM_CACHE_DIR, or fedsim/ in ~/.cache."""
    return directory_of(CACHE)


def directory_of(variable: str) -> Path:
    """Return the directory that CACHE or LEDGER names, or its default in the home directory.

    Raises: ConfigError: there is no home directory, and the variable is not set; or the place
      would depend on the working directory.
    """
    base_variable, base, inside = _DEFAULT_PLACES[variable]
    for name, below in ((variable, ""), (base_variable, inside)):
        if value := os.environ.get(name):
            found = Path(expand_home(name, value)) / below
            # A ledger per working directory would count only some of the runs, and a cache would
            # leave people's texts in each.
            expect(name, value, found.is_absolute(), "a path from / or ~ on")
            return found
    return Path(expand_home(variable, base)) / inside


class NotOurs(ConfigError):
    """Other users can write, or have written, to a directory."""


def own_directory(path: Path) -> Path:
    """Check that only this user can write to a directory or replace it; make it if it is missing.

    Modes change, so callers check each time before they trust or run a file of it. Modes of
    directories that exist are not changed.
    Returns: `path` without links.
    Raises: NotOurs: another user owns it or can write to it, or to a directory above it.
    """
    found = Path(os.path.realpath(path))
    for each in (*reversed(found.parents), found):
        try:
            if not each.exists():
                with suppress(FileExistsError):
                    each.mkdir(mode=0o700)
            why = _fault_of(each.lstat(), alone=each == found)
        except OSError as error:
            why = f"cannot be written to ({error.strerror})"
        if why:
            where = f"a directory of your own, in such directories; {CACHE} can name another place"
            raise NotOurs.of("cache", each, f"{where}; this one {why}")
    return found


def _fault_of(found: os.stat_result, *, alone: bool) -> str:
    """Why other users could replace a directory inside of this one, or (alone) add files to it."""
    # In a user namespace without root, / belongs to the unknown user that root is there, too.
    owners = {os.getuid()} if alone else {os.getuid(), 0, os.lstat("/").st_uid}
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid not in owners:
        return f"belongs to another user, {found.st_uid}"
    if writable and (alone or not found.st_mode & stat.S_ISVTX):
        return f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def private_directory(field: str, path: Path) -> None:
    """Make `path` with mode 0700, or check the mode of an existing directory.

    Raises: ConfigError: it cannot be made, is another user's, or others can read it.
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
    """Add the file's name to an OSError of this context: the error of a write has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomically(path: Path, *parts: bytes, mode: int = 0o644) -> None:
    """Write `path` so that a crash at any moment leaves the old file or the new one."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(parts)

    write_with(path, write, mode)


def write_with(path: Path, write: Callable[[Path], None], mode: int = 0o644) -> None:
    """Like `write_atomically`, by a library that takes a file name: `write(name)` writes it."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL, mode)  # no link that others put there
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)  # respects the umask
    os.close(descriptor)
    try:
        with named(path):
            write(temporary)
            with temporary.open("rb") as file:
                os.fchmod(file.fileno(), mode)  # some libraries make a file of their own
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory, and those above it, unless it exists; its name is durable on return."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def keep_private(directory: Path) -> None:
    """Let only this user read a directory and the files in it, whatever the umask."""
    for place, _, names in os.walk(directory):
        os.chmod(place, 0o700)
        for name in names:
            os.chmod(os.path.join(place, name), 0o600)


@contextmanager
def new_directory(out: Path, *, wait: bool = False) -> Iterator[Path]:
    """Yield an empty directory that becomes `out` when the context ends without an error.

    Until then it is in a hidden one beside `out`, whose name is random and whose mode is 0700, so
    that nobody else can put a directory or link in its place beforehand, or read what is in it.
    What processes of this user that were killed left there for the same `out` is removed first.

    Args:
      out: absent, or an empty directory; unchanged until then.
      wait: wait for another process that writes `out` instead of raising an error.
    Raises: ConfigError: `out` exists, cannot be written, or another process is writing it.
    """
    _expect_free(out)
    place = out.with_name(f".{out.name}.{secrets.token_hex(8)}{HIDDEN}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(out, wait)
        place.mkdir(mode=0o700)
        descriptor = os.open(place, os.O_RDONLY)
        with suppress(OSError):  # of file systems without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Whoever sees it, and no lock, may remove the directory.
        (made := place / MADE).mkdir()  # with the usual mode, which it keeps
    except BlockingIOError:
        expected = "a place to which no other process is writing"
        raise ConfigError.of("out", out, expected) from None
    except OSError as error:
        raise ConfigError.of("out", out, f"a place to write to ({error})") from None
    try:
        with removed_at_end(place):
            _expect_free(out)  # the process that was waited for may have written it
            yield made
            made.rename(out)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(descriptor)
    sync_directory(out.parent)


def _expect_free(out: Path) -> None:
    """Raise ConfigError unless a directory can become `out`."""
    is_free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    is_free &= not out.is_symlink() and not os.path.ismount(out)
    expected = "a directory that is not there yet, or an empty one, and no link; it already exists"
    expect("out", out, is_free, expected)


def _remove_unfinished(out: Path, wait: bool) -> None:
    """Remove what killed processes of this user left of `out`. No link is followed."""
    for place in out.parent.glob(f".{glob.escape(out.name)}.{RANDOM}{HIDDEN}"):
        try:
            found, made = place.lstat(), (place / MADE).lstat()
            if {found.st_uid, made.st_uid} != {os.getuid()} or not stat.S_ISDIR(made.st_mode):
                continue
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                shutil.rmtree(place, ignore_errors=True)  # of a link: nothing
            finally:
                os.close(descriptor)
        except BlockingIOError:
            raise
        except OSError:  # a link, without locks, or gone
            continue


def sync_directory(directory: Path) -> None:
    """Make the names of new files in it durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(
    path: Path, record: dict[str, Any], mode: int = 0o644, *, sort_keys: bool = False
) -> None:
    """Write a JSON object, indented, atomically."""
    text = json.dumps(record, indent=2, sort_keys=sort_keys) + "\n"
    write_atomically(path, text.encode(), mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """Read the object that `write_json` wrote. Raises FileDamaged if it is no JSON object."""
    return _objects([path.read_bytes()], path)[0]


def _objects(texts: Iterable[bytes], path: Path) -> list[dict[str, Any]]:
    try:
        records = [json.loads(text) for text in texts]
    except (ValueError, RecursionError) as error:
        raise FileDamaged(f"{path}: expected JSON, cut or changed since ({error})") from None
    if not all(isinstance(record, dict) for record in records):
        raise FileDamaged(f"{path}: expected a JSON object")
    return records


def read_object(path: Path, field: str) -> dict[str, Any]:
    """Read the JSON object in a user's file. Args: field: the setting that named it, for errors.

    Raises: ConfigError: it cannot be read, is larger than MAX_JSON, or is no JSON object.
    """
    expected = f"a JSON object of at most {MAX_JSON} bytes"
    try:  # reading a pipe would block
        expect(field, path, path.is_file() and path.stat().st_size <= MAX_JSON, expected)
        return read_json(path)
    except (OSError, FileDamaged) as error:
        raise ConfigError.of(field, path, f"{expected} ({brief(str(error), 200)})") from None


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON-lines file, without an incomplete last line.

    Raises: FileDamaged: a line is no JSON object.
    """
    return _objects(_whole(path.read_bytes()).splitlines(), path) if path.exists() else []


def _whole(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def remove_cut_off_line(path: Path) -> None:
    """Remove an incomplete last line, which a crash left, before a line is appended."""
    if path.exists():
        os.truncate(path, len(_whole(path.read_bytes())))


def open_to_append(path: Path, mode: int | None = None) -> IO[bytes]:
    """Open a file of lines to append; an incomplete last line is removed. Its name is durable on
    return. Args: mode: of a new file; None: by the umask."""
    is_new = not path.exists()
    remove_cut_off_line(path)
    file = open(path, "ab")
    if is_new and mode is not None:
        path.chmod(mode)
    sync_directory(path.parent)  # also for an earlier process that was killed before this
    return file


def write_durably(file: IO[bytes], data: bytes) -> None:
    """Write data so that it survives a crash once this returns."""
    with named(Path(file.name)):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def cgroup_value(name: str) -> str:
    """Return a value of this container's control group, of version 2; empty if there is none."""
    try:
        return (CGROUP / name).read_text().strip()
    except OSError:
        return ""


def cpus() -> int:
    """Return the number of CPUs that this process may use: those it may run on, or the quota of
    its container, rounded up, if that is less."""
    count = len(os.sched_getaffinity(0))
    quota, _, period = cgroup_value("cpu.max").partition(" ")
    return min(count, math.ceil(int(quota) / int(period))) if quota.isdecimal() else count
