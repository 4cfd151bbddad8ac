"""Independent jobs on worker processes of Ray, each in the environment of a run's workers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import ActorPool

from fedsim.config import EngineConfig
from fedsim.engine.actors import cause, connect, placed_in_time
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import actor_options, keep_compiled
from fedsim.errors import FedsimError
from fedsim.files import cache_dir

RETRIES = 2  # of a job whose process is lost

Function = Callable[..., Any]


class Runner:
    """A process that computes one job after another, with its compiled programs."""

    def __init__(self, compiled: Path):
        """Start. Args: compiled: directory of compiled programs."""
        keep_compiled(compiled)

    def run(self, function: Function, job: Any, *shared: Any) -> Any:
        """Compute function(job, *shared) in this process."""
        return function(job, *shared)


def on_workers(
    function: Function, jobs: Sequence[Any], *shared: Any, config: EngineConfig
) -> Iterator[Any]:
    """Yield function(job, *shared) for each job, in their order.

    Args:
      function: importable in the processes; a job whose process is lost is computed again.
      shared: arguments of all jobs; each node stores them once.
      config: number, threads and accelerator of the processes.

    Raises:
      ConfigError: the cluster cannot be reached, or has no room.
      EngineError: a job failed, or its process was lost repeatedly.
    """
    workers = config.num_workers, config.threads_per_worker
    cluster, runners = connect(*workers), []
    try:
        placement = placed_in_time(cluster, *workers, config.accelerator, config.wait_for_workers)
        options = actor_options(placement) | {"max_task_retries": RETRIES}
        actor = ray.remote(Runner).options(**options)
        count = min(placement.num_workers, len(jobs))
        runners += [actor.remote(cache_dir() / "compiled") for _ in range(count)]
        stored = [ray.put(each) for each in shared]
        pool = ActorPool(runners)
        yield from pool.map(lambda runner, job: runner.run.remote(function, job, *stored), [*jobs])
    except RayTaskError as error:
        if isinstance(error.cause, FedsimError):
            raise error.cause from None
        raise EngineError(cause(error), details=str(error)) from error
    except RayError as error:
        raise EngineError(f"a process was lost repeatedly: {cause(error)}") from error
    finally:
        for runner in runners:
            ray.kill(runner)
        cluster.close()
