"""Workers as Ray actors: where they come from, and what their failures mean."""

import dataclasses
import enum
import os
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

MAX_LOSSES = 4  # of one lane, in one call
PULL_S = 60.0  # for a sum to come from another node
START_S = 300.0  # for all workers to answer for the first time; imports are slow on busy hosts


class Actors:
    """Makes the workers of one engine, on a cluster that it joins or starts."""

    def __init__(
        self,
        task: Task,
        *,
        num_workers: int | None,
        threads: int,
        devices: int | None = None,
        accelerator: str = "auto",
        wait_s: float = 0.0,
        cache_dir: Path | None = None,
    ):
        """Raises: ConfigError: the cluster cannot be reached, or has no room for the workers."""
        self._cluster = Cluster(_cpus_needed(num_workers, threads * (devices or 1)))
        try:
            wanted = (num_workers, threads, devices, accelerator)
            self.placement: Placement = placed_in_time(self._cluster, *wanted, wait_s)
            # An argument of methods: one of actors' constructors would have to be there when Ray
            # starts them again.
            self.task = ray.put(task)
        except BaseException:
            self._cluster.close()
            raise
        self.warning = self._cluster.warning
        self._cache_dir = cache_dir
        self._versions = versions()
        self._kind: str | None = None  # of the host of the first worker that has answered
        self.fixed = num_workers is not None

    def create(self, worker_class: type, **arguments: Any) -> Any:
        """A new actor, on its way up; it has no task yet.

        Args: arguments: of its constructor, beside the directory of compiled programs.
        """
        actor = ray.remote(worker_class).options(**actor_options(self.placement))
        return actor.remote(**arguments, cache_dir=self._cache_dir)

    def wanted(self) -> int:
        """How many workers there should be now: what was asked for, or what there is room for."""
        room = self.placement.room(self._cluster.nodes())
        return min(self.placement.num_workers, room) if self.fixed else room

    def stores(self) -> list[tuple[float, int]]:
        """(bytes of a node's object store, workers whose sums come to lie there), of each node.

        A sum lies on its worker's node, and then on that of this process, which adds all of them.
        """
        driver = self._cluster.driver_node()
        found = [(driver.get("object_store_memory", 0), self.placement.num_workers)]
        for node in self._cluster.nodes():
            if workers := min(self.placement.room([node]), self.placement.num_workers):
                found.append((node.get("object_store_memory", 0), workers))
        return found

    def stranger(self, facts: dict[str, Any]) -> str:
        """Why a worker with these facts must not compute: its bits might differ. Empty if it may.

        Args: facts: what `Worker.begin` answered.
        """
        if not (found := difference(self._versions, facts["versions"])):
            self._versions |= facts["versions"]  # of accelerators, which this process may not have
        self._kind = self._kind or facts["kind"]
        if not found and facts["kind"] != self._kind:
            # Other processors and devices round otherwise. Who computes a unit may depend on who
            # else was drawn, so a unit that is missing would change more than its own part.
            found = f"{facts['kind']} instead of {self._kind}: workers must be of one kind"
        return found and f"the worker on {facts['host']} has {found}"

    def close(self) -> None:
        """Let go of the cluster, and end it if it is a private one."""
        self.task = None
        self._cluster.close()


def placed_in_time(
    cluster: Cluster,
    num_workers: int | None,
    threads: int,
    devices: int | None,
    accelerator: str,
    wait_s: float = 0.0,
) -> Placement:
    """Where workers go, as soon as they find room there.

    The placement is made anew whenever nodes have joined: before, nobody knows what `auto` means.
    Raises: ConfigError: there is no room when the time is up.
    """
    deadline, asked = time.monotonic() + wait_s, None
    while True:
        nodes = cluster.nodes()
        placement = place_workers(num_workers, threads, nodes, devices, accelerator)
        if placement.room(nodes) >= placement.num_workers or time.monotonic() >= deadline:
            expect_room(placement, nodes)
            return placement
        if placement != asked:
            cluster.ask_for([placement.needs] * placement.num_workers)
            asked = placement
        time.sleep(1)


class Shared:
    """The parameters in the object store: put there once per version, read without copying."""

    def __init__(self):
        self.version, self.ref, self._leaves = 0, None, []

    def put(self, params: Any) -> bool:
        """Share these, unless they are the ones that are shared. Returns whether they are new.

        Raises: EngineError: there is no room for them.
        """
        leaves = jax.tree.leaves(params)
        same = len(leaves) == len(self._leaves) and all(
            new is old and isinstance(new, jax.Array)  # which nobody can have written to
            for new, old in zip(leaves, self._leaves, strict=True)
        )
        if same:
            return False
        self.drop()  # first, or the store would hold one version more
        try:
            self.ref = ray.put(jax.tree.map(np.asarray, params))
        except (ObjectStoreFullError, OutOfDiskError) as error:
            reason = f"no room for the parameters in the object store: {cause(error)}"
            raise EngineError(reason) from error
        self._leaves, self.version = leaves, self.version + 1
        return True

    def drop(self) -> None:
        """Free the parameters, in the object store and here."""
        self.ref, self._leaves = None, []

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the parameters that are shared."""
        return sum(leaf.nbytes for leaf in self._leaves)


def failure(what: str, error: Exception) -> EngineError:
    """An exception of a worker's code as the driver reports it: one line, the worker's traceback
    in `details`."""
    return EngineError(f"{what}: {cause(error)}", details=_plain(str(error)) + "\n")


def cause(error: Exception) -> str:
    """The exception of the worker's code, without Ray's frames around it."""
    inner = getattr(error, "cause", None)
    if inner is not None:
        return _plain(f"{type(inner).__name__}: {inner}")
    lines = [line.strip() for line in _plain(str(error)).strip().splitlines()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:", line)]
    return (named or lines or [type(error).__name__])[-1]


def _plain(text: str) -> str:
    """Without terminal colours, which Ray puts in."""
    return re.sub(r"\x1b\[\d*m", "", text)


def _cpus_needed(num_workers: int | None, threads: int) -> int:
    """CPUs a private cluster declares: this machine's, or more if more workers were asked for."""
    return max(len(os.sched_getaffinity(0)), (num_workers or 1) * threads)


class State(enum.Enum):
    """What is known of a worker at a moment."""

    HEALTHY = "healthy"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    DEAD = "dead"


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a worker may take, in seconds."""

    first: float = 600.0
    """Seconds for the first call of a kind, which compiles."""
    least: float = 60.0
    """Seconds for any other call, however short the last ones were."""
    medians: float = 5.0
    """How many medians of recent calls of its kind any other call may take, if that is longer."""
    back: float = 300.0
    """To answer after it joined or was lost; then it is given up."""


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
        """Times a worker answered again after it had been lost."""
        self.busy_s = 0.0
        """Seconds that workers have spent on calls they answered."""
        self._workers: dict[int, _Worker] = {}
        self._lost: set[int] = set()
        self._idle: deque[int] = deque()  # HEALTHY ones, idle the longest first
        self._seconds = defaultdict(lambda: deque(maxlen=50))  # of recent calls, by kind

    def state(self, worker: int) -> State:
        """The state that a worker is in."""
        return self._workers[worker].state

    def count(self, *states: State) -> int:
        """Workers in any of these states."""
        return sum(worker.state in states for worker in self._workers.values())

    @property
    def alive(self) -> int:
        """Workers that are not DEAD."""
        return len(self._workers) - self.count(State.DEAD)

    def idle(self) -> list[int]:
        """HEALTHY workers, the one that has been idle longest first."""
        return list(self._idle)

    def join(self, worker: int, now: float) -> None:
        """A new worker, which has not answered yet."""
        if worker in self._workers:
            raise ValueError(f"worker={worker}: expected one that has not joined before")
        self._workers[worker] = _Worker(State.UNAVAILABLE, now)

    def choose(self, worker: int, kinds: Sequence[Hashable]) -> int:
        """Which of some calls is the best for a worker: the first of a kind that it has compiled,
        else of one that no other has nor is at, so that all have their own; else the first."""

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
        """A HEALTHY worker got a call; returns its deadline.

        Args: losses: how often the call was lost before; each time doubles its deadline.
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
        """A call, or a probe of an UNAVAILABLE worker, was answered. DEAD ones stay dead."""
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
        """A call or a probe came back with an error, or was too late."""
        record = self._workers[worker]
        if record.state == State.DEAD:
            return
        if record.state != State.UNAVAILABLE:  # else the time since the first loss counts
            record.since = now
            self._lost.add(worker)
        self._leave(worker, State.UNAVAILABLE)

    def die(self, worker: int) -> None:
        """Take a worker for lost: it will not come back."""
        self._leave(worker, State.DEAD)

    def overdue(self, now: float) -> list[int]:
        """BUSY workers whose deadline has passed."""
        busy = ((i, worker) for i, worker in self._workers.items() if worker.state == State.BUSY)
        return [i for i, worker in busy if worker.deadline < now]

    def given_up(self, now: float) -> list[int]:
        """UNAVAILABLE workers that have had all the time there is to come back."""
        last = now - self.patience.back
        away = (i for i, worker in self._workers.items() if worker.state == State.UNAVAILABLE)
        return [i for i in away if self._workers[i].since < last]

    def _leave(self, worker: int, state: State) -> None:
        record = self._workers[worker]
        record.state = state
        record.warm.clear()  # a new process compiles again
        if worker in self._idle:
            self._idle.remove(worker)
