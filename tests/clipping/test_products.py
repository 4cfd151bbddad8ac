"""What the one-product gradients of layers are for, and the layers that do not get them."""

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
