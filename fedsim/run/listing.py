"""The runs in a directory, a row each: what `fedsim runs` shows."""

import math
from pathlib import Path
from typing import Any

from fedsim.accounting import at_most
from fedsim.config import settings_of
from fedsim.errors import FedsimError
from fedsim.files import read_json
from fedsim.run import directory, ledger, metrics
from fedsim.run.console import spent
from fedsim.run.directory import Busy, StoredRun
from fedsim.run.terminal import aligned

COLUMNS = ("run", "algorithm", "data", "epsilon", "steps", "loss", "status")


def runs_in(place: Path) -> list[dict[str, Any]]:
    """The runs in a directory and below, by path: `COLUMNS`, `num_steps`, and `guarantee`.

    epsilon is what a run may claim: that of its plan, once a step was released. loss is the last
    one on users who are not trained on. status: finished, running, stopped (--resume goes on), or
    damaged.
    """
    found = sorted(place.rglob(directory.CONFIG))
    return [row for row in (_row(path.parent, place) for path in found) if row is not None]


def _row(run_dir: Path, place: Path) -> dict[str, Any] | None:
    """None: it is the config.json of something else, such as a model."""
    name = str(run_dir.relative_to(place))
    try:
        if "identity" not in read_json(run_dir / directory.CONFIG):
            return None
        stored = directory.load(run_dir)
        return {"run": name, **_facts(run_dir, stored)}
    except (FedsimError, OSError, KeyError, TypeError, ValueError):
        return {**dict.fromkeys(COLUMNS), "run": name, "status": "damaged"}


def _facts(run_dir: Path, stored: StoredRun) -> dict[str, Any]:
    summary = directory.summary_of(run_dir)
    epsilon, steps, loss = math.inf, 0, math.nan
    if summary is not None:
        epsilon, steps = spent(summary), int(summary["steps_done"])
        loss = float(summary["final_eval_loss"] or math.nan)
    else:
        lines = ledger.read(run_dir)[1:]
        logged = metrics.read(run_dir)
        losses = [float(line["eval/loss"]) for line in logged if "eval/loss" in line]
        steps = len(lines) or max((line["step"] for line in logged), default=0)
        if stored.private:
            plan = stored.plan if lines else None
            epsilon = plan.target_epsilon + plan.slack.epsilon if plan else math.nan
        loss = losses[-1] if losses else math.nan
    plan, num_steps = stored.plan, stored.settings.num_steps
    return {
        "algorithm": stored.identity.algorithm,
        "data": Path(str(settings_of(stored.run)["data"])).name,
        "epsilon": epsilon,
        "steps": steps,
        "num_steps": num_steps,
        "loss": loss,
        "status": _status(run_dir, steps >= num_steps),
        "guarantee": plan is not None and plan.guarantee,
    }


def _status(run_dir: Path, ended: bool) -> str:
    try:
        with directory.lock(run_dir, to_read=True):
            return "finished" if ended else "stopped"
    except Busy:
        return "running"


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as a table of plain text; a star where epsilon is no guarantee."""
    return aligned([COLUMNS, *map(_cells, rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] == "damaged":
        return [row["run"], *["-"] * (len(COLUMNS) - 2), "damaged"]
    epsilon = "-" if math.isnan(row["epsilon"]) else "inf"
    if math.isfinite(row["epsilon"]):
        epsilon = at_most(row["epsilon"], ".4f") + ("" if row["guarantee"] else "*")
    loss = "-" if math.isnan(row["loss"]) else f"{row['loss']:.4g}"
    steps = f"{row['steps']}/{row['num_steps']}"
    first = [str(row[name]) for name in ("run", "algorithm", "data")]
    return [*first, epsilon, steps, loss, row["status"]]
