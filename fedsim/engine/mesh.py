"""A worker with several devices, or one of several processes that are joined into one mesh.

Every device works through its share of a lane as a worker of its own; the shares are added by one
psum over the mesh. All processes of a mesh are called with the same lane, and all get its sum.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedsim.clipping import Clip, Strategy
from fedsim.engine.engine import Stats
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker

AXIS = "devices"


class MeshWorker(Worker):
    """Computes lanes on all devices of its mesh."""

    def __init__(self, task: Task | None = None, cache_dir: Path | None = None):
        super().__init__(task, cache_dir)
        self._workers: list[Worker] = []  # of this process's devices

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, *args):
        """The clipped sum of the whole lane, and the statistics of this process's share of it."""
        shares = dict(zip(jax.devices(), np.array_split(rows, jax.device_count()), strict=True))
        mine = [shares[device] for device in jax.local_devices()]
        found = self._run("lane_sum", version, params, mine, *args)
        total = self._add([lane_sum for lane_sum, _ in found])
        return total, Stats.join([stats for _, stats in found])

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """Nats and predictions of a lane on this process's devices alone."""
        shares = np.array_split(rows, jax.local_device_count())
        found = self._run("lane_nats", version, params, shares, split)
        return sum(nats for nats, _ in found), sum(count for _, count in found)

    def _run(self, method, version, params, shares, *args):
        """The answers of this process's devices, each for its share."""
        devices = jax.local_devices()
        self._workers = self._workers or [Worker(self.task) for _ in devices]

        def run(worker, device, share):
            with jax.default_device(device):
                return getattr(worker, method)(version, params, share, *args)

        with ThreadPoolExecutor(len(devices)) as threads:
            return list(threads.map(run, self._workers, devices, shares))

    def _add(self, sums: list[Any]) -> Any:
        """The sum over the mesh, as NumPy, in every process."""
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))

        def spread(*parts):
            """[devices, ...], a device's part on that device."""
            placed = [
                jax.device_put(part[None], device)
                for part, device in zip(parts, jax.local_devices(), strict=True)
            ]
            shape = (jax.device_count(), *parts[0].shape)
            return jax.make_array_from_single_device_arrays(shape, sharding, placed)

        def added(parts):
            total = _psum(mesh)(jax.tree.map(spread, *parts))
            return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0))[0], total)

        if all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(sums)):
            return added(sums)
        # Devices add int32. The two halves of whole numbers are added by themselves, so that
        # neither sum can overflow.
        low = added([jax.tree.map(lambda x: (x & 0xFFFF).astype(np.int32), s) for s in sums])
        high = added([jax.tree.map(lambda x: (x >> 16).astype(np.int32), s) for s in sums])
        return jax.tree.map(lambda upper, lower: (upper.astype(np.int64) << 16) + lower, high, low)


def mesh_sum(
    task: Task, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy
) -> tuple[Any, Stats]:
    """What `--engine spmd` computes, as a plain function: the clipped sum over all units.

    To be called with the same arguments in every process that `jax.distributed` has joined, whoever
    started them (Ray Train's JaxTrainer, mpirun, Slurm). Arguments are those of
    `Engine.clipped_sum`. That these processes are of one kind of processor or accelerator, and have
    the same packages, is not looked at: who started them answers for it, or compares
    `Worker.facts`.
    Returns: (the sum, the same in every process; the statistics of this process's share of units).
    Raises: UnfitDevice: the arithmetic of this process's device is not what the guarantee rests on.
    """
    _look_at_device()
    return MeshWorker(task).lane_sum(0, params, rows, clip, strategy)


@functools.cache
def _look_at_device() -> None:
    """Once, for it computes. Raises: UnfitDevice."""
    Worker().facts()


@functools.cache
def _psum(mesh: Mesh):
    return jax.jit(
        jax.shard_map(
            lambda tree: jax.lax.psum(tree, AXIS),
            mesh=mesh,
            in_specs=PartitionSpec(AXIS),
            out_specs=PartitionSpec(),
        )
    )
