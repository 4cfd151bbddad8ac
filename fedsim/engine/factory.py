"""Makes the engine that the settings ask for."""

from collections.abc import Callable

import jax

from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine, ignore
from fedsim.engine.environment import remember_programs
from fedsim.engine.task import Task
from fedsim.errors import expect


def create(config: EngineConfig, task: Task, *, note: Callable[[str], None] = ignore) -> Engine:
    """The engine that is asked for, its workers on their way up; `Engine.ready` waits for them.

    Args: note: told, for people, what happened to workers.
    Raises: ConfigError: the cluster cannot be reached or has no room for the workers.
    """
    compiled, mesh = remember_programs(), config.mesh_shape
    if config.kind == "local":
        expect_accelerator(config)
        from fedsim.engine.worker import LocalEngine

        return LocalEngine(task, num_lanes=config.num_lanes, mesh=mesh)
    from fedsim.engine.ray_engine import RayEngine

    return RayEngine(
        task,
        num_lanes=config.num_lanes,
        mesh=mesh,
        num_workers=config.num_workers,
        threads=config.threads_per_worker,
        devices=mesh.devices if mesh else config.devices_per_worker,
        accelerator=config.accelerator,
        wait_s=config.wait_for_workers,
        cache_dir=compiled,
        note=note,
    )


def expect_accelerator(config: EngineConfig) -> None:
    """Raises ConfigError where this process is to compute on an accelerator that it has not."""
    if config.accelerator != "auto":
        found = jax.default_backend()
        expected = f"auto, or {found}, which is what JAX finds on this machine"
        expect("accelerator", config.accelerator, config.accelerator == found, expected)


def reduction(config: EngineConfig, *, exact: bool) -> str:
    """How sums are added, as far as their bits depend on it. Engines with the same reduction give
    the same bits.

    Args: exact: whether sums are of whole numbers, as with noise; then nothing matters.
    """
    return "whole numbers" if exact else f"{config.num_lanes} lanes in order"
