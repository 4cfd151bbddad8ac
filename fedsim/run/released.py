"""What the steps since the last checkpoint released, kept so that it is never computed twice.

A step that is run again, after a crash, on another host or with other packages, may come to another
gradient; under the same noise, two gradients would give their difference away. So what a step
releases is written before the ledger says that it was released, and a step that is in the ledger is
taken from here if its bits would be others. A file goes when a checkpoint makes it needless.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization

from fedsim.files import write_atomically
from fedsim.mechanism import NoisyMean
from fedsim.run import checkpoint
from fedsim.run.ledger import gradient_sha256

DIRECTORY = "released"
MOST_BYTES = 2**28
"""Of a step's numbers: larger ones are not kept, for writing them would take as long as a step."""


def digest(noisy: NoisyMean, clip_norm: float) -> str:
    """What the ledger has of a step's release: of its numbers, and of the next step's C."""
    return gradient_sha256((noisy.numbers, np.float64(clip_norm)))


def keep(run_dir: Path, step: int, noisy: NoisyMean, clip_norm: float) -> bool:
    """Write what `step` releases; durable when this returns. Returns: False: it is too large."""
    arrays = [_narrow(leaf) for leaf in jax.tree.leaves(noisy.numbers)]
    if sum(array.nbytes for array in arrays) > MOST_BYTES:
        return False
    record = {"arrays": dict(zip(map(str, range(len(arrays))), arrays, strict=True))}
    record |= {"unit": noisy.unit, "clip_norm": clip_norm}
    (run_dir / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
    write_atomically(_path(run_dir, step), serialization.msgpack_serialize(record))
    return True


def kept(run_dir: Path, step: int, like: NoisyMean, sha256: str) -> tuple[NoisyMean, float] | None:
    """What `step` released and the next step's C, if it is there and of this digest.

    Args: like: of the same shapes and types.
    """
    try:
        record: Any = serialization.msgpack_restore(_path(run_dir, step).read_bytes())
        leaves, treedef = jax.tree.flatten(like.numbers)
        arrays = [record["arrays"][str(i)].astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    except Exception:  # there is none, or something else: MessagePack's errors have no type
        return None
    found = NoisyMean(jax.tree.unflatten(treedef, arrays), record["unit"])
    return (found, record["clip_norm"]) if digest(found, record["clip_norm"]) == sha256 else None


def drop(run_dir: Path, before: int) -> None:
    """Remove what the steps before this one released: a checkpoint has it."""
    for path in (run_dir / DIRECTORY).glob("step-*.msgpack"):
        if path.name < checkpoint.name(before):
            path.unlink()


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / checkpoint.name(step)


def _narrow(array: np.ndarray) -> np.ndarray:
    """The same whole numbers in the smallest type that holds them."""
    most = max(abs(int(array.max(initial=0))), abs(int(array.min(initial=0))))
    return array.astype(np.min_scalar_type(-most - 1))
