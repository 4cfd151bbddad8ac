"""The engine on Ray: long-lived actors, one per accelerator or group of CPU threads.

The driver stores the parameters in the object store once per version and sends lanes to idle
workers. A lane lost with its worker is computed again, never dropped; a lane that is lost
repeatedly ends the run. Sums are added in lane order while later lanes still run, and no worker
runs further ahead than the driver has memory for.

A worker has one time limit, `EngineConfig.worker_timeout`: for a call, and for its start, also
after it was lost. It is the only way to find a worker that hangs.
"""

import dataclasses
import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from fedsim.config import EngineConfig
from fedsim.engine.actors import Actors, cause, failure, stored
from fedsim.engine.engine import Engine, EngineError, ignore
from fedsim.engine.task import Task
from fedsim.engine.worker import NoTask, Worker
from fedsim.signals import raise_if_stopped

MAX_LOSSES = 4  # of one lane, in one call
PULL_S = 60.0  # seconds to fetch a sum from another node
PAUSE_S = 0.2  # seconds between two probes of a worker that cannot be reached
RECRUIT_S = 10.0  # seconds between two looks for room for more workers
INCOMPATIBLE_S = 600.0  # the same after a worker of another kind of host: it may be the only room
AHEAD = 2  # lanes per worker that may be done or in flight before the driver has added them


@dataclasses.dataclass(eq=False)
class _Call:
    """A method over lanes, and its progress."""

    method: str
    version: int
    shared: Any  # reference to the parameters in the object store
    lanes: Sequence[np.ndarray]
    args: tuple
    todo: list[int] = dataclasses.field(init=False)  # heap of lanes
    losses: Counter = dataclasses.field(default_factory=Counter)
    answers: dict[int, Any] = dataclasses.field(default_factory=dict)
    upto: int = 0  # lanes whose answers were taken

    def __post_init__(self) -> None:
        self.todo = list(range(len(self.lanes)))

    def take(self, window: int) -> int | None:
        """Take the first waiting lane; None if there is none, or the driver must add sums first."""
        if not self.todo or (self.returns_sum and self.todo[0] >= self.upto + window):
            return None
        return heapq.heappop(self.todo)

    @property
    def returns_sum(self) -> bool:
        """True if answers are as large as the parameters, and are returned beside statistics."""
        return self.method == "lane_sum"


@dataclasses.dataclass
class _Worker:
    """A worker. It gets lanes while it is up, one at a time."""

    actor: Any
    give_up_at: float  # while it is not up
    probe_at: float | None = 0.0  # time to send it the task; None: it was sent
    up: bool = False  # it has answered, and was not lost since
    lost: bool = False  # it was up before


@dataclasses.dataclass
class _Flight:
    """A lane in flight, or the task on its way to a worker (without a call)."""

    worker: int
    sent: float
    call: _Call | None = None
    lane: int = 0
    large: Any = None


class RayEngine(Engine):
    """Computes on a pool of Ray actors.

    State outlives a call: a worker that hangs in one step gets no lane in the next, until it
    answers. A worker that does not come back is given up, and another takes its place if there is
    room. If the user named no number of workers, nodes that join get workers, too.
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
          config: lanes, workers and their time limits.
          warn: receives warnings about workers.
          cache_dir: directory of compiled programs.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        super().__init__(task, config.num_lanes, warn)
        self._actors = Actors(task, config, cache_dir)
        if self._actors.warning:
            warn(self._actors.warning)
        self._timeout_s = config.worker_timeout
        self._start_s = max(config.worker_timeout, config.wait_for_workers)
        self.num_workers = self._actors.placement.num_workers
        if (idle := self.num_workers - self.num_lanes) > 0:
            warn(
                f"a step is cut in {self.num_lanes} parts, so {idle} of {self.num_workers} workers "
                f"are idle: num_lanes={2 * self.num_workers} uses all"
            )
        self._workers: dict[int, _Worker] = {}
        self._idle: deque[int] = deque()  # idle the longest first
        self._flights: dict[Any, _Flight] = {}
        self._calls: list[_Call] = []
        self._params, self._leaves, self._version = None, [], 0
        self._names = itertools.count()
        self._started, self._recruit_at = False, 0.0
        self._restarts, self._busy_s, self._looked_at = 0, 0.0, time.monotonic()
        for _ in range(self.num_workers):
            self._hire()

    @property
    def num_up(self) -> int:
        """Number of workers that have answered and were not lost since."""
        return sum(worker.up for worker in self._workers.values())

    def ready(self) -> None:
        while (up := self.num_up) < self.num_workers:
            self.on_progress(up, self.num_workers)
            self._collect()
        self._started = True

    def facts(self) -> dict[str, Any]:
        return self._actors.facts

    def describe(self) -> str:
        count = "1 process" if self.num_workers == 1 else f"{self.num_workers} processes"
        return f"{count}, {self._actors.placement.describe()} each"

    def close(self) -> None:
        for worker in self._workers.values():
            ray.kill(worker.actor)
        self._flights.clear()
        self._params, self._leaves = None, []
        self._actors.close()

    def measurements(self) -> dict[str, float]:
        now, busy = time.monotonic(), self._busy_s
        share = busy / max(1e-9, (now - self._looked_at) * self.num_workers)
        self._looked_at, self._busy_s = now, 0.0
        return {
            **super().measurements(),
            "performance/worker_restarts": self._restarts,
            "performance/workers": self.num_up,
            "performance/busy_share": min(1.0, share),
        }

    def _lanes(self, method, params, lanes, *args):
        self._store(params)
        call = _Call(method, self._version, self._params, lanes, args)
        self._calls.append(call)
        return self._answers(call)

    def _begin(self, method, params, lanes, *args):
        answers = self._lanes(method, params, lanes, *args)
        self._dispatch()
        return answers

    def _store(self, params: Any) -> None:
        """Put parameters into the object store, unless they are there already."""
        leaves = jax.tree.leaves(params)
        if len(leaves) == len(self._leaves) and all(
            new is old and isinstance(new, jax.Array)  # immutable, so equal if identical
            for new, old in zip(leaves, self._leaves, strict=True)
        ):
            return
        self._params, self._leaves = None, []  # first: the store need not hold two versions
        self._params = stored(jax.tree.map(np.asarray, params), "the parameters")
        self._leaves, self._version = leaves, self._version + 1

    def _answers(self, call: _Call) -> Iterator[Any]:
        """Yield answers in lane order, as soon as they arrive."""
        try:
            while call.upto < len(call.lanes):
                self._dispatch(call)
                if call.upto not in call.answers:
                    self._collect()
                    continue
                answer = call.answers.pop(call.upto)
                call.upto += 1
                self._dispatch(call)  # so that workers compute while the caller adds
                yield answer
        finally:
            self._calls.remove(call)

    def _dispatch(self, first: _Call | None = None) -> None:
        """Send lanes to idle workers: of the call that is waited for, then of the other calls."""
        for call in self._calls if first is None else [first, *self._calls]:
            window = AHEAD * max(1, len(self._workers))
            while self._idle and (lane := call.take(window)) is not None:
                self._send(self._idle.popleft(), call, lane)

    def _send(self, worker: int, call: _Call, lane: int) -> None:
        method = getattr(self._workers[worker].actor, call.method)
        arguments = (call.version, call.shared, call.lanes[lane], *call.args)
        if call.returns_sum:  # two results: wait for the statistics, then fetch the sum once
            large, ref = method.options(num_returns=2).remote(*arguments)
        else:
            large, ref = None, method.remote(*arguments)
        self._flights[ref] = _Flight(worker, time.monotonic(), call, lane, large)

    def _collect(self) -> None:
        """Wait briefly for answers; handle those that came, and workers that are late."""
        raise_if_stopped()
        self._probe()
        self._recruit()
        refs = list(self._flights)
        if not refs:
            time.sleep(PAUSE_S)
        else:
            unreached = any(worker.probe_at for worker in self._workers.values())
            ray.wait(refs, timeout=PAUSE_S if unreached else 1.0)
            # All that are there: an answer is not late, however long the driver was suspended.
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                if (flight := self._flights.pop(ref, None)) is not None:
                    self._answered(ref, flight)
        self._end_late()

    def _end_late(self) -> None:
        """Start again the workers whose call took too long; give up those that do not come back."""
        now = time.monotonic()
        for ref, flight in list(self._flights.items()):
            if flight.call is not None and now > flight.sent + self._timeout_s:
                del self._flights[ref]
                ray.kill(self._workers[flight.worker].actor, no_restart=False)
                self._lost(flight)
        for number, worker in list(self._workers.items()):
            if not worker.up and now > worker.give_up_at:
                reason = f"it did not answer within {self._start_s:.0f} s (worker_timeout)"
                self._give_up(number, f"{reason}; free in the cluster: {_free()}")

    def _answered(self, ref: Any, flight: _Flight) -> None:
        try:
            answer = ray.get(ref, timeout=PULL_S)
            if flight.large is not None:
                answer = (ray.get(flight.large, timeout=PULL_S), answer)
        except (ActorUnavailableError, ObjectLostError, GetTimeoutError):
            self._lost(flight)
        except RayTaskError as error:
            if flight.call is None and isinstance(error.cause, RaySystemError):
                # The task arrived but cannot be unpickled: its data or a package are missing.
                self._give_up(flight.worker, cause(error.cause))
            # The arguments did not arrive, or the process was started again unnoticed.
            elif isinstance(error.cause, RayError | NoTask):
                self._lost(flight)
            elif flight.call is None and self._started:
                # A process that was started again cannot compute: its device may be broken.
                self._recruit_at = time.monotonic() + INCOMPATIBLE_S
                self._give_up(flight.worker, cause(error))
            else:
                raise failure(self._name(flight), error) from error
        except RayError as error:  # died for good, or unknown
            self._give_up(flight.worker, cause(error))
            self._lost(flight)
        else:
            self._file(flight, answer)

    def _file(self, flight: _Flight, answer: Any) -> None:
        if flight.call is not None:
            flight.call.answers[flight.lane] = answer
            self._busy_s += time.monotonic() - flight.sent
        elif reason := self._actors.why_incompatible(answer):
            self._recruit_at = time.monotonic() + INCOMPATIBLE_S
            self._give_up(flight.worker, reason)
            return
        else:
            worker = self._workers[flight.worker]
            self._restarts += worker.lost
            worker.up = True
        self._idle.append(flight.worker)

    def _lost(self, flight: _Flight) -> None:
        """Record a loss: the worker gets no lane until it answers; its lane is put back."""
        now = time.monotonic()
        if (worker := self._workers.get(flight.worker)) is not None:
            worker.probe_at = now + PAUSE_S
            if worker.up:
                worker.up, worker.lost, worker.give_up_at = False, True, now + self._start_s
        call = flight.call
        if call is None or call not in self._calls:
            return
        call.losses[flight.lane] += 1
        self.redispatched += 1
        if call.losses[flight.lane] >= MAX_LOSSES:
            raise EngineError(
                f"{self._name(flight)} lost its worker, or took longer than worker_timeout="
                f"{self._timeout_s:g} s, {MAX_LOSSES} times"
            )
        heapq.heappush(call.todo, flight.lane)

    def _hire(self) -> None:
        """Start one more worker."""
        actor = self._actors.create(Worker)
        self._workers[next(self._names)] = _Worker(actor, time.monotonic() + self._start_s)

    def _probe(self) -> None:
        """Send the task to workers that were lost or have started; they are up when they answer."""
        now = time.monotonic()
        for number, worker in self._workers.items():
            if worker.probe_at is not None and worker.probe_at <= now:
                worker.probe_at = None
                self._flights[worker.actor.begin.remote(self._actors.task)] = _Flight(number, now)

    def _recruit(self) -> None:
        """Start workers in the place of those given up, and on nodes that have joined."""
        now = time.monotonic()
        if now < self._recruit_at or not self._started:
            return
        self._recruit_at = now + RECRUIT_S
        for _ in range(self._actors.wanted() - len(self._workers)):
            self._hire()

    def _give_up(self, number: int, reason: str) -> None:
        """End a worker for good. It has no lane: those of a lost worker were put back."""
        for ref in [ref for ref, flight in self._flights.items() if flight.worker == number]:
            del self._flights[ref]
        ray.kill(self._workers.pop(number).actor)
        if not self._started:
            raise EngineError(f"a worker could not start: {reason}")
        if not self._workers:
            raise EngineError(f"no worker is left: {reason}")
        self.warn(f"a worker was lost, and its work is repeated: {reason}")

    def _name(self, flight: _Flight) -> str:
        if flight.call is None:
            return f"worker {flight.worker}"
        rows = flight.call.lanes[flight.lane]
        return f"lane {flight.lane} (examples {_short(np.unique(rows[rows >= 0]))})"


def _short(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:8].tolist()))
    return f"{shown}, ... {len(rows)} in all" if len(rows) > 8 else shown


def _free() -> str:
    have = ray.available_resources()
    return ", ".join(f"{have.get(name, 0):g} {name}" for name in ("CPU", "GPU", "TPU"))
