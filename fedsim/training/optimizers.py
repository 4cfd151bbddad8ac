"""The update after the privatised gradient: optimizers by name, schedules, averages.

All of it is post-processing: it costs no privacy, and it determines the bits of a run. Settings
that the user leaves open follow from a rule in public quantities, which was fitted on public text
(`docs/lab/closed.md`, optimizers) and costs no privacy either.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedsim.config import UPDATE, RunConfig
from fedsim.errors import ConfigError, FedsimError, expect

MOMENTUM = 0.9


class Diverged(FedsimError):
    """A training that cannot recover; the message has the privacy that it spent."""

    exit_code = 3


def update_rule(
    run: RunConfig, learning_rate: float | optax.Schedule
) -> optax.GradientTransformation:
    """The optimizer of a run from `with_defaults`: momentum (sgd with 0.9), or one of optax.

    It must need nothing but a learning rate or its schedule.

    Raises: ConfigError: there is no such optimizer, or it does not take its options.
    """
    factory, options = _parse(str(run.optimizer))
    return factory(learning_rate=learning_rate, **options)


def rate_of(run: RunConfig, num_steps: int) -> float | optax.Schedule:
    """Learning rate of each step, from 0: constant, or falling to zero after the last step."""
    peak, schedule = run.learning_rate, run.schedule
    assert peak is not None and schedule is not None, "settled"
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return optax.linear_schedule(peak, 0.0, num_steps)
    return optax.cosine_decay_schedule(peak, max(1, num_steps))


def _parse(name: str) -> tuple[Callable, dict[str, Any]]:
    """The factory of an optimizer and its options."""
    kind, _, text = name.partition(":")
    factory = optax.sgd if kind == "momentum" else getattr(optax, kind, None)
    # noisy_sgd adds noise of its own; scale_by_... are parts of
    excluded = kind == "noisy_sgd" or kind.startswith("scale_by")
    if not excluded and inspect.isfunction(factory):
        options = {"momentum": MOMENTUM} if kind == "momentum" else {}
        options |= _options(name, text, factory)
        if _works(factory, options):
            return factory, options
    expected = "momentum or an optax optimizer such as adafactor, adam, sgd, with options it takes"
    raise ConfigError.of("optimizer", name, expected)


def updater(
    transformation: optax.GradientTransformation, params: Any
) -> Callable[[Any, Any, Any], Any]:
    """(gradient, optimizer state, parameters) -> (parameters, optimizer state), compiled for
    parameters like these."""

    def update(grad, opt_state, params):
        updates, opt_state = transformation.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = jax.eval_shape(transformation.init, params)
    return jax.jit(update).lower(params, opt_state, params).compile()


@jax.jit
def largest_of(params: Any) -> jax.Array:
    """The largest absolute value of a parameter; nan if one is nan."""
    return jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(params)]).max()


def averaged(average: Any, params: Any, ema: float, step: int) -> Any:
    """Exponential moving average of the parameters after `step` steps, from that before.

    The weights add up to one and fall by the factor `ema` from each step to the one before.
    """
    return _moved(average, params, (1 - ema) / (1 - ema**step))


@jax.jit
def _moved(average, params, share):
    return jax.tree.map(lambda a, p: a + (share * (p - a)).astype(a.dtype), average, params)


def _options(name: str, text: str, factory: Callable) -> dict[str, Any]:
    """Parse the options after the name: numbers, true, false and null by parameter."""
    names = inspect.signature(factory).parameters.keys() - {"learning_rate"}
    options = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        expect("optimizer", name, key in names, f"options among {sorted(names)}")
        try:
            options[key] = json.loads(value, parse_constant=int)  # which refuses NaN and Infinity
        except ValueError:
            expected = f"{key}=a number, true, false or null"
            raise ConfigError.of("optimizer", name, expected) from None
    return options


def _works(factory: Callable, options: dict[str, Any]) -> bool:
    """True if the optimizer updates from a gradient alone, unlike lbfgs, with these options."""
    params = {"matrix": jnp.zeros((2, 3)), "vector": jnp.zeros(2)}
    try:
        transformation = factory(learning_rate=1.0, **options)
        transformation.update(params, transformation.init(params), params)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False
    return True


RATES = {"adafactor": 0.1, "adam": 0.01, "adamw": 0.01}
"""Learning rates of optimizers that divide by the size of the gradient, and so do not depend on the
noise."""
MOMENTUM_RATES = {  # what is trained: (rate where bound / stddev is 100, exponent of it, the most)
    "fresh": (0.15, 1.2, 0.3),
    "pretrained": (6.4e-3, 1.0, 0.03),
    "adapters": (4.7e-2, 1.0, 0.1),
}
STEPS = 100
AVERAGED = 10  # steps that the average looks back, about: a tenth of a run of STEPS


class Noise(NamedTuple):
    """The public quantities that the rule for the learning rate depends on."""

    stddev: float
    """Standard deviation of the noise on a coordinate of a step's mean gradient: C sigma / M, or C
    sigma / B. For correlated noise, that of the independent noise that adds as much to sums of
    steps."""
    bound: float
    """Bound on the norm of that gradient: C, or 1 with normalised clipping."""
    num_steps: int


def with_defaults(run: RunConfig, noise: Noise, *, fresh: bool = True) -> RunConfig:
    """The run with optimizer, learning_rate, schedule and ema filled in.

    Args:
      fresh: the trained model is not a pretrained one.
    Raises: ConfigError: there is no rule for the learning rate of this optimizer.
    """
    kind = run.optimizer or "momentum"
    trained = "adapters" if run.model.lora_rank else "fresh" if fresh else "pretrained"
    ema = max(0.0, 1 - AVERAGED / noise.num_steps)
    rate = run.learning_rate or _rate(kind, noise, *MOMENTUM_RATES[trained])
    usual = {"optimizer": kind, "learning_rate": rate, "schedule": "constant", "ema": ema}
    missing = {name: usual[name] for name in UPDATE if getattr(run, name) is None}
    return dataclasses.replace(run, **missing)


def _rate(optimizer: str, noise: Noise, usual: float, exponent: float, most: float) -> float:
    """The learning rate by the rule. Args: usual, exponent, most: of `MOMENTUM_RATES`."""
    kind = optimizer.partition(":")[0]
    if kind in RATES:
        return RATES[kind]
    momentum = _parse(optimizer)[1].get("momentum") or 0.0
    expected = f"a value: there is a rule for momentum, sgd, {', '.join(RATES)}, not for {kind}"
    expect("learning_rate", None, kind in ("momentum", "sgd"), expected)
    expect("optimizer", optimizer, 0 <= momentum < 1, "momentum in [0, 1)")
    # Noise moves each parameter by rate times stddev times the root of the number of steps.
    share = noise.bound / max(noise.stddev, 1e-12) * math.sqrt(STEPS / max(STEPS, noise.num_steps))
    rate = min(most, usual * (share / 100) ** exponent) / noise.bound
    # A gradient moves the parameters by 1 / (1 - momentum) times the rate, in all.
    faded = (1 - momentum) / (1 - MOMENTUM)
    return float(f"{rate * faded:.3g}")
