"""Rematerialisation changes memory and time alone, with every strategy; so do the model's parts."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from zoo import PARTS, random_like

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.models.language_model import LanguageModelTask

UNITS, GROUP = 3, 2


def losses_of(config):
    return LanguageModelTask(None, config).losses


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    shape = (UNITS, GROUP)
    tokens = rng.integers(11, size=(*shape, 12)).astype(np.int32)
    return {"tokens": tokens, "sizes": rng.integers(2, 13, shape).astype(np.int32)}


@functools.cache
def clipped(config, name):
    strategy = Strategy(name, UNITS * GROUP)
    mask = np.array([[True, True], [True, False], [True, True]])
    run = functools.partial(
        clip_chunk, losses_of(config), clip=Clip(0.5, in_float32=True), strategy=strategy
    )
    return jax.jit(lambda params, batch: run(params, batch, mask))


# Between them, they have every part of the families. Compiling takes seconds.
SLOW = [("qwen3", name, True) for name in ("scan", "ghost")]
SLOW += [("gpt2", "ghost", False)]
SLOW += [("capped", name, True) for name in ("direct", "ghost")]
SLOW += [("turned", name, False) for name in ("direct", "ghost")]
CASES = [("qwen3", "direct", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("family, name, remat", CASES)
def test_every_strategy_gives_the_sum_of_scan_without_it(family, name, remat, batch):
    config = dataclasses.replace(PARTS[family], num_layers=1)
    params = random_like(config, np.random.default_rng(0))
    expected, norms, losses, _ = clipped(config, "scan")(params, batch)
    size = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(expected)))
    own = dataclasses.replace(config, remat=remat)
    total, found, found_losses, dropped = clipped(own, name)(params, batch)
    assert not dropped.any()
    np.testing.assert_allclose(found, norms, rtol=2e-5)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert jax.tree.structure(total) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * size)


def test_less_is_kept_for_the_backward_pass(batch):
    """(Of XLA's programs for CPUs it cannot be told: they share what is computed twice.)"""
    config = PARTS["llama"]
    params = random_like(config, np.random.default_rng(0))
    rows = jax.tree.map(lambda leaf: leaf[:, 0], batch)

    def kept(config):
        backward = jax.eval_shape(
            lambda p: jax.vjp(lambda p: losses_of(config)(p, rows).sum(), p)[1], params
        )
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    own = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert kept(dataclasses.replace(config, remat=True)) - own < 0.3 * (kept(config) - own)
