"""The state between two steps, written whole or not at all.

Restoring parameters, optimizer state and step is all that resuming takes, for randomness has no
state (see `keys`). MessagePack through flax: loading runs no code. A file ends with the sha256 of
what comes before, so that it is read as it was written or not at all.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from fedsim.errors import FedsimError
from fedsim.files import write_atomically
from fedsim.placement import beside

DIRECTORY = "checkpoints"
KEEP = 2
LONGEST_S = 60.0  # between two checkpoints: so much work may be lost
DIGEST_SIZE = hashlib.sha256().digest_size


class CheckpointError(FedsimError, ValueError):
    """A checkpoint is not what was written, or not of this run."""


def save(run_dir: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps and remove all but the last few.

    Args:
      state: a dict of array trees, numbers and strings.
    """
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / name(step)
    arrays = jax.tree.map(np.asarray, serialization.to_state_dict(state))
    packed = serialization.msgpack_serialize(arrays)
    write_atomically(path, packed, hashlib.sha256(packed).digest())
    for old in kept(run_dir)[:-KEEP]:
        old.unlink()
    return path


class Saver:
    """Writes checkpoints in a thread, one at a time; leaving its context waits for the last.

    What is saved must not change afterwards: JAX's arrays never do.
    """

    def __init__(self, write: Callable[[int, dict[str, Any]], None], step: int):
        """Args:
        write: writes the state after a step; durable when it returns.
        step: the one whose checkpoint is there already, or 0.
        """
        self._write, self._step = write, step
        self._thread, self._last = ThreadPoolExecutor(1), None
        self._saved_at = time.monotonic()

    def due(self, step: int, every: int) -> bool:
        """Whether a state is to be saved after `step`: every so many steps, and every minute."""
        return step % every == 0 or time.monotonic() - self._saved_at >= LONGEST_S

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state unless that step was saved. Raises: what went wrong with the save before."""
        if step > self._step:
            self._wait()
            self._step, self._saved_at = step, time.monotonic()
            self._last = self._thread.submit(self._write, step, dict(state))

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind, *_) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._wait()


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return max(kept(run_dir), default=None)


def kept(run_dir: Path) -> list[Path]:
    """The checkpoints there are, the newest last."""
    return sorted((run_dir / DIRECTORY).glob("step-*.msgpack"))


def check(path: Path) -> memoryview:
    """What was packed into a checkpoint. Raises CheckpointError unless it is as it was written."""
    data = memoryview(path.read_bytes())
    packed = data[:-DIGEST_SIZE]
    if hashlib.sha256(packed).digest() != data[-DIGEST_SIZE:]:
        raise CheckpointError(f"{path}: was cut or changed since it was written")
    return packed


def restore(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint in the structure of `like`.

    Raises: CheckpointError: it was changed, or is the state of something else.
    """
    state: Any = load(path)
    try:
        return jax.tree.map(beside, serialization.from_state_dict(like, state), like)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: expected the state of this run ({error})") from None


def load(path: Path) -> dict[str, Any]:
    """The state of a checkpoint as nested dicts of arrays. Raises: CheckpointError."""
    packed = check(path)
    try:
        state: Any = serialization.msgpack_restore(packed)  # pyright: ignore (any buffer will do)
        if "params" in state.keys():
            return state
    except Exception:  # of whatever is in it: MessagePack's errors have no type in common
        pass
    raise CheckpointError(f"{path}: expected the state of a run")


def load_params(path: Path) -> Any:
    """The parameters that a checkpoint releases, as nested dicts of float32 arrays."""
    return released(load(path))


def released(state: Mapping[str, Any]) -> Any:
    """The parameters that are handed out: the average, where there is one."""
    average = state.get("average")
    return state["params"] if average is None else average


def load_step(path: Path) -> int:
    """The step that a checkpoint was written after."""
    return int(load(path)["step"])


def name(step: int) -> str:
    """The file name of the checkpoint after `step` steps."""
    return f"step-{step:08d}.msgpack"


def params_sha256(params: Any) -> str:
    """sha256 over names, shapes, types and bytes of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        leaf = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()
