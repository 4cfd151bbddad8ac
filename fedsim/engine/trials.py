"""The choice of a run's clipping strategy: the requested one, or the fastest of a few by trial.

Trials read made-up rows alone, so the choice is the same for all data of one model and length.
`choose_strategy` chooses on the driver; `try_strategy` compiles and times one strategy on a worker.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim import cgroups
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
from fedsim.engine.environment import trial_clock
from fedsim.engine.task import MADE_UP
from fedsim.errors import ConfigError
from fedsim.files import NotOurs, keep_in_cache, own_directory

AUTO = "auto"
LEAST_TRIALS_S, TRIALS_SHARE = 10.0, 0.02  # time for trials: seconds, or a share of the run
REPEATS = 3
FEW = 2  # units of the first trial
TELLING_SECONDS = 0.3  # below, a first call and other work on the machine disturb the time
TRIAL_SECONDS = 3.0  # a first trial that extrapolates to more is not repeated with all units
GIVE_UP = 1.5  # likewise for this multiple of the best time so far
SAME_NORMS = 0.02  # relative; strategies agree to 1e-5 in float32, and to less in bfloat16


def choose_strategy(
    engine: Engine,
    params: Any,
    num_units: int,
    group: int,
    clip: Clip,
    wanted: str,
    cache: Path,
    *,
    num_steps: int = 0,
    first: np.ndarray | None = None,
    heard: Callable[[int, int], None] = ignore,
) -> tuple[Strategy, str]:
    """Choose the strategy for steps of about `num_units` units of `group` rows.

    Bits of a result depend on the choice, and a timer makes it, so it is cached: equal runs on one
    machine make the same choice. A choice that was made before all strategies were tried is cached
    for runs of this length alone.
    Args:
      engine: computes the trials, on one worker.
      params: tree of float32 arrays.
      num_units: expected number of units of a step; at most TRIAL_UNITS are made up.
      group: rows of a unit.
      clip: the clip norm C.
      wanted: "auto", or a strategy.
      cache: the directory of cached choices.
      num_steps: steps of the run. No trial begins that would end, at the average time of the
        trials so far, after ten seconds or 2 % of the run, whichever is more.
      first: units of the first step [units, group], whose programs are compiled in the background
        once the choice is made; it does not depend on them.
      heard: called with (strategies tried, strategies).
    Returns: (strategy, a line with the reason).
    Raises: ConfigError: the requested strategy cannot be used.
    """
    # Powers of two, so that steps of similar size make the same choice.
    together = max(1, 2 ** round(math.log2(max(1, num_units / engine.num_lanes))))
    most, of_run = min(TRIAL_UNITS, 2 ** num_units.bit_length()), num_steps * num_units
    rows = np.arange(most * group).reshape(most, group)

    def prepare(strategy: Strategy) -> None:
        # After the choice: what is compiled depends on the data, and takes time from trials.
        if first is not None:
            engine.prepare(params, first, clip, strategy)

    if wanted != AUTO:
        prepare(Strategy.parse(wanted))
        return _requested(engine, params, rows, clip, wanted), "as asked for"
    machine = engine.machine(params)
    buckets = engine.task.buckets
    on_cpu = ", cpu," in machine
    shared = on_cpu and Strategy("direct").shares_rows(group, buckets)
    limited = buckets is not None and bool(buckets.side_by_side)
    size = num_coordinates(params)
    tried = candidates(group, size, on_cpu=on_cpu, shared=shared, limited=limited)
    digest = _digest(machine, params, (most, together, group), tried)
    of_all, of_some = cache / f"{digest}.json", cache / f"{digest}-{of_run}.json"
    ours = _is_ours(cache)
    if ours and (cached := _cached(of_all, tried) or _cached(of_some, tried)):
        prepare(cached)
        return cached, "the fastest when this machine tried"
    began, trials = time.monotonic(), []
    for trial in engine.try_strategies(params, rows, clip, tried, together):
        trials.append(trial)
        heard(len(trials), len(tried))
        best = min((t.seconds for t in trials if t.fault is None), default=math.inf)
        run = best / len(rows) * of_run / engine.num_workers
        next_ends = (time.monotonic() - began) * (len(trials) + 1) / len(trials)
        if next_ends > max(LEAST_TRIALS_S, TRIALS_SHARE * run):
            break
    strategy = choose([(t.strategy, None if t.fault else t.seconds) for t in trials])
    prepare(strategy)
    times = "; ".join(map(_describe, trials))
    which = f"fastest of {len(trials)} tried" if len(trials) > 1 else "the only one tried"
    if ours:
        file = of_all if len(trials) == len(tried) else of_some
        with suppress(OSError):  # a cache that cannot be written costs time, never a run
            keep_in_cache(file, json.dumps({"strategy": str(strategy), "trials": times}).encode())
    return strategy, f"{which}: {times}"


def _requested(engine: Engine, params: Any, rows: np.ndarray, clip: Clip, wanted: str) -> Strategy:
    """Parse a requested strategy and try it beside `scan`. Raises ConfigError if it has a fault."""
    strategy = Strategy.parse(wanted)
    if strategy.name != "scan":
        *_, trial = engine.try_strategies(params, rows, clip, [Strategy(), strategy])
        if trial.fault is not None:
            raise ConfigError.of("strategy", wanted, f"another one: {trial.fault}")
    return strategy


def _is_ours(cache: Path) -> bool:
    """True if only this user can write to the cache: files of others are not trusted."""
    try:
        own_directory(cache)
    except NotOurs:
        return False
    return True


def _cached(file: Path, tried: Sequence[Strategy]) -> Strategy | None:
    """Read a cached choice. None if it is not one of `tried`, the strategies that `auto` allows:
    whoever can write to the cache could name another."""
    try:
        strategy = Strategy.parse(str(json.loads(file.read_text())["strategy"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return strategy if strategy in tried else None


def _describe(trial: Trial) -> str:
    result = trial.fault or f"{trial.seconds * 1e3:.3g} ms, {trial.memory / 2**20:.0f} MiB"
    return f"{trial.strategy} {result}"


def _digest(machine: str, params: Any, units: Sequence[int], tried: Sequence[Strategy]) -> str:
    """Digest all on which times depend: the machine, the model, the shapes, the programs."""
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
    """Compile and time a strategy on those made-up units whose length costs most in total.

    Args:
      worker: a `Worker`, with the parameters on its device.
      params: tree of float32 arrays on the device.
      rows: numbers of made-up rows, int [units, group].
      clip: the clip norm C.
      strategy: the strategy to try.
      norms: norms of these units by another strategy, to compare with; None: no comparison.
      best: seconds of the fastest strategy so far.
      together: units of a lane, at least one.
    Returns: (the trial, with the seconds that all of `rows` would take; norms).
    """
    lengths = worker.lengths(rows, strategy)
    length = _most_telling(lengths)
    rows = rows[lengths == length]
    units_of_pass = functools.partial(worker.units_of_pass, strategy, rows.shape[1])
    count = units_of_pass(length)
    full = np.resize(rows, (-(-len(rows) // count) * count, rows.shape[1]))  # whole passes
    share = padded(lengths, units_of_pass, together) / (len(full) * length)
    try:
        trial, computed = _try(worker, params, full, clip, strategy, best / share)
    except UnsupportedModel as error:
        return Trial(strategy, fault=str(error)), np.zeros(0)
    computed = computed[: len(rows)]
    if trial.fault is None and not _alike(computed, norms):
        trial = dataclasses.replace(trial, fault="other norms than simpler ones find")
    return dataclasses.replace(trial, seconds=trial.seconds * share), computed


def _try(worker, params, rows, clip, strategy, best):
    programs = worker.programs
    compiled = [
        programs.compile(programs.zeros(params, clip), params, chunk, clip, strategy)
        for chunk in worker.lane_chunks(params, rows, clip, strategy, MADE_UP)
    ]
    analyses = (program.memory_analysis() for program in compiled)
    memory = max((analysis.temp_size_in_bytes for analysis in analyses if analysis), default=0)
    if memory > (free := free_memory()):
        fault = f"needs {memory / 2**20:.0f} MiB, and {free / 2**20:.0f} are free"
        return Trial(strategy, memory=memory, fault=fault), np.zeros(0)
    worker.be_alone()
    clock = trial_clock()

    def timed(rows):
        start = clock()
        _, stats = worker.add_lane(params, rows, clip, strategy, MADE_UP)
        return clock() - start, stats.norms

    # A few units show whether the strategy is fast enough to be timed closely.
    few = max(FEW, strategy.units_at_once(rows.shape[1]))
    for chunk in worker.lane_chunks(params, rows[:few], clip, strategy, MADE_UP):
        programs.checked(programs.zeros(params, clip), params, chunk, clip, strategy)
    probe, norms = timed(rows[:few])
    seconds = probe * len(rows) / len(rows[:few])
    if probe < TELLING_SECONDS or seconds < min(TRIAL_SECONDS, GIVE_UP * best):
        times, norms = zip(*(timed(rows) for _ in range(REPEATS)), strict=True)
        seconds, norms = min(times), norms[0]
    return Trial(strategy, seconds, memory), norms


def _alike(norms: np.ndarray, expected: np.ndarray | None) -> bool:
    """True if norms of two strategies agree on the units that both computed."""
    if expected is None:
        return True
    both = min(len(norms), len(expected))
    return np.allclose(norms[:both], expected[:both], SAME_NORMS, equal_nan=True)


def _most_telling(lengths: np.ndarray) -> int:
    """Return the length with the largest sum over its units; the shortest of equal ones."""
    values, counts = np.unique(lengths, return_counts=True)
    return int(values[(values * counts).argmax()])


def free_memory() -> int:
    """Return the free bytes of a worker: of its accelerator, or its share of the host's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    count = cgroups.cpus()
    return cgroups.free_memory() * min(count, int(os.environ.get("NPROC", count))) // count
