"""The clipping strategy of a run: the one that was asked for, or the fastest of a few by trial.

`choose_strategy` chooses on the driver, `try_strategy` compiles and times one on a worker.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim.clipping import (
    Clip,
    Strategy,
    UnsupportedModel,
    candidates,
    choose,
    num_coordinates,
    padded,
)
from fedsim.engine.engine import TRIAL_UNITS, Engine, Trial, ignore
from fedsim.engine.environment import free_memory, trial_clock
from fedsim.errors import ConfigError
from fedsim.files import NotOurs, own_directory, write_json

AUTO = "auto"
MESH = ", mesh "  # what a host that has one says, where units are taken one at a time
LEAST_TRIALS_S, TRIALS_SHARE = 10.0, 0.02  # what trials may take: seconds, or of the run
REPEATS = 3
FEW = 4  # units that are tried first
TELLING_SECONDS = 0.3  # what takes less, a first call and other work may have disturbed
TRIAL_SECONDS = 3.0  # a trial that takes longer is not repeated, nor done with more units
GIVE_UP = 1.5  # times the best so far: the same
SAME_NORMS = 0.02  # strategies agree to 1e-5 in float32; in bfloat16 to less


def choose_strategy(
    engine: Engine,
    params: Any,
    rows: np.ndarray,
    clip: Clip,
    wanted: str,
    cache: Path,
    *,
    num_units: float = 0.0,
    heard: Callable[[int, int], None] = ignore,
) -> tuple[Strategy, str]:
    """The strategy for units like `rows`, and a line that says why.

    The choice is part of a result's bits and a timer makes it, so it is remembered: runs alike on
    the same machine make the same one. One that ended before all were tried is that of runs of this
    length alone.
    Args:
      rows: [units, group], as a step draws them; some are tried.
      wanted: "auto", or a strategy.
      cache: the directory where choices are remembered.
      num_units: of the whole run: no trial is begun that would end, if it took as long as those
        before it, after ten seconds or a fiftieth of the run.
      heard: told how many of how many strategies were tried.
    Raises: ConfigError: the strategy that is wanted cannot be used.
    """
    rows = rows[(rows >= 0).any(axis=1)]
    # Powers of two, so that draws of about as many make the same choice.
    together = max(1, 2 ** round(math.log2(max(1, len(rows) / engine.num_lanes))))
    most = min(TRIAL_UNITS, 2 ** len(rows).bit_length())
    rows, group = rows[:most], rows.shape[1]
    if wanted != AUTO:
        strategy = Strategy.parse(wanted)
        if strategy.name == "scan" or not len(rows):
            return strategy, "as asked for"
        *_, trial = engine.try_strategies(params, rows, clip, [Strategy(), strategy])
        if trial.fault is not None:
            raise ConfigError.of("strategy", wanted, f"another one: {trial.fault}")
        return strategy, "as asked for"
    if not len(rows):
        return Strategy("scan", min(group, 8)), "nothing to try others on"
    count = num_coordinates(params)
    machine = engine.machine(params)
    on_cpu = ", cpu," in machine and MESH not in machine
    tried = candidates(group, count, on_cpu=on_cpu)
    digest = _digest(machine, params, (most, together, group), tried)
    of_all, of_some = cache / f"{digest}.json", cache / f"{digest}-{num_units:.0f}.json"
    ours = _is_ours(cache)
    known = (_remembered(of_all, tried) or _remembered(of_some, tried)) if ours else None
    if known is not None:
        return known, "as on this machine before"
    began, trials = time.monotonic(), []
    for trial in engine.try_strategies(params, rows, clip, tried, together):
        trials.append(trial)
        heard(len(trials), len(tried))
        best = min((t.seconds for t in trials if t.fault is None), default=math.inf)
        run = best / len(rows) * num_units / engine.num_workers
        next_ends = (time.monotonic() - began) * (len(trials) + 1) / len(trials)
        if next_ends > max(LEAST_TRIALS_S, TRIALS_SHARE * run):
            break
    strategy = choose([(t.strategy, None if t.fault else t.seconds) for t in trials])
    why = "; ".join(map(_describe, trials))
    if ours:
        file = of_all if len(trials) == len(tried) else of_some
        write_json(file, {"strategy": str(strategy), "trials": why})
    return strategy, why


def _is_ours(cache: Path) -> bool:
    try:
        own_directory(cache)
    except NotOurs:  # what is remembered there may be anybody's
        return False
    return True


def _remembered(file: Path, tried: Sequence[Strategy]) -> Strategy | None:
    """The choice that was written there, or None where it is none of those that would be tried:
    of these the guarantee is known, and anyone who can write to the cache can name another."""
    try:
        found = Strategy.parse(str(json.loads(file.read_text())["strategy"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return found if found in tried else None


def _describe(trial: Trial) -> str:
    result = trial.fault or f"{trial.seconds * 1e3:.3g} ms, {trial.memory / 2**20:.0f} MiB"
    return f"{trial.strategy} {result}"


def _digest(machine: str, params: Any, units: Sequence[int], tried: Sequence[Strategy]) -> str:
    """Names what times depend on: the machine, the model, the shapes, the programs."""
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params)
    facts = [machine, str(shapes), units, list(map(str, tried)), jax.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def try_strategy(
    worker: Any,
    params: Any,
    rows: np.ndarray,
    clip: Clip,
    strategy: Strategy,
    norms: np.ndarray | None,
    best: float,
    together: int,
) -> tuple[Trial, np.ndarray]:
    """Compile and time a strategy on the units among `rows` of the length that costs most.

    Args:
      worker: a `Worker`, which has the parameters on its device.
      norms: of these units, as another strategy finds them; None: nothing to hold against.
      best: seconds of the fastest strategy so far.
      together: units of a lane, at least one.
    Returns: (what became of it, with the seconds that all of `rows` would take; norms).
    """
    lengths = worker.lengths(rows)
    length = _most_telling(lengths)
    rows = rows[lengths == length]
    count = strategy.units_at_once(rows.shape[1])
    some = np.resize(rows, (-(-len(rows) // count) * count, rows.shape[1]))
    share = padded(lengths, count, together) / (len(some) * length)
    try:
        trial, found = _try(worker, params, some, clip, strategy, best / share)
    except UnsupportedModel as error:
        return Trial(strategy, fault=str(error)), np.zeros(0)
    found = found[: len(rows)]
    if trial.fault is None and not _alike(found, norms):
        trial = dataclasses.replace(trial, fault="other norms than simpler ones find")
    return dataclasses.replace(trial, seconds=trial.seconds * share), found


def _try(worker, params, rows, clip, strategy, best):
    programs = worker.programs
    before = set(programs.compiled)
    for chunk in worker.lane_chunks(params, rows, clip, strategy):
        programs.compile(programs.zeros(params, clip), params, chunk, clip, strategy)
    new = [programs.compiled[key].memory_analysis() for key in programs.compiled.keys() - before]
    memory = max((found.temp_size_in_bytes for found in new if found), default=0)
    if jax.default_backend() == "cpu" and worker.mesh is not None:  # one memory for all devices
        memory *= worker.mesh.size
    if memory > (free := free_memory()):
        fault = f"needs {memory / 2**20:.0f} MiB, and {free / 2**20:.0f} are free"
        return Trial(strategy, memory=memory, fault=fault), np.zeros(0)
    clock = trial_clock()

    def timed(rows):
        start = clock()
        _, stats = worker.add_lane(params, rows, clip, strategy)
        return clock() - start, stats.norms

    # A few units tell whether there is anything to look at closely.
    few = max(FEW, strategy.units_at_once(rows.shape[1]))
    for chunk in worker.lane_chunks(params, rows[:few], clip, strategy):
        programs.checked(programs.zeros(params, clip), params, chunk, clip, strategy)
    probe, norms = timed(rows[:few])
    seconds = probe * len(rows) / len(rows[:few])
    if probe < TELLING_SECONDS or seconds < min(TRIAL_SECONDS, GIVE_UP * best):
        times, norms = zip(*(timed(rows) for _ in range(REPEATS)), strict=True)
        seconds, norms = min(times), norms[0]
    return Trial(strategy, seconds, memory), norms


def _alike(found: np.ndarray, expected: np.ndarray | None) -> bool:
    """Whether norms are the same, as far as both are known."""
    known = 0 if expected is None else min(len(found), len(expected))
    return expected is None or np.allclose(
        found[:known], expected[:known], SAME_NORMS, equal_nan=True
    )


def _most_telling(lengths: np.ndarray) -> int:
    """The length of the units that make up most together, the shortest where there are several."""
    values, counts = np.unique(lengths, return_counts=True)
    return values[(values * counts).argmax()]
