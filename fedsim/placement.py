"""Arrays that several devices have between them, a part each."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedsim.config import AXES, MeshShape
from fedsim.errors import expect

BLOCKS = "blocks"
"""Name of parameters that are stacked, leaves [layers, ...]: a loop goes through their first axis,
along which they are not cut."""


def make_mesh(shape: MeshShape) -> Mesh:
    """A mesh of the first of this process's devices. Raises ConfigError: it has fewer."""
    found = jax.local_devices()
    have = f"at most {len(found)} devices, as JAX finds (JAX_NUM_CPU_DEVICES: of a CPU)"
    expect("mesh", shape, shape.devices <= len(found), have)
    grid = [getattr(shape, axis) for axis in AXES]
    return Mesh(np.array(found[: shape.devices]).reshape(grid), AXES)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """How arrays are cut, a tree of NamedSharding like `tree`: in the parts of each axis of the
    mesh along the longest axis of the array that so many equal parts have, another one each, if
    there is one; or not at all, where no axis has so many."""

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
    """The same inside of a program, of which XLA is told how they are cut, and so is a gradient
    with respect to them. None: one device has them."""
    if mesh is None:
        return params
    return jax.lax.with_sharding_constraint(params, shardings(params, mesh))


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on each device."""
    return NamedSharding(mesh, PartitionSpec())


def is_cut(leaf: Any) -> bool:
    """Whether an array lies on several devices."""
    return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1


def any_cut(tree: Any) -> bool:
    """Whether an array of a tree does."""
    return any(map(is_cut, jax.tree.leaves(tree)))


def beside(leaf: Any, like: Any) -> Any:
    """An array on the devices of another one, cut in the same way, if that one is cut."""
    return jax.device_put(leaf, like.sharding) if is_cut(like) else leaf


def slabs(leaf: Any, most: int) -> Iterator[np.ndarray]:
    """An array's consecutive parts along its first axis, of at most so many bytes, or of one entry:
    on the host there is one of them at a time, wherever the others are."""
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
                own = low - (first.start or 0)
                cut = jax.lax.dynamic_slice_in_dim(part.data, own, high - low)
                slab[(slice(low - start, high - start), *rest)] = np.asarray(cut)
        yield slab
