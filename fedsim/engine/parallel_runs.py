"""Independent jobs side by side, as many at a time as the cluster has room for.

A job runs in a process with the CPU threads and accelerators of a worker, which Ray reserves, so
nothing is oversubscribed. A job whose process is lost is started again; the job must remember its
finished part. (Ray Tune cannot set the environment variables of its processes: to have those of a
worker, each job would need a second process.)
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from fedsim.cgroups import cpus
from fedsim.engine.actors import cause, placed_in_time
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import Placement, actor_options, keep_compiled
from fedsim.errors import FedsimError
from fedsim.signals import heed

ATTEMPTS = 3  # starts of a job whose process is lost each time, or of a process
LONG_S = 180.0  # to wait for a process to start before that is said

Function = Callable[..., Any]


class Runner:
    """A process that runs one job after another, with shared imports and compiled programs."""

    def __init__(self, cache_dir: Path | None):
        """Start; `cache_dir` is the directory of compiled programs, or None."""
        if cache_dir is not None:
            keep_compiled(cache_dir)

    def ready(self) -> None:
        """Return once the process has room on the cluster."""

    def run(self, function: Function, job: Any, *shared: Any) -> Any:
        """Compute function(job, *shared) in this process."""
        return function(job, *shared)


class ParallelRuns:
    """Processes on the cluster that RAY_ADDRESS names, or on a private one on this machine.

    Attributes:
      placement: the number of processes and the resources of each.
    """

    def __init__(
        self,
        *,
        at_once: int | None = None,
        threads: int = 1,
        devices: int | None = None,
        accelerator: str = "auto",
        wait_s: float = 0.0,
        cache_dir: Path | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ):
        """Connect to the cluster, or start one.

        Args:
          at_once: most jobs at a time; None: as many as there is room for at the start.
          threads, devices, accelerator: of a job, as for a run's workers.
          wait_s: seconds to wait for a node that can hold a job, as with an autoscaler.
          cache_dir: directory of compiled programs, shared with other processes and runs.
          warn: called once if no process has room on the cluster for some minutes.
        Raises: ConfigError: the cluster cannot be reached, or has no room for a job.
        """
        self._cluster = Cluster(max(cpus(), threads * (devices or 1)))
        try:
            most = placed_in_time(self._cluster, None, threads, devices, accelerator, wait_s)
        except BaseException:
            self._cluster.close()
            raise
        number = at_once or most.num_workers
        if not wait_s:  # else an autoscaler may add nodes for processes without room
            number = min(number, most.num_workers)
        self.placement: Placement = dataclasses.replace(most, num_workers=number)
        self._cache_dir = cache_dir
        self._warn, self._lost = warn, 0
        self._runners: list[Any] = []
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}  # by what they answer once they have room

    def run(
        self, function: Function, jobs: Sequence[Any], *shared: Any
    ) -> Iterator[tuple[int, Any]]:
        """Run function(job, *shared) for all jobs.

        Args:
          function: importable in the jobs' processes.
          jobs: the first arguments, which are pickled.
          shared: the other arguments of all jobs; each node stores them once.
        Yields: (index of a job, its result or a FedsimError), as jobs end.
        """
        waiting = list(enumerate(jobs))[::-1]
        attempts = [0] * len(jobs)
        number = min(self.placement.num_workers, len(jobs))
        for _ in range(number - len(self._idle) - len(self._starting)):
            self._start()
        stored = [ray.put(each) for each in shared]
        busy: dict[Any, tuple[int, Any]] = {}
        while waiting or busy:
            while waiting and self._idle:  # one without room would keep a job from the others
                index, job = waiting.pop()
                runner = self._idle.pop()
                attempts[index] += 1
                busy[runner.run.remote(function, job, *stored)] = index, runner
            ref = self._next([*busy, *self._starting], idle=not busy)
            if ref in self._starting:
                self._join(ref)
                continue
            index, runner = busy.pop(ref)
            try:
                result = ray.get(ref)
            except RayTaskError as error:
                result = _failure(error)
            except RayError as error:
                ray.kill(runner)
                self._start()
                if attempts[index] < ATTEMPTS:
                    waiting.append((index, jobs[index]))
                    continue
                yield index, EngineError(f"its process was lost {ATTEMPTS} times: {cause(error)}")
                continue
            self._idle.append(runner)
            yield index, result

    def _next(self, refs: list[Any], *, idle: bool) -> Any:
        """The first of some answers. Args: idle: no job is running."""
        warned_at = time.monotonic() + LONG_S if idle else math.inf
        while not (done := ray.wait(refs, num_returns=1, timeout=min(1.0, LONG_S))[0]):
            heed()
            if time.monotonic() > warned_at:
                self._warn("no process has room on the cluster yet: waiting for others to end")
                warned_at = math.inf
        return done[0]

    def _start(self) -> None:
        options = actor_options(self.placement) | {"max_restarts": 0}
        runner = ray.remote(Runner).options(**options).remote(self._cache_dir)
        self._runners.append(runner)
        self._starting[runner.ready.remote()] = runner

    def _join(self, ref: Any) -> None:
        """Take a process that has started; start another one where it was lost before."""
        runner = self._starting.pop(ref)
        try:
            ray.get(ref)
        except RayError as error:
            self._lost += 1
            if self._lost >= ATTEMPTS:
                lost = f"{ATTEMPTS} processes were lost as they started: {cause(error)}"
                raise EngineError(lost) from error
            self._start()
            return
        self._lost = 0
        self._idle.append(runner)

    def close(self) -> None:
        """End the processes, and the cluster if it is a private one."""
        for runner in self._runners:
            ray.kill(runner)
        self._cluster.close()


def _failure(error: RayTaskError) -> FedsimError:
    inner = error.cause
    if isinstance(inner, FedsimError):  # of its own kind: a run that diverged is no fault
        return inner
    return EngineError(cause(error), details=str(error))
