"""Per-unit norms and weighted sums of single layers, held against gradients that NumPy forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedsim.clipping import layers
from fedsim.clipping.bookkeeping import TRUSTED

UNITS = 3
# tokens, inputs, outputs: the first two of few tokens and wide, the others not
SHAPES = {"gram": (3, 16, 12), "gram of one": (1, 6, 7), "direct": (9, 4, 5), "narrow": (2, 3, 1)}


def tokens_of(rng, tokens, inputs, outputs):
    x, g = (rng.normal(size=(UNITS, tokens, n)).astype(np.float32) for n in (inputs, outputs))
    return x, g


def lookups(rng, tokens, vocab, width):
    """Ids that repeat, some of them counted from the end, and cotangents."""
    ids = rng.integers(-vocab, vocab, size=(UNITS, tokens))
    ids[:, -1] = ids[:, 0] % vocab - vocab
    return ids.astype(np.int32), rng.normal(size=(UNITS, tokens, width)).astype(np.float32)


def added_up(ids, h, vocab):
    """sum over tokens of onehot(id) h^T, float64 [units, vocab, width]."""
    total = np.zeros((UNITS, vocab, h.shape[2]))
    for unit, (own, rows) in enumerate(zip(ids, h, strict=True)):
        for token, row in zip(own, rows, strict=True):
            total[unit, token] += row
    return total


def check(rule, module, calls, params, expected):
    """Norms and weighted sum of a layer against its units' gradients, by parameter."""
    weights = np.array([0.5, 0.0, 2.0], np.float32)

    @jax.jit
    def run(calls, weights):
        layer = rule(module, calls)
        found = layer.vectors(params), layer.squared_norms(params)
        return *found, layer.weighted_sum(params, weights)

    vectors, norms, found = run(calls, weights)
    squared, rounding = (part + np.zeros(UNITS) for part in norms)
    squared += sum(np.square(leaf).sum(axis=1) for leaf in vectors.values())
    exact = sum(np.square(grad).reshape(UNITS, -1).sum(axis=1) for grad in expected.values())
    np.testing.assert_allclose(squared, exact, rtol=2e-5)
    assert squared.shape == rounding.shape == (UNITS,)
    assert (rounding >= 0).all() and (rounding < 1e-4 * squared).all()
    found |= {name: weights @ leaf for name, leaf in vectors.items()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        total = np.tensordot(weights, grad, axes=1)
        np.testing.assert_allclose(found[name], total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_dense(shape, bias, calls, rng):
    _, inputs, outputs = SHAPES[shape]
    seen = [tokens_of(rng, *SHAPES[shape]) for _ in range(calls)]
    x, g = (np.concatenate(leaves, axis=1).astype(np.float64) for leaves in zip(*seen, strict=True))
    expected = {"kernel": np.einsum("uti,uto->uio", x, g)}
    if bias:
        expected["bias"] = g.sum(axis=1)
    check(layers.Dense, nn.Dense(outputs), {layers.CALL: seen}, expected, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_embedding(shape, rng):
    tokens, vocab, width = SHAPES[shape]
    ids, h = lookups(rng, tokens, vocab, width)
    calls = {layers.CALL: [(ids[..., None], h)]}
    params = {"embedding": np.zeros((vocab, width))}
    expected = {"embedding": added_up(ids, h, vocab)}
    check(layers.Embed, nn.Embed(vocab, width), calls, params, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("looked_up", [True, False])
def test_tied_embedding(shape, looked_up, rng):
    tokens, width, vocab = SHAPES[shape]
    x, g = tokens_of(rng, tokens, width, vocab)
    calls = {layers.ATTEND: [(jnp.asarray(x), jnp.asarray(g))]}
    expected = np.einsum("utv,utd->uvd", g.astype(np.float64), x)
    if looked_up:
        # Cotangents like the head's own gradient, so that the two do not stand at right angles.
        ids, h = lookups(rng, tokens + 2, vocab, width)
        h += 3 * np.take_along_axis(expected, ids[..., None] % vocab, axis=1).astype(np.float32)
        calls[layers.CALL] = [(jnp.asarray(ids)[..., None], jnp.asarray(h))]
        expected = expected + added_up(ids, h, vocab)
    params = {"embedding": np.zeros((vocab, width))}
    check(layers.Embed, nn.Embed(vocab, width), calls, params, {"embedding": expected})


@pytest.mark.parametrize("kind, centered", [(nn.LayerNorm, True), (nn.RMSNorm, False)])
@pytest.mark.parametrize("names", [("scale",), ("bias",), ("scale", "bias")])
def test_norms(kind, centered, names, rng):
    if not centered and "bias" in names:
        pytest.skip("it has no bias")
    x, g = (rng.normal(size=(UNITS, 4, 6)) for _ in range(2))
    middle = x.mean(axis=2, keepdims=True) if centered else 0
    z = (x - middle) / np.sqrt(np.square(x - middle).mean(axis=2, keepdims=True) + 0.1)
    gradients = {"scale": (z * g).sum(axis=1), "bias": g.sum(axis=1)}
    calls = {layers.CALL: [(jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32))]}
    expected = {name: gradients[name] for name in names}
    check(layers.Norm, kind(epsilon=0.1, name="own"), calls, expected, expected)


@pytest.mark.parametrize("tokens", [2, 30])
def test_half_precision_is_multiplied_and_added_in_float32(tokens, rng):
    x, g = (jnp.asarray(leaf, jnp.bfloat16) for leaf in tokens_of(rng, tokens, 8, 8))
    exact = np.einsum("uti,uto->uio", *(np.asarray(leaf, np.float64) for leaf in (x, g)))
    check(layers.Dense, nn.Dense(8), {layers.CALL: [(x, g)]}, ["kernel"], {"kernel": exact})


@pytest.mark.parametrize("tokens", [2, 30])
def test_what_cancels_is_not_trusted(tokens, rng):
    x, g = tokens_of(rng, tokens, 8, 8)
    half = tokens // 2
    x[:, half:], g[:, half:] = x[:, :half], -g[:, :half]
    squared, rounding = layers.product_norms(jnp.asarray(x), jnp.asarray(g))
    assert (squared < rounding).all() and (rounding > 0).all()


def test_squares_that_underflow_beside_large_ones_are_not_trusted():
    x, g = jnp.full((1, 1, 8), 1e-23), jnp.full((1, 1, 8), 1e18)
    squared, rounding = layers.product_norms(x, g)  # the norm is 8e-5
    assert not squared >= rounding


def cancelling(rng, units, tokens, width):
    """Cotangents [units, 1, tokens, width] whose second half takes the first half back, nearly."""
    shape = (units, 1, 1, 1)
    first = rng.normal(size=(units, 1, tokens // 2, width)) * 10 ** rng.uniform(-3, 3, shape)
    second = -first * (1 + 10 ** rng.uniform(-8, 0, shape))
    return jnp.asarray(np.concatenate([first, second], axis=2), jnp.float32)


@pytest.mark.parametrize("kind", ["dense", "embedding", "tied"])
@pytest.mark.parametrize("tokens, inputs, outputs", [(6, 32, 48), (40, 8, 6)])
def test_what_is_trusted_is_no_longer_than_its_norm(kind, tokens, inputs, outputs, rng):
    units = 2000
    half = rng.normal(size=(units, 1, tokens // 2, inputs)).astype(np.float32)
    ids = rng.integers(outputs, size=(units, 1, tokens // 2, 1))
    x, ids = (jnp.asarray(np.concatenate([leaf, leaf], axis=2)) for leaf in (half, ids))
    lookup = (ids, cancelling(rng, units, tokens, inputs))
    matmul = (x, cancelling(rng, units, tokens, outputs))

    def one(seen):
        lookup, matmul = seen
        params = {"embedding": np.zeros((outputs, inputs))}
        calls = {layers.CALL: [lookup]} | ({layers.ATTEND: [matmul]} if kind == "tied" else {})
        layer = layers.Embed(nn.Embed(outputs, inputs), calls)
        if kind == "dense":
            params = {"kernel": np.zeros((inputs, outputs))}
            layer = layers.Dense(nn.Dense(outputs), {layers.CALL: [matmul]})
        squared, rounding = layer.squared_norms(params)
        (total,) = layer.weighted_sum(params, 1 / jnp.sqrt(squared + rounding)).values()
        return total, squared >= TRUSTED * rounding

    totals, trusted = jax.jit(lambda seen: jax.lax.map(one, seen))((lookup, matmul))
    lengths = np.linalg.norm(np.asarray(totals, np.float64).reshape(units, -1), axis=1)
    kept = np.asarray(trusted)[:, 0]
    assert 100 < kept.sum() < 1990
    assert 1 - 1e-3 < lengths[kept].max() <= 1 + 1e-5
