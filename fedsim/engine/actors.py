"""Ray actors: the workers of an engine, what is sent to them, and independent jobs."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError
from ray.util import ActorPool

from fedsim.config import EngineConfig
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import difference, keep_compiled, versions
from fedsim.engine.preflight import actor_options, expect_room, place_workers
from fedsim.engine.task import Task
from fedsim.errors import FedsimError
from fedsim.files import cpus

RETRIES = 2  # of a job whose process is lost


class Actors:
    """Creates the workers of one engine, on a cluster that it joins or starts."""

    def __init__(self, task: Task | None, config: EngineConfig, cache_dir: Path | None = None):
        """Connect to the cluster and place the workers.

        Args:
          task: the model and its data.
          config: number, threads and accelerator of the workers. With `wait_for_workers`, they may
            have no room yet: Ray starts them when there is, and asks an autoscaler for nodes.
          cache_dir: directory of compiled programs.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        # A private cluster declares the machine's CPUs, or more if the workers need more.
        self._cluster = Cluster(max(cpus(), (config.num_workers or 1) * config.threads_per_worker))
        try:
            nodes = self._cluster.nodes()
            self.placement = place_workers(config, nodes)
            if not config.wait_for_workers:
                expect_room(self.placement, nodes)
            # An argument of methods: an argument of the constructor would have to exist when Ray
            # starts an actor again.
            self.task = stored(task, "the task")
        except BaseException:
            self._cluster.close()
            raise
        self.warning = self._cluster.warning
        self.facts: dict[str, Any] = {}
        """Facts of the first worker that has answered; the others must be like it."""
        self._cache_dir = cache_dir
        self._versions = versions()

    def create(self, worker_class: type) -> Any:
        """Start an actor, which has no task yet."""
        actor = ray.remote(worker_class).options(**actor_options(self.placement))
        return actor.remote(cache_dir=self._cache_dir)

    def why_incompatible(self, facts: dict[str, Any]) -> str:
        """Say why a worker must not compute: its bits might differ. Empty if it may.

        Args:
          facts: the answer of `Worker.begin`.
        """
        if not (reason := difference(self._versions, facts["versions"])):
            self._versions |= facts["versions"]  # adds accelerators' packages, which it may lack
        self.facts = self.facts or facts
        kind, first = facts["kind"], self.facts["kind"]
        if not reason and kind != first:
            # Other processors and devices round differently. Which worker computes a unit may
            # depend on the other units drawn, so a missing unit would change more than its part.
            reason = f"{kind} instead of {first}: workers must be of one kind"
        return reason and f"the worker on {facts['host']} has {reason}"

    def close(self) -> None:
        """Disconnect from the cluster, and end it if it is a private one."""
        self.task = None
        self._cluster.close()


def stored(value: Any, what: str) -> Any:
    """Put a value into Ray's object store and return its reference.

    Raises: EngineError: there is no room for it.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        reason = f"no room for {what} in the object store: {cause(error)}"
        raise EngineError(reason) from error


def failure(place: str, error: Exception) -> EngineError:
    """Report an exception of a worker's code in one line, with its traceback in `details`."""
    return EngineError(f"{place}: {cause(error)}", details=_plain(str(error)) + "\n")


def cause(error: Exception) -> str:
    """Return the exception of the worker's code as one line, without Ray's frames."""
    inner = getattr(error, "cause", None)
    if inner is not None:
        return _plain(f"{type(inner).__name__}: {inner}")
    lines = [line.strip() for line in _plain(str(error)).strip().splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:", line)]
    return (named or lines or [type(error).__name__])[-1]


def _plain(text: str) -> str:
    """Remove terminal colours, which Ray adds."""
    return re.sub(r"\x1b\[\d*m", "", text)


class _Runner:
    """A process that computes one job after another, with its compiled programs."""

    def __init__(self, cache_dir: Path):
        keep_compiled(cache_dir)

    @ray.method(max_task_retries=RETRIES)
    def run(self, function: Callable[..., Any], job: Any, *shared: Any) -> Any:
        return function(job, *shared)


def on_workers(
    function: Callable[..., Any], jobs: Sequence[Any], *shared: Any, config: EngineConfig
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
    actors, runners = Actors(None, config, keep_compiled()), []
    try:
        count = min(actors.placement.num_workers, len(jobs))
        runners += [actors.create(_Runner) for _ in range(count)]
        references = [stored(each, "arguments") for each in shared]
        pool = ActorPool(runners)
        yield from pool.map(
            lambda runner, job: runner.run.remote(function, job, *references), [*jobs]
        )
    except RayTaskError as error:
        if isinstance(error.cause, FedsimError):
            raise error.cause from None
        raise failure("a job", error) from error
    except RayError as error:
        raise EngineError(f"a process was lost repeatedly: {cause(error)}") from error
    finally:
        for runner in runners:
            ray.kill(runner)
        actors.close()
