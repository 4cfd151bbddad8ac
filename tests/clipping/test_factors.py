"""Norms of gradients that are not formed: never below that of what is formed, and not far above."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsim.clipping.ghost import BEYOND, WIDE, Factors

pytestmark = pytest.mark.privacy
UNITS, TOKENS, LOOKUPS = 2, 6, 5
SHAPES = [(3, 2), (40, 17), (WIDE + 30, 20)]
KINDS = ["product", "lookups", "both"]


def factors_of(kind, given):
    """Factors of what was drawn that a kind has."""
    return Factors(
        None if kind == "lookups" else given[:2], None if kind == "product" else given[2:]
    )


@functools.cache
def compiled(kind, shape):
    """(left, right, ids, looked up) -> squares and bounds [units], and each unit's gradient
    [2 units, N, D], formed whole, then as it is added."""

    def run(*given):
        factors = factors_of(kind, given)
        added = [
            factors.add_to(jnp.zeros(shape), lambda grad, unit, u=u: jnp.where(unit == u, grad, 0))
            for u in range(UNITS)
        ]
        formed = jnp.concatenate([factors.formed(shape), jnp.stack(added)])
        return *factors.squared_and_bound(), formed

    return jax.jit(run)


def draw(rng, shape, cancelling):
    """Factors of all sizes; where they cancel, pairs of tokens all but take each other away."""
    scales = 10.0 ** rng.uniform(-12, 5, 3)
    left = rng.normal(size=(UNITS, TOKENS, shape[0])) * scales[0]
    right = rng.normal(size=(UNITS, TOKENS, shape[1])) * scales[1]
    ids = rng.integers(0, shape[0], (UNITS, LOOKUPS))
    rows = rng.normal(size=(UNITS, LOOKUPS, shape[1])) * scales[2]
    if cancelling:
        left[:, 1::2] = left[:, ::2]
        right[:, 1::2] = -right[:, ::2] * (1 - 10.0 ** rng.uniform(-8, -2))
        ids[:, 1], rows[:, 1] = ids[:, 0], -rows[:, 0] * (1 + 1e-6)
    return *(x.astype(np.float32) for x in (left, right)), ids, rows.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_above_the_norm_of_what_is_formed(kind, shape, rng):
    run = compiled(kind, shape)
    for trial in range(60):
        cancelling = bool(trial % 2)
        squared, bounds, formed = run(*draw(rng, shape, cancelling))
        true = np.sqrt((np.asarray(formed, np.longdouble) ** 2).sum(axis=(1, 2)))
        assert (true <= np.tile(np.asarray(bounds, np.longdouble), 2)).all()
        true = true[UNITS:]
        if not cancelling and kind != "both" and true.min() > 1e-6:
            assert np.allclose(np.asarray(bounds, float), true.astype(float), rtol=0.01)
            assert np.allclose(np.sqrt(np.asarray(squared, float)), true.astype(float), rtol=1e-3)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e9])
def test_nothing_is_claimed_of_numbers_that_are_too_large(value, rng):
    left, right, *lookups = draw(rng, SHAPES[0], False)
    left[1, 2, 0] = value
    _, bounds, _ = compiled("both", SHAPES[0])(left, right, *lookups)
    assert bounds[0] < 1e6 and not bounds[1] < BEYOND  # also if it is nan


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("platform, tiles", [("cpu", 4), ("gpu", 1)])
def test_a_sum_in_tiles_is_that_of_whole_gradients(kind, platform, tiles, rng, monkeypatch):
    shape, given = (24, 7), draw(rng, (24, 7), False)
    monkeypatch.setattr("fedsim.clipping.ghost.TILE", 50)  # six rows of seven
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    factors = factors_of(kind, given)
    add = lambda total: factors.add_to(total, lambda grad, unit: grad * (unit + 1))  # noqa: E731
    assert kind == "lookups" or f" length={tiles}\n" in str(jax.make_jaxpr(add)(jnp.ones(shape)))
    total = add(jnp.ones(shape))
    formed = factors.formed(shape)
    assert np.allclose(total, 1 + formed[0] + 2 * formed[1], rtol=1e-5)
