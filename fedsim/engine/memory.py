"""What a device needs of memory for the steps of a run, before there is one.

Arrays that stay are counted from their shapes. What a program needs beside its arguments and its
result is what XLA says of it, compiled for the shapes alone, on the platform that is here: nothing
is computed, and no parameters have to exist. An accelerator's programs may need more or less.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping import Clip, Strategy, clipped_sum
from fedsim.clipping.layered import BLOCKS, Programs, num_layers, rest_of
from fedsim.config import MeshShape
from fedsim.engine.calls import EVAL_ROWS_PER_CHUNK, longest_rows_of_call
from fedsim.engine.resources import compiler_options
from fedsim.engine.sharded import bytes_of_part
from fedsim.engine.task import Task


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes of one device at the moment of a step at which it has most."""

    parameters: int
    """Those that are trained: its parts of them."""
    frozen: int
    """The model that adapters sit on."""
    optimizer: int
    """The optimizer's state, and an average of the parameters."""
    sums: int
    """The clipped sum, whole numbers of four bytes; or the gradient that is made of it."""
    gradients: int = 0
    """Of the units that are computed, before and after rounding."""
    weights: int = 0
    """What a device gathers: all that is outside of the blocks, and two layers."""
    activations: int = 0
    """What blocks saw, and what programs have beside arguments and results."""

    @property
    def total(self) -> int:
        """The sum of all parts, in bytes."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A model and the rows of its units: everything that memory follows from, as shapes."""

    task: Task
    own: Any
    """What is trained: a tree of `ShapeDtypeStruct`s, the blocks' stacked."""
    fixed: Any
    """What is frozen, likewise; {}: nothing."""
    rows: Any
    """Those of one unit, [group, ...]."""
    state: Any
    """Of the optimizer, with averages of the parameters."""

    def need(self, strategy: Strategy, mesh: MeshShape) -> Need:
        """Bytes of each device of a mesh, or of the one that has the whole model."""
        return max(self.moments(strategy, mesh).values(), key=lambda need: need.total)

    def moments(self, strategy: Strategy, mesh: MeshShape) -> dict[str, Need]:
        """The same at each of the moments that could be that of the most."""
        return self._layered(strategy, mesh) if strategy.layered else self._whole(strategy)

    def _whole(self, strategy: Strategy) -> dict[str, Need]:
        own, state, temporary = _bytes(self.own), _bytes(self.state), self._of_sum(strategy)
        gradients = min(temporary, strategy.units_at_once(_length(self.rows)) * own)
        stay, old = Need(own, _bytes(self.fixed), state, own), {"parameters": 2 * own}
        many = _with_length(self.rows, longest_rows_of_call(self.task.buckets))
        nats = _temporary(self.task.nats, self.own, many, *self._frozen)
        moments = {
            "sum": {"gradients": gradients, "activations": temporary - gradients},
            "update": {**old, "optimizer": 2 * state},
            "evaluation": {**old, "sums": 0, "activations": nats},  # of the step before
        }
        return {name: dataclasses.replace(stay, **each) for name, each in moments.items()}

    def _layered(self, strategy: Strategy, mesh: MeshShape) -> dict[str, Need]:
        own, fixed = (bytes_of_part(tree, mesh) for tree in (self.own, self.fixed))
        state = -(-_bytes(self.state) * own // max(1, _bytes(self.own)))
        stay = Need(own, fixed, state, own)
        layer, rest = _parts(self.own, self.fixed)
        of_layer, of_rest = _bytes(layer[0]), _bytes(rest[0])
        temporary, x, of_eval = self._of_programs
        layers = num_layers(self.own, self.fixed)
        seen = (layers + 1) * x
        kept = of_rest + (0 if strategy.name == "twice" else layers) * of_layer
        largest = max(of_layer, of_rest)  # and its numbers, of this device and of all of them
        moments = {  # gradients and activations
            "head": (of_rest, seen + x + temporary["head"]),
            "block": (kept + of_layer, seen + 2 * x + temporary["block_back"]),
            "stem": (kept + of_rest, seen + x + temporary["stem_back"]),
            "adding": (kept + 3 * largest, seen + x),
        }
        gathered = dataclasses.replace(stay, weights=_bytes(rest) + 2 * _bytes(layer))
        found = {
            name: dataclasses.replace(gathered, gradients=gradients, activations=activations)
            for name, (gradients, activations) in moments.items()
        }
        evaluated = {"parameters": 2 * own, "sums": 0, "activations": of_eval}
        return {
            **found,
            # The new parameters take the place of the gradient, which took that of the sum.
            "update": dataclasses.replace(stay, optimizer=2 * state),
            "evaluation": dataclasses.replace(gathered, **evaluated),
        }

    @functools.cached_property
    def _of_programs(self) -> tuple[dict[str, int], int, int]:
        """(temporary bytes of each program, by name; bytes of what a block sees of a unit; what
        blocks and head have of the rows of an evaluation)."""
        layers = self.task.layers
        assert layers is not None, "the task has layers"
        programs, (layer, rest) = Programs(layers), _parts(self.own, self.fixed)
        real = jax.ShapeDtypeStruct((_length(self.rows),), bool)
        x = jax.eval_shape(programs.stem, *rest, self.rows)
        of_head = jax.eval_shape(programs.head, *rest, x, self.rows, real)[1]
        found = {
            "head": _temporary(programs.head, *rest, x, self.rows, real),
            "block_back": _temporary(programs.block_back, *layer, x, x),
            "stem_back": _temporary(programs.stem_back, *rest, self.rows, of_head, x),
        }
        many = _with_length(self.rows, EVAL_ROWS_PER_CHUNK)
        seen = jax.eval_shape(programs.stem, *rest, many)
        of_eval = 3 * _bytes(seen) + _temporary(programs.nats, *rest, seen, many)
        return found, _bytes(x), of_eval

    def _of_sum(self, strategy: Strategy) -> int:
        """Temporary bytes of the program that adds the contributions of as many units as go into a
        pass."""
        group = _length(self.rows)
        units = strategy.units_at_once(group)

        def add(total, params, batch, mask, *frozen):
            def losses(params, batch):
                return self.task.losses(params, batch, *frozen)

            clip = Clip(1.0, normalised=True)
            return clipped_sum(losses, params, batch, mask, clip, strategy, total=total)

        batch = jax.tree.map(lambda leaf: _like(leaf, (units, *leaf.shape)), self.rows)
        total = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.int32), self.own)
        mask = jax.ShapeDtypeStruct((units, group), bool)
        return _temporary(add, total, self.own, batch, mask, *self._frozen, donate_argnums=0)

    @property
    def _frozen(self) -> tuple[Any, ...]:
        """What the task's functions get beside parameters and rows."""
        return (self.fixed,) if self.fixed else ()


def _temporary(function: Any, *shapes: Any, **options: Any) -> int:
    program = jax.jit(function, **options).lower(*shapes)
    found = program.compile(compiler_options(jax.default_backend())).memory_analysis()
    return found.temp_size_in_bytes if found else 0


def _parts(own: Any, fixed: Any) -> tuple[list[Any], list[Any]]:
    """One layer of both, and all outside of the blocks."""

    def layer(tree):
        return jax.tree.map(lambda leaf: _like(leaf, leaf.shape[1:]), tree.get(BLOCKS, {}))

    return [layer(own), layer(fixed)], [rest_of(own), rest_of(fixed)]


def _with_length(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda leaf: _like(leaf, (count, *leaf.shape[1:])), tree)


def _like(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _length(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
