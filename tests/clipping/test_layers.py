"""Per-unit gradients of single layers, held against those that NumPy forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedsim.clipping import ghost

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


def check(module, calls, expected):
    """A layer's gradients against those of its units, by parameter."""

    @jax.jit
    def run(calls):
        products = ghost.matrix(module, calls, expected).items()
        formed = {name: product.formed(expected[name].shape[1:]) for name, product in products}
        return ghost.vectors(module, calls, expected) | formed

    found = run(calls)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-5, atol=1e-5)


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
    check(nn.Dense(outputs), {ghost.CALL: seen}, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_embedding(shape, rng):
    tokens, vocab, width = SHAPES[shape]
    ids, h = lookups(rng, tokens, vocab, width)
    calls = {ghost.CALL: [(ids, h)]}
    expected = {"embedding": added_up(ids, h, vocab)}
    check(nn.Embed(vocab, width), calls, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("looked_up", [True, False])
def test_tied_embedding(shape, looked_up, rng):
    tokens, width, vocab = SHAPES[shape]
    x, g = tokens_of(rng, tokens, width, vocab)
    calls = {ghost.ATTEND: [(jnp.asarray(x), jnp.asarray(g))]}
    expected = np.einsum("utv,utd->uvd", g.astype(np.float64), x)
    if looked_up:
        # Cotangents like the head's own gradient, so that the two do not stand at right angles.
        ids, h = lookups(rng, tokens + 2, vocab, width)
        h += 3 * np.take_along_axis(expected, ids[..., None] % vocab, axis=1).astype(np.float32)
        calls[ghost.CALL] = [(jnp.asarray(ids), jnp.asarray(h))]
        expected = expected + added_up(ids, h, vocab)
    check(nn.Embed(vocab, width), calls, {"embedding": expected})


@pytest.mark.parametrize("kind, centered", [(nn.LayerNorm, True), (nn.RMSNorm, False)])
@pytest.mark.parametrize("names", [("scale",), ("bias",), ("scale", "bias")])
def test_norms(kind, centered, names, rng):
    if not centered and "bias" in names:
        pytest.skip("it has no bias")
    x, g = (rng.normal(size=(UNITS, 4, 6)) for _ in range(2))
    middle = x.mean(axis=2, keepdims=True) if centered else 0
    z = (x - middle) / np.sqrt(np.square(x - middle).mean(axis=2, keepdims=True) + 0.1)
    gradients = {"scale": (z * g).sum(axis=1), "bias": g.sum(axis=1)}
    calls = {ghost.CALL: [(jnp.asarray(x, jnp.float32), jnp.asarray(g, jnp.float32))]}
    expected = {name: gradients[name] for name in names}
    check(kind(epsilon=0.1, name="own"), calls, expected)


@pytest.mark.parametrize("tokens", [2, 30])
def test_half_precision_is_multiplied_and_added_in_float32(tokens, rng):
    x, g = (jnp.asarray(leaf, jnp.bfloat16) for leaf in tokens_of(rng, tokens, 8, 8))
    exact = np.einsum("uti,uto->uio", *(np.asarray(leaf, np.float64) for leaf in (x, g)))
    expected = {"kernel": exact, "bias": np.asarray(g, np.float64).sum(axis=1)}
    check(nn.Dense(8), {ghost.CALL: [(x, g)]}, expected)
