"""Engines: where gradients are computed. Ray is imported below this package alone."""

from fedsim.config import RunConfig
from fedsim.engine.engine import Engine, EngineError
from fedsim.files import cache_dir

__all__ = ["Engine", "EngineError", "start"]


def start(run: RunConfig, task) -> Engine:
    """The engine a run asks for, its workers on their way up; `Engine.ready` waits for them.

    Raises: ConfigError: the cluster cannot be reached or has no room for the workers.
    """
    if run.engine == "local":
        from fedsim.engine.local import LocalEngine

        return LocalEngine(task, num_lanes=run.num_lanes)
    from fedsim.engine.ray_pool import RayPool

    return RayPool(
        task,
        num_lanes=run.num_lanes,
        num_workers=run.num_workers,
        threads=run.threads_per_worker,
        cache_dir=cache_dir() / "compiled",
    )
