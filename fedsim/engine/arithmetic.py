"""Does a device compute as the proof of contributions assumes? Asked before it computes the first.

`clipping.contribution` allows a product and a sum one rounding of float32 each, and a root and a
quotient a few. A processor keeps to that; of other devices it is measured. What is found out is
whether the arithmetic is another one (TF32, bfloat16, approximate roots), not every single value.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.clipping.contribution import ROUNDING
from fedsim.errors import FedsimError

NUMBERS = 2**14
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
