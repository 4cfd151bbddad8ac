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


@pytest.mark.slow
@pytest.mark.parametrize(  # tied with a soft cap; untied with a divisor; each also frozen
    "name, below, text",
    [("capped", "int8", "direct:2"), ("turned", "", "scan:2"), ("capped", "", "ghost:2")],
)
def test_chunks_give_what_whole_logits_give(name, below, text, rng, monkeypatch):
    config, weights = dataclasses.replace(PARTS[name], num_layers=1), ()
    params = random_like(config, rng)
    if below:
        config, weights = lora.adapted(config, 2, 8.0), (frozen.as_frozen(params, below),)
        params = adapters_of(random_like(config, rng))
    task, shape = LanguageModelTask(None, config), (3, 2, 12)
    batch = {"tokens": rng.integers(11, size=shape).astype(np.int32)}
    batch |= {"sizes": rng.integers(2, 13, shape[:2]), "trained": rng.random(shape) < 0.6}

    def computed():
        """A clipped sum with its norms and losses, compiled anew."""
        mask, clip = np.ones(shape[:2], bool), Clip(0.5, in_float32=True)
        losses = lambda params, rows: task.losses(params, rows, *weights)  # noqa: E731
        run = functools.partial(clip_chunk, losses, clip=clip, strategy=Strategy.parse(text))
        return jax.jit(run)(params, batch, mask)

    expected, made, real = computed(), [], language_model.nats_in_chunks
    monkeypatch.setattr(language_model, "WHOLE_LOGITS", 0)
    monkeypatch.setattr(language_model, "CHUNK_LOGITS", 5 * VOCAB)  # the last has padding
    monkeypatch.setattr(language_model, "nats_in_chunks", lambda *x: made.append(x) or real(*x))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, computed(), expected)
    assert bool(made) == (text != "ghost:2")  # which needs a whole head


def test_whole_logits_are_never_there():
    """The compiled program of a long row of many words needs a fraction of their bytes."""
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=80_000, max_length=513)
    task = LanguageModelTask(None, dataclasses.replace(config, num_layers=1, remat=True))
    rows = {"tokens": np.zeros((1, 513), np.int32), "sizes": np.full(1, 513, np.int32)}
    gradient = jax.grad(lambda params: task.losses(params, rows).sum())
    program = jax.jit(gradient).lower(jax.eval_shape(task.init, jax.random.key(0))).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * 512 * 80_000 / 1.5
