"""Where a build works until it is complete: a hidden directory beside `out`, held by one process.

`out` is whole or absent. A mistake of the user's or a full disk leaves nothing; a build that was
interrupted or killed, lost a worker or the network, or could open no more files, leaves its
finished parts, which the same build goes on with.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsim.errors import DataError, Interrupted
from fedsim.files import TOO_MANY_FILES, write_json

PLAN = "plan.json"


def check_absent(out: Path) -> None:
    """Raises: DataError: `out` is there and not an empty directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"out={out}: already exists, expected a new directory")


@contextmanager
def staging(out: Path, wait: bool) -> Iterator[Path]:
    """A directory to work in; its subdirectory `out` becomes `out` at the end.

    Args: wait: for another process that is building `out`, instead of raising.
    Raises: DataError: `out` exists, cannot be made, or is being built by another process.
    """
    check_absent(out)
    directory = out.parent / f".{out.name}.building"
    try:
        descriptor = _hold(directory, wait)
    except BlockingIOError:
        raise DataError.of("out", out, "a directory that no other process is building") from None
    except OSError as error:
        raise DataError.of("out", out, f"a place to write to ({error})") from None
    try:
        check_absent(out)  # who held it before may have finished
        yield directory
        os.rename(directory / "out", out)
    except BaseException as error:
        if not _goes_on(error):
            shutil.rmtree(directory, ignore_errors=True)
        elif not any(directory.iterdir()):  # it was not begun
            directory.rmdir()
        raise
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _goes_on(error: BaseException) -> bool:
    """Whether the same command goes on from what is there."""
    if isinstance(error, OSError):
        return error.errno in TOO_MANY_FILES
    return isinstance(error, KeyboardInterrupt | Interrupted)


def _hold(directory: Path, wait: bool) -> int:
    """A descriptor of the directory, made if need be, whose lock this process holds."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
                return descriptor
        except FileNotFoundError:
            pass  # its holder finished and removed it in between
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def resume(directory: Path, plan: dict[str, Any]) -> bool:
    """Keeps what an interrupted build of the same plan left in `directory`, or clears it.

    Returns: whether there was such a build.
    """
    file = directory / PLAN
    plan = json.loads(json.dumps(plan))
    same = file.exists() and json.loads(file.read_text()) == plan
    if same:
        for temporary in directory.rglob("*.tmp"):
            temporary.unlink(missing_ok=True)
        return True
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(file, plan)
    return False
