"""The engine on Ray: long-lived actors, one per accelerator or group of CPU threads.

The driver puts the parameters into the object store once per call and hands lanes to whoever is
free. A lane lost with its worker is computed again, never dropped; a lane that is lost again and
again ends the run. Ray itself retries nothing (`resources.actor_options`).
"""

import dataclasses
import os
import statistics
import time
from collections import Counter, defaultdict, deque
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayError,
    RayTaskError,
)

from fedsim.config import ConfigError
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import Engine, EngineError
from fedsim.engine.resources import WorkerPlan, actor_options, plan_workers
from fedsim.engine.worker import Worker

MAX_LOSSES = 4  # of one lane, in one call
FIRST_DEADLINE_S = 600.0  # a worker's first lane of a kind compiles
MIN_DEADLINE_S = 60.0
BACK_DEADLINE_S = 300.0  # for a lost worker to be started again and answer
START_DEADLINE_S = 120.0
PAUSE_S = 0.2  # between two questions to a worker that cannot be reached


@dataclasses.dataclass
class _Flight:
    """A call under way: a lane's, or a probe of a worker that was lost (lane None)."""

    worker: int
    method: str
    version: int
    lane: int | None
    started: float
    deadline: float


class RayPool(Engine):
    """Computes on a pool of Ray actors.

    State outlives a call: a worker frozen in one step is still out in the next, until a probe of it
    answers. One that does not come back within BACK_DEADLINE_S is given up.
    """

    def __init__(
        self, task, *, num_lanes: int, num_workers: int | None, threads: int, cache_dir=None
    ):
        super().__init__(num_lanes)
        self._workers: dict[int, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._lost_at: dict[int, float] = {}
        self._dead: set[int] = set()
        self._warm: set[tuple[int, str]] = set()  # (worker, method)
        self._seconds = defaultdict(lambda: deque(maxlen=50))  # of recent lanes, by method
        self._version = 0
        self._cluster = Cluster(_cpus_needed(num_workers, threads))
        try:
            resources = self._cluster.resources()
            self.plan: WorkerPlan = plan_workers(num_workers, threads, resources)
            _expect_room(self.plan, resources)
        except BaseException:
            self._cluster.close()
            raise
        self.num_workers = self.plan.num_workers
        actor = ray.remote(Worker).options(**actor_options(self.plan))
        self._workers = {i: actor.remote(task, cache_dir) for i in range(self.num_workers)}
        self._idle = deque(self._workers)

    def ready(self) -> None:
        refs = [worker.ping.remote() for worker in self._workers.values()]
        try:
            ray.get(refs, timeout=START_DEADLINE_S)
        except GetTimeoutError as error:
            raise EngineError(f"workers did not start within {START_DEADLINE_S:.0f} s") from error
        except RayError as error:
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
                self._flights[ref] = self._flight(worker, method, lane, losses[lane])
            for lane in self._collect(answers):
                losses[lane] += 1
                self.redispatched += 1
                if losses[lane] >= MAX_LOSSES:
                    raise EngineError(
                        f"lane {lane} lost its worker, or took too long, {MAX_LOSSES} times; "
                        + _name(lanes[lane])
                    )
                todo.appendleft(lane)
            while upto in answers:
                yield answers.pop(upto)
                upto += 1

    def _flight(self, worker: int, method: str, lane: int | None, losses: int = 0) -> _Flight:
        """A call that starts now; a lane that was lost before gets twice the time."""
        patience = FIRST_DEADLINE_S
        if (worker, method) in self._warm:
            patience = max(MIN_DEADLINE_S, 5 * statistics.median(self._seconds[method]))
        now = time.monotonic()
        return _Flight(worker, method, self._version, lane, now, now + patience * 2**losses)

    def _collect(self, answers: dict[int, Any]) -> list[int]:
        """Wait a moment; file what was answered, return the lanes that were lost."""
        lost = self._late()
        for ref in ray.wait(list(self._flights), num_returns=1, timeout=1)[0]:
            flight = self._flights.pop(ref)
            try:
                answer = ray.get(ref)
            except (ActorUnavailableError, ObjectLostError):
                time.sleep(PAUSE_S)
                self._probe(flight.worker)
            except RayTaskError as error:
                raise EngineError(f"lane {flight.lane} failed: {_cause(error)}") from error
            except RayError as error:  # died for good, or something unheard of
                self._give_up(flight.worker, _cause(error))
            else:
                self._file(flight, answer, answers)
                continue
            lost.append(flight.lane)
        return [lane for lane in lost if lane is not None]

    def _file(self, flight: _Flight, answer: Any, answers: dict[int, Any]) -> None:
        self._idle.append(flight.worker)
        self._lost_at.pop(flight.worker, None)
        if flight.lane is not None:
            self._warm.add((flight.worker, flight.method))
            self._seconds[flight.method].append(time.monotonic() - flight.started)
            if flight.version == self._version:  # not one that an abandoned call left behind
                answers[flight.lane] = answer

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
        self._warm = {(other, method) for other, method in self._warm if other != worker}
        lost_at = self._lost_at.setdefault(worker, time.monotonic())
        if time.monotonic() - lost_at > BACK_DEADLINE_S:
            self._give_up(worker, f"it did not come back within {BACK_DEADLINE_S:.0f} s")
            return
        flight = self._flight(worker, "ping", None)
        flight.deadline = lost_at + BACK_DEADLINE_S
        self._flights[self._workers[worker].ping.remote()] = flight

    def _give_up(self, worker: int, reason: str) -> None:
        self._dead.add(worker)
        if len(self._dead) == self.num_workers:
            raise EngineError(f"no worker is left: {reason}")


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
