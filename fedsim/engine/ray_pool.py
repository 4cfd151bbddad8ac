"""The engine on Ray: long-lived actors, one per accelerator or group of CPU threads.

The driver puts the parameters into the object store once per call and hands lanes to whoever is
free. A lane lost with its worker is computed again, never dropped; a lane that is lost again and
again ends the run. Ray itself retries nothing (`resources.actor_options`).
"""

import dataclasses
import os
import statistics
import time
from collections import Counter, deque
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayTaskError,
)

from fedsim.config import ConfigError
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import Engine, EngineError
from fedsim.engine.resources import WorkerPlan, actor_options, plan_workers
from fedsim.engine.worker import Worker

MAX_LOSSES = 4  # of one lane, in one call
FIRST_DEADLINE_S = 600.0  # a worker's first lane compiles
MIN_DEADLINE_S = 60.0
PROBE_DEADLINE_S = 60.0
START_DEADLINE_S = 120.0


@dataclasses.dataclass
class _Flight:
    """A call under way: a lane's, or a probe of a worker that was lost (lane None)."""

    worker: int
    version: int
    lane: int | None
    started: float
    deadline: float


class RayPool(Engine):
    """Computes on a pool of Ray actors.

    State outlives a call: a worker frozen in one step is still out in the next, until a probe of it
    answers.
    """

    def __init__(
        self, task, *, num_lanes: int, num_workers: int | None, threads: int, cache_dir=None
    ):
        super().__init__(num_lanes)
        cpus = _cpus_needed(num_workers, threads)
        self._cluster = Cluster(cpus)
        self.plan: WorkerPlan = plan_workers(
            num_workers, threads, self._cluster.resources(), cache_dir
        )
        self.num_workers = self.plan.num_workers
        _expect_room(self.plan, self._cluster.resources())
        actor = ray.remote(Worker).options(**actor_options(self.plan))
        self._workers = {i: actor.remote(task) for i in range(self.num_workers)}
        self._idle, self._dead = deque(self._workers), set()
        self._flights: dict[Any, _Flight] = {}
        self._seconds: deque[float] = deque(maxlen=50)  # of recent lanes
        self._warm: set[int] = set()
        self._version = 0

    def ready(self) -> None:
        refs = [worker.ping.remote() for worker in self._workers.values()]
        try:
            ray.get(refs, timeout=START_DEADLINE_S)
        except GetTimeoutError as error:
            raise EngineError(f"workers did not start within {START_DEADLINE_S:.0f} s") from error
        except (ActorDiedError, RayTaskError) as error:
            raise EngineError(f"a worker could not start: {_cause(error)}") from error

    def describe(self) -> str:
        if self.plan.num_gpus or self.plan.num_tpus:
            return "Ray actor with an accelerator"
        return f"Ray actor with {self.plan.threads} CPU thread(s)"

    def close(self) -> None:
        for worker in self._workers.values():
            ray.kill(worker)  # pyright: ignore[reportArgumentType]
        self._flights.clear()
        self._cluster.close()

    def _lanes(self, method, params, lanes, *args):
        self._version += 1
        shared = ray.put(jax.tree.map(np.asarray, params))
        todo, losses, answers, upto = deque(range(len(lanes))), Counter(), {}, 0
        while upto < len(lanes):
            while todo and self._idle:
                worker, lane = self._idle.popleft(), todo.popleft()
                call = getattr(self._workers[worker], method)
                ref = call.remote(self._version, shared, lanes[lane], *args)
                self._flights[ref] = self._flight(worker, lane)
            for lane in self._collect(answers):
                losses[lane] += 1
                self.redispatched += 1
                if losses[lane] >= MAX_LOSSES:
                    raise EngineError(
                        f"lane {lane} lost its worker {MAX_LOSSES} times; {_name(lanes[lane])}"
                    )
                todo.appendleft(lane)
            while upto in answers:
                yield answers.pop(upto)
                upto += 1

    def _flight(self, worker: int, lane: int) -> _Flight:
        patience = FIRST_DEADLINE_S
        if worker in self._warm and self._seconds:
            patience = max(MIN_DEADLINE_S, 5 * statistics.median(self._seconds))
        now = time.monotonic()
        return _Flight(worker, self._version, lane, now, now + patience)

    def _collect(self, answers: dict[int, Any]) -> list[int]:
        """Wait a moment; file what was answered, return the lanes that were lost."""
        lost = []
        for ref in ray.wait(list(self._flights), num_returns=1, timeout=1)[0]:
            flight = self._flights.pop(ref)
            try:
                answer = ray.get(ref)
            except ActorDiedError as error:
                self._dead.add(flight.worker)
                lost.append(flight.lane)
                if len(self._dead) == self.num_workers:
                    raise EngineError(f"no worker is left: {_cause(error)}") from error
            except (ActorUnavailableError, ObjectLostError):
                self._probe(flight.worker)
                lost.append(flight.lane)
            except RayTaskError as error:
                raise EngineError(f"lane {flight.lane} failed: {_cause(error)}") from error
            else:
                self._idle.append(flight.worker)
                if flight.lane is not None and flight.version == self._version:
                    answers[flight.lane] = answer
                    self._warm.add(flight.worker)
                    self._seconds.append(time.monotonic() - flight.started)
        return [lane for lane in lost + self._late() if lane is not None]

    def _late(self) -> list[int | None]:
        """Restart the workers whose deadline has passed; return their lanes."""
        now = time.monotonic()
        late = [ref for ref, flight in self._flights.items() if flight.deadline < now]
        flights = [self._flights.pop(ref) for ref in late]
        for flight in flights:
            ray.kill(self._workers[flight.worker], no_restart=False)  # pyright: ignore
            self._probe(flight.worker)
        return [flight.lane for flight in flights]

    def _probe(self, worker: int) -> None:
        """Ask a lost worker for a sign of life; until it answers it gets no lane."""
        self._warm.discard(worker)
        ref = self._workers[worker].ping.remote()
        now = time.monotonic()
        self._flights[ref] = _Flight(worker, self._version, None, now, now + PROBE_DEADLINE_S)


def _cpus_needed(num_workers: int | None, threads: int) -> int:
    """CPUs a private cluster declares: this machine's, or more if more workers were asked for."""
    return max(len(os.sched_getaffinity(0)), (num_workers or 1) * threads)


def _expect_room(plan: WorkerPlan, cluster: dict[str, float]) -> None:
    """An error instead of waiting forever for what the cluster does not have."""
    needs = {"CPU": plan.threads, "GPU": plan.num_gpus, "TPU": plan.num_tpus}
    for name, need in needs.items():
        have = cluster.get(name, 0)
        if plan.num_workers * need > have:
            room = f"{need:g} {name} each, and the cluster has {have:g}"
            raise ConfigError(
                f"num_workers={plan.num_workers}: expected at most {have // need:g} ({room})"
            )


def _name(lane: np.ndarray) -> str:
    return f"its examples are {np.unique(lane[lane >= 0])[:8].tolist()} ..."


def _cause(error: Exception) -> str:
    """The exception of the worker's code, without Ray's frames around it."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}" if cause else str(error).strip().splitlines()[-1]
