"""The state of a run between two steps, from which it resumes.

Checkpoints have the part that may be published. Values that reveal sizes of draws, and losses of
held-out users, are in `progress.json`, which is for the owner of the run alone.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from fedsim.config import to_json
from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json
from fedsim.run import checkpoint

PROGRESS = "progress.json"
KEEP = checkpoint.KEEP + 1  # the last one's checkpoint may not be there yet
REALISED = ("gradients_computed", "wall_seconds")
"""Fields of a state that reveal sizes of draws."""
LOSSES = ("initial_eval_loss", "eval_loss", "evaluated")
APART = REALISED + LOSSES
"""Fields of a state that are in progress.json, and in no checkpoint."""


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
        return checkpoint.released(vars(self))


def restored(run_dir: Path, state: State) -> State:
    """The state of the last checkpoint, or `state` if there is none. Raises CheckpointError: a
    checkpoint was changed, or is of another run."""
    kept = checkpoint.kept(run_dir)
    if not kept:
        return state
    *older, path = kept
    for each in older:
        checkpoint.load(each)  # a changed one is refused before it is needed
    try:
        fields, chain = checkpoint.restore(path, _published(vars(state)))
    except checkpoint.CheckpointError as error:
        before = f"{older[-1].name}, the one before" if older else "the first step"
        raise checkpoint.CheckpointError(f"{error}; remove it to go on from {before}") from None
    for name in fields.keys() - {"params", "opt_state", "average"}:
        fields[name] = fields[name].item()
    return State(**fields, **private_part(run_dir, fields["step"]), chain=chain)


def save(run_dir: Path, step: int, state: dict[str, Any]) -> None:
    """Write progress.json, then a checkpoint. Args: state: the fields of a `State`."""
    steps = _steps(run_dir)
    steps[str(step)] = {name: state[name] for name in APART}
    write_json(run_dir / PROGRESS, {"steps": dict(list(steps.items())[-KEEP:])}, mode=0o600)
    checkpoint.save(run_dir, step, _published(state), state["chain"])


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

    Args:
      state: the fields of a `State`, or those of a checkpoint and of `private_part`.
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
        "params_sha256": checkpoint.params_sha256(checkpoint.released(state)),
        **found,
    }
