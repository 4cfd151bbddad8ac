"""Checkpoints: the state of a run between two steps, from which it resumes, written atomically.

Checkpoints have the part that may be published. Values that reveal sizes of draws, and losses of
held-out users, are in `progress.json`, which is for the owner of the run alone.

Resuming needs parameters, optimizer state and step alone, because randomness has no state (see
`keys`). The file is in safetensors: an array is named by its place in the state, and the metadata
have the state as JSON, with types and shapes in place of arrays; loading runs no code. In front of
the JSON is the sha256 of it and of the bytes of all arrays, so that a changed file is refused. The
state includes the chain of the run's ledger after its step, which tells checkpoints of different
runs apart.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import serialization
from safetensors import SafetensorError, safe_open

from fedsim.config import to_json
from fedsim.errors import FedsimError, FileDamaged
from fedsim.files import TEMPORARY, make_directory, read_json, write_json
from fedsim.models import weights

DIRECTORY, SUFFIX = "checkpoints", ".safetensors"
KEEP = 2
LONGEST_S = 60.0  # between two checkpoints: the work that a crash may cost
ABOUT = "fedsim"  # key of the metadata: digest and state
ARRAY = "array of"  # key in the state: type and shape of an array
CHAIN = "chain"
PROGRESS = "progress.json"
KEEP_PROGRESS = KEEP + 1  # the last one's checkpoint may not be there yet
REALISED = ("gradients_computed", "wall_seconds")
"""Fields of a state that reveal sizes of draws."""
LOSSES = ("initial_eval_loss", "eval_loss", "evaluated")
APART = REALISED + LOSSES
"""Fields of a state that are in progress.json, and in no checkpoint."""


class CheckpointError(FedsimError, ValueError):
    """A checkpoint was changed, or is of another run."""


@dataclasses.dataclass
class State:
    """Everything that resuming needs."""

    params: Any
    opt_state: Any
    average: Any = None
    """Running average of the parameters, which is released instead of them; None without one."""
    step: int = 0
    """Number of indices that are used up, lost ones too."""
    lost_steps: int = 0
    """Number of steps that count for epsilon, but whose gradient was lost to a crash."""
    gradients_computed: int = 0
    wall_seconds: float = 0.0
    clip_norm: float = math.nan
    """C of the next step; it changes if the plan adapts it."""
    initial_eval_loss: float = math.nan
    eval_loss: float = math.nan
    evaluated: int = -1
    """Step after which eval_loss was computed."""
    chain: str = ""
    """Chain of the ledger after the step; empty without a ledger, or if it is not known."""

    @property
    def released(self) -> Any:
        """The parameters that are evaluated and exported."""
        return released(vars(self))


def restored(run_dir: Path, state: State) -> State:
    """The state of the last checkpoint, or `state` if there is none. Raises CheckpointError: a
    checkpoint was changed, or is of another run."""
    files = kept(run_dir)
    if not files:
        return state
    *older, path = files
    for each in older:
        load(each)  # a changed one is refused before it is needed
    like = _published(vars(state))
    try:
        stored = load(path)
        fields: Any = serialization.from_state_dict(like, stored)
        jax.tree.map(lambda *_: None, fields, like)  # raises if their structures differ
    except (ValueError, KeyError) as error:
        changed = isinstance(error, CheckpointError)
        why = error if changed else f"{path}: expected the state of this run ({error})"
        before = f"{older[-1].name}, the one before" if older else "the first step"
        raise CheckpointError(f"{why}; remove it to go on from {before}") from None
    for name in fields.keys() - {"params", "opt_state", "average"}:
        fields[name] = fields[name].item()
    chain = str(stored.get(CHAIN, ""))
    return State(**fields, **private_part(run_dir, fields["step"]), chain=chain)


def save(run_dir: Path, step: int, state: dict[str, Any]) -> None:
    """Write progress.json, then a checkpoint. Args: state: the fields of a `State`."""
    steps = _steps(run_dir)
    steps[str(step)] = {name: state[name] for name in APART}
    write_json(
        run_dir / PROGRESS, {"steps": dict(list(steps.items())[-KEEP_PROGRESS:])}, mode=0o600
    )
    write(run_dir, step, _published(state), state["chain"])


def private_part(run_dir: Path, step: int) -> dict[str, Any]:
    """The fields of `APART` after a step; empty if progress.json was removed."""
    fields = _steps(run_dir).get(str(step), {})
    return {name: fields[name] for name in APART if name in fields}


def _steps(run_dir: Path) -> dict[str, dict[str, Any]]:
    try:
        steps = read_json(run_dir / PROGRESS).get("steps")
    except (FileNotFoundError, FileDamaged):  # no guarantee depends on these values
        return {}
    return steps if isinstance(steps, dict) else {}


def _published(state: dict[str, Any]) -> dict[str, Any]:
    """The fields of a state that may be published."""
    return {name: value for name, value in state.items() if name not in (*APART, "chain")}


def results(state: dict[str, Any]) -> dict[str, Any]:
    """The fields of `summary.json` that follow from a state.

    Args: state: the fields of a `State`, or those of a checkpoint and of `private_part`.
    """
    found = {name: state[name] for name in REALISED if name in state}
    if all(name in state for name in LOSSES):
        is_last = state["evaluated"] == state["step"]  # not if it was stopped in between
        losses = (state["initial_eval_loss"], state["eval_loss"] if is_last else math.nan)
        names = ("initial_eval_loss", "final_eval_loss")
        found |= {n: to_json(float(loss)) for n, loss in zip(names, losses, strict=True)}
    return {
        "final_clip_norm": float(state["clip_norm"]),
        "steps_done": int(state["step"]),
        "lost_steps": int(state["lost_steps"]),
        "params_sha256": params_sha256(released(state)),
        **found,
    }


def write(run_dir: Path, step: int, state: dict[str, Any], chain: str = "") -> Path:
    """Write the state after `step` steps, and remove all but the last KEEP checkpoints.

    Args:
      state: a dict of array trees, numbers and strings.
      chain: of the ledger after the step; empty without a ledger.

    Returns: The file's path.
    """
    directory = run_dir / DIRECTORY
    make_directory(directory)
    for left in directory.glob(f"*{TEMPORARY}"):  # by a save that was killed
        left.unlink()
    arrays: dict[str, np.ndarray] = {}

    def placed(place: Any, leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | str):
            return leaf
        array = arrays[_name(place)] = np.asarray(leaf)
        return {ARRAY: [str(array.dtype), *array.shape]}

    whole = serialization.to_state_dict(state) | ({CHAIN: chain} if chain else {})
    text = json.dumps(jax.tree_util.tree_map_with_path(placed, whole))
    digest = hashlib.sha256(text.encode())
    for _, array in sorted(arrays.items()):
        digest.update(_bytes(array))
    path = path_of(run_dir, step)
    weights.write(path, arrays, {ABOUT: f"{digest.hexdigest()} {text}"})
    for old in kept(run_dir)[:-KEEP]:
        old.unlink()
    return path


def _name(place: Any) -> str:
    return jax.tree_util.keystr(place, simple=True, separator="/")


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in order, without a copy of an array that is in order."""
    return np.ravel(array).view(np.uint8).data


class Saver:
    """Writes checkpoints in a thread, one at a time; leaving its context waits for the last.

    A state must not change after it was given to `save`; JAX's arrays never do.
    """

    def __init__(self, write: Callable[[int, dict[str, Any]], None], step: int):
        """Start the thread.

        Args:
          write: (step, state) -> None; writes a state, which is durable when it returns.
          step: the step of the existing checkpoint, or 0.
        """
        self._write, self._step = write, step
        self._thread, self._last = ThreadPoolExecutor(1), None
        self._saved_at = time.monotonic()

    def due(self, step: int, every: int) -> bool:
        """True if a state is to be saved after `step`: every `every` steps or `LONGEST_S`."""
        return step % every == 0 or time.monotonic() - self._saved_at >= LONGEST_S

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state unless that step was saved. Raises the error of the previous save, if
        any."""
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


def path_of(run_dir: Path, step: int) -> Path:
    """The file of the checkpoint after `step` steps."""
    return run_dir / DIRECTORY / f"step-{step:08d}{SUFFIX}"


def latest(run_dir: Path) -> Path | None:
    """The newest checkpoint, if there is one."""
    return max(kept(run_dir), default=None)


def kept(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, the newest last."""
    return sorted((run_dir / DIRECTORY).glob(f"step-*{SUFFIX}"))


def load(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint as nested dicts of arrays.

    Raises: CheckpointError: it was changed, or is no state of a run.
    """
    try:
        with safe_open(path, "numpy") as file:
            sha256, _, text = file.metadata()[ABOUT].partition(" ")
            tree, digest = json.loads(text), hashlib.sha256(text.encode())
            leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_stands)
            stored = {_name(place): leaf[ARRAY] for place, leaf in leaves if _stands(leaf)}
            if stored.keys() != set(file.keys()):
                raise ValueError
            arrays = {name: file.get_tensor(name) for name in stored}
            for name, array in sorted(arrays.items()):
                if [str(array.dtype), *array.shape] != stored[name]:
                    raise ValueError
                digest.update(_bytes(array))
            if digest.hexdigest() != sha256:
                raise ValueError
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: was cut or changed since it was written") from None
    values = [arrays[_name(place)] if _stands(x) else _value(x) for place, x in leaves]
    state = jax.tree.unflatten(treedef, values)
    if isinstance(state, dict) and "params" in state:
        return state
    raise CheckpointError(f"{path}: expected the state of a run")


def _stands(leaf: Any) -> bool:
    """True if an entry of a state's JSON is the type and shape of an array."""
    return isinstance(leaf, dict) and ARRAY in leaf


def _value(leaf: Any) -> Any:
    return leaf if isinstance(leaf, str) else np.asarray(leaf)


def load_params(path: Path) -> Any:
    """The released parameters of a checkpoint, as nested dicts of float32 arrays."""
    return released(load(path))


def released(state: Mapping[str, Any]) -> Any:
    """The parameters that are evaluated and exported: the average, if the state has one."""
    average = state.get("average")
    return state["params"] if average is None else average


def params_sha256(params: Any, dtype: Any = None) -> str:
    """sha256 over names, shapes, types and bytes of all parameters.

    Args: dtype: type that the arrays are converted to; None: their own.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        leaf = np.asarray(leaf, dtype)
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        digest.update(_bytes(leaf))
    return digest.hexdigest()
