"""The state between two steps, written whole or not at all.

Restoring parameters, optimizer state and step is all that resuming takes, for randomness has no
state (see `keys`). A file has the bytes of large arrays, then all else as MessagePack through
flax, in which they are named by their places; loading runs no code. It ends with the size of that,
and the sha256 of all that comes before, so that it is read as it was written or not at all.

It has the chain of the run's ledger after its step, by which that of another run is known.

Large arrays are written in parts, and read by the parts that devices have: one that no host could
hold need not be on one.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from fedsim.errors import FedsimError
from fedsim.files import make_directory, write_pieces
from fedsim.placement import any_cut, beside, is_cut, slabs

DIRECTORY = "checkpoints"
KEEP = 2
LONGEST_S = 60.0  # between two checkpoints: so much work may be lost
DIGEST_SIZE = hashlib.sha256().digest_size
SIZE_BYTES = 8
LARGE, ALIGNED = 2**20, 64  # bytes: of an array that is not packed, and of where it begins
SLAB = 2**26  # bytes of what is on the host of an array that devices have between them
PLACE = "bytes at"
CHAIN = "chain"


class CheckpointError(FedsimError, ValueError):
    """A checkpoint is not what was written, or not of this run."""


def save(run_dir: Path, step: int, state: dict[str, Any], chain: str = "") -> Path:
    """Write the state after `step` steps and remove all but the last few.

    Args:
      state: a dict of array trees, numbers and strings.
      chain: of the ledger after that step; empty: there is no ledger.
    """
    directory = run_dir / DIRECTORY
    make_directory(directory)
    path = directory / name(step)
    chained = {CHAIN: np.frombuffer(bytes.fromhex(chain), np.uint8)} if chain else {}
    write_pieces(path, _pieces(serialization.to_state_dict(state) | chained))
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


def check(path: Path) -> None:
    """Raises CheckpointError unless a checkpoint is as it was written."""
    _content(path, mapped=True)


def _content(path: Path, *, mapped: bool) -> memoryview:
    """What is in a checkpoint, without its digest. Args: mapped: not read before it is used."""
    with path.open("rb") as file:
        whole = mapped and os.fstat(file.fileno()).st_size > 0
        data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ) if whole else file.read())
    if hashlib.sha256(data[:-DIGEST_SIZE]).digest() != data[-DIGEST_SIZE:]:
        raise CheckpointError(f"{path}: was cut or changed since it was written")
    return data[:-DIGEST_SIZE]


def restore(path: Path, like: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The state of a checkpoint in the structure of `like`, and its `chain`.

    Raises: CheckpointError: it was changed, or is the state of something else.
    """
    state: Any = load(path, mapped=any_cut(like))
    try:
        found = jax.tree.map(beside, serialization.from_state_dict(like, state), like)
        return found, chain(state)
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: expected the state of this run ({error})") from None


def load(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The state of a checkpoint as nested dicts of arrays.

    Args: mapped: large arrays are in memory as far as they are looked at.
    Raises: CheckpointError.
    """
    content = _content(path, mapped=mapped)
    try:
        size = int.from_bytes(content[-SIZE_BYTES:], "little")
        packed = bytes(content[-size - SIZE_BYTES : -SIZE_BYTES])
        state: Any = _with_large(serialization.msgpack_restore(packed), content)
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


def chain(state: Mapping[str, Any]) -> str:
    """The chain of the ledger after the step of a loaded state; empty where it was not kept."""
    return np.asarray(state[CHAIN]).tobytes().hex() if CHAIN in state else ""


def name(step: int) -> str:
    """The file name of the checkpoint after `step` steps."""
    return f"step-{step:08d}.msgpack"


def params_sha256(params: Any) -> str:
    """sha256 over names, shapes, types and bytes of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        leaf = leaf if is_cut(leaf) else np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        for slab in slabs(leaf, SLAB) if leaf.ndim else [leaf]:
            digest.update(slab.tobytes())
    return digest.hexdigest()


def _pieces(state: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """The file of a state dict, in parts of `SLAB` bytes."""
    large, end, digest = [], 0, hashlib.sha256()

    def placed(leaf: Any) -> Any:
        nonlocal end
        if not np.ndim(leaf) or leaf.nbytes < LARGE:
            return np.asarray(leaf)
        large.append(leaf)
        found = {PLACE: end, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        end += leaf.nbytes + -leaf.nbytes % ALIGNED
        return found

    def parts() -> Iterator[bytes | memoryview]:
        packed = serialization.msgpack_serialize(jax.tree.map(placed, state))
        for leaf in large:
            for slab in slabs(leaf, SLAB):
                yield slab.reshape(-1).view(np.uint8).data
            yield bytes(-leaf.nbytes % ALIGNED)
        yield packed
        yield len(packed).to_bytes(SIZE_BYTES, "little")

    for part in parts():
        digest.update(part)
        yield part
    yield digest.digest()


def _with_large(tree: Any, content: memoryview) -> Any:
    """A state dict with its large arrays in their places."""
    if not isinstance(tree, dict):
        return tree
    if PLACE not in tree:
        return {name: _with_large(leaf, content) for name, leaf in tree.items()}
    shape, dtype = tree["shape"], np.dtype(tree["dtype"])
    return np.frombuffer(content, dtype, math.prod(shape), tree[PLACE]).reshape(shape)
