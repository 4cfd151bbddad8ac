"""The loss of a row is the mean over its own trained tokens."""

import functools

import jax
import numpy as np
import reference
from stores import store_of

from fedsim.data import Dataset
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

VOCAB, LENGTH = 11, 6
CONFIG = TransformerConfig(VOCAB, LENGTH, width=16, num_layers=1, num_heads=2)


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
