"""The released numbers of the steps since the last checkpoint, so that none is computed twice.

A step that is repeated after a crash, on another host or with other packages, may give a gradient
with other bits; two gradients under the same noise would reveal their difference. So the numbers of
a step are written before the ledger notes its release, and a repeated step whose bits differ takes
them from here. A file is removed once a checkpoint covers its step. A note says that steps since
the last checkpoint may be of another host, so that the first one does not expect its own bits.
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

DIRECTORY, ELSEWHERE = "released", "elsewhere"
MAX_BYTES = 2**28
"""Largest size of a step's numbers that is kept: writing more would take as long as a step."""


class Step(NamedTuple):
    """The numbers that a step releases."""

    noisy: NoisyMean
    clip_norm: float
    """C of the next step."""
    loss: float | None = None
    """The step's training loss with noise; None if it is not released."""


def digest(step: Step) -> str:
    """The `gradient_sha256` of a step's release in the ledger."""
    noisy, clip_norm, loss = step
    beside = (np.float64(clip_norm), *(() if loss is None else (np.float64(loss),)))
    return gradient_sha256((noisy.numbers, *beside))


def keep(run_dir: Path, step: int, what: Step) -> bool:
    """Write what `step` releases; durable when this returns.

    Returns:
      False if it is too large to be kept.
    """
    noisy = what.noisy
    leaves = jax.tree.leaves(noisy.numbers)
    if sum(leaf.size for leaf in leaves) > MAX_BYTES:  # a number takes at least a byte
        return False
    arrays = [_narrow(leaf) for leaf in leaves]
    if sum(array.nbytes for array in arrays) > MAX_BYTES:
        return False
    record = {"arrays": dict(zip(map(str, range(len(arrays))), arrays, strict=True))}
    record |= {"unit": noisy.unit, "clip_norm": what.clip_norm}
    record |= {} if what.loss is None else {"loss": what.loss}
    make_directory(run_dir / DIRECTORY, 0o700)
    write_atomically(_path(run_dir, step), serialization.msgpack_serialize(record))
    return True


def kept(run_dir: Path, step: int, like: NoisyMean, sha256: str) -> Step | None:
    """The kept release of `step`.

    Args:
      like: a release with the same shapes and types.
      sha256: its digest in the ledger.

    Returns:
      None if there is none, or one with another digest.
    """
    try:
        record: Any = serialization.msgpack_restore(_path(run_dir, step).read_bytes())
        leaves, treedef = jax.tree.flatten(like.numbers)
        arrays = [record["arrays"][str(i)].astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    except Exception:  # no file, or a damaged one: MessagePack's errors have no common type
        return None
    noisy = NoisyMean(jax.tree.unflatten(treedef, arrays), record["unit"])
    release = Step(noisy, record["clip_norm"], record.get("loss"))
    return release if digest(release) == sha256 else None


def drop(run_dir: Path, before: int) -> None:
    """Remove the releases of the steps before this one, which a checkpoint covers."""
    for path in (run_dir / DIRECTORY).glob("step-*.msgpack"):
        if path.stem < checkpoint.stem(before):
            path.unlink()


def note_elsewhere(run_dir: Path, why: str) -> None:
    """Note, before a step on another host or with other packages, that bits may be others; durable
    when this returns. Args: why: the reason, or empty to remove the note."""
    path = run_dir / DIRECTORY / ELSEWHERE
    if why:
        make_directory(path.parent, 0o700)
        write_atomically(path, why.encode())
    else:
        path.unlink(missing_ok=True)


def elsewhere(run_dir: Path) -> str:
    """Why released steps that no checkpoint covers may have other bits; empty if they do not."""
    path = run_dir / DIRECTORY / ELSEWHERE
    return path.read_text(errors="replace") if path.exists() else ""


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / DIRECTORY / f"{checkpoint.stem(step)}.msgpack"


def _narrow(array: np.ndarray) -> np.ndarray:
    """Whole numbers in the smallest integer type that holds them."""
    most = max(abs(int(array.max(initial=0))), abs(int(array.min(initial=0))))
    return array.astype(np.min_scalar_type(-most - 1))
