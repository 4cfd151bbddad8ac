"""Workers as Ray actors: their creation, the meaning of their failures, and the driver's view of
their health.

`Health` is a pure state machine, fed with events and the time:

    join                  -> UNAVAILABLE    it has not answered yet
    HEALTHY     start     -> BUSY           it has a lane and a deadline
    BUSY        answer    -> HEALTHY
    UNAVAILABLE answer    -> HEALTHY        it answered a probe
    any         lose      -> UNAVAILABLE    its process died, was late, or cannot be reached
    any         die       -> DEAD           for good; another worker takes its place

It never waits, kills or reads a clock; `ray_engine` does, and passes events and times.
"""

import dataclasses
import enum
import re
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from fedsim.cgroups import cpus
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import EngineError
from fedsim.engine.environment import (
    Placement,
    actor_options,
    difference,
    expect_room,
    place_workers,
    versions,
)
from fedsim.engine.task import Task
from fedsim.signals import heed

MAX_LOSSES = 4  # of one lane, in one call
PULL_S = 60.0  # seconds to fetch a sum from another node
START_S = 300.0  # seconds for all workers to start; imports are slow on busy hosts


class Actors:
    """Creates the workers of one engine, on a cluster that it joins or starts."""

    def __init__(
        self,
        task: Task,
        *,
        num_workers: int | None,
        threads: int,
        accelerator: str = "auto",
        wait_s: float = 0.0,
        cache_dir: Path | None = None,
    ):
        """Connect to the cluster and place the workers.

        Args:
          task: the model and its data.
          num_workers: requested number; None: as many as there is room for, now and later.
          threads: CPU threads of a worker.
          accelerator: auto, cpu, gpu or tpu.
          wait_s: seconds to wait for room, as with an autoscaler.
          cache_dir: directory of compiled programs.
        Raises: ConfigError: the cluster cannot be reached, or has no room for the workers.
        """
        self._cluster = connect(num_workers, threads)
        try:
            wanted = (num_workers, threads, accelerator)
            self.placement: Placement = placed_in_time(self._cluster, *wanted, wait_s)
            # An argument of methods: an argument of the constructor would have to exist when Ray
            # starts an actor again.
            self.task = _stored(task, "the task")
        except BaseException:
            self._cluster.close()
            raise
        self.warning = self._cluster.warning
        self._cache_dir = cache_dir
        self._versions = versions()
        self._kind: str | None = None  # of the host of the first worker that has answered
        self.fixed = num_workers is not None

    def create(self, worker_class: type) -> Any:
        """Start an actor, which has no task yet."""
        actor = ray.remote(worker_class).options(**actor_options(self.placement))
        return actor.remote(cache_dir=self._cache_dir)

    def wanted(self) -> int:
        """Return the number of workers that should run now: as requested, or as there is room."""
        room = self.placement.room(self._cluster.nodes())
        return min(self.placement.num_workers, room) if self.fixed else room

    def stores(self) -> list[tuple[float, int]]:
        """Return (bytes of a node's object store, workers whose sums it holds) for each node.

        A sum is stored on its worker's node, and then on the node of this process, which adds them.
        """
        driver = self._cluster.driver_node()
        stores = [(driver.get("object_store_memory", 0), self.placement.num_workers)]
        for node in self._cluster.nodes():
            if workers := min(self.placement.room([node]), self.placement.num_workers):
                stores.append((node.get("object_store_memory", 0), workers))
        return stores

    def stranger(self, facts: dict[str, Any]) -> str:
        """Say why a worker must not compute: its bits might differ. Empty if it may.

        Args:
          facts: the answer of `Worker.begin`.
        """
        if not (reason := difference(self._versions, facts["versions"])):
            self._versions |= facts["versions"]  # adds accelerators' packages, which it may lack
        self._kind = self._kind or facts["kind"]
        if not reason and facts["kind"] != self._kind:
            # Other processors and devices round differently. Which worker computes a unit may
            # depend on the other units drawn, so a missing unit would change more than its part.
            reason = f"{facts['kind']} instead of {self._kind}: workers must be of one kind"
        return reason and f"the worker on {facts['host']} has {reason}"

    def close(self) -> None:
        """Disconnect from the cluster, and end it if it is a private one."""
        self.task = None
        self._cluster.close()


def placed_in_time(
    cluster: Cluster,
    num_workers: int | None,
    threads: int,
    accelerator: str,
    wait_s: float = 0.0,
) -> Placement:
    """Place workers as soon as there is room for them; arguments as of `Actors`.

    The placement is computed again while nodes join, because `auto` depends on the nodes.
    Raises: ConfigError: there is no room when the time is up.
    """
    deadline, requested = time.monotonic() + wait_s, None
    while True:
        nodes = cluster.nodes()
        placement = place_workers(num_workers, threads, nodes, accelerator)
        there = placement.room(nodes) >= placement.num_workers
        if wait_s and there and requested is None:
            # An earlier driver may have been killed with a request, which only another one ends.
            cluster.ask_for([placement.needs] * placement.num_workers)
        if there or time.monotonic() >= deadline:
            expect_room(placement, nodes)
            return placement
        if placement != requested:
            cluster.ask_for([placement.needs] * placement.num_workers)
            requested = placement
        heed()
        time.sleep(1)


def connect(num_workers: int | None, threads: int) -> Cluster:
    """Join a cluster, or start one for these workers; arguments as of `Actors`.

    A private cluster declares the machine's CPUs, or more if the workers need more.
    """
    return Cluster(max(cpus(), (num_workers or 1) * threads))


def _stored(value: Any, what: str) -> Any:
    """Put a value into Ray's object store; returns its reference. Raises: EngineError: it is full.

    Args: what: the value, in words.
    """
    try:
        return ray.put(value)
    except (ObjectStoreFullError, OutOfDiskError) as error:
        reason = f"no room for {what} in the object store: {cause(error)}"
        raise EngineError(reason) from error


class Shared:
    """The parameters in Ray's object store: stored once per version, read without copying."""

    def __init__(self):
        self.version, self.ref, self._leaves = 0, None, []

    def put(self, params: Any) -> bool:
        """Store parameters, unless they are stored already.

        Returns: true if they are new.
        Raises: EngineError: there is no room for them.
        """
        leaves = jax.tree.leaves(params)
        same = len(leaves) == len(self._leaves) and all(
            new is old and isinstance(new, jax.Array)  # immutable, so equal if identical
            for new, old in zip(leaves, self._leaves, strict=True)
        )
        if same:
            return False
        self.drop()  # first, so that the store does not hold two versions
        self.ref = _stored(jax.tree.map(np.asarray, params), "the parameters")
        self._leaves, self.version = leaves, self.version + 1
        return True

    def drop(self) -> None:
        """Release the parameters, in the object store and here."""
        self.ref, self._leaves = None, []

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored parameters."""
        return sum(leaf.nbytes for leaf in self._leaves)


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


class State(enum.Enum):
    """The state of a worker, as the driver knows it."""

    HEALTHY = "healthy"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Patience:
    """Deadlines of workers."""

    first: float = 600.0
    """Seconds for the first call of a kind, which compiles."""
    least: float = 60.0
    """Least seconds for any other call."""
    medians: float = 5.0
    """Deadline of any other call in medians of recent calls of its kind, if that is longer."""
    back: float = 300.0
    """Seconds to answer after it joined or was lost, before it is given up."""


@dataclasses.dataclass
class _Worker:
    state: State
    since: float
    kind: Hashable = None
    deadline: float = 0.0
    warm: set[Hashable] = dataclasses.field(default_factory=set)


class Health:
    """States of all workers that ever joined."""

    def __init__(self, patience: Patience | None = None):
        self.patience = patience or Patience()
        self.restarts = 0
        """Number of times that a worker answered again after it had been lost."""
        self.busy_s = 0.0
        """Seconds that workers spent on calls that they answered."""
        self._workers: dict[int, _Worker] = {}
        self._lost: set[int] = set()
        self._idle: deque[int] = deque()  # HEALTHY ones, idle the longest first
        self._seconds = defaultdict(lambda: deque(maxlen=50))  # of recent calls, by kind

    def state(self, worker: int) -> State:
        """Return a worker's state."""
        return self._workers[worker].state

    def count(self, *states: State) -> int:
        """Count the workers in any of these states."""
        return sum(worker.state in states for worker in self._workers.values())

    @property
    def alive(self) -> int:
        """Number of workers that are not DEAD."""
        return len(self._workers) - self.count(State.DEAD)

    def idle(self) -> list[int]:
        """Return the HEALTHY workers, the one that has been idle longest first."""
        return list(self._idle)

    def join(self, worker: int, now: float) -> None:
        """Add a new worker, which has not answered yet."""
        if worker in self._workers:
            raise ValueError(f"worker={worker}: expected one that has not joined before")
        self._workers[worker] = _Worker(State.UNAVAILABLE, now)

    def choose(self, worker: int, kinds: Sequence[Hashable]) -> int:
        """Return the index of the best call for a worker.

        The first of a kind that the worker has compiled; else the first of a kind that no other
        worker has compiled or is running, so that kinds are spread; else the first.
        """

        def strange(number):
            kind = kinds[number]
            if kind in self._workers[worker].warm:
                return 0
            others = self._workers.values()
            return 1 + any(
                kind in other.warm or (other.state, other.kind) == (State.BUSY, kind)
                for other in others
            )

        return min(range(len(kinds)), key=strange)

    def start(self, worker: int, kind: Hashable, now: float, losses: int = 0) -> float:
        """Record that a HEALTHY worker got a call.

        Args:
          worker: its number.
          kind: the kind of call, by what is compiled for it.
          now: seconds.
          losses: number of times that the call was lost before; each doubles its deadline.
        Returns: the deadline.
        """
        record = self._workers[worker]
        if record.state != State.HEALTHY:
            raise ValueError(f"worker={worker}: expected a healthy one, it is {record.state.value}")
        self._idle.remove(worker)
        allowed = self.patience.first
        if kind in record.warm:
            usual = self.patience.medians * statistics.median(self._seconds[kind])
            allowed = max(self.patience.least, usual)
        record.state, record.since, record.kind = State.BUSY, now, kind
        record.deadline = now + allowed * 2**losses
        return record.deadline

    def answer(self, worker: int, now: float) -> None:
        """Record the answer to a call, or to a probe of an UNAVAILABLE worker. DEAD stays DEAD."""
        record = self._workers[worker]
        if record.state == State.BUSY:
            self._seconds[record.kind].append(now - record.since)
            self.busy_s += now - record.since
            record.warm.add(record.kind)
        elif record.state == State.UNAVAILABLE:
            self.restarts += worker in self._lost
            self._lost.discard(worker)
        else:
            return
        record.state, record.since = State.HEALTHY, now
        self._idle.append(worker)

    def lose(self, worker: int, now: float) -> None:
        """Record that a call or a probe failed or was late."""
        record = self._workers[worker]
        if record.state == State.DEAD:
            return
        if record.state != State.UNAVAILABLE:  # `since` is the time of the first loss
            record.since = now
            self._lost.add(worker)
        self._leave(worker, State.UNAVAILABLE)

    def die(self, worker: int) -> None:
        """Record that a worker will not come back."""
        self._leave(worker, State.DEAD)

    def overdue(self, now: float) -> list[int]:
        """Return the BUSY workers whose deadline has passed."""
        busy = ((i, worker) for i, worker in self._workers.items() if worker.state == State.BUSY)
        return [i for i, worker in busy if worker.deadline < now]

    def given_up(self, now: float) -> list[int]:
        """Return the UNAVAILABLE workers whose time to come back has passed."""
        last = now - self.patience.back
        away = (i for i, worker in self._workers.items() if worker.state == State.UNAVAILABLE)
        return [i for i in away if self._workers[i].since < last]

    def _leave(self, worker: int, state: State) -> None:
        record = self._workers[worker]
        record.state = state
        record.warm.clear()  # a new process compiles again
        if worker in self._idle:
            self._idle.remove(worker)
