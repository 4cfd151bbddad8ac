"""Workers as Ray actors: their place, what is sent to them, and the cause of a failure."""

import re
import time
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
from fedsim.signals import raise_if_stopped


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

    def why_incompatible(self, facts: dict[str, Any]) -> str:
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
        raise_if_stopped()
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

    def put(self, params: Any) -> None:
        """Store parameters, unless they are stored already.

        Raises: EngineError: there is no room for them.
        """
        leaves = jax.tree.leaves(params)
        same = len(leaves) == len(self._leaves) and all(
            new is old and isinstance(new, jax.Array)  # immutable, so equal if identical
            for new, old in zip(leaves, self._leaves, strict=True)
        )
        if same:
            return
        self.drop()  # first, so that the store does not hold two versions
        self.ref = _stored(jax.tree.map(np.asarray, params), "the parameters")
        self._leaves, self.version = leaves, self.version + 1

    def drop(self) -> None:
        """Release the parameters, in the object store and here."""
        self.ref, self._leaves = None, []


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
