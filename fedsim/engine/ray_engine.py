"""The engine on Ray: long-lived actors, one per accelerator or group of CPU threads.

The driver stores the parameters in the object store once per version and sends lanes to idle
workers. A lane lost with its worker is computed again, never dropped; a lane that is lost
repeatedly ends the run. Sums are added in lane order while later lanes still run, and no worker
runs further ahead than the driver has memory for.
"""

import dataclasses
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

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

from fedsim.engine.actors import (
    MAX_LOSSES,
    PULL_S,
    START_S,
    Actors,
    Health,
    Patience,
    Shared,
    State,
    cause,
    failure,
)
from fedsim.engine.cluster import Monitor
from fedsim.engine.engine import Engine, EngineError, ignore, one_of_each
from fedsim.engine.environment import store_bytes
from fedsim.engine.task import Task
from fedsim.engine.worker import NoTask, Worker
from fedsim.signals import heed

PAUSE_S = 0.2  # seconds between two probes of a worker that cannot be reached
RECRUIT_S = 10.0  # seconds between two looks for room for more workers
STRANGE_S = 600.0  # the same after a worker of another kind of host: it may be the only room
AHEAD = 2  # lanes per worker that may be done or in flight before the driver has added them


@dataclasses.dataclass(eq=False)
class _Call:
    """A method over lanes, and its progress."""

    method: str
    version: int
    shared: Any  # reference to the parameters in the object store
    lanes: Sequence[np.ndarray]
    args: tuple
    kinds: Sequence[Hashable]  # of each lane, by what is compiled for it
    todo: dict[Hashable, list[int]] = dataclasses.field(init=False)  # heaps of lanes, by kind
    losses: Counter = dataclasses.field(default_factory=Counter)
    answers: dict[int, Any] = dataclasses.field(default_factory=dict)
    upto: int = 0  # lanes whose answers were taken

    def __post_init__(self) -> None:
        self.todo = {kind: [] for kind in self.kinds}
        for lane, kind in enumerate(self.kinds):
            self.todo[kind].append(lane)

    def first(self, window: float) -> list[int]:
        """Return the first waiting lane of each kind that is within the window, ascending."""
        first = (lanes[0] for lanes in self.todo.values() if lanes)
        return sorted(lane for lane in first if lane < self.upto + window)

    def take(self, lane: int) -> None:
        """Take a lane, the first waiting one of its kind."""
        heapq.heappop(self.todo[self.kinds[lane]])

    def again(self, lane: int) -> None:
        """Put back a lane whose worker was lost."""
        heapq.heappush(self.todo[self.kinds[lane]], lane)

    @property
    def returns_sum(self) -> bool:
        """True if answers are as large as the parameters, and are returned beside statistics."""
        return self.method == "lane_sum"


@dataclasses.dataclass
class _Flight:
    """A lane in flight, or a probe of a worker (without a call)."""

    worker: int
    call: _Call | None = None
    lane: int = 0
    large: Any = None


class RayEngine(Engine):
    """Computes on a pool of Ray actors.

    State outlives a call: a worker that hangs in one step gets no lane in the next, until a probe
    answers. A worker that does not come back is given up, and another takes its place if there is
    room. If the user named no number of workers, nodes that join get workers, too.
    """

    def __init__(
        self,
        task: Task,
        *,
        num_lanes: int,
        warn: Callable[[str], None] = ignore,
        patience: Patience | None = None,
        wait_s: float = 0.0,
        **actors: Any,
    ):
        """Start the workers; `ready` waits for them.

        Args:
          task: the model and its data.
          num_lanes: most lanes of a step.
          warn: receives warnings about workers.
          patience: deadlines of workers.
          wait_s: seconds to wait for room, at the start and for workers that were lost.
          actors: other arguments of `Actors`.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        super().__init__(task, num_lanes, warn)
        self._actors = Actors(task, wait_s=wait_s, **actors)
        self._wait_s = wait_s
        if self._actors.warning:
            warn(self._actors.warning)
        self._monitor = Monitor()
        self.num_workers = self._actors.placement.num_workers
        self._health = Health(patience or Patience(back=max(Patience.back, wait_s)))
        if self.num_workers > num_lanes:
            warn(
                f"a step is cut in {num_lanes} parts, so {self.num_workers - num_lanes} of "
                f"{self.num_workers} workers are idle: num_lanes={2 * self.num_workers} uses all"
            )
        self._workers: dict[int, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._probe_at: dict[int, float] = {}
        self._calls: list[_Call] = []
        self._shared = Shared()
        self._names = itertools.count()
        self._started, self._recruit_at = False, 0.0
        self._looked_at, self._busy_s = time.monotonic(), 0.0
        for _ in range(self.num_workers):
            self._hire()

    def ready(self) -> None:
        deadline = time.monotonic() + START_S + self._wait_s
        while (up := self._health.count(State.HEALTHY, State.BUSY)) < self.num_workers:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{up} of {self.num_workers} workers started within "
                    f"{START_S + self._wait_s:.0f} s; "
                    f"free in the cluster: {_free()}"
                )
            self.heard(up, self.num_workers)
            self._collect()
        self._started = True

    def describe(self) -> str:
        count = "1 process" if self.num_workers == 1 else f"{self.num_workers} processes"
        return f"{count}, {self._actors.placement.describe()} each"

    def close(self) -> None:
        for worker in self._workers.values():
            ray.kill(worker)
        self._flights.clear()
        self._shared.drop()
        self._actors.close()

    def read_ahead(self, rows):
        # Lanes go to idle workers in about this order, and pages are shared by a host's workers.
        for worker, lane in zip(self._health.idle(), self.cut(rows).rows, strict=False):
            self._workers[worker].read_ahead.remote("train", lane)

    def publish(self, step, values):
        self._monitor.publish({"step": step, **values})

    def measurements(self) -> dict[str, float]:
        now, busy = time.monotonic(), self._health.busy_s
        share = (busy - self._busy_s) / max(1e-9, (now - self._looked_at) * self.num_workers)
        self._looked_at, self._busy_s = now, busy
        return {
            **super().measurements(),
            "performance/worker_restarts": self._health.restarts,
            "performance/workers": self._health.count(State.HEALTHY, State.BUSY),
            "performance/busy_share": min(1.0, share),
        }

    def _lanes(self, method, params, lanes, *args, lengths=()):
        call = self._call(method, params, lanes, args, lengths)
        self._calls.append(call)
        return self._answers(call)

    def _begin(self, method, params, lanes, *args):
        answers = self._lanes(method, params, lanes, *args)
        self._dispatch()
        return answers

    def prepare(self, params, rows, clip, strategy):
        spare = self._health.idle()[1:]  # one is left for calls that are waited for
        units = one_of_each(self.task, rows) if len(rows) else []
        lanes = [np.concatenate(units[i :: len(spare)]) for i in range(len(spare)) if units[i:]]
        call = self._call("prepare", params, lanes, (clip, strategy))
        for lane, worker in zip(range(len(lanes)), spare, strict=False):
            self._send(worker, call, lane)

    def _call(
        self,
        method: str,
        params: Any,
        lanes: Sequence[np.ndarray],
        args: tuple,
        lengths: Sequence[int] = (),
    ) -> _Call:
        if self._shared.put(params) and self._shared.version == 1:
            self._check_store(self._shared.num_bytes)
        # Without lengths, calls of about as many rows take about as long.
        kinds = [(method, size) for size in lengths or [len(lane).bit_length() for lane in lanes]]
        return _Call(method, self._shared.version, self._shared.ref, lanes, args, kinds)

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

    def _check_store(self, param_bytes: int) -> None:
        """Note if an object store is so small that Ray spills to disk."""
        stores = [
            (have, store_bytes(param_bytes, AHEAD * workers))
            for have, workers in self._actors.stores()
        ]
        have, need = min(stores, key=lambda store: store[0] / store[1])
        if have < need:
            self.warn(
                f"the object store has {have / 1e6:,.0f} MB on a node; {need / 1e6:,.0f} MB would "
                "keep all sums in memory. Steps are slower, because Ray spills to disk"
            )

    def _dispatch(self, first: _Call | None = None) -> None:
        """Send lanes to idle workers: of the call that is waited for, then of the other calls."""
        calls = self._calls if first is None else [first, *self._calls]
        for call in calls:
            for worker in self._health.idle():
                window = AHEAD * max(1, self._health.alive) if call.returns_sum else np.inf
                if not (lanes := call.first(window)):
                    break
                best = self._health.choose(worker, [call.kinds[lane] for lane in lanes])
                call.take(lanes[best])
                self._send(worker, call, lanes[best])

    def _send(self, worker: int, call: _Call, lane: int) -> None:
        method = getattr(self._workers[worker], call.method)
        arguments = (call.version, call.shared, call.lanes[lane], *call.args)
        if call.returns_sum:  # two results: wait for the statistics, then fetch the sum once
            large, ref = method.options(num_returns=2).remote(*arguments)
        else:
            large, ref = None, method.remote(*arguments)
        self._flights[ref] = _Flight(worker, call, lane, large)
        self._health.start(worker, call.kinds[lane], time.monotonic(), call.losses[lane])

    def _collect(self) -> None:
        """Wait briefly for answers; handle those that came, and workers that are late."""
        heed()
        now = time.monotonic()
        if self._health.overdue(now) or self._health.given_up(now):
            self._hear(0.0, len(self._flights))  # the driver itself may have been suspended
        for worker in self._health.overdue(now):
            ray.kill(self._workers[worker], no_restart=False)
            self._lost(self._land(worker))
        for worker in self._health.given_up(now):
            self._give_up(worker, f"it did not answer within {self._health.patience.back:.0f} s")
        self._probe(now)
        self._recruit(now)
        if not self._flights:
            time.sleep(PAUSE_S)
            return
        self._hear(PAUSE_S if self._probe_at else 1.0)

    def _hear(self, timeout: float, most: int = 1) -> None:
        """Take answers once there are `most`, or the time is up."""
        for ref in ray.wait(list(self._flights), num_returns=most, timeout=timeout)[0]:
            self._answered(ref, self._flights.pop(ref))

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
                self._recruit_at = time.monotonic() + STRANGE_S
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
        elif stranger := self._actors.stranger(answer):
            self._recruit_at = time.monotonic() + STRANGE_S
            self._give_up(flight.worker, stranger)
        self._health.answer(flight.worker, time.monotonic())

    def _lost(self, flight: _Flight) -> None:
        """Record a loss: the worker gets no lane until it answers a probe; its lane is put back."""
        self._health.lose(flight.worker, time.monotonic())
        if self._health.state(flight.worker) == State.UNAVAILABLE:
            self._probe_at[flight.worker] = time.monotonic() + PAUSE_S
        call = flight.call
        if call is None or call not in self._calls:
            return
        call.losses[flight.lane] += 1
        self.redispatched += 1
        if call.losses[flight.lane] >= MAX_LOSSES:
            raise EngineError(
                f"{self._name(flight)} lost its worker, or took too long, {MAX_LOSSES} times"
            )
        call.again(flight.lane)

    def _land(self, worker: int) -> _Flight:
        """Remove and return the flight of a worker: its answer is no longer awaited."""
        ref = next(ref for ref, flight in self._flights.items() if flight.worker == worker)
        return self._flights.pop(ref)

    def _hire(self) -> None:
        """Start one more worker."""
        worker = next(self._names)
        self._workers[worker] = self._actors.create(Worker)
        self._health.join(worker, time.monotonic())
        self._probe_at[worker] = 0.0

    def _probe(self, now: float) -> None:
        """Send the task to workers that are out or have started; the answer makes them HEALTHY."""
        for worker in [i for i, when in self._probe_at.items() if when <= now]:
            del self._probe_at[worker]
            answer = self._workers[worker].begin.remote(self._actors.task)
            self._flights[answer] = _Flight(worker)

    def _recruit(self, now: float) -> None:
        """Start workers in the place of those given up, and on nodes that have joined."""
        if now < self._recruit_at or not self._started:
            return
        self._recruit_at = now + RECRUIT_S
        for _ in range(self._actors.wanted() - self._health.alive):
            self._hire()

    def _give_up(self, worker: int, reason: str) -> None:
        self._health.die(worker)
        self._probe_at.pop(worker, None)
        for ref in [ref for ref, flight in self._flights.items() if flight.worker == worker]:
            del self._flights[ref]
        ray.kill(self._workers.pop(worker))
        if not self._started:
            raise EngineError(f"a worker could not start: {reason}")
        if not self._health.alive:
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
