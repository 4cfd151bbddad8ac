"""A worker whose devices have a model between them: a part of each array, and whole layers in turn.

Parameters and sums are JAX arrays on the devices of a mesh, and stay there: what `lane_sum` returns
is cut like the parameters. So many units as there are devices are computed side by side, a unit on
one device, by programs for one device (`clipping.layered`). Programs for all devices copy weights,
and add whole numbers; they do no arithmetic that rounds. So the numbers are the same for any mesh.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedsim.clipping import Clip, Strategy
from fedsim.clipping.contribution import whole
from fedsim.clipping.layered import BLOCKS, Programs, norm_and_scale, num_layers, rest_of
from fedsim.clipping.observed import UnsupportedModel
from fedsim.config import MeshShape
from fedsim.config.mesh import AXES, FSDP, TENSOR
from fedsim.engine.calls import EVAL_ROWS_PER_CHUNK
from fedsim.engine.engine import EngineError, Stats
from fedsim.engine.resources import compiler_options
from fedsim.engine.task import Task
from fedsim.engine.worker import Worker, expect_fit, flush, no_sum, sum_holds
from fedsim.errors import expect

ALL = PartitionSpec(AXES)  # the first axis over all devices


def make_mesh(shape: MeshShape) -> Mesh:
    """A mesh of the first of this process's devices. Raises ConfigError: it has fewer."""
    found = jax.local_devices()
    have = f"at most {len(found)} devices, as JAX finds (JAX_NUM_CPU_DEVICES: of a CPU)"
    expect("mesh", shape, shape.devices <= len(found), have)
    grid = [getattr(shape, axis) for axis in AXES]
    return Mesh(np.array(found[: shape.devices]).reshape(grid), AXES)


def layers_of(task: Task, shape: MeshShape) -> Any:
    """The layers that a mesh goes through. Raises ConfigError: it cannot, with this task."""
    layers = task.layers
    given = layers is not None and task.local_steps is None
    expect("mesh", shape, given, "none: the task has no layers, or its users have local steps")
    return layers


def specs_of(params: Any, mesh: MeshShape) -> Any:
    """How arrays are cut, a tree like `params`: over FSDP along the longest axis that so many equal
    parts have, of stacked arrays one of each layer's, and over TENSOR along the longest of the
    others, or of these parts; or not at all, where there is none."""

    def spec(leaf, first):
        left = list(np.shape(leaf))
        cut: list[tuple[str, ...]] = [() for _ in left]
        for axis in (FSDP, TENSOR):
            parts = getattr(mesh, axis)
            fitting = [i for i in range(first, len(left)) if left[i] and left[i] % parts == 0]
            if parts > 1 and fitting:
                longest = max(fitting, key=lambda i: (not cut[i], left[i]))  # noqa: B023
                left[longest] //= parts
                cut[longest] = (*cut[longest], axis)
        return PartitionSpec(*(names or None for names in cut))

    return {
        name: jax.tree.map(functools.partial(spec, first=int(name == BLOCKS)), leaf)
        for name, leaf in params.items()
    }


class ShardedWorker(Worker):
    """Computes lanes on a mesh, with the strategies `layers` and `twice`."""

    def __init__(self, task: Task | None, shape: MeshShape, cache_dir: Path | None = None):
        """Args: task: None: `begin` brings it.
        Raises: ConfigError: there are not so many devices, or the model has no layers."""
        if task is not None:
            layers_of(task, shape)
        super().__init__(task, cache_dir)
        self.shape, self.mesh = shape, make_mesh(shape)
        self._devices = list(self.mesh.devices.flat)
        self._options = compiler_options(self._devices[0].platform)
        self._numbers = jax.jit(_numbers, compiler_options=self._options)
        self._layer = jax.jit(_layer, out_shardings=self._sharding(PartitionSpec()))
        self._whole = jax.jit(lambda tree: tree, out_shardings=self._sharding(PartitionSpec()))
        self._add_layer = jax.jit(_add_layer, donate_argnums=0)
        self._add = jax.jit(_add, donate_argnums=0)

    @functools.cached_property
    def _run(self) -> dict[str, Any]:
        """The programs for one device, by name."""
        own = Programs(layers_of(self.task, self.shape))
        forward, back = (own.stem, own.block, own.nats), (own.head, own.block_back, own.stem_back)
        parts = (*forward, *back, own.squares)
        return {each.__name__: jax.jit(each, compiler_options=self._options) for each in parts}

    def place(self, params: Any) -> Any:
        """Parameters or the like, cut and put on the devices."""
        return jax.tree.map(jax.device_put, params, self._shardings(params))

    def frozen(self) -> tuple[Any, ...]:
        """The frozen parameters, cut; none are an empty tree."""
        if self._frozen is None:
            self._frozen = (self.place(self.task.frozen or {}),)
        return self._frozen

    def lane_sum(self, version: int, params: Any, rows: np.ndarray, clip: Clip, strategy: Strategy):
        """Like `Worker.lane_sum`, but the sum is JAX arrays, cut like the parameters; or NumPy
        int64, where int32 might not hold it. Raises: UnsupportedModel, EngineError."""
        if not strategy.layered or clip.in_float32:
            expected = "layers or twice, on a mesh, and a finite epsilon"
            raise UnsupportedModel(f"strategy={strategy}: expected {expected}")
        model = _Model(self, self._on_device(version, params))
        way = dataclasses.replace(clip, norm=1.0)  # C is an argument of the program: it may move
        scaled = functools.partial(norm_and_scale, clip=way)
        scale = self._of_shapes(("scale", way), model.own, scaled)
        stats, total, flushed = Stats.zeros(len(rows)), self._zeros(params), None
        room = most = sum_holds(params, clip)
        expect_fit(strategy, len(self._devices), most)
        for chunk in self._lane_chunks(params, rows, clip, strategy):
            for first in range(0, len(chunk.units), len(self._devices)):
                units = chunk.units[first : first + len(self._devices)]
                room -= len(units)
                if room < 0:
                    flushed = flush(flushed, total)
                    total, room = self._zeros(params), most - len(units)
                batch, mask = self._dealt((chunk.batch, chunk.mask), first)
                unit = _Units(model, batch, mask, scale, np.float32(clip.norm))
                total, values = unit.added(total, twice=strategy.name == "twice")
                for column, value in zip(stats.columns(), values, strict=True):
                    column[units] = np.asarray(value)[: len(units)]
        return total if flushed is None else flush(flushed, total), stats

    def lane_nats(self, version: int, params: Any, rows: np.ndarray, split: str):
        """(sum of nats, number of predicted tokens) over examples `rows` [n] of a split."""
        model = _Model(self, self._on_device(version, params))
        size = EVAL_ROWS_PER_CHUNK * len(self._devices)
        found = np.zeros((2, len(rows)))
        for chunk in self._chunks(split, rows[:, None], size, in_passes=False):
            batch = jax.tree.map(
                lambda leaf: leaf.reshape(-1, EVAL_ROWS_PER_CHUNK, *leaf.shape[2:]), chunk.batch
            )
            values = np.asarray(model.nats(self._dealt(batch, 0))).transpose(1, 0, 2).reshape(2, -1)
            found[:, chunk.units] = values[:, : len(chunk.units)]
        return float(found[0].sum()), int(found[1].sum())

    def run(self, name: str, *arguments: Any) -> Any:
        """What a program of `layered.Programs` returns on each device: a list for each result.

        Args: arguments: lists, of what each device has.
        """
        found = [self._run[name](*own) for own in zip(*arguments, strict=True)]
        return list(map(list, zip(*found, strict=True))) if isinstance(found[0], tuple) else found

    def numbers(self, found: list[Any], scales: list[jax.Array]) -> Any:
        """Each device's gradient in whole numbers: one tree of arrays [devices, ...]."""
        numbers = list(map(self._numbers, found, scales))
        return jax.tree.map(lambda *parts: self._joined(parts), *numbers)

    def add_layer(self, total: Any, numbers: Any, layer: int) -> Any:
        """The sum, with all devices' numbers of a layer's parameters."""
        return {**total, BLOCKS: self._add_layer(total[BLOCKS], numbers, layer)}

    def add(self, total: Any, numbers: Any) -> Any:
        """The sum, with all devices' numbers of the other parameters."""
        return {**total, **self._add(rest_of(total), numbers)}

    def everywhere(self, tree: Any, layer: int | None = None) -> list[Any]:
        """Whole arrays, or one layer of stacked ones, as each device has them."""
        whole = self._whole(tree) if layer is None else self._layer(tree, layer)
        leaves, treedef = jax.tree.flatten(whole)
        parts = [{each.device: each.data for each in leaf.addressable_shards} for leaf in leaves]
        return [treedef.unflatten([part[device] for part in parts]) for device in self._devices]

    def _joined(self, parts):
        shape = (len(parts), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding(ALL), list(parts))

    def _dealt(self, tree, first) -> Any:
        """One entry of each array for each device, from the first one on; zeros where none is."""

        def entry(number):
            def of(leaf):
                there = first + number < len(leaf)
                return leaf[first + number] if there else np.zeros_like(leaf[0])

            return jax.tree.map(of, tree)

        dealt = [jax.device_put(entry(i), device) for i, device in enumerate(self._devices)]
        return tuple(map(list, zip(*dealt, strict=True))) if isinstance(tree, tuple) else dealt

    def _zeros(self, params):
        """A sum of no units."""
        shardings = self._shardings(params)
        return self._of_shapes(("zeros",), params, _no_sum, out_shardings=shardings)()

    def _of_shapes(self, key, params, function, **options):
        """`function` with the shapes of the parameters as `whole`; compiled once for a key."""
        shapes = _shapes(params)
        leaves, treedef = jax.tree.flatten(shapes)
        if (key := (*key, treedef, *leaves)) not in self.programs:
            self.programs[key] = jax.jit(functools.partial(function, whole=shapes), **options)
        return self.programs[key]

    def _shardings(self, params):
        return jax.tree.map(self._sharding, specs_of(params, self.shape))

    def _sharding(self, spec):
        return NamedSharding(self.mesh, spec)


class RemoteShardedWorker(ShardedWorker):
    """The same in a process of its own, which sends its sums as whole NumPy arrays."""

    def lane_sum(self, *args: Any):
        """Like `Worker.lane_sum`."""
        total, stats = super().lane_sum(*args)
        return jax.tree.map(np.asarray, total), stats


class _Model:
    """The parameters of a sum: parts of them on each device, and all that are not in blocks."""

    def __init__(self, worker: ShardedWorker, own: Any):
        self.worker, self.own, (self.fixed,) = worker, own, worker.frozen()
        if BLOCKS not in own and BLOCKS not in self.fixed:
            raise UnsupportedModel("expected parameters that have all blocks in one tree")
        self.num_layers = num_layers(own, self.fixed)
        self.rest = [worker.everywhere(rest_of(tree)) for tree in (own, self.fixed)]

    def layer(self, number: int) -> list[list[Any]]:
        """A layer's own and fixed parameters, whole on each device."""
        trees = (tree.get(BLOCKS, {}) for tree in (self.own, self.fixed))
        return [self.worker.everywhere(tree, number) for tree in trees]

    def forward(self, batch: list[Any]) -> Iterator[list[jax.Array]]:
        """What each block sees, and what the head does, of each device's rows."""
        x = self.worker.run("stem", *self.rest, batch)
        yield x
        for number in range(self.num_layers):
            before, x = x, self.worker.run("block", *self.layer(number), x)
            jax.block_until_ready(before)  # else all layers would be gathered at once
            yield x

    def nats(self, batch: list[Any]) -> Any:
        """(nats, predictions), [devices, 2, rows]."""
        (x,) = collections.deque(self.forward(batch), 1)
        nats, predictions = self.worker.run("nats", *self.rest, x, batch)
        return [[np.asarray(a), np.asarray(b)] for a, b in zip(nats, predictions, strict=True)]


class _Units:
    """Some units, one on each device, and their way into the sum."""

    def __init__(self, model: _Model, batch: list[Any], mask: list[Any], scale: Any, norm: Any):
        """Args: scale: the compiled `norm_and_scale`. norm: C."""
        self.model, self.worker = model, model.worker
        self.batch, self.mask, self.scale, self.norm = batch, mask, scale, norm

    def added(self, total: Any, *, twice: bool) -> tuple[Any, tuple[Any, ...]]:
        """(the sum with their contributions; norms, losses, dropped, rows of each).

        Raises: EngineError: a second pass found another norm than the first.
        """
        *seen, x = self.model.forward(self.batch)
        head = self.worker.run("head", *self.model.rest, x, self.batch, self.mask)
        losses, *of_head = head
        kept, squares = {}, []
        for layer, found, own in self._back(seen, *of_head):
            squares.append(own)
            if not twice:
                kept[layer] = found
            del found  # before the next one is there
        of_unit = (list(own) for own in zip(*squares, strict=True))
        each = zip(of_unit, self.mask, strict=True)
        found = [self.scale(own, real, self.norm) for own, real in each]
        norms, scales, dropped = zip(*found, strict=True)
        if twice:
            again = []
            for layer, found, own in self._back(seen, *of_head):
                again.append(own)
                total = jax.block_until_ready(self._add(total, layer, found, scales))
                del found
            if not np.array_equal(np.array(squares), np.array(again), equal_nan=True):
                raise EngineError("a unit's gradient was another one when it was computed again")
        for layer in list(kept):
            total = self._add(total, layer, kept.pop(layer), scales)
        rows = [np.asarray(real).sum() for real in self.mask]
        columns = (np.array(column) for column in (norms, losses, dropped, rows))
        return total, tuple(columns)

    def _add(self, total, layer, found, scales):
        if not jax.tree.leaves(found):
            return total
        numbers = self.worker.numbers(found, scales)
        if layer is None:
            return self.worker.add(total, numbers)
        return self.worker.add_layer(total, numbers, layer)

    def _back(self, seen, of_head, dx):
        """(layer, gradients, sums of their squares) of each layer, the last one first, and of the
        other parameters, layer being None."""
        for layer in reversed(range(self.model.num_layers)):
            before = dx
            found, dx = self.worker.run("block_back", *self.model.layer(layer), seen[layer], dx)
            yield layer, found, self.worker.run("squares", found)
            del found
            jax.block_until_ready(before)
        found = self.worker.run("stem_back", *self.model.rest, self.batch, of_head, dx)
        yield None, found, self.worker.run("squares", found)


def _no_sum(whole):
    return no_sum(whole, Clip(1.0))


def _numbers(grad, scale):
    return jax.tree.map(lambda g: whole(g, scale)[None], grad)


def _layer(stacked, layer):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, 0, False), stacked)


def _add_layer(total, numbers, layer):
    def add(t, z):
        new = jax.lax.dynamic_index_in_dim(t, layer, 0, False) + z.sum(axis=0, dtype=jnp.int32)
        return jax.lax.dynamic_update_index_in_dim(t, new, layer, 0)

    return jax.tree.map(add, total, numbers)


def _add(total, numbers):
    return jax.tree.map(lambda t, z: t + z.sum(axis=0, dtype=jnp.int32), total, numbers)


def _shapes(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
