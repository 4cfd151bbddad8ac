"""Files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where fedsim keeps what it can make again: FEDSIM_CACHE_DIR, or fedsim/ in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FEDSIM_CACHE_DIR") or Path(base) / "fedsim")


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `path` so that a crash at any moment leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: Path, record: dict[str, Any], mode: int = 0o644) -> None:
    """Write a JSON object, indented, atomically."""
    write_atomically(path, (json.dumps(record, indent=2) + "\n").encode(), mode)


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a line cut off by a crash is removed from the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return [json.loads(line) for line in data[:whole].splitlines()]
