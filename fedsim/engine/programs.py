"""The compiled programs of a worker, each looked at before it is used.

With a mesh, its devices have the parameters, the frozen ones, each gradient and the sum between
them, and XLA cuts the same programs. In what order numbers are added is then a matter of the mesh:
bits are, too.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedsim.clipping import Chunk, Clip, Strategy, UnsupportedModel, clip_chunk, zeros_like
from fedsim.engine.arithmetic import check_stored
from fedsim.engine.resources import compiler_options
from fedsim.engine.task import Task
from fedsim.placement import everywhere, in_parts, shardings

_zeros = jax.jit(zeros_like, static_argnums=1)  # leaf by leaf costs a small model a hundredth


class Programs:
    """What a task is computed with on one device, or on those of a mesh."""

    def __init__(self, task: Task, mesh: Mesh | None = None):
        self.task, self.mesh = task, mesh
        self.compiled: dict[tuple, Any] = {}
        """Programs by what they depend on."""
        self._checked: set[int] = set()
        self._frozen: tuple[Any, ...] | None = None
        self._version, self._params = None, None

    def clip_chunk(
        self, total: Any, params: Any, chunk: Chunk, clip: Clip, strategy: Strategy
    ) -> tuple[Any, ...]:
        """`total`, which is used up, with a chunk's contributions; (total, norms, losses, dropped).

        Raises: UnsupportedModel: what a unit contributes would depend on the others.
        """
        program = self.checked(total, params, chunk, clip, strategy)
        return program(total, params, *self._arguments(chunk, clip))

    def compile(self, total: Any, params: Any, chunk: Chunk, clip: Clip, strategy: Strategy) -> Any:
        """The program of a chunk. Raises: UnsupportedModel: what it adds is not stored first."""
        buckets = self.task.buckets
        buckets = buckets.up_to(chunk.length) if buckets else None

        # One program for a clip norm that moves.
        def add(total, params, batch, mask, norm, *frozen):
            def losses(params, batch):
                return self.task.losses(in_parts(params, self.mesh), batch, *frozen)

            own = dataclasses.replace(clip, norm=norm)
            options = {"buckets": buckets, "local": self.task.local_steps, "total": total}
            return clip_chunk(losses, params, batch, mask, own, strategy, **options)

        key = ("sum", chunk.length, chunk.mask.shape, clip.normalised, clip.in_float32, strategy)
        arguments = (total, params, *self._arguments(chunk, clip))
        is_new = key not in self.compiled
        options: dict[str, Any] = {"donate_argnums": 0}
        if self.mesh is not None:  # the sum is cut as the parameters are
            whole = everywhere(self.mesh)
            options["out_shardings"] = (shardings(total, self.mesh), whole, whole, whole)
        program = self._compiled(key, add, *arguments, **options)
        if is_new and not clip.in_float32:
            check_stored(program)
        return program

    def checked(self, total: Any, params: Any, chunk: Chunk, clip: Clip, strategy: Strategy) -> Any:
        """The program of a chunk, looked at before it is used for the first time."""
        program = self.compile(total, params, chunk, clip, strategy)
        if id(program) not in self._checked and not clip.in_float32:
            fresh = functools.partial(self.zeros, params, clip)
            arguments = (params, *self._arguments(chunk, clip))
            if _checked_side_by_side(program, fresh, arguments, chunk, strategy):
                self._checked.add(id(program))
        return program

    def nats(self, params: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """(nats, predicted tokens) of each row of a batch."""
        arguments = (params, self._on_all(batch), *self.frozen())
        key = ("nats", *(leaf.shape for leaf in jax.tree.leaves(batch)))
        nats, predictions = self._compiled(key, self.task.nats, *arguments)(*arguments)
        return np.asarray(nats), np.asarray(predictions)

    def zeros(self, params: Any, clip: Clip) -> Any:
        """The sum over no units at all."""
        total = _zeros(params, jnp.float32 if clip.in_float32 else jnp.int32)
        return total if self.mesh is None else self.place(total)

    def place(self, params: Any) -> Any:
        """Parameters or the like, put on the device, or in parts on those of the mesh."""
        return jax.device_put(params, None if self.mesh is None else shardings(params, self.mesh))

    def on_device(self, version: int, params: Any) -> Any:
        """Parameters on the device. Args: version: names them; equal ones are put there once."""
        if version != self._version:
            # The previous parameters go first: they may pin an object of shared memory.
            self._version, self._params = None, None
            self._version, self._params = version, self.place(params)
        return self._params

    def frozen(self) -> tuple[Any, ...]:
        """What the task's functions get beside parameters and batch, put on the device once."""
        if self._frozen is None:
            frozen = self.task.frozen
            self._frozen = () if frozen is None else (self.place(frozen),)
        return self._frozen

    def _arguments(self, chunk: Chunk, clip: Clip) -> tuple[Any, ...]:
        """What a chunk's program gets beside the sum and the parameters."""
        own = self._on_all((chunk.batch, chunk.mask, np.float32(clip.norm)))
        return *own, *self.frozen()

    def _on_all(self, tree: Any) -> Any:
        """What each device needs whole, as programs take it."""
        return tree if self.mesh is None else jax.device_put(tree, everywhere(self.mesh))

    def _compiled(self, key: tuple, function: Any, *args: Any, **options: Any) -> Any:
        """`function`, compiled for arguments like these; `key` says what else it depends on."""
        if key not in self.compiled:
            lowered = jax.jit(function, **options).lower(*args)
            self.compiled[key] = lowered.compile(compiler_options(jax.default_backend()))
        return self.compiled[key]


def _checked_side_by_side(program, no_sum, arguments, chunk, strategy):
    """Whether there was anything to see: units with rows whose numbers are not all zero.

    Raises UnsupportedModel: what a unit contributes depends on its place in a pass or on the
    others there.

    Units side by side share matrix products, of which each computes its own rows. In what order a
    row's terms are added is a matter of shapes, not of values. So one look at any values tells:
    the whole numbers of all are those of every other one, and of the rest, in other places; so
    are their norms and losses, which are released, too, if that is asked for.
    """
    at_once = strategy.units_at_once(chunk.mask.shape[1])
    if at_once == 1:
        return True
    params, batch, mask, *others = arguments
    if not (real := np.flatnonzero(chunk.mask.any(axis=1))).size:
        return False
    some = np.resize(real, at_once)

    def total(units, places):
        of_place = np.zeros(len(mask), int)
        of_place[places] = units
        real = np.isin(np.arange(len(mask)), places)[:, None] & mask[of_place]
        moved = jax.tree.map(lambda leaf: leaf[of_place], batch)
        added, norms, losses, _ = program(no_sum(), params, moved, real, *others)
        return jax.tree.map(np.asarray, added), np.stack([norms, losses])[:, places]

    places = np.arange(at_once)
    together, values = total(some, places)
    apart = [total(some[half::2], (places[half::2] + 1) % at_once) for half in (0, 1)]
    added = jax.tree.map(lambda *leaves: sum(leaves), *(each for each, _ in apart))
    alike = map(np.array_equal, jax.tree.leaves(together), jax.tree.leaves(added))
    # A loss or norm that is not a number is the same as itself.
    halves = ((values[:, half::2], apart[half][1]) for half in (0, 1))
    same = (np.array_equal(*pair, equal_nan=True) for pair in halves)
    if not (all(alike) and all(same)):
        raise UnsupportedModel("side by side, units change what the others contribute")
    return any(leaf.any() for leaf in jax.tree.leaves(together))
