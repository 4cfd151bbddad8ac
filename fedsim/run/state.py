"""Where a run is: what its checkpoints hold, and a resumed run goes on from."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from fedsim.config import to_json
from fedsim.run import checkpoint
from fedsim.run.console import Console


@dataclasses.dataclass
class State:
    """Everything that a resumed run needs."""

    params: Any
    opt_state: Any
    step: int = 0
    lost_steps: int = 0
    """Steps that were released and paid for, and whose gradient was lost to a crash."""
    gradients_computed: int = 0
    wall_seconds: float = 0.0
    clip_norm: float = math.nan
    """C of the next step, which moves where the plan says so."""
    initial_eval_loss: float = math.nan
    eval_loss: float = math.nan
    evaluated: int = -1
    """The step after which eval_loss was computed."""


def restored(run_dir: Path, state: State, console: Console) -> State:
    """The last checkpoint, or the state as it is if there is none."""
    kept = checkpoint.kept(run_dir)
    if not kept:
        return state
    *older, path = kept
    for each in older:
        checkpoint.check(each)
    fields = checkpoint.restore(path, vars(state))
    for name in vars(state).keys() - {"params", "opt_state"}:
        fields[name] = fields[name].item()
    state = State(**fields)
    console.note(f"resuming after step {state.step}")
    return state


def results(state: dict[str, Any]) -> dict[str, Any]:
    """What `summary.json` says of a state. Args: state: the fields of a `State`."""
    return {
        "final_clip_norm": float(state["clip_norm"]),
        "steps_done": int(state["step"]),
        "lost_steps": int(state["lost_steps"]),
        "initial_eval_loss": to_json(float(state["initial_eval_loss"])),
        "final_eval_loss": to_json(float(state["eval_loss"])),
        "params_sha256": checkpoint.params_sha256(state["params"]),
        "gradients_computed": int(state["gradients_computed"]),
        "wall_seconds": round(float(state["wall_seconds"]), 3),
    }
