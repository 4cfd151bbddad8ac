"""From a run's settings to its summary: open, plan, launch."""

from typing import Any

from fedsim.config import Algorithm, PrivacyConfig, RunConfig
from fedsim.engine import versions
from fedsim.plan import method_for
from fedsim.run import Console, directory
from fedsim.training.open import OpenRun, Plant, Source, open_run
from fedsim.training.planned import PlannedRun, plan_run
from fedsim.training.resolve import runnable
from fedsim.training.trainer import Callback, Trainer


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    source: Source | None = None,
    plant: Plant | None = None,
    callback: Callback | None = None,
    trial: bool = False,
    count: bool = True,
    held_out: bool = True,
) -> dict[str, Any]:
    """Train, or go on training; returns what `summary.json` holds.

    Nothing is written to the run directory before everything has been found in order.
    Args:
      source: data and task, instead of those that the settings name.
      plant: of an audit.
      callback: called after every step with its number, from 1, and its metrics.
      trial: it is one of a private selection, which is counted in the ledger of the data instead.
      count: count it in the ledger of the data; False: a replay, which releases nothing new.
      held_out: evaluate on held-out users, which is done without noise.
    Raises: ConfigError (a user's mistake), EngineError (workers), LedgerError.
    """
    privacy = runnable(privacy, run)
    with open_run(
        algorithm, privacy, run, console, source=source, plant=plant, held_out=held_out
    ) as opened:
        planned = plan_run(opened, counted=count and not trial, trial=trial)
        return launch(opened, planned, callback=callback, replays=not count).fit()


def launch(
    opened: OpenRun,
    planned: PlannedRun,
    *,
    callback: Callback | None = None,
    replays: bool = False,
) -> Trainer:
    """Write the run's directory if it is new, lock it, and return what takes the steps."""
    host = planned.engine.host(planned.params)
    strategy = {"name": str(planned.strategy), "why": planned.why}
    stored = opened.begin(planned.task, plan=planned.plan, host=host, strategy=strategy)
    drawing = directory.drawing_key(opened.key, stored)
    if drawing is not opened.key:  # of a seed; the pool of ELS takes seconds for many users
        users = opened.data.train
        method = method_for(opened.algorithm, planned.privacy, users, opened.key, drawing)
        planned = planned._replace(method=method)
    opened.console.note(f"{'clipped sum':17} {planned.strategy} ({planned.why})")
    other_bits = directory.other_bits(stored, versions(), host)
    if opened.stored and other_bits:
        opened.console.note(
            f"a step that is run again may have other bits: {other_bits}: then what it released is "
            "taken as it was kept, or left out"
        )
    return Trainer(opened, planned, host, other_bits, replays, callback)
