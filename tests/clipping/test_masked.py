"""The loss of a row is the mean over its own trained tokens, in every strategy and packing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from flax import linen as nn
from hypothesis import given, settings, strategies as st

from experiments.harness.stores import store_of
from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.data import Dataset
from fedsim.models.language_model import LanguageModelTask, cross_entropy, predicted
from fedsim.models.transformer import TransformerConfig

VOCAB, LENGTH, WIDTH, UNITS, GROUP = 11, 6, 3, 4, 2
STRATEGIES = ("scan", "direct", "ghost")
CONFIG = TransformerConfig(VOCAB, LENGTH, width=16, num_layers=1, num_heads=2)


class Bigram(nn.Module):
    """Predicts a token from the one before it alone."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        return nn.Dense(VOCAB, use_bias=False, name="head")(x)


def losses(params, batch):
    tokens, real = batch["tokens"], predicted(*(batch[x] for x in ("tokens", "sizes", "trained")))
    nats = cross_entropy(Bigram().apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])
    return jnp.sum(jnp.where(real, nats, 0), axis=1) / jnp.maximum(real.sum(axis=1), 1)


@functools.cache
def compiled(normalised):
    def run(params, batch, mask, norm):
        clip = Clip(norm, normalised, in_float32=True)
        return {
            name: clip_chunk(losses, params, batch, mask, clip, Strategy(name))
            for name in STRATEGIES
        }

    return jax.jit(run)


def rows_of(rng, shape, density):
    batch = {
        "tokens": rng.integers(VOCAB, size=(*shape, LENGTH)).astype(np.int32),
        "sizes": rng.integers(LENGTH + 1, size=shape).astype(np.int32),
        "trained": rng.random((*shape, LENGTH)) < density,
    }
    batch["trained"] &= np.arange(LENGTH) < batch["sizes"][..., None]
    return batch


@settings(deadline=None, max_examples=40)
@given(
    density=st.sampled_from([0.0, 0.3, 1.0]), normalised=st.booleans(), seed=st.integers(0, 2**32)
)
def test_every_strategy_takes_the_mean_over_a_rows_own_trained_tokens(density, normalised, seed):
    rng = np.random.default_rng(seed)
    batch, mask = rows_of(rng, (UNITS, GROUP), density), rng.random((UNITS, GROUP)) < 0.7
    embed, head = (rng.normal(size=s).astype(np.float32) for s in ((VOCAB, WIDTH), (WIDTH, VOCAB)))
    params = {"embed": {"embedding": embed}, "head": {"kernel": head}}
    expected = np.zeros(embed.size + head.size)
    for unit in range(UNITS):
        gradients = [
            reference.bigram_gradient(
                {"embed": embed, "head": head},
                batch["tokens"][unit, row, : batch["sizes"][unit, row]],
                batch["trained"][unit, row],
            )
            for row in np.flatnonzero(mask[unit])
        ]
        if gradients:
            mean = sum(gradients) / len(gradients)
            expected += reference.clip(mean, 0.7, normalised)
    for name, (total, *_) in compiled(normalised)(params, batch, mask, 0.7).items():
        found = np.concatenate(
            [total["embed"]["embedding"].ravel(), total["head"]["kernel"].ravel()]
        )
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=name)


@functools.cache
def task_of():
    """Users with rows of which some tokens are trained on, one with a row of which none is."""
    rng, rows, trained = np.random.default_rng(5), {}, {}
    for user in range(4):
        sizes = rng.integers(2, LENGTH + 1, 5)
        rows[f"u{user}"] = [rng.integers(VOCAB, size=n) for n in sizes]
        trained[f"u{user}"] = [rng.random(n) < 0.5 for n in sizes]
    trained["u0"][0][:] = False
    store = store_of(rows, LENGTH, VOCAB, trained)
    task = LanguageModelTask(Dataset(train=store, eval_users=store), CONFIG)
    params = task.init(jax.random.key(1))
    return task, jax.tree.map(lambda x: x + rng.normal(0, 0.3, x.shape).astype("f4"), params)


def test_the_loss_of_a_row_is_that_of_the_plain_loops():
    task, params = task_of()
    batch = task.read("train", np.array([0, 3, 7, -1]))
    logits = reference.transformer_logits(params, batch["tokens"], CONFIG.num_heads)
    log_probs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    nats, predictions = jax.jit(task.nats)(params, batch)
    found = jax.jit(task.losses)(params, batch)
    for row in range(4):
        places = [i for i in range(1, LENGTH) if batch["trained"][row, i]]
        own = [-log_probs[row, i - 1, batch["tokens"][row, i]] for i in places]
        assert predictions[row] == len(places)
        np.testing.assert_allclose(nats[row], sum(own), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[row], np.mean(own) if own else 0, rtol=1e-4, atol=1e-5)
    assert predictions[0] == 0 and predictions[1] > 0


def test_the_loss_of_a_row_does_not_depend_on_what_others_train_on():
    task, params = task_of()
    batch = task.read("train", np.arange(1, 7))
    before = jax.jit(task.losses)(params, batch)
    trained = batch["trained"].copy()
    trained[1:] = ~trained[1:]
    after = jax.jit(task.losses)(params, batch | {"trained": trained})
    assert 0 < before[0] == after[0] and (before[1:] != after[1:]).any()
