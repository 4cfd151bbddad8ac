"""Sharding of arrays over the devices of one process."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedsim.config import AXES, MeshShape
from fedsim.errors import expect

BLOCKS = "blocks"
"""Name of stacked parameters, leaves [layers, ...]. A loop runs over their first axis, which is
never sharded."""


def make_mesh(shape: MeshShape) -> Mesh:
    """Make a mesh of the first of this process's devices.

    Raises: ConfigError: the process has fewer devices.
    """
    devices = jax.local_devices()
    have = f"at most {len(devices)} devices, as JAX finds (JAX_NUM_CPU_DEVICES: of a CPU)"
    expect("mesh", shape, shape.devices <= len(devices), have)
    grid = [getattr(shape, axis) for axis in AXES]
    return Mesh(np.array(devices[: shape.devices]).reshape(grid), AXES)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Choose the sharding of each array of a tree.

    Each axis of the mesh divides the longest axis of the array that it divides evenly, preferably
    one that no other axis of the mesh divides. Arrays without such an axis are replicated.
    Returns: tree of NamedSharding like `tree`.
    """

    def of(path, leaf):
        left = list(np.shape(leaf))
        cut: list[tuple[str, ...]] = [() for _ in left]
        first = int(path[:1] == (jax.tree_util.DictKey(BLOCKS),))
        for axis, parts in mesh.shape.items():
            fitting = [i for i in range(first, len(left)) if left[i] and left[i] % parts == 0]
            if parts > 1 and fitting:
                longest = max(fitting, key=lambda i: (not cut[i], left[i]))  # noqa: B023
                left[longest] //= parts
                cut[longest] = (*cut[longest], axis)
        return NamedSharding(mesh, PartitionSpec(*(names or None for names in cut)))

    return jax.tree.map_with_path(of, tree)


def in_parts(params: Any, mesh: Mesh | None) -> Any:
    """Constrain the sharding of parameters, and of gradients with respect to them, in a program.

    Args:
      params: tree of arrays.
      mesh: None: one device has them, and nothing is constrained.
    """
    if mesh is None:
        return params
    return jax.lax.with_sharding_constraint(params, shardings(params, mesh))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Return the sharding that replicates an array on each device."""
    return NamedSharding(mesh, PartitionSpec())


def is_cut(leaf: Any) -> bool:
    """True if an array is on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def any_cut(tree: Any) -> bool:
    """True if an array of a tree is on several devices."""
    return any(map(is_cut, jax.tree.leaves(tree)))


def beside(leaf: Any, like: Any) -> Any:
    """Shard an array like another one, if that one is on several devices."""
    return jax.device_put(leaf, like.sharding) if is_cut(like) else leaf


def slabs(leaf: Any, most: int) -> Iterator[np.ndarray]:
    """Yield an array's consecutive parts along its first axis: the host holds one at a time.

    Args:
      leaf: an array with at least one axis, possibly sharded.
      most: bytes of a part; a part has at least one entry of the first axis.
    """
    shape, entry = np.shape(leaf), max(1, leaf.nbytes // max(1, len(leaf)))
    size = max(1, most // entry)
    for start in range(0, shape[0], size):
        stop = min(start + size, shape[0])
        if not is_cut(leaf):
            yield np.ascontiguousarray(leaf[start:stop])
            continue
        slab = np.empty((stop - start, *shape[1:]), leaf.dtype)
        for part in leaf.addressable_shards:
            first, *rest = part.index
            low, high, _ = first.indices(shape[0])
            low, high = max(low, start), min(high, stop)
            if part.replica_id == 0 and low < high:
                offset = low - (first.start or 0)
                cut = jax.lax.dynamic_slice_in_dim(part.data, offset, high - low)
                slab[(slice(low - start, high - start), *rest)] = np.asarray(cut)
        yield slab
