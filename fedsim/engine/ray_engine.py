"""The engine on Ray: long-lived actors, one per accelerator or group of CPU threads.

The driver stores the parameters in the object store once per call and sends lanes to idle workers.
A lane lost with its worker is computed again, never dropped; a lane that is lost repeatedly ends
the run. Sums are added in lane order while later lanes still run, and no worker runs further ahead
than the driver has memory for.

A worker has one time limit, `EngineConfig.worker_timeout`: for a call, and for its start, also
after it was lost. It is the only way to find a worker that hangs. A run goes on without workers
that do not come back.
"""

import dataclasses
import heapq
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from fedsim.config import EngineConfig
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import Engine, EngineError, ignore
from fedsim.engine.environment import difference, versions
from fedsim.engine.preflight import actor_options, expect_room, place_workers
from fedsim.engine.task import Task
from fedsim.engine.worker import NoTask, Worker
from fedsim.files import cpus
from fedsim.signals import raise_if_stopped

MAX_LOSSES = 4  # of one lane, in one call
PULL_S = 60.0  # seconds to fetch a sum from another node
PAUSE_S = 0.2  # seconds between two calls of a worker that cannot be reached
AHEAD = 2  # lanes per worker that may be done or in flight before the driver has added them


@dataclasses.dataclass(eq=False)
class _Call:
    """A method over lanes, and its progress."""

    method: str
    lanes: Sequence[Any]
    args: tuple
    version: int
    params: Any  # a reference
    todo: list[int]  # heap of lanes
    losses: Counter = dataclasses.field(default_factory=Counter)
    answers: dict[int, Any] = dataclasses.field(default_factory=dict)
    next_lane: int = 0  # whose answer is waited for


@dataclasses.dataclass
class _Worker:
    """A worker. It gets lanes while it is up, one at a time."""

    actor: Any
    give_up_at: float  # while it is not up
    up: bool = False  # it has answered, and was not lost since


@dataclasses.dataclass
class _Flight:
    """A lane in flight, or the task on its way to a worker (without a call)."""

    worker: int
    sent: float
    call: _Call | None = None
    lane: int = 0


class RayEngine(Engine):
    """Computes on a pool of Ray actors.

    State outlives a call: a worker that hangs in one step gets no lane in the next, until it
    answers.
    """

    def __init__(
        self,
        task: Task,
        config: EngineConfig,
        *,
        warn: Callable[[str], None] = ignore,
        cache_dir: Path | None = None,
    ):
        """Start the workers; `ready` waits for them.

        Args:
          task: the model and its data.
          config: lanes, workers and their time limits. With `wait_for_workers`, they may have no
            room yet: Ray starts them when there is, and asks an autoscaler for nodes.
          warn: receives warnings about workers.
          cache_dir: directory of compiled programs.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        super().__init__(task, config.num_lanes)
        self.warn = warn
        self.redispatched = 0
        """Number of lanes computed again because a worker was lost, since the start."""
        self._facts: dict[str, Any] = {}  # of the first worker; the others must be like it
        self._versions = versions()
        self._timeout_s = config.worker_timeout
        self._start_s = max(config.worker_timeout, config.wait_for_workers)
        # A private cluster declares the machine's CPUs, or more if the workers need more.
        self._cluster = Cluster(max(cpus(), (config.num_workers or 1) * config.threads_per_worker))
        if self._cluster.warning:
            warn(self._cluster.warning)
        try:
            nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            self._placement = place_workers(config, nodes)
            self.num_lanes = self._placement.num_lanes(config.num_lanes)
            if not config.wait_for_workers:
                expect_room(self._placement, nodes)
            # An argument of methods: an argument of the constructor would have to exist when Ray
            # starts an actor again.
            self._task = stored(task, "the task")
        except BaseException:
            self._cluster.close()
            raise
        actors = ray.remote(Worker).options(**actor_options(self._placement))
        give_up_at = time.monotonic() + self._start_s
        self._workers = {
            number: _Worker(actors.remote(cache_dir=cache_dir), give_up_at)
            for number in range(self._placement.num_workers)
        }
        self._idle: deque[int] = deque()  # idle the longest first
        self._flights: dict[Any, _Flight] = {}
        self._call: _Call | None = None
        self._version, self._started = 0, False
        for number in self._workers:
            self._begin(number)

    def ready(self) -> None:
        while not all(worker.up for worker in self._workers.values()):
            self._collect()
        self._started = True

    def facts(self) -> dict[str, Any]:
        return self._facts

    def describe(self) -> str:
        count, threads = self._placement.num_workers, self._placement.threads
        device = f"{threads} CPU thread{'s' * (threads > 1)}"
        if self._placement.accelerator:
            device = f"1 {self._placement.accelerator}"
        return f"{count} process{'es' * (count > 1)}, {device} each"

    def close(self) -> None:
        for worker in self._workers.values():
            ray.kill(worker.actor)
        self._flights.clear()
        self._call = self._task = None
        self._cluster.close()

    def _lanes(self, method, params, lanes, *args):
        self._call, self._version = None, self._version + 1  # the store need not hold two versions
        reference = stored(jax.tree.map(np.asarray, params), "the parameters")
        todo = list(range(len(lanes)))
        call = self._call = _Call(method, lanes, args, self._version, reference, todo)
        while call.next_lane < len(lanes):
            self._dispatch(call)
            if call.next_lane not in call.answers:
                self._collect()
                continue
            answer = call.answers.pop(call.next_lane)
            call.next_lane += 1
            self._dispatch(call)  # so that workers compute while the caller adds
            yield answer

    def _dispatch(self, call: _Call) -> None:
        """Send lanes to idle workers, unless the driver must add sums first."""
        window = AHEAD * len(self._workers)
        while self._idle and call.todo and call.todo[0] < call.next_lane + window:
            number, lane = self._idle.popleft(), heapq.heappop(call.todo)
            method = getattr(self._workers[number].actor, call.method)
            ref = method.remote(call.version, call.params, call.lanes[lane], *call.args)
            self._flights[ref] = _Flight(number, time.monotonic(), call, lane)

    def _begin(self, number: int) -> None:
        """Send the task to a worker that has started or was lost; it is up when it answers."""
        ref = self._workers[number].actor.begin.remote(self._task)
        self._flights[ref] = _Flight(number, time.monotonic())

    def _collect(self) -> None:
        """Wait briefly for answers; handle those that came, and workers that are late."""
        raise_if_stopped()
        ray.wait(list(self._flights), timeout=1.0)
        # All that are there: an answer is not late, however long the driver was suspended.
        refs = list(self._flights)
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
            if (flight := self._flights.pop(ref, None)) is not None:
                self._answered(ref, flight)
        now = time.monotonic()
        for ref, flight in list(self._flights.items()):
            if flight.call is not None and now > flight.sent + self._timeout_s:
                del self._flights[ref]
                ray.kill(self._workers[flight.worker].actor, no_restart=False)
                self._lost(flight)
        for number, worker in list(self._workers.items()):
            if not worker.up and now > worker.give_up_at:
                reason = f"it did not answer within {self._start_s:.0f} s (worker_timeout)"
                self._give_up(number, reason)

    def _answered(self, ref: Any, flight: _Flight) -> None:
        try:
            answer: Any = ray.get(ref, timeout=PULL_S)
        except (ActorUnavailableError, ObjectLostError, GetTimeoutError):
            self._lost(flight)
        except RayTaskError as error:
            # The arguments did not arrive, or the process was started again unnoticed. Of arguments
            # that cannot be unpickled, data or a package are missing.
            missing = isinstance(error.cause, RaySystemError)
            if isinstance(error.cause, RayError | NoTask) and not missing:
                self._lost(flight)
            elif flight.call is None and (self._started or missing):
                self._give_up(flight.worker, cause(error.cause if missing else error))
            else:
                details = _plain(str(error)) + "\n"
                raise EngineError(f"{_name(flight)}: {cause(error)}", details=details) from error
        except RayError as error:  # died for good, or unknown
            self._give_up(flight.worker, cause(error))
            self._put_back(flight)
        else:
            if flight.call is not None:
                flight.call.answers[flight.lane] = answer
            elif reason := self._why_incompatible(answer):
                return self._give_up(flight.worker, reason)
            self._workers[flight.worker].up = True
            self._idle.append(flight.worker)

    def _why_incompatible(self, facts: dict[str, Any]) -> str:
        """Say why a worker must not compute: its bits might differ. Empty if it may."""
        if not (reason := difference(self._versions, facts["versions"])):
            self._versions |= facts["versions"]  # adds accelerators' packages, which it may lack
        self._facts = self._facts or facts
        kind, first = facts["kind"], self._facts["kind"]
        if not reason and kind != first:
            # Other processors and devices round differently. Which worker computes a unit may
            # depend on the other units drawn, so a missing unit would change more than its part.
            reason = f"{kind} instead of {first}: workers must be of one kind"
        return reason and f"the worker on {facts['host']} has {reason}"

    def _lost(self, flight: _Flight) -> None:
        """Put a lane back, and give its worker no other one until it answers."""
        self._put_back(flight)
        worker = self._workers[flight.worker]
        if worker.up:
            worker.up, worker.give_up_at = False, time.monotonic() + self._start_s
        time.sleep(PAUSE_S)
        self._begin(flight.worker)

    def _put_back(self, flight: _Flight) -> None:
        call = flight.call
        if call is None or call is not self._call:
            return
        call.losses[flight.lane] += 1
        self.redispatched += 1
        if call.losses[flight.lane] >= MAX_LOSSES:
            raise EngineError(
                f"{_name(flight)} lost its worker, or took longer than worker_timeout="
                f"{self._timeout_s:g} s, {MAX_LOSSES} times"
            )
        heapq.heappush(call.todo, flight.lane)

    def _give_up(self, number: int, reason: str) -> None:
        """End a worker for good."""
        for ref in [ref for ref, flight in self._flights.items() if flight.worker == number]:
            del self._flights[ref]
        ray.kill(self._workers.pop(number).actor)
        if not self._started:
            raise EngineError(f"a worker could not start: {reason}")
        if not self._workers:
            raise EngineError(f"no worker is left: {reason}")
        self.warn(f"a worker was lost, and its work is repeated: {reason}")


def _name(flight: _Flight) -> str:
    if flight.call is None:
        return f"worker {flight.worker}"
    if not isinstance(rows := flight.call.lanes[flight.lane], np.ndarray):
        return f"part {flight.lane}"
    rows = np.unique(rows)
    rows = rows[rows >= 0].tolist()
    more = f", ... {len(rows)} in all" if len(rows) > 8 else ""
    return f"lane {flight.lane} (examples {', '.join(map(str, rows[:8]))}{more})"


def stored(value: Any, what: str) -> Any:
    """Put a value into Ray's object store and return its reference.

    Raises: EngineError: there is no room for it.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        reason = f"no room for {what} in the object store: {cause(error)}"
        raise EngineError(reason) from error


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
