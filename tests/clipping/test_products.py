"""The one-product gradients of layers, held against those that JAX derives."""

import flax
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


@pytest.mark.parametrize("axis", [scan.INPUTS, scan.OUTPUTS])
def test_the_product_is_that_of_numpy_and_so_is_its_gradient(axis, rng):
    x, g = rng.normal(size=(4, 6, 5)), rng.normal(size=(4, 6, 3))
    weight = rng.normal(size=(5, 3) if axis == scan.INPUTS else (3, 5))
    y, back = jax.vjp(lambda x, w: scan.product(x, w, axis), *map(jnp.float32, (x, weight)))
    matrix = weight if axis == scan.INPUTS else weight.T
    dx, dw = back(jnp.float32(g))
    dmatrix = np.einsum("bli,blo->io", x, g)
    np.testing.assert_allclose(y, x @ matrix, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, g @ matrix.T, rtol=1e-4, atol=1e-5)
    expected = dmatrix if axis == scan.INPUTS else dmatrix.T
    np.testing.assert_allclose(dw, expected, rtol=1e-4, atol=1e-5)


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


def test_another_interceptor_sees_every_call(rng, monkeypatch):
    model, ids = Tied(), ids_of(rng, 5)
    params = model.init(jax.random.key(0), ids)["params"]
    seen = []

    def outputs(params, ids):
        def twice(next_fun, args, kwargs, context):
            seen.append(context.method_name)
            y = next_fun(*args, **kwargs)
            return 2 * y if context.method_name == "attend" else y

        with nn.intercept_methods(twice):
            return model.apply({"params": params}, ids)

    expected = 2 * model.apply({"params": params}, ids)
    calls = counted(monkeypatch)
    np.testing.assert_array_equal(in_one_product(outputs)(params, ids), expected)
    assert seen.count("attend") == 1 and not calls


def test_a_subclass_is_left_alone(rng, monkeypatch):
    class Shifted(nn.Dense):
        def __call__(self, inputs):
            return super().__call__(inputs) + 1

    model, x = Shifted(3), jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    variables = model.init(jax.random.key(0), x)
    calls = counted(monkeypatch)
    np.testing.assert_array_equal(
        in_one_product(model.apply)(variables, x), model.apply(variables, x)
    )
    assert not calls


def shared(rng):
    x = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    return x, nn.Dense(3).init(jax.random.key(0), x)["params"]


@pytest.mark.parametrize(
    "fields, leaf",
    [({"features": 7}, "kernel"), ({"features": 3}, "bias")],
)
def test_parameters_that_do_not_fit_are_refused_as_before(fields, leaf, rng):
    x, params = shared(rng)
    model = nn.Dense(**fields)
    if leaf == "bias":
        params = {"kernel": params["kernel"]}
    for apply in (model.apply, in_one_product(model.apply)):
        with pytest.raises(flax.errors.FlaxError):
            apply({"params": params}, x)


def test_a_bias_that_is_not_used_is_not_added(rng):
    x, params = shared(rng)
    params |= {"bias": jnp.ones(3)}
    model = nn.Dense(3, use_bias=False)
    expected = model.apply({"params": params}, x)
    np.testing.assert_array_equal(in_one_product(model.apply)({"params": params}, x), expected)


def test_a_model_may_be_initialised_inside_and_its_parameters_boxed(rng):
    x, _ = shared(rng)
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model = nn.Dense(3, kernel_init=init)
    expected, params = (f(jax.random.key(0), x) for f in (model.init_with_output, model.init))
    found = in_one_product(model.init_with_output)(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(in_one_product(model.apply)(params, x), expected[0])


@pytest.mark.parametrize("lift", ["scan", "vmap"])
def test_lifted_layers_have_the_same_gradient(lift, rng):
    x = jnp.asarray(rng.normal(size=(6, 5)), jnp.float32)

    class Lifted(nn.Module):
        @nn.compact
        def __call__(self, x):
            if lift == "vmap":
                dense = nn.vmap(
                    nn.Dense, variable_axes={"params": None}, split_rngs={"params": False}
                )
                return dense(5)(x)

            class Step(nn.Module):
                @nn.compact
                def __call__(self, x, _):
                    return jnp.tanh(nn.Dense(5)(x)), None

            layers = nn.scan(
                Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return layers()(x, None)[0]

    model = Lifted()
    params = jax.jit(model.init)(jax.random.key(0), x)["params"]

    def loss(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, x)))

    expected, found = (jax.jit(jax.grad(f))(params) for f in (loss, in_one_product(loss)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )
