"""The state between two steps, written whole or not at all.

Restoring parameters, optimizer state and step is all that resuming takes, for randomness has no
state (see `keys`). MessagePack through flax: loading runs no code.
"""

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from fedsim.files import write_atomically

DIRECTORY = "checkpoints"
KEEP = 2


def save(run_dir: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps and remove all but the last few.

    Args:
      state: a dict of array trees, numbers and strings.
    """
    directory = run_dir / DIRECTORY
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{step:08d}.msgpack"
    arrays = jax.tree.map(np.asarray, serialization.to_state_dict(state))
    write_atomically(path, serialization.msgpack_serialize(arrays))
    for old in _all(run_dir)[:-KEEP]:
        old.unlink()
    return path


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return max(_all(run_dir), default=None)


def restore(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint in the structure of `like`."""
    state: Any = serialization.msgpack_restore(path.read_bytes())
    return serialization.from_state_dict(like, state)


def load_params(path: Path) -> Any:
    """The parameters of a checkpoint, as nested dicts of float32 arrays."""
    return serialization.msgpack_restore(path.read_bytes())["params"]


def params_sha256(params: Any) -> str:
    """sha256 over names, shapes, types and bytes of all parameters."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        leaf = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def _all(run_dir: Path) -> list[Path]:
    return sorted((run_dir / DIRECTORY).glob("step-*.msgpack"))
