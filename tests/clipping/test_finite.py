"""A number that is not finite adds nothing, also where a compiler may assume that none exists."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedsim.clipping import Clip, Strategy, clip_chunk, contribution
from fedsim.engine import programs

pytestmark = pytest.mark.privacy
FAST = "--xla_cpu_enable_fast_math=true"
FASTER = f"{FAST} --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
STRATEGIES = ["scan:1", "direct:1", "direct:4", "ghost:4"]
NOT_FINITE = [np.nan, -np.nan, np.inf, -np.inf]
TOO_LARGE = [*NOT_FINITE, 3e38, -3e38, 2.0**31, -(2.0**31), 2.0**20 + 1, -(2.0**20) - 1]


def check():
    """Check what a process with these options of XLA compiles."""
    x = np.array(TOO_LARGE, np.float32)
    whole = np.asarray(jax.jit(lambda x, s: contribution.whole(x, s, 4))(x, np.float32(1)))
    assert not whole.any(), whole
    finite = np.asarray(jax.jit(contribution.is_finite)(x))
    assert np.array_equal(finite, np.isfinite(x)), finite
    for name in STRATEGIES:
        programs.check_contributions(Strategy.parse(name), np.zeros((64, 128), np.float32))


@pytest.mark.parametrize("flags", [FAST, FASTER])
def test_a_compiler_that_takes_all_numbers_for_finite_lets_none_pass(flags):
    environment = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-c", "import test_finite; test_finite.check()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_coordinate_that_is_too_large_for_a_finite_gradient_is_zero():
    dimensions = 4
    most = 2.0 ** contribution.lattice_bits(dimensions)
    x = np.array([most, -most, most - 1, 0.5, 1.5, *TOO_LARGE], np.float32)
    whole = np.asarray(contribution.whole(x, jnp.float32(1), dimensions))
    expected = [most, -most, most - 1, 0, 2, *(0 for _ in TOO_LARGE)]
    assert np.array_equal(whole, np.array(expected, np.int64))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("wrong", ["all are finite", "nan alone"])
def test_a_unit_that_is_not_finite_is_looked_at_before_a_run(monkeypatch, name, wrong):
    found = {
        "all are finite": lambda x: jnp.ones(x.shape, bool),
        "nan alone": lambda x: x == x,  # so that infinite norms pass
    }
    monkeypatch.setattr(contribution, "is_finite", found[wrong])
    programs._check_contributions.cache_clear()
    with pytest.raises(programs.UnfitDevice, match="C, expected 0, as its gradient is not finite"):
        programs.check_contributions(Strategy.parse(name), np.zeros((64, 128), np.float32))
    programs._check_contributions.cache_clear()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_unit_that_is_not_finite_takes_nothing_from_the_units_beside_it(rng, dtype, name):
    """The sum is that over the other units, exactly, and that unit alone is dropped."""
    layers = [nn.Dense(16, dtype=dtype), nn.LayerNorm(dtype=dtype), nn.Dense(4, dtype=dtype)]
    model = nn.Sequential(layers)
    x = rng.normal(size=(4, 1, 3, 8)).astype(np.float32)
    params = model.init(jax.random.key(0), x[:, 0])["params"]

    def losses(params, x):
        return jnp.square(model.apply({"params": params}, x).astype(jnp.float32)).sum((1, 2))

    @jax.jit
    def total(x, real):
        return clip_chunk(losses, params, x, real[:, None], Clip(1.0), Strategy.parse(name))

    for unit, number in enumerate([np.nan, np.inf, -np.inf, 3e38]):
        bad = x.copy()
        bad[unit, 0, 1, 2] = number
        others = np.arange(4) != unit
        added, _, _, dropped = total(bad, np.ones(4, bool))
        assert np.array_equal(dropped, ~others)
        jax.tree.map(np.testing.assert_array_equal, added, total(x, others)[0])
        assert any(leaf.any() for leaf in jax.tree.leaves(added))
