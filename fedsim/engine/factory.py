"""The choice of the engine by the settings."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax

from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine, ignore
from fedsim.engine.environment import remember_programs
from fedsim.engine.preflight import cluster_address
from fedsim.engine.task import Task
from fedsim.errors import expect
from fedsim.installation import optional


def create(config: EngineConfig, task: Task, *, warn: Callable[[str], None] = ignore) -> Engine:
    """Create the engine of the settings. Its workers are starting; `Engine.ready` waits for them.

    Args:
      config: kind of engine, workers, threads and accelerator.
      task: the model and its data.
      warn: receives warnings about workers.
    Raises: ConfigError: the accelerator does not exist, or the cluster cannot be reached or has no
      room for the workers.
    """
    compiled = remember_programs()
    if config.kind == "local":
        expect_accelerator(config)
        from fedsim.engine.worker import LocalEngine

        return LocalEngine(task, num_lanes=config.num_lanes)
    with optional():
        from fedsim.engine.ray_engine import RayEngine

    return RayEngine(
        task,
        num_lanes=config.num_lanes,
        num_workers=config.num_workers,
        threads=config.threads_per_worker,
        accelerator=config.accelerator,
        timeout_s=config.worker_timeout,
        wait_s=config.wait_for_workers,
        cache_dir=compiled,
        warn=warn,
    )


@contextmanager
def start_cluster_early(config: EngineConfig) -> Iterator[Callable[..., Engine]]:
    """Start a private cluster, if the settings need one, while the caller goes on; it ends with
    the context.

    Yields: `create` for these settings, of the task and `warn`, which waits for the cluster.
      Raises: EngineError: Ray does not start.
    """
    if config.kind == "local" or cluster_address():
        yield functools.partial(create, config)
        return

    def create_there(task: Task, **how: Any) -> Engine:
        cluster.result()
        return create(config, task, **how)

    with ThreadPoolExecutor(1) as thread:
        cluster = thread.submit(_cluster, config)
        try:
            yield create_there
        finally:
            if cluster.exception() is None:
                cluster.result().close()


def _cluster(config: EngineConfig) -> Any:
    """Import Ray and start a cluster of this process."""
    with optional():
        from fedsim.engine import actors

    return actors.connect(config.num_workers, config.threads_per_worker)


def expect_accelerator(config: EngineConfig) -> None:
    """Raise ConfigError if this process has not the accelerator of the settings."""
    if config.accelerator != "auto":
        backend = jax.default_backend()
        expected = f"auto, or {backend}, which is what JAX finds on this machine"
        expect("accelerator", config.accelerator, config.accelerator == backend, expected)


def reduction(config: EngineConfig, *, exact: bool) -> str:
    """Describe the order of additions in sums: engines with equal descriptions give equal bits.

    Args:
      config: the settings of the engine.
      exact: true if sums are of whole numbers, as with noise; then no order matters.
    """
    return "whole numbers" if exact else f"{config.num_lanes} lanes in order"
