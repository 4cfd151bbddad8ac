"""The clipping strategy of a run, and a trial of it on made-up rows.

`choose_strategy` takes the one that the settings name, or that the rule of `clipping.by_rule`
takes, on the driver. `try_strategy` compiles it on a worker, compares what it finds with `scan`
where its norms are not those of gradients that it forms, and says what time and memory it needs.
Trials read made-up rows alone.
"""

import functools
import os
import time
from typing import Any

import jax
import numpy as np

from fedsim import cgroups
from fedsim.clipping import AUTO, Clip, Strategy, UnsupportedModel, by_rule, num_coordinates
from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine, Trial
from fedsim.engine.task import MADE_UP
from fedsim.errors import ConfigError

TRIAL_UNITS = 32  # most units on which a strategy is tried
FEW = 2  # least units that are computed
SAME_NORMS = 0.02  # relative; strategies agree to 1e-5 in float32, and to less in bfloat16


def choose_strategy(
    engine: Engine,
    params: Any,
    group: int,
    clip: Clip,
    config: EngineConfig,
    *,
    first: np.ndarray | None = None,
) -> tuple[Strategy, str]:
    """Choose the strategy for steps with units of `group` rows.

    Args:
      engine: tries the strategy, on one worker.
      params: tree of float32 arrays.
      group: rows of a unit.
      clip: the clip norm C.
      config: `strategy` and `rows_per_pass`.
      first: units of the first step [units, group], whose programs are compiled in the background;
        the choice does not depend on them.
    Returns: (strategy, a line with the reason).
    Raises: ConfigError: the requested strategy cannot be used.
    """
    task, name, rows = engine.task, config.strategy, config.rows_per_pass
    take = functools.partial(
        by_rule,
        group=group,
        num_parameters=num_coordinates(params),
        adapters=task.frozen is not None,
        on_cpu=engine.platform(params) == "cpu",
        length=task.buckets.lengths[-1] if task.buckets else None,
    )
    strategy, why = take(name, rows), "by rule" if name == AUTO else "as asked for"
    if strategy.name == "ghost" or (strategy.name == "direct" and rows is not None):
        dummy = np.arange(TRIAL_UNITS * group).reshape(TRIAL_UNITS, group)
        trial = engine.try_strategy(params, dummy, clip, strategy)
        if name == AUTO and trial.unsupported:  # which follows from the model alone
            why = f"by rule, as {strategy} does not support the model: {trial.unsupported}"
            strategy = take("direct", rows)
        elif trial.fault:
            setting, value = ("strategy", name) if trial.unsupported else ("rows_per_pass", rows)
            raise ConfigError.of(setting, value, f"another one: {strategy} {trial.fault}")
    if first is not None:
        engine.prepare(params, first, clip, strategy)
    return strategy, why


def try_strategy(
    worker: Any, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy
) -> Trial:
    """Try a strategy on those made-up units whose length costs most in total.

    Args:
      worker: a `Worker`, with the parameters on its device.
      params: tree of float32 arrays on the device.
      rows: numbers of made-up rows, int [units, group].
      clip: the clip norm C.
      strategy: the strategy to try.
    """
    group, lengths = rows.shape[1], worker.lengths(rows, strategy)
    values, counts = np.unique(lengths, return_counts=True)
    length = int(values[(values * counts).argmax()])
    passes = [(n, worker.units_of_pass(strategy, group, n)) for n in values.tolist()]
    most = dict(passes)[length]
    some = rows[lengths == length]
    some = np.resize(some, (-(-len(some) // most) * most, group))  # whole passes
    few = some[: max(FEW, most)]
    try:
        if (memory := _memory(worker, params, some, clip, strategy)) > (free := free_memory()):
            return Trial(memory=memory, free=free)
        _, stats = worker.add_lane(params, few, clip, strategy, MADE_UP)
        if strategy.name == "ghost":
            _, expected = worker.add_lane(params, few, clip, Strategy("scan", 1), MADE_UP)
            if not np.allclose(stats.norms, expected.norms, SAME_NORMS, equal_nan=True):
                raise UnsupportedModel("other norms than scan finds")
    except UnsupportedModel as error:
        return Trial(unsupported=str(error))
    start = time.perf_counter()
    worker.add_lane(params, few, clip, strategy, MADE_UP)  # again, as the first call compiled
    seconds = time.perf_counter() - start
    numbers = zip(passes, counts.tolist(), strict=True)
    padded = sum(n * units * -(-count // units) for (n, units), count in numbers)
    return Trial(seconds * padded / (len(few) * length), memory, free)


def _memory(worker, params, rows, clip, strategy) -> int:
    """Bytes that the program of some made-up units needs beside parameters and sum."""
    programs = worker.programs
    analyses = [
        programs.compile(
            programs.zeros(params, clip), params, chunk, clip, strategy
        ).memory_analysis()
        for chunk in worker.lane_chunks(params, rows, clip, strategy, MADE_UP)
    ]
    return max((analysis.temp_size_in_bytes for analysis in analyses if analysis), default=0)


def free_memory() -> int:
    """Return the free bytes of a worker: of its accelerator, or its share of the host's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    count = cgroups.cpus()
    return cgroups.free_memory() * min(count, int(os.environ.get("NPROC", count))) // count
