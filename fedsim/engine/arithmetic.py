"""Does a device compute as the proof of contributions assumes? Asked before it computes the first.

`clipping.contribution` allows a product and a sum one rounding of float32 each, and a root and a
quotient a few. What is found out is whether the arithmetic is another one (TF32, bfloat16,
approximate roots), not every single value. The proof also rests on gradients that are in memory
before a norm is taken of them, in the program as it was compiled.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh

from fedsim.clipping import ROUNDING, Clip, Strategy, clip_chunk, lattice_bits, num_coordinates
from fedsim.errors import FedsimError
from fedsim.placement import everywhere, in_parts, shardings

NUMBERS = 2**14
LARGE = 2.0**17  # squares of its size are rounded by more than 1
KNOWN_SHAPE = 4, 128
MOST_SHAPES, NUMBERS_OF_SHAPES = 2, range(2**12, 2**18 + 1)
LAYER = 128, 4
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "products": (jnp.multiply, np.multiply, 1),
    "sums": (jnp.add, np.add, 1),
    "quotients": (jnp.divide, np.divide, 5),
    "roots": (lambda x, _: jnp.sqrt(x), lambda x, _: np.sqrt(x), 5),
    "long sums": (lambda x, _: x.sum(), lambda x, _: x.sum(), NUMBERS),
    "squares": (lambda x, _: jnp.square(x), lambda x, _: np.square(x), 1),
}
"""By name: on the device, in float64, and how many roundings the proof has for it."""


class UnfitDevice(FedsimError):
    """A device whose arithmetic the guarantee cannot rest on."""


def check_arithmetic(device: Any) -> None:
    """Raises UnfitDevice: an operation errs by more than the proof has for it, or whole numbers are
    not exact."""
    rng = np.random.default_rng(0)
    x, y = np.exp(rng.uniform(-20, 20, (2, NUMBERS))).astype(np.float32)
    with jax.default_device(device):
        for name, (operation, exact, roundings) in OPERATIONS.items():
            found = np.asarray(jax.jit(operation)(x, y), np.float64)
            expected = exact(x.astype(np.float64), y.astype(np.float64))
            worst = float(np.max(np.abs(found / expected - 1))) / ROUNDING
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
    """Raises UnfitDevice: the compiled program has no loop that stores a gradient before it is
    read, inside of the loop over units; see `clipping.scan.stored`."""
    lines = program.as_text().splitlines()
    loops = [line for line in lines if " while(" in line and "known_trip_count" not in line]
    if len(loops) < 2:
        raise UnfitDevice(
            "the compiled program of a clipped sum has lost the loop that stores gradients: the "
            "guarantee does not hold there; expected a version of JAX that fedsim was tested with"
        )


def check_contributions(strategy: Strategy, params: Any, mesh: Mesh | None = None) -> None:
    """Look at what hostile units contribute, exactly, in programs made as those of a run are.

    Their gradients are products less what float32 makes of them, with one rounding and with two, so
    that zeros and rounding errors hang on how a compiler ordered the two; and large constants.
    Args:
      strategy: for units of one row.
      params: arrays whose shapes the gradients have: the largest of them with NUMBERS_OF_SHAPES,
        and a small one.
      mesh: whose devices have the parameters between them, as those of the run; None: one has.
    Raises: UnfitDevice: one contributes more than C.
    """
    leaves = jax.tree.leaves(params)
    shapes = {leaf.shape for leaf in leaves if leaf.size in NUMBERS_OF_SHAPES}
    largest = sorted(shapes, key=lambda shape: (math.prod(shape), shape))[-MOST_SHAPES:]
    _check_contributions(strategy, (KNOWN_SHAPE, *largest), mesh)


@functools.lru_cache(maxsize=64)
def _check_contributions(strategy, shapes, mesh):
    losses, params, shapes = _of_layer() if strategy.name == "ghost" else _of_arrays(shapes)
    units, clip = max(2, strategy.units_at_once(1)), Clip(1.0)
    mask = np.arange(units)[:, None] == 0

    def add(params, batch, mask):  # of arguments: XLA knows nothing of what they hold
        def cut(params, rows):
            return losses(in_parts(params, mesh), rows)

        return clip_chunk(cut, params, batch, mask, clip, strategy)[0]

    program = jax.jit(add, out_shardings=mesh and shardings(params, mesh))
    params = jax.device_put(params, mesh and shardings(params, mesh))
    most = 4 ** lattice_bits(num_coordinates(params))
    for row in _hostile_rows(shapes):
        batch = jax.tree.map(lambda x: np.broadcast_to(x, (units, 1, *x.shape)), row)
        batch = jax.device_put(batch, mesh and everywhere(mesh))
        if (found := sum_of_squares(program(params, batch, mask))) > most:
            raise UnfitDevice(
                f"strategy={strategy}: a unit contributes {(found / most) ** 0.5:.4g} C, expected "
                "at most C: the guarantee does not hold with this compiler and device"
            )


def _of_arrays(shapes):
    """(losses, parameters, shapes of z): gradients of these shapes that are x y - z, x and y
    along the last axis, a row being the x, y and z of each array."""

    def losses(params, rows):
        def loss(p, row):
            x, y, z = row
            x, y = (each.reshape(len(z), *[1] * (p.ndim - 1), -1) for each in (x, y))
            return 0.5 * jnp.square(p[None] + (x * y - z)).reshape(len(z), -1).sum(axis=1)

        return sum(map(loss, params, rows))

    return losses, [jnp.zeros(shape, jnp.float32) for shape in shapes], shapes


def _of_layer():
    """The same of a layer, the cotangent of whose output is x y - z."""
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
    """The row of one unit, several times: x, y [last axis] and z [shape] for each array."""
    rng = np.random.default_rng(0)
    pairs = [LARGE * rng.uniform(1, 2, (2, shape[-1])).astype(np.float32) for shape in shapes]
    exact = [x.astype(np.float64) * y for x, y in pairs]
    for products in ([x * y for x, y in pairs], exact, [2.0**30 + 0 * x for x, _ in pairs]):
        each = zip(pairs, products, shapes, strict=True)
        yield [(*pair, np.broadcast_to(z.astype(np.float32), shape)) for pair, z, shape in each]


def sum_of_squares(tree: Any) -> int:
    """The sum of squares of whole numbers, int32, exact."""

    def of(leaf):
        high, low = np.divmod(np.asarray(leaf).ravel().astype(np.int64), 2**16)
        return (int(high @ high) << 32) + (int(high @ low) << 17) + int(low @ low)

    return sum(map(of, jax.tree.leaves(tree)))
