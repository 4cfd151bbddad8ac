"""The other strategies are scan, only faster; what `ghost` does not know it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from zoo import (
    LENGTH,
    PARTS,
    VOCAB,
    Tied,
    Untied,
    losses_of,
    random_batch,
    random_like,
    random_params,
)

from fedsim.clipping import Buckets, Clip, Strategy, clip_chunk
from fedsim.clipping.contribution import lattice_bits
from fedsim.clipping.ghost import UnsupportedModel
from fedsim.models.language_model import LanguageModelTask

UNITS, GROUP = 4, 2
# Wide enough for Grams, also where a layer has seen twice the tokens; narrow enough for none.
MODELS = {"tied wide": Tied(48), "tied": Tied(4), "untied wide": Untied(32), "untied": Untied(4)}
REMAT = {"qwen3": True, "capped": True, "gpt2": False, "turned": False}  # these have all parts
OTHERS = ["ghost:8", "ghost:1", "direct:1", "direct:8", "scan:1"]


def problem(name, rng):
    """(losses, those that the other strategies see, parameters, rows, buckets)."""
    batch = random_batch(rng, UNITS, GROUP)
    if name in MODELS:
        losses, params = losses_of(MODELS[name]), random_params(MODELS[name], rng)
        cut = lambda batch, length: batch | {"tokens": batch["tokens"][..., :length]}  # noqa: E731
        buckets = Buckets((2, LENGTH), lambda batch: batch["sizes"], cut)
        # A mean over a row's padding, too: rows cannot be cut.
        return losses, losses, params, batch, buckets if name.startswith("tied") else None
    config = dataclasses.replace(PARTS[name], num_layers=1)
    again = dataclasses.replace(config, remat=REMAT[name])
    losses = [LanguageModelTask(None, each).losses for each in (config, again)]
    return *losses, random_like(config, rng), batch, None


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("name", [*MODELS, *REMAT])
def test_every_strategy_equals_scan(name, normalised, rng):
    losses, again, params, batch, buckets = problem(name, rng)

    @jax.jit
    def run(mask, norm):
        clip = Clip(norm, normalised, in_float32=True)  # to compare all digits
        given, how = (params, batch, mask, clip), map(Strategy.parse, OTHERS)
        others = [clip_chunk(again, *given, each, buckets=buckets) for each in how]
        return clip_chunk(losses, *given, Strategy("scan", 8)), others

    for density, norm in ((0.0, 1.0), (0.5, 1e-3), (0.5, 0.3), (1.0, 1.0), (1.0, 1e4)):
        expected, others = run(rng.random((UNITS, GROUP)) < density, norm)
        assert not expected[3].any()
        for found in others:
            for own, other in zip(expected[1:], found[1:], strict=True):
                np.testing.assert_allclose(other, own, rtol=2e-5, atol=1e-7)
            assert {leaf.dtype for leaf in jax.tree.leaves(found[0])} == {jnp.dtype("float32")}
            error = np.linalg.norm(flat(found[0]) - flat(expected[0]))
            assert error <= 2e-5 * np.linalg.norm(flat(expected[0]))


class Own(nn.Module):
    """A model with one thing that `ghost` does not know."""

    part: str

    @nn.compact
    def __call__(self, batch):
        tokens = batch["tokens"]
        embed = nn.Embed(VOCAB, 8, name="embed")
        x = embed(tokens)
        if self.part == "head by hand":
            return x @ embed.embedding.T
        if self.part == "parameter":
            x = x * self.param("gain", nn.initializers.ones, (1, 1, 8))
        elif self.part == "module":
            x = nn.Conv(8, (3,), name="conv")(x)
        elif self.part == "derived":
            x = Subclass(8, name="mine")(x)
        elif self.part == "joint norm":
            x = nn.LayerNorm(feature_axes=(-2, -1), reduction_axes=(-2, -1), name="norm")(x)
        elif self.part == "remat":
            x = nn.remat(Block)(name="block")(x)
        elif self.part == "masked norm":
            x = nn.LayerNorm(name="norm")(x, mask=x > 0)
        return nn.Dense(VOCAB, name="head")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(x)


class Subclass(nn.Dense):
    """May compute what it likes."""


REFUSED = {
    "head by hand": "parameter embed/embedding: expected to be used by calls of its Dense or Embed",
    "parameter": "parameter gain: expected to be used by calls of its Dense or Embed",
    "module": "parameter conv/",
    "derived": "parameter mine/",
    "joint norm": r"parameter norm/\w+ of shape \(8, 8\): expected \(8,\)",
    "masked norm": "norm: called with 2 arguments, expected one",
    "remat": "block/Dense_0: called inside of remat, scan or the like",
}


@pytest.mark.parametrize("part, message", REFUSED.items())
def test_what_is_not_known_is_refused_by_name(part, message, rng):
    model, length = Own(part), UNITS * GROUP
    batch = random_batch(rng, UNITS, GROUP, length)
    rows = jax.tree.map(lambda leaf: leaf[0], batch)
    params = jax.eval_shape(model.init, jax.random.key(0), rows)["params"]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), params)
    mask, strategy = np.ones((UNITS, GROUP), bool), Strategy("ghost", UNITS * GROUP)
    given = losses_of(model), batch, mask, Clip(1.0), strategy
    with pytest.raises(UnsupportedModel, match=message):
        jax.eval_shape(lambda p: clip_chunk(given[0], p, *given[1:]), params)


class Mixed(nn.Module):
    """A model whose layers do not see rows in the order in which they are given."""

    part: str

    @nn.compact
    def __call__(self, batch):
        tokens, sizes = batch["tokens"], batch["sizes"]
        order = jnp.argsort(sizes) if self.part == "sorted" else jnp.arange(len(sizes))
        x = nn.Embed(VOCAB, 8, name="embed")(tokens[order])
        if self.part == "positions":
            x = x + nn.Embed(LENGTH, 8, name="positions")(jnp.arange(tokens.shape[1]))[None]
        elif self.part == "transposed":
            x = jnp.swapaxes(nn.Dense(8, name="dense")(jnp.swapaxes(x, 0, 1)), 0, 1)
        return nn.Dense(VOCAB, name="head")(nn.tanh(x))[jnp.argsort(order)]


@pytest.mark.privacy
@pytest.mark.parametrize("part", ["sorted", "positions", "transposed"])
def test_units_keep_their_numbers_whatever_the_order_of_rows_depends_on(part, rng):
    """Of a model that sorts its rows by length, a unit would have had another one's gradient."""
    model, units = Mixed(part), 8
    batch = random_batch(rng, units, 1)
    batch["sizes"] = rng.permutation(units)[:, None].astype(np.int32) % LENGTH + 1
    params = random_params(model, rng)

    @functools.partial(jax.jit, static_argnums=0)
    def run(name, mask):
        strategy = Strategy(name, 4)
        return clip_chunk(losses_of(model), params, batch, mask, Clip(0.1), strategy)[:2]

    every = np.ones((units, 1), bool)
    whole, norms = run("ghost", every)
    np.testing.assert_allclose(norms, run("scan", every)[1], rtol=1e-5)
    total, most = flat(whole), 4 ** lattice_bits(len(flat(whole)))
    for unit in range(units):
        alone = np.arange(units)[:, None] == unit
        own, rest = (flat(run("ghost", mask)[0]) for mask in (alone, ~alone))
        np.testing.assert_array_equal(total - rest, own)
        assert 0.98 * most < np.sum(own**2) <= most


@pytest.mark.privacy
@pytest.mark.parametrize("tied", [True, False])
def test_an_id_that_no_table_has_is_one_row_for_the_norm_and_for_the_sum(tied, rng):
    """Below -V, an id was counted from the end once for the norm and twice for the sum."""

    def losses(params, rows):
        embed = nn.Embed(VOCAB, 64)
        x = embed.apply({"params": params}, rows["ids"])
        x = embed.apply({"params": params}, 1 + x, method="attend") if tied else x
        return jnp.sum(x, axis=(1, 2))

    params = {"embedding": rng.normal(size=(VOCAB, 64)).astype(np.float32)}

    @jax.jit
    def run(ids):
        mask, strategy = jnp.ones((1, 1), bool), Strategy("ghost", 1)
        return clip_chunk(losses, params, {"ids": ids}, mask, Clip(1.0), strategy)[0]

    for ids in ([-VOCAB - 1, VOCAB - 1], [-9 * VOCAB, 0], [VOCAB, VOCAB - 1], [-1, VOCAB - 1]):
        z = flat(run(np.array([[ids]], np.int32)))
        assert np.sum(z**2) <= 4 ** lattice_bits(z.size)
