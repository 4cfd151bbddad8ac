"""The choice of the engine and of the clipping strategy by the settings."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from fedsim.clipping import AUTO, Clip, Strategy, by_rule, num_coordinates
from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine, ignore
from fedsim.engine.environment import keep_compiled
from fedsim.engine.task import Task
from fedsim.errors import expect


def create(config: EngineConfig, task: Task, *, warn: Callable[[str], None] = ignore) -> Engine:
    """Create the engine of the settings. Its workers are starting; `Engine.ready` waits for them.

    Args:
      config: kind of engine, workers, threads and accelerator.
      task: the model and its data.
      warn: receives warnings about workers.
    Raises: ConfigError: the accelerator does not exist, or the cluster cannot be reached or has no
      room for the workers.
    """
    compiled = keep_compiled()
    if config.kind == "local":
        if config.accelerator != "auto":
            backend = jax.default_backend()
            expected = f"auto, or {backend}, which is what JAX finds on this machine"
            expect("accelerator", config.accelerator, config.accelerator == backend, expected)
        from fedsim.engine.worker import LocalEngine

        return LocalEngine(task, num_lanes=config.num_lanes)
    from fedsim.engine.ray_engine import RayEngine

    return RayEngine(task, config, warn=warn, cache_dir=compiled)


def choose_strategy(
    engine: Engine,
    params: Any,
    group: int,
    clip: Clip,
    config: EngineConfig,
    *,
    public_places: bool = False,
    check: bool = True,
) -> Strategy:
    """Choose the strategy for steps with units of `group` rows: the one of the settings, or of the
    rule.

    Args:
      engine: its device decides, and one worker checks that `ghost` supports the model.
      params: tree of float32 arrays.
      group: rows of a unit.
      clip: the clip norm C.
      config: `strategy` and `rows_per_pass`.
      public_places: as of `by_rule`.
      check: false: do not check `ghost`, which compiles programs.
    Raises: ConfigError: the requested strategy does not support the model, or texts would decide
      the places of units in passes on an accelerator.
    """
    task, name, rows = engine.task, config.strategy, config.rows_per_pass
    take = functools.partial(
        by_rule,
        group=group,
        num_parameters=num_coordinates(params),
        adapters=task.frozen is not None,
        on_cpu=engine.platform == "cpu",
        length=task.buckets.lengths[-1] if task.buckets else None,
        public_places=public_places,
    )
    strategy = take(name, rows)
    single = "units one at a time on an accelerator, where others' texts would decide their places"
    several = not (public_places or clip.in_float32) and engine.keeps_places(strategy, group)
    expect("rows_per_pass", rows, not several, f"at most {group}: {single}")
    if check and strategy.name == "ghost":
        fault = engine.ghost_fault(params, group, clip, strategy)
        if fault and name == AUTO:
            return take("direct", rows)
        expect("strategy", name, not fault, f"another one: {strategy} {fault}")
    return strategy
