"""The compiled programs of a worker, and the checks before each of them is used.

The proof of `clipping.contribution` allows one rounding of float32 for a product and a sum, and a
few for a root and a quotient. It also needs gradients in memory before a norm is taken of them, in
the program as compiled. The checks detect other arithmetic (TF32, bfloat16, approximate roots) and
programs without that property; they do not test every value.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedsim.clipping import (
    ROUNDING,
    Chunk,
    Clip,
    Strategy,
    UnsupportedModel,
    clip_chunk,
    lattice_bits,
    num_coordinates,
    zeros_like,
)
from fedsim.engine.task import Task
from fedsim.errors import FedsimError

NUMBERS = 2**14  # tested values of an operation
LARGE = 2.0**11, 2.0**12, 2.0**17  # of the factors: products are rounded by up to 1/2, 2 and 2048
KNOWN_SHAPE = 4, 128
MAX_SHAPES, NUMBERS_OF_SHAPES = 2, range(2**12, 2**18 + 1)
NOT_FINITE = math.nan, math.inf, -math.inf, 3e38, -3e38  # or without a finite square
LAYER = 128, 4  # inputs and outputs of the tested layer
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "products": (jnp.multiply, np.multiply, 1),
    "sums": (jnp.add, np.add, 1),
    "quotients": (jnp.divide, np.divide, 5),
    "roots": (lambda x, _: jnp.sqrt(x), lambda x, _: np.sqrt(x), 5),
    "long sums": (lambda x, _: x.sum(), lambda x, _: x.sum(), NUMBERS),
    "squares": (lambda x, _: jnp.square(x), lambda x, _: np.square(x), 1),
}
"""By name: the operation on the device, in float64, and the roundings that the proof allows."""


class UnfitDevice(FedsimError):
    """The guarantee does not hold on this device or with this compiler."""


def default_device() -> Any:
    """Return the device that programs run on."""
    return jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore


def check_arithmetic(device: Any) -> None:
    """Check the error of float32 operations and the rounding to whole numbers on a device.

    Raises: UnfitDevice: an operation has a larger error than the proof allows.
    """
    rng = np.random.default_rng(0)
    x, y = np.exp(rng.uniform(-20, 20, (2, NUMBERS))).astype(np.float32)
    with jax.default_device(device):
        for name, (operation, exact, roundings) in OPERATIONS.items():
            computed = np.asarray(jax.jit(operation)(x, y), np.float64)
            expected = exact(x.astype(np.float64), y.astype(np.float64))
            worst = float(np.max(np.abs(computed / expected - 1))) / ROUNDING
            if not worst <= roundings * (1 + 2 * ROUNDING):
                raise UnfitDevice(
                    f"{device}: {name} err by {worst:.3g} u, u = 2^-24; expected at "
                    f"most {roundings}: the guarantee does not hold there"
                )
        halves = np.float32(rng.integers(-(2**22), 2**22, NUMBERS)) + np.float32(0.5)
        whole = np.asarray(jax.jit(lambda x: jnp.round(x).astype(jnp.int32))(halves))
    if not np.array_equal(whole, np.rint(halves).astype(np.int32)):
        raise UnfitDevice(f"{device}: rounds to other whole numbers than IEEE 754 says")


def check_stored(program: Any) -> None:
    """Check that a compiled program stores a gradient before it reads it; see `stored`.

    Raises: UnfitDevice: the loop that stores it, inside of the loop over units, is gone.
    """
    lines = program.as_text().splitlines()
    loops = [line for line in lines if " while(" in line and "known_trip_count" not in line]
    if len(loops) < 2:
        raise UnfitDevice(
            "the compiled program of a clipped sum has lost the loop that stores gradients: the "
            "guarantee does not hold there; expected a version of JAX that fedsim was tested with"
        )


def check_contributions(strategy: Strategy, params: Any) -> None:
    """Check the exact contributions of hostile units, in programs compiled like those of a run.

    Their gradients are products minus their float32 values, with one rounding and with two, so that
    zeros and rounding errors depend on how the compiler ordered the two; large constants; and
    numbers that are not finite, or whose squares are not: such a unit must contribute zero.
    Args:
      strategy: for units of one row.
      params: arrays whose shapes the gradients have: the largest within NUMBERS_OF_SHAPES, and a
        small one.
    Raises: UnfitDevice: a unit contributes more than C, or is not dropped.
    """
    shapes = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.size in NUMBERS_OF_SHAPES}
    largest = sorted(shapes, key=lambda shape: (math.prod(shape), shape))[-MAX_SHAPES:]
    _check_contributions(strategy, (KNOWN_SHAPE, *largest), default_device())


@functools.lru_cache(maxsize=64)
def _check_contributions(strategy, shapes, device):  # the cache is for this device
    losses, params, shapes = _of_layer() if strategy.name == "ghost" else _of_arrays(shapes)
    units, clip = max(2, strategy.units_at_once(1)), Clip(1.0)
    mask = np.arange(units)[:, None] == 0

    def add(params, batch, mask):  # arguments, so that XLA cannot fold their values
        total, _, _, dropped = clip_chunk(losses, params, batch, mask, clip, strategy)
        return total, dropped

    program = None
    most = 4 ** lattice_bits(num_coordinates(params))
    rows = [(most, row) for row in _hostile_rows(shapes)]
    rows += [(0, row) for row in _rows_not_finite(shapes)]
    for longest, row in rows:
        batch = jax.tree.map(lambda x: np.broadcast_to(x, (units, 1, *x.shape)), row)
        if program is None:
            program = _compile(jax.jit(add), params, batch, mask)
        total, dropped = program(params, batch, mask)
        if (square := sum_of_squares(total)) > longest or not (longest or dropped[0]):
            expected = "at most C" if longest else "0, as its gradient is not finite"
            raise UnfitDevice(
                f"strategy={strategy}: a unit contributes {(square / most) ** 0.5:.4g} C, expected "
                f"{expected}: the guarantee does not hold with this compiler and device"
            )


def _of_arrays(shapes):
    """Return (losses, parameters, shapes of z): gradients of these shapes are x y - z, with x and y
    along the last axis; a row has the x, y and z of each array."""

    def losses(params, rows):
        def loss(p, row):
            x, y, z = row
            x, y = (factor.reshape(len(z), *[1] * (p.ndim - 1), -1) for factor in (x, y))
            return 0.5 * jnp.square(p[None] + (x * y - z)).reshape(len(z), -1).sum(axis=1)

        return sum(map(loss, params, rows))

    return losses, [jnp.zeros(shape, jnp.float32) for shape in shapes], shapes


def _of_layer():
    """Return the same for a layer whose output has the cotangent x y - z."""
    inputs, outputs = LAYER
    model = nn.Sequential([nn.Dense(outputs)])
    seen = np.random.default_rng(1).uniform(1, 2, (1, 1, inputs)).astype(np.float32)

    def losses(params, rows):
        ((x, y, z),) = rows
        output: Any = model.apply({"params": params}, jnp.broadcast_to(seen, (len(x), 1, inputs)))
        return jnp.sum(output[:, 0] * (x * y - z), axis=1)

    params = model.init(jax.random.key(0), seen)["params"]
    return losses, params, [(outputs,)]


def _hostile_rows(shapes):
    """Yield rows of one unit: x, y [last axis] and z [shape] for each array."""
    # Coordinates beyond C add nothing (`contribution.whole`): it takes many that are rounded by
    # less to exceed C.
    rng = np.random.default_rng(0)
    for large in LARGE:
        pairs = [large * rng.uniform(1, 2, (2, shape[-1])).astype(np.float32) for shape in shapes]
        exact = [x.astype(np.float64) * y for x, y in pairs]
        for products in ([x * y for x, y in pairs], exact, [2.0**30 + 0 * x for x, _ in pairs]):
            rows = zip(pairs, products, shapes, strict=True)
            yield [(*pair, np.broadcast_to(z.astype(np.float32), shape)) for pair, z, shape in rows]


def _rows_not_finite(shapes):
    """Yield rows like those of `_hostile_rows`, one number of which makes a gradient not finite."""
    *_, (first, *others) = _hostile_rows(shapes)
    for number in NOT_FINITE:
        for place in (0, 2):
            arrays = [np.array(array) for array in first]
            arrays[place].flat[0] = number
            yield [tuple(arrays), *others]


def sum_of_squares(tree: Any) -> int:
    """Add the squares of int32 numbers exactly."""

    def of(leaf):
        high, low = np.divmod(np.asarray(leaf).ravel().astype(np.int64), 2**16)
        return (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)

    return sum(map(of, jax.tree.leaves(tree)))


def on_accelerator() -> bool:
    """True if programs run on a GPU or TPU."""
    return jax.default_backend() != "cpu"


def compiler_options(platform: str) -> dict[str, str | bool] | None:
    """Options of XLA for each program whose bits matter."""
    # A unit's contribution must be a function of its rows: no atomics, whose order varies, and no
    # choice of kernels by timing, which would differ between workers.
    return {"xla_gpu_deterministic_ops": True} if platform == "gpu" else None


def _compile(function: Any, *args: Any) -> Any:
    """Compile a jitted function as those of a run, for arguments like these."""
    return function.lower(*args).compile(compiler_options(jax.default_backend()))


_zeros = jax.jit(zeros_like, static_argnums=1)  # leaf by leaf costs a small model a hundredth


class Programs:
    """The compiled functions of a task."""

    def __init__(self, task: Task):
        self.task = task
        self.compiled: dict[tuple, Any] = {}
        """Programs by all on which they depend beside the task."""
        self._checked: set[tuple] = set()
        self._version, self._params = None, None

    def clip_chunk(
        self, total: Any, params: Any, chunk: Chunk, clip: Clip, strategy: Strategy
    ) -> tuple[Any, ...]:
        """Add a chunk's contributions to `total`, whose buffer is donated.

        The program is checked before its first use.
        Returns: (total, norms [units], losses [units], dropped [units]).
        Raises:
          UnfitDevice: the program does not store a gradient before it reads it.
          UnsupportedModel: a unit's contribution would depend on other units.
        """
        program, arguments, key = self._of_sum(total, params, chunk, clip, strategy)
        if not clip.in_float32 and key not in self._checked:
            check_stored(program)
            no_sum = functools.partial(self.zeros, params, clip)
            if _checked_side_by_side(program, no_sum, arguments, chunk, strategy):
                self._checked.add(key)
        return program(total, *arguments)

    def memory(self, params: Any, chunk: Chunk, clip: Clip, strategy: Strategy) -> int:
        """Return the bytes on the device while a chunk is added: those of the program, an
        optimizer's two moments, an average of the parameters, and a full sum that is fetched."""
        program, *_ = self._of_sum(self.zeros(params, clip), params, chunk, clip, strategy)
        found = program.memory_analysis()
        own = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
        return own - found.alias_size_in_bytes + 4 * 4 * num_coordinates(params)

    def _of_sum(self, total, params, chunk, clip, strategy):
        """Return the program that adds a chunk, its arguments beside the sum, and its key."""
        buckets, strategy = self.task.buckets, strategy.of(chunk)
        buckets = buckets.up_to(chunk.length) if buckets and not chunk.rows else None

        # The norm is an argument: an adaptive clip norm needs one program.
        def add(total, params, batch, mask, norm, *frozen):
            def losses(params, batch):
                return self.task.losses(params, batch, *frozen)

            given = params, batch, mask, dataclasses.replace(clip, norm=norm), strategy
            return clip_chunk(losses, *given, buckets=buckets, total=total)

        shapes = chunk.length, chunk.mask.shape, chunk.rows
        # A text in a row of its own and texts that share rows are different arrays.
        kind = jax.tree.structure(chunk.batch)
        key = ("sum", kind, *shapes, clip.normalised, clip.in_float32, strategy)
        arguments = params, chunk.batch, chunk.mask, np.float32(clip.norm), *self.frozen
        return self._compiled(key, add, total, *arguments, donate_argnums=0), arguments, key

    def nats(self, params: Any, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        """Compute (nats, predicted tokens) of each row of a batch, [rows] each."""
        arguments = (params, batch, *self.frozen)
        key = ("nats", *(leaf.shape for leaf in jax.tree.leaves(batch)))
        nats, predictions = self._compiled(key, self.task.nats, *arguments)(*arguments)
        return np.asarray(nats), np.asarray(predictions)

    def zeros(self, params: Any, clip: Clip) -> Any:
        """Return the sum over no units."""
        return _zeros(params, jnp.float32 if clip.in_float32 else jnp.int32)

    def on_device(self, version: int, params: Any) -> Any:
        """Return parameters on the device; each `version` is put there once."""
        if version != self._version:
            # Release the previous parameters first: they may pin an object of shared memory.
            self._version, self._params = None, None
            self._version, self._params = version, jax.device_put(params)
        return self._params

    @functools.cached_property
    def frozen(self) -> tuple[Any, ...]:
        """The task's frozen parameters as a tuple of arguments, on the device."""
        frozen = self.task.frozen
        return () if frozen is None else (jax.device_put(frozen),)

    def _compiled(self, key: tuple, function: Any, *args: Any, **options: Any) -> Any:
        """Compile `function` for arguments like these, once for each `key`."""
        if key not in self.compiled:
            self.compiled[key] = _compile(jax.jit(function, **options), *args)
        return self.compiled[key]


def _checked_side_by_side(program, no_sum, arguments, chunk, strategy):
    """Raise UnsupportedModel unless contributions are units' own; true if numbers were compared."""
    # Units side by side are mapped over by `jax.vmap`, so none is a function of another; but they
    # share matrix products, in which each has separate rows. The order in which a row's terms are
    # added depends on shapes, not on values, so few units are enough: a pass adds the same as every
    # second unit of it and then the rest, at other places. On accelerators places are the draw's
    # (`Engine.keeps_places`). There each unit is also alone (a lone one again, as kernels may add
    # in varying order), and halves by each bit of the place, with the other half's units, part any
    # two places. Norms and losses are compared, as a step may release them.
    params, batch, mask, *others = arguments
    group = mask.shape[1]
    if (at_once := strategy.of(chunk).units_at_once(group)) == 1 and not on_accelerator():
        return True
    if not (real := np.flatnonzero(mask.any(axis=1))).size:
        return False

    def added(units, parts, moved_by=0):
        total, values = no_sum(), np.zeros((2, at_once))
        for part in parts:
            of_place, real = np.zeros(len(mask), int), np.zeros_like(mask)
            to = (part + moved_by) % at_once
            of_place[to], real[to] = units[part], mask[units[part]]
            moved = jax.tree.map(lambda leaf, of_place=of_place: leaf[of_place], batch)
            total, norms, losses, _ = program(total, params, moved, real, *others)
            values[:, part] = np.stack([norms, losses])[:, to]
        return jax.tree.map(np.asarray, total), values

    places, bits = np.arange(at_once), range(max(1, (at_once - 1).bit_length()))
    halves = [[places[places >> bit & 1 == half] for half in (0, 1)] for bit in bits]
    moved_by, turns = 1, [(0, halves[0])]
    if on_accelerator():
        moved_by = 0
        turns = [(0, places[:, None]), *((1 << bit, halves[bit]) for bit in bits)]
    for shift, parts in turns:
        units = np.resize(np.roll(real, shift), at_once)
        together, values = added(units, [places])
        apart, of_apart = added(units, parts, moved_by)
        alike = map(np.array_equal, jax.tree.leaves(together), jax.tree.leaves(apart))
        # equal_nan: a loss or norm may be nan in both.
        if not (all(alike) and np.array_equal(values, of_apart, equal_nan=True)):
            lone = f"accelerator={jax.default_backend()}: expected cpu: computed again"
            several = f"rows_per_pass={strategy.rows}: expected at most {group}: side by side"
            found = "units contribute other bits on this device"
            raise UnsupportedModel(f"{several if at_once > 1 else lone}, {found}")
    return any(leaf.any() for leaf in jax.tree.leaves(together))
