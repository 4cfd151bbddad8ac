"""Optimizers by name, with a constant learning rate: the update that both algorithms share."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedsim.errors import ConfigError


def optimizer(name: str, learning_rate: float | optax.Schedule) -> optax.GradientTransformation:
    """`momentum` (sgd with 0.9), or any optax optimizer that needs nothing but a learning rate, or
    its schedule.

    Raises: ConfigError: no such optimizer.
    """
    if name == "momentum":
        return optax.sgd(learning_rate, momentum=0.9)
    factory = getattr(optax, name, None)
    # noisy_sgd adds noise of its own; scale_by_... are parts of optimizers.
    excluded = name == "noisy_sgd" or name.startswith("scale_by")
    if excluded or not inspect.isfunction(factory) or not _works(factory):
        expected = "momentum or an optax optimizer such as adafactor, adam, sgd"
        raise ConfigError(f"optimizer={name}: expected {expected}")
    return factory(learning_rate=learning_rate)


def updater(transformation: optax.GradientTransformation) -> Callable[[Any, Any, Any], Any]:
    """(gradient, optimizer state, parameters) -> (parameters, optimizer state), compiled."""

    def update(grad, opt_state, params):
        updates, opt_state = transformation.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(update)


def _works(factory) -> bool:
    """Can be made from a learning rate and updates from a gradient alone (lbfgs, say, cannot)."""
    params = jnp.zeros(2)
    try:
        transformation = factory(learning_rate=1.0)
        transformation.update(params, transformation.init(params), params)
    except (TypeError, AttributeError):
        return False
    return True
