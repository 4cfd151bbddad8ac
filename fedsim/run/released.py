"""What the steps since the last checkpoint released, kept so that it is never computed twice.

A step that is run again, after a crash, on another host or with other packages, may come to another
gradient; under the same noise, two gradients would give their difference away. So what a step
releases is written before the ledger says that it was released, and a step that is in the ledger is
taken from here if its bits would be others. A file goes when a checkpoint makes it needless.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import serialization

from fedsim.files import make_directory, write_atomically
from fedsim.mechanism import NoisyMean
from fedsim.run import checkpoint
from fedsim.run.ledger import gradient_sha256

DIRECTORY = "released"
MOST_BYTES = 2**28
"""Of a step's numbers: larger ones are not kept, for writing them would take as long as a step."""


class Step(NamedTuple):
    """What a step releases."""

    noisy: NoisyMean
    clip_norm: float
    """C of the next step."""
    loss: float | None = None
    """Its training loss, with noise; None: it is not released."""


def digest(step: Step) -> str:
    """What the ledger has of a step's release."""
    noisy, clip_norm, loss = step
    beside = (np.float64(clip_norm), *(() if loss is None else (np.float64(loss),)))
    return gradient_sha256((noisy.numbers, *beside))


def keep(run_dir: Path, step: int, what: Step) -> bool:
    """Write what `step` releases; durable when this returns. Returns: False: it is too large."""
    noisy = what.noisy
    leaves = jax.tree.leaves(noisy.numbers)
    if sum(leaf.size for leaf in leaves) > MOST_BYTES:  # a byte each at least
        return False
    arrays = [_narrow(leaf) for leaf in leaves]
    if sum(array.nbytes for array in arrays) > MOST_BYTES:
        return False
    record = {"arrays": dict(zip(map(str, range(len(arrays))), arrays, strict=True))}
    record |= {"unit": noisy.unit, "clip_norm": what.clip_norm}
    record |= {} if what.loss is None else {"loss": what.loss}
    make_directory(run_dir / DIRECTORY, 0o700)
    write_atomically(_path(run_dir, step), serialization.msgpack_serialize(record))
    return True


def kept(run_dir: Path, step: int, like: NoisyMean, sha256: str) -> Step | None:
    """What `step` released, if it is there and of this digest.

    Args: like: of the same shapes and types.
    """
    try:
        record: Any = serialization.msgpack_restore(_path(run_dir, step).read_bytes())
        leaves, treedef = jax.tree.flatten(like.numbers)
        arrays = [record["arrays"][str(i)].astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    except Exception:  # there is none, or something else: MessagePack's errors have no type
        return None
    noisy = NoisyMean(jax.tree.unflatten(treedef, arrays), record["unit"])
    found = Step(noisy, record["clip_norm"], record.get("loss"))
    return found if digest(found) == sha256 else None


def drop(run_dir: Path, before: int) -> None:
    """Remove what the steps before this one released: a checkpoint has it."""
    for path in (run_dir / DIRECTORY).glob("step-*.msgpack"):
        if path.stem < checkpoint.stem(before):
            path.unlink()


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / f"{checkpoint.stem(step)}.msgpack"


def _narrow(array: np.ndarray) -> np.ndarray:
    """The same whole numbers in the smallest type that holds them."""
    most = max(abs(int(array.max(initial=0))), abs(int(array.min(initial=0))))
    return array.astype(np.min_scalar_type(-most - 1))
