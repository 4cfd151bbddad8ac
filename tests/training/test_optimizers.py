"""Optimizers by name: known updates, and a refusal instead of a surprise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refused import refuses

from fedsim.config import run_config
from fedsim.training.optimizers import update_rule

GRAD = {"a": jnp.array([1.0, -2.0]), "b": jnp.full((3, 2), 0.5)}


def optimizer(name, learning_rate):
    return update_rule(run_config(data="x", run_dir="x", optimizer=name), learning_rate)


def updates(name, learning_rate, num_steps):
    """The updates of the first steps when the gradient stays the same."""
    transformation = optimizer(name, learning_rate)
    params = jax.tree.map(jnp.ones_like, GRAD)
    state, found = transformation.init(params), []
    for _ in range(num_steps):
        update, state = transformation.update(GRAD, state, params)
        params = optax.apply_updates(params, update)
        found.append(update)
    return found


def test_momentum_adds_nine_tenths_of_the_last_update():
    factors = [1, 1.9, 1 + 0.9 * 1.9]
    for factor, update in zip(factors, updates("momentum", 0.25, 3), strict=True):
        np.testing.assert_allclose(update["a"], -0.25 * factor * GRAD["a"], rtol=1e-6)


NO_OPTIMIZER = ["", "Adam", "adam ", "nonsense", "__name__", "contrib", "GradientTransformation"]
NOT_FROM_A_LEARNING_RATE = ["scale_by_adam", "chain", "clip", "apply_updates", "global_norm"]
NOT_FROM_A_GRADIENT = ["lbfgs", "polyak_sgd"]
OTHER_OPTIONS = ["adam:b3=1", "adam:b1", "adam:b1=x", "momentum:learning_rate=3"]
OTHER_OPTIONS += ["sgd:momentum=true,x=1"]


@pytest.mark.parametrize(
    "name", NO_OPTIMIZER + NOT_FROM_A_LEARNING_RATE + NOT_FROM_A_GRADIENT + OTHER_OPTIONS
)
def test_what_is_no_optimizer_is_refused(name):
    with refuses(f"optimizer={name}"):
        optimizer(name, 0.1)
