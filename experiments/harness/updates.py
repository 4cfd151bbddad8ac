"""Updates of the literature that `fedsim train` does not offer, for the study of optimizers.

Both know how much noise there is, which is public, and ask nothing else of the data.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim.engine import Task, WrappedTask

CORRECTED = "adam, bias corrected"
SCALED, SCALED_ARRAYS = "scale then privatize", "scale then privatize, by arrays"
FLOOR = 0.3
"""Where a second moment is less than that of so much of the noise, it is taken to be that."""
LEAST = 0.1
"""The least second moment of a scale, as a share of the mean of all coordinates."""
WARM_UP = 10
"""Steps without scales: the first second moments are noise."""
MODEL, SCALE = "model", "scale"


class Corrected(NamedTuple):
    """The state of `adam_corrected`, and of `scaled`: steps taken, first and second moments."""

    count: jax.Array
    first: Any
    second: Any


def adam_corrected(
    rate: float, stddev: float, b1: float = 0.9, b2: float = 0.95
) -> optax.GradientTransformation:
    """Adam without what the noise adds to its second moments.

    Args: stddev: of the noise of a coordinate of a gradient.
    Source: Tang et al. 2023, arXiv 2312.14334; its floor gamma' is (FLOOR stddev)^2 here.
    """

    def update(updates, state, params=None):
        count = state.count + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.second, updates)
        fix1, fix2 = 1 - b1**count, 1 - b2**count

        def change(m, v):
            own = jnp.maximum(v / fix2 - stddev**2, (FLOOR * stddev) ** 2 + 1e-16)
            return -rate * m / fix1 / jnp.sqrt(own)

        return jax.tree.map(change, first, second), Corrected(count, first, second)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Corrected(jnp.zeros((), jnp.int32), zeros, zeros)

    return optax.GradientTransformation(init, update)


class ScaledTask(WrappedTask):
    """A task whose parameters are theta / s, and s: a gradient in them is s times as long."""

    def losses(self, params, batch, *frozen):
        """The inner task's losses at theta."""
        return self.inner.losses(model_of(params), batch, *frozen)

    def nats(self, params, batch, *frozen):
        """The inner task's losses and predictions at theta."""
        return self.inner.nats(model_of(params), batch, *frozen)

    @property
    def layers(self) -> None:
        """None: they are those of theta."""
        return None


def scaled_start(task: Task, params: Any) -> tuple[Task, Any]:
    """A task and its parameters, with scales of one."""
    return ScaledTask(task), with_scale(params, jax.tree.map(jnp.ones_like, params))


def with_scale(theta: Any, scale: Any) -> dict[str, Any]:
    """Parameters of a ScaledTask."""
    return {MODEL: jax.tree.map(jnp.divide, theta, scale), SCALE: scale}


def model_of(params: Any) -> Any:
    """theta. Scales have no gradient."""
    return jax.tree.map(lambda p, s: p * jax.lax.stop_gradient(s), params[MODEL], params[SCALE])


def scaled(
    rate: float, stddev: float, *, arrays: bool = False, b1: float = 0.9, b2: float = 0.95
) -> optax.GradientTransformation:
    """Gradients are scaled by 1 / sqrt(second moment), clipped, made noisy, and followed with
    momentum: noise is as large in each coordinate of Adam's step, and not divided by anything.

    The second moments are those of the noisy gradients of the steps before, without what the noise
    adds to them, averaged over rows and over columns (as in Adafactor), for a single coordinate's
    is mostly noise.

    Args: arrays: average over whole arrays.
    Source: arXiv 2507.01129; the averages are ours.
    """
    average = _over_array if arrays else _over_rows_and_columns

    def update(updates, state, params=None):
        assert params is not None
        count, grad = state.count + 1, updates[MODEL]
        theta, scale = model_of(params), params[SCALE]
        first = jax.tree.map(lambda m, g: b1 * m + g, state.first, grad)
        theta = jax.tree.map(lambda p, m: p - rate * m, theta, first)

        def moved(v, g, s):
            return b2 * v + (1 - b2) * (g * g - stddev**2) / s**2

        second = jax.tree.map(moved, state.second, grad, scale)
        fixed = jax.tree.map(lambda v: average(v / (1 - b2**count)), second)
        size = sum(v.size for v in jax.tree.leaves(fixed))
        least = LEAST * sum(jnp.sum(v) for v in jax.tree.leaves(fixed)) / size + 1e-16
        fixed = jax.tree.map(lambda v: jnp.maximum(v, least), fixed)
        own = jnp.sqrt(sum(jnp.sum(v) for v in jax.tree.leaves(fixed)) / size)
        ready = count >= WARM_UP  # a gradient is as long as without scales
        scale = jax.tree.map(lambda v: jnp.where(ready, own / jnp.sqrt(v), 1.0), fixed)
        target = with_scale(theta, scale)
        return jax.tree.map(jnp.subtract, target, params), Corrected(count, first, second)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params[MODEL])
        return Corrected(jnp.zeros((), jnp.int32), zeros, zeros)

    return optax.GradientTransformation(init, update)


def _over_array(v: jax.Array) -> jax.Array:
    return jnp.full_like(v, jnp.maximum(v.mean(), 0.0))


def _over_rows_and_columns(v: jax.Array) -> jax.Array:
    if v.ndim < 2:
        return _over_array(v)
    rows = jnp.maximum(v.mean(axis=tuple(range(1, v.ndim)), keepdims=True), 0.0)
    columns = jnp.maximum(v.mean(axis=0, keepdims=True), 0.0)
    return rows * columns / jnp.maximum(v.mean(), 1e-30)
