"""The one-product gradients of layers, held against those that JAX derives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedsim.clipping import scan
from fedsim.clipping.scan import in_one_product


def counted(monkeypatch):
    """The axes of all calls of `product` from now on."""
    calls, product = [], scan.product

    def count(x, weight, axis):
        calls.append(axis)
        return product(x, weight, axis)

    monkeypatch.setattr(scan, "product", count)
    return calls


class Tied(nn.Module):
    """A model with all that is intercepted."""

    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(19, 8, dtype=self.dtype, name="embed")
        dense = nn.remat(nn.Dense) if self.remat else nn.Dense
        x = nn.Dense(8, use_bias=False, dtype=self.dtype)(embed(ids))
        return embed.attend(jnp.tanh(dense(8, dtype=self.dtype, name="second")(x)))


def ids_of(rng, *shape):
    return jnp.asarray(rng.integers(19, size=shape))


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("remat", [False, True])
def test_value_and_gradient_are_those_that_jax_derives(shape, dtype, remat, rng, monkeypatch):
    model, ids = Tied(dtype, remat), ids_of(rng, *shape)
    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    weights = jnp.asarray(rng.normal(size=(*shape, 19)), dtype)

    def loss(params, ids):
        return jnp.sum(weights * model.apply({"params": params}, ids))

    expected = jax.jit(jax.value_and_grad(loss))(params, ids)
    calls = counted(monkeypatch)
    found = jax.jit(jax.value_and_grad(in_one_product(loss)))(params, ids)
    assert set(calls) == {scan.INPUTS, scan.OUTPUTS}
    calls.clear()
    jax.eval_shape(in_one_product(loss), params, ids)
    assert sorted(calls) == [scan.INPUTS, scan.INPUTS, scan.OUTPUTS]
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == jnp.float32 else {"rtol": 0.02, "atol": 0.1}
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), found, expected)
    dtypes = [jax.tree.map(jnp.result_type, tree) for tree in (found, expected)]
    assert dtypes[0] == dtypes[1]


def test_no_cotangent_is_copied_into_another_order(rng):
    """What it is for: the derived gradient's program has a transposed copy, this one has none."""
    x, g = (jnp.asarray(rng.normal(size=(4, 64, n)), jnp.float32) for n in (256, 1024))
    model = nn.Dense(1024)
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params, x, g):
        return jnp.sum(g * model.apply({"params": params}, x))

    def copies(loss):
        text = jax.jit(jax.grad(loss)).lower(params, x, g).compile().as_text()
        return sum("[1024,256]" in line and "copy" in line for line in text.splitlines())

    if jax.default_backend() != "cpu":
        pytest.skip("of the compiler for processors")
    assert copies(loss) > 0
    assert copies(in_one_product(loss)) == 0


def own_product(x, kernel, dimensions, precision=None):
    return 2 * jax.lax.dot_general(x, kernel, dimensions, precision)


@pytest.mark.parametrize(
    "fields", [{"dot_general": own_product}, {"precision": "highest"}, {"dot_general_cls": 1}]
)
def test_a_layer_with_a_product_of_its_own_keeps_it(fields, rng, monkeypatch):
    if "dot_general_cls" in fields:
        fields = {"dot_general_cls": lambda: own_product}
    model, x = nn.Dense(3, **fields), jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    variables = model.init(jax.random.key(0), x)
    calls = counted(monkeypatch)
    np.testing.assert_array_equal(
        in_one_product(model.apply)(variables, x), model.apply(variables, x)
    )
    assert not calls
