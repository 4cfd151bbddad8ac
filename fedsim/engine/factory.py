"""The choice of the engine and of the clipping strategy by the settings."""

import dataclasses
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

        # A lane ends with the transfer of its sum from the device.
        lanes = config.num_lanes if jax.default_backend() == "cpu" else 1
        return LocalEngine(task, num_lanes=lanes)
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
    note: Callable[[str], None] = ignore,
) -> Strategy:
    """Choose the strategy for steps with units of `group` rows: the one of the settings, or of the
    rule, whose rows of a pass are halved until the memory of an accelerator holds a step.

    Args:
      engine: its device decides, and one worker checks that `ghost` supports the model.
      params: tree of float32 arrays.
      group: rows of a unit.
      clip: the clip norm C.
      config: `strategy` and `rows_per_pass`.
      public_places: as of `by_rule`.
      check: false: do not check `ghost` and memory, which compiles programs.
      note: receives a line about fewer rows.
    Raises: ConfigError: the requested strategy does not support the model, texts would decide the
      places of units in passes on an accelerator, or its memory is too small.
    """
    task, name, rows = engine.task, config.strategy, config.rows_per_pass
    length = task.buckets.lengths[-1] if task.buckets else None
    take = functools.partial(
        by_rule,
        group=group,
        num_parameters=num_coordinates(params),
        adapters=task.frozen is not None,
        on_cpu=engine.platform == "cpu",
        length=length,
        public_places=public_places,
    )
    strategy = take(name, rows)
    single = "units one at a time on an accelerator, where others' texts would decide their places"
    several = not (public_places or clip.in_float32) and engine.keeps_places(strategy, group)
    expect("rows_per_pass", rows, not several, f"at most {group}: {single}")
    of_model = f"rows of {length} tokens and {num_coordinates(params):,} trained parameters"
    text = ""
    while check:
        fault, lack = engine.faults(params, group, clip, strategy)
        if fault and name == AUTO and strategy.name == "ghost":
            strategy = take("direct", rows)
            continue
        expect("strategy", name, not fault, f"another one: {strategy} {fault}")
        if not lack:
            break
        text = f"{strategy} with {of_model} {lack}"
        remedy = "fewer, a smaller max_length or model, or adapters (lora_rank)"
        expect("rows_per_pass", strategy.rows, strategy.rows > (rows or 1), f"{remedy}: {text}")
        strategy = dataclasses.replace(strategy, rows=strategy.rows // 2)
    if text:
        note(f"{text}: {strategy} is taken")
    return strategy
