"""Checkpoints as 0.2 wrote them, which are read: the bytes of large arrays, then all else as
MessagePack, in which they are named by their places, the size of that, and the sha256 of all."""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from flax import serialization

SUFFIX = ".msgpack"
DIGEST_SIZE = hashlib.sha256().digest_size
SIZE_BYTES = 8
PLACE = "bytes at"


def load(path: Path) -> Any:
    """The state. Raises: ValueError: it is not as it was written, or none."""
    data = memoryview(path.read_bytes())
    content = data[:-DIGEST_SIZE]
    if hashlib.sha256(content).digest() != data[-DIGEST_SIZE:]:
        raise ValueError("was cut or changed since it was written")
    try:
        size = int.from_bytes(content[-SIZE_BYTES:], "little")
        packed = bytes(content[-size - SIZE_BYTES : -SIZE_BYTES])
        return _with_large(serialization.msgpack_restore(packed), content)
    except Exception:  # of whatever is in it: MessagePack's errors have no type in common
        raise ValueError("expected the state of a run") from None


def _with_large(tree: Any, content: memoryview) -> Any:
    """A state dict with its large arrays in their places."""
    if not isinstance(tree, dict):
        return tree
    if PLACE not in tree:
        return {name: _with_large(leaf, content) for name, leaf in tree.items()}
    shape, dtype = tree["shape"], np.dtype(tree["dtype"])
    return np.frombuffer(content, dtype, math.prod(shape), tree[PLACE]).reshape(shape)
