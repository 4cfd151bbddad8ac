"""The model against a plain NumPy forward pass, and what user-level privacy asks of its loss."""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import transformer_logits
from refused import refuses
from stores import store_of

from fedsim.data.dataset import Dataset
from fedsim.models.language_model import LanguageModelTask, cross_entropy
from fedsim.models.transformer import Transformer, TransformerConfig, preset
from fedsim.run.checkpoint import params_sha256

VOCAB, LENGTH = 23, 10
CONFIG = TransformerConfig(VOCAB, LENGTH, width=16, num_layers=2, num_heads=4)
MODEL = Transformer(CONFIG)


@pytest.fixture(scope="module")
def params():
    """Every parameter random, also those that start at 0 or 1."""
    rng = np.random.default_rng(3)
    fresh = init(jax.random.key(0), jnp.zeros((5, LENGTH), jnp.int32))["params"]
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.3, leaf.shape).astype(np.float32), fresh
    )


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(4).integers(VOCAB, size=(5, LENGTH)).astype(np.int32)


logits = jax.jit(lambda params, tokens: MODEL.apply({"params": params}, tokens))


@jax.jit
def nats(params, tokens, sizes):
    batch = {"tokens": tokens, "sizes": sizes}
    return LanguageModelTask(None, CONFIG).nats(params, batch)


gradient = jax.jit(jax.grad(lambda params, *batch: nats(params, *batch)[0].sum()))
init = jax.jit(MODEL.init)


def test_the_forward_pass_is_that_of_the_plain_loops(params, tokens):
    expected = transformer_logits(params, tokens, CONFIG.num_heads)
    assert expected.std() > 1  # nothing cancels
    np.testing.assert_allclose(logits(params, tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", [1, 5, LENGTH - 1])
def test_a_later_token_does_not_change_earlier_logits(changed, params, tokens):
    other = tokens.copy()
    other[:, changed] = (other[:, changed] + 1) % VOCAB
    before, after = logits(params, tokens), logits(params, other)
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (np.abs(before[:, changed:] - after[:, changed:]).max(axis=(0, 2)) > 1e-3).all()


def test_padding_does_not_change_the_loss(params, tokens):
    sizes = np.full(5, 6, np.int32)
    padded = tokens.copy()
    padded[:, 6:] = (padded[:, 6:] + 5) % VOCAB
    for before, after in zip(nats(params, tokens, sizes), nats(params, padded, sizes), strict=True):
        np.testing.assert_array_equal(before, after)
    cut, predictions = nats(params, tokens[:, :6], sizes)
    np.testing.assert_allclose(cut, nats(params, tokens, sizes)[0], rtol=1e-6)
    np.testing.assert_array_equal(predictions, 5)


@pytest.mark.parametrize("size", [0, 1])
def test_a_row_without_a_prediction_has_no_loss_and_no_gradient(size, params, tokens):
    sizes = np.full(5, size, np.int32)
    found, predictions = nats(params, tokens, sizes)
    np.testing.assert_array_equal(found, 0)
    np.testing.assert_array_equal(predictions, 0)
    grads = gradient(params, tokens, sizes)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("scale", [1, 1e4, np.inf])
def test_the_gradient_of_the_loss_is_bit_for_bit_what_jax_derives(scale, rng):
    logits = jnp.asarray(rng.normal(size=(3, 5, 17)), jnp.float32)
    logits = logits.at[0, 1, 2].set(scale).at[1, 1].multiply(scale)
    targets = jnp.asarray(rng.integers(17, size=(3, 5))).at[2, 3].set(16)
    weights = jnp.asarray(rng.normal(size=(3, 5)), jnp.float32).at[0].set(0)

    def derived(logits, targets):
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]

    def gradient(loss):
        @jax.jit
        def run(logits, weights):
            nats, back = jax.vjp(lambda logits: loss(logits, targets), logits)
            return nats, back(weights)

        return run(logits, weights)

    expected, found = gradient(derived), gradient(cross_entropy)
    assert np.isfinite(found[1]).all() == np.isfinite(scale)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_paper_preset_has_350_million_parameters():
    config = preset("paper", vocab_size=30_522, max_length=128)
    shapes = jax.eval_shape(
        Transformer(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 128), jnp.int32)
    )
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    width, block = 1024, 4 * 1024**2 + 8 * 1024**2 + 5 * 1024 + 4 * 1024
    assert count == (30_522 + 128) * width + 24 * block + 2 * width  # biases and norms included
    assert abs(count / 350e6 - 1) < 0.05


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(5)
    texts = {f"u{u}": [rng.integers(VOCAB, size=n) for n in (4, 10, 1, 0)] for u in range(3)}
    store = store_of(texts, max_length=LENGTH, vocab_size=VOCAB)
    return LanguageModelTask(Dataset(train=store), CONFIG)


def test_the_loss_of_an_example_is_the_mean_over_its_predictions(task, params):
    batch = task.read("train", np.array([0, 1, 2, 3, -1]))
    found, predictions = nats(params, batch["tokens"], batch["sizes"])
    np.testing.assert_array_equal(predictions, [3, 9, 0, 0, 0])
    losses = jax.jit(task.losses)(params, batch)
    assert losses.dtype == jnp.float32 and np.isfinite(losses).all()
    np.testing.assert_allclose(losses[:2], found[:2] / np.array([3, 9]), rtol=1e-6)
    np.testing.assert_array_equal(losses[2:], 0)


def test_a_task_starts_from_the_same_parameters_wherever_it_is_unpickled(task):
    again = pickle.loads(pickle.dumps(task))
    found = jax.jit(again.init)(jax.random.key(2))
    expected = init(jax.random.key(2), jnp.zeros((5, LENGTH), jnp.int32))["params"]
    assert params_sha256(found) == params_sha256(expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


@pytest.mark.privacy
@pytest.mark.parametrize("token", [VOCAB, 2**31 + 5, 2**32 - VOCAB])  # as int32, two are negative
def test_a_token_that_the_model_lacks_is_refused_where_it_is_read(token):
    texts = {"u": [[1, 2], [VOCAB - 1, token]]}
    store = store_of(texts, max_length=LENGTH, vocab_size=2**32)
    task = LanguageModelTask(Dataset(train=store), CONFIG)
    assert task.read("train", np.array([0, -1]))["tokens"].max() == 2
    with refuses("data=train with a token that the model lacks", says=f"ids in [0, {VOCAB})"):
        task.read("train", np.array([0, 1]))
