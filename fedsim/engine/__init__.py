"""Engines: where gradients are computed. Ray is imported below this package alone."""

from fedsim.config import RunConfig, expect
from fedsim.engine.engine import Engine, EngineError
from fedsim.engine.worker import keep_compiled
from fedsim.files import cache_dir

__all__ = ["Engine", "EngineError", "reduction", "start"]


def start(run: RunConfig, task) -> Engine:
    """The engine a run asks for, its workers on their way up; `Engine.ready` waits for them.

    Raises: ConfigError: the cluster cannot be reached or has no room for the workers.
    """
    compiled = cache_dir() / "compiled"
    keep_compiled(compiled)  # the driver's own: optimizer, and everything with engine=local
    if run.engine == "local":
        from fedsim.engine.local import LocalEngine

        return LocalEngine(task, num_lanes=run.num_lanes)
    if run.engine == "spmd":
        from fedsim.engine.spmd import SpmdEngine as RayEngine
    else:
        from fedsim.engine.ray_pool import RayPool as RayEngine
    return RayEngine(
        task,
        num_lanes=run.num_lanes,
        num_workers=run.num_workers,
        threads=run.threads_per_worker,
        devices=run.devices_per_worker,
        accelerator=run.accelerator,
        wait_s=run.wait_for_workers,
        cache_dir=compiled,
    )


def reduction(run: RunConfig) -> str:
    """How sums are added, as far as their bits depend on it. Engines with the same reduction, lanes
    and devices of a worker give the same bits.

    Raises: ConfigError: with spmd, the number of workers is part of it and has to be given.
    """
    if run.engine != "spmd":
        return "lanes in order"
    given = run.num_workers is not None
    expect("num_workers", run.num_workers, given, "a number: bits depend on it with engine=spmd")
    return f"psum over {run.num_workers} workers"
