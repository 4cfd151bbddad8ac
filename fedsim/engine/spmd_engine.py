"""The engine for many nodes: the pool's workers joined by jax.distributed into one mesh.

A step's units are cut over all devices and added by one psum; only the parameters and one sum pass
through Ray. In multi-controller JAX the death of one process is everybody's: the group is ended and
started again, at a new port, and the step is computed once more. Sums of whole numbers are the same
for any numbers of processes and devices; those of floating-point numbers depend on them.
"""

import functools
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray
from jaxlib import _jax  # pyright: ignore
from ray.exceptions import RayError, RayTaskError

from fedsim.clipping import Strategy
from fedsim.engine.actors import MAX_LOSSES, PULL_S, START_S, Actors, Shared, cause, failure
from fedsim.engine.engine import Engine, EngineError, Stats, ignore
from fedsim.engine.health import Health, Patience
from fedsim.engine.lanes import costs, whole
from fedsim.engine.mesh import MeshWorker
from fedsim.engine.monitor import Monitor
from fedsim.engine.task import Task
from fedsim.noise import HeldSum, Share

HEARTBEAT_S = 10  # until the survivors of a lost process notice
GROUP = 0  # the name under which `Health` knows the group


class SpmdWorker(MeshWorker):
    """One process of the group."""

    _held: Any = None  # the sum of a step, between `hold_sum` and `release`

    def address(self) -> str:
        """Where this process can be reached, with a port that nobody uses."""
        with socket.socket() as unused:
            unused.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{unused.getsockname()[1]}"

    def join(self, coordinator: str, num_processes: int, rank: int, task: Task) -> dict[str, Any]:
        """Become a process of the mesh; once in its life. Returns its `facts`."""
        host = {"hostname": ray.util.get_node_ip_address()}  # else what the host's name stands for
        made = functools.partial(_jax.make_gloo_tcp_collectives, **host)
        _jax.make_gloo_tcp_collectives = made
        jax.distributed.initialize(
            coordinator,
            num_processes,
            rank,
            coordinator_bind_address=coordinator,  # else on all interfaces
            heartbeat_timeout_seconds=HEARTBEAT_S,
            initialization_timeout=int(START_S),
        )
        return self.begin(task)

    def hold_sum(self, *args: Any) -> Stats:
        """Like `lane_sum`, but the sum stays here until its noise is added."""
        self._held, stats = self.lane_sum(*args)
        return stats

    def release(self, share: Share) -> list[np.ndarray]:
        """The numbers of a share of that sum, with their noise. The sum is let go of."""
        held, self._held = self._held, None
        return share.released(jax.tree.leaves(held))


class _GroupLost(Exception):
    """A process of the group died, cannot be reached, or is late."""


class SpmdEngine(Engine):
    """Computes on a group of Ray actors that are one mesh."""

    def __init__(
        self,
        task: Task,
        *,
        num_lanes: int,
        note: Callable[[str], None] = ignore,
        patience: Patience | None = None,
        trusted: bool = False,
        **actors: Any,
    ):
        """Args:
        trusted: whether workers keep sums, and are given the keys of the noise that they add.
        actors: see `Actors`.
        """
        super().__init__(task, num_lanes, note)
        self.trusted = trusted
        self._actors = Actors(task, **actors)
        if self._actors.warning:
            note(self._actors.warning)
        self._monitor = Monitor()
        self.num_workers = self._actors.placement.num_workers
        self._health = Health(patience)
        self._health.join(GROUP, time.monotonic())
        self._shared = Shared()
        self._group: list[Any] = []
        self._create()

    def ready(self) -> None:
        self._join(START_S)

    def describe(self) -> str:
        return f"{self._actors.placement.describe()}, joined by jax.distributed"

    def close(self) -> None:
        self._end()
        self._shared.drop()
        self._actors.close()

    def cut(self, rows):
        return whole(rows)  # all processes have a part of each pass

    def measurements(self) -> dict[str, float]:
        restarts = {"performance/group_restarts": self._health.restarts}
        return {**super().measurements(), **restarts}

    def publish(self, step, values):
        self._monitor.publish({"step": step, **values})

    def clipped_sum(self, params, rows, clip, strategy=Strategy()):  # noqa: B008 (frozen)
        if not self.trusted or clip.in_float32 or not len(rows):
            return super().clipped_sum(params, rows, clip, strategy)
        self._shared.put(params)
        arguments = (self._shared.version, self._shared.ref, rows, clip, strategy)

        def hold():
            return [worker.hold_sum.remote(*arguments) for worker in self._group]

        stats = Stats.of_all(rows, self._until_done("hold_sum", hold, rows), self.cut(rows).order)
        holding = self._group

        def release(shares):
            def call():  # workers that took the place of lost ones compute the sum first
                again = [] if self._group is holding else hold()
                pairs = zip(self._group, shares, strict=True)
                return again + [worker.release.remote(share) for worker, share in pairs]

            return self._until_done("release", call)[-len(shares) :]

        return HeldSum(params, self.num_workers, release), stats

    def _lanes(self, method, params, lanes, *args, lengths=()):
        self._shared.put(params)
        if method == "lane_sum":
            if lanes:
                yield self._sum(lanes[0], args)
            return

        def call():
            return [
                getattr(self._group[i % len(self._group)], method).remote(
                    self._shared.version, self._shared.ref, lane, *args
                )
                for i, lane in enumerate(lanes)
            ]

        yield from self._until_done(method, call)

    def _sum(self, rows: np.ndarray, args: tuple) -> tuple[Any, Stats]:
        """The sum over all rows, and their statistics in order."""

        def call():
            arguments = (self._shared.version, self._shared.ref, rows, *args)
            pairs = [
                worker.lane_sum.options(num_returns=2).remote(*arguments) for worker in self._group
            ]
            # All processes have the same sum.
            return [pairs[0][0], *(stats for _, stats in pairs)]

        total, *parts = self._until_done("lane_sum", call, rows)
        return total, Stats.join(parts)

    def _until_done(
        self, method: str, call: Callable[[], list[Any]], rows: np.ndarray | None = None
    ) -> list[Any]:
        """Answers of the calls that `call` makes, from a new group if this one is lost.

        Args: rows: those whose lengths programs depend on, if they do.
        """
        found = None if rows is None else costs(self.task, "train", rows)
        lengths = () if found is None else tuple(np.unique(found.max(axis=1)).tolist())
        for losses in range(MAX_LOSSES):
            try:
                now = time.monotonic()
                deadline = self._health.start(GROUP, (method, lengths), now, losses)
                answers = self._wait(call(), deadline)
                self._health.answer(GROUP, time.monotonic())
                return answers
            except _GroupLost as lost:
                reason = str(lost)
            self._health.lose(GROUP, time.monotonic())
            self.redispatched += 1
            self.note(f"starting the group of workers again: {reason}")
            self._end()
            self._create()
            self._join(self._health.patience.back)
        raise EngineError(f"{method} lost its workers, or took too long, {MAX_LOSSES} times")

    def _wait(self, refs: list[Any], deadline: float) -> list[Any]:
        """All answers, or what went wrong first."""
        found, left = {}, list(refs)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=1)
            for ref in done:
                try:
                    found[ref] = ray.get(ref, timeout=PULL_S)
                except RayTaskError as error:
                    # A lost peer shows as an error of the collective, like a lack of memory.
                    if isinstance(error.cause, jax.errors.JaxRuntimeError | RayError):
                        raise _GroupLost(cause(error)) from error
                    raise failure("a step failed", error) from error
                except RayError as error:
                    raise _GroupLost(cause(error)) from error
            if not done and time.monotonic() > deadline:  # what is there is not late
                raise _GroupLost("a worker did not answer in time")
        return [found[ref] for ref in refs]

    def _create(self) -> None:
        """New actors, on their way up. Ray does not restart them: a process joins only once."""
        count = range(self.num_workers)
        self._group = [self._actors.create(SpmdWorker, max_restarts=0) for _ in count]

    def _join(self, timeout: float) -> None:
        """Wait for the actors and make them one mesh.

        Raises: EngineError: they do not start, cannot see the data, or differ in versions.
        """
        deadline = time.monotonic() + timeout
        try:
            coordinator = ray.get(self._group[0].address.remote(), timeout=timeout)
            joined = [
                worker.join.remote(coordinator, self.num_workers, rank, self._actors.task)
                for rank, worker in enumerate(self._group)
            ]
            found = ray.get(joined, timeout=max(1.0, deadline - time.monotonic()))
        except RayError as error:
            raise failure(f"{self.num_workers} workers could not be joined", error) from error
        if strangers := list(filter(None, map(self._actors.stranger, found))):
            raise EngineError(f"a worker could not start: {strangers[0]}")
        self._health.answer(GROUP, time.monotonic())

    def _end(self) -> None:
        for worker in self._group:
            ray.kill(worker)
        self._group = []
