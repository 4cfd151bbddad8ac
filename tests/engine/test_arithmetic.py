"""A device whose arithmetic the guarantee cannot rest on is refused."""

import jax
import jax.numpy as jnp
import pytest

from fedsim.engine import programs
from fedsim.engine.environment import compiler_options

pytestmark = pytest.mark.privacy


def rounded_to_bfloat16(x, y):
    return (x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16)).astype(jnp.float32)


def without_three_bits(x, _):
    return jnp.sqrt(x) * jnp.float32(1 + 2**-21)


def test_a_processor_is_fit():
    programs.check_arithmetic(jax.local_devices()[0])


@pytest.mark.parametrize(
    "name, wrong", [("products", rounded_to_bfloat16), ("roots", without_three_bits)]
)
def test_arithmetic_of_less_precision_is_refused(monkeypatch, name, wrong):
    _, exact, roundings = programs.OPERATIONS[name]
    monkeypatch.setitem(programs.OPERATIONS, name, (wrong, exact, roundings))
    with pytest.raises(programs.UnfitDevice, match=f"{name} err by .*the guarantee does not"):
        programs.check_arithmetic(jax.local_devices()[0])


def test_xla_knows_what_it_is_told_of_programs_for_gpus():
    assert compiler_options("cpu") is None and compiler_options("tpu") is None
    options = compiler_options("gpu")
    assert options
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(options)  # a name that it does not know is an error, also here
    with pytest.raises(Exception, match="No such compile option"):
        lowered.compile({f"{name}_": value for name, value in options.items()})
