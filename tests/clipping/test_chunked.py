"""The loss in chunks of tokens is that of whole logits, and never holds them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from zoo import FAMILIES, PARTS, VOCAB, adapters_of, random_like

from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.models import frozen, language_model, lora
from fedsim.models.language_model import LanguageModelTask

UNITS, GROUP, LENGTH = 3, 2, 12


@pytest.fixture
def batch(rng):
    shape = (UNITS, GROUP)
    sizes = rng.integers(2, LENGTH + 1, shape).astype(np.int32)
    tokens = rng.integers(11, size=(*shape, LENGTH)).astype(np.int32)
    return {"tokens": tokens, "sizes": sizes, "trained": rng.random((*shape, LENGTH)) < 0.6}


def problem(name, trained, rng):
    """(task, parameters, frozen weights)."""
    config = dataclasses.replace(PARTS[name], num_layers=1)
    if trained == "model":
        return LanguageModelTask(None, config), random_like(config, rng), ()
    adapted = lora.adapted(config, 2, 8.0)
    weights = frozen.as_frozen(random_like(config, rng), trained)
    return LanguageModelTask(None, adapted), adapters_of(random_like(adapted, rng)), (weights,)


def computed(task, strategy, params, batch, *weights):
    """(nats of each row, a clipped sum with norms and losses), compiled anew."""

    def run(params, batch, *weights):
        def losses(params, rows):
            return task.losses(params, rows, *weights)

        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
        mask = np.ones((UNITS, GROUP), bool)
        clip = Clip(0.5, in_float32=True)
        return task.nats(params, rows, *weights), clip_chunk(
            losses, params, batch, mask, clip, strategy
        )

    return jax.jit(run)(params, batch, *weights)


def in_chunks_of(tokens, monkeypatch):
    monkeypatch.setattr(language_model, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(language_model, "CHUNK_LOGITS", tokens * VOCAB)
    made, real = [], language_model.nats_in_chunks
    monkeypatch.setattr(
        language_model, "nats_in_chunks", lambda *args: made.append(args) or real(*args)
    )
    return made


CASES = [  # tied with a soft cap; untied with a divisor; each also frozen
    pytest.param("capped", "int8", "direct", marks=pytest.mark.ci),
    pytest.param("turned", "model", "scan", marks=pytest.mark.ci),
    ("capped", "model", "ghost"),
    ("gpt2", "bfloat16", "scan"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, trained, strategy", CASES)
def test_chunks_give_what_whole_logits_give(name, trained, strategy, batch, rng, monkeypatch):
    task, params, weights = problem(name, trained, rng)
    how = Strategy(strategy, GROUP)
    expected = computed(task, how, params, batch, *weights)
    made = in_chunks_of(5, monkeypatch)  # 22 positions: the last chunk has padding
    found = computed(task, how, params, batch, *weights)
    assert bool(made)
    (nats, counts), (total, norms, losses, _) = found
    (whole_nats, whole_counts), (whole_total, whole_norms, whole_losses, _) = expected
    np.testing.assert_array_equal(counts, whole_counts)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(nats, whole_nats)
    close(norms, whole_norms)
    close(losses, whole_losses)
    jax.tree.map(lambda a, b: close(a, b, rtol=1e-4), total, whole_total)


def test_whole_logits_are_never_there():
    """The compiled program of a long row of many words needs a fraction of their bytes."""
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=80_000, max_length=513)
    task = LanguageModelTask(None, dataclasses.replace(config, num_layers=1, remat=True))
    rows = {"tokens": np.zeros((1, 513), np.int32), "sizes": np.full(1, 513, np.int32)}
    gradient = jax.grad(lambda params: task.losses(params, rows).sum())
    program = jax.jit(gradient).lower(jax.eval_shape(task.init, jax.random.key(0))).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 512 * 80_000 / 1.5
