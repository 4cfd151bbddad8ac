"""Decoding of many texts at a time: each as if it were alone, drawn as the model says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained_models import CONFIG
from scipy import stats
from zoo import PARTS, random_like

from fedsim.config import Sampling
from fedsim.models import Decoder, Prompt, Transformer
from fedsim.models.decoding import draw

KEY = jax.random.key(0)
PROMPTS = [
    Prompt(ids, most, number)
    for number, (ids, most) in enumerate(
        [([256, 7, 30], 8), ([256], 20), ([256] + [9] * 19, 3), ([256, 1], 1), ([256], 11)]
    )
]


def model_of(config):
    return config, random_like(config, np.random.default_rng(0))


def without_cache(config, params, prompt, how, ends=()):
    """What is drawn if the whole text is computed again for each token."""
    run = jax.jit(lambda tokens: Transformer(config).apply({"params": params}, tokens))
    key, found = jax.random.fold_in(KEY, prompt.number), []
    text = np.zeros((1, config.max_length), np.int32)
    text[0, : len(prompt.ids)] = prompt.ids
    for i in range(prompt.most):
        at = len(prompt.ids) + i
        found.append(int(draw(run(text)[:, at - 1], jax.random.fold_in(key, i)[None], how)[0]))
        if found[-1] in ends or i + 1 == prompt.most:
            break
        text[0, at] = found[-1]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_texts_are_those_of_the_model_without_a_cache(slots):
    config, params = model_of(CONFIG)
    how = Sampling(temperature=2.0, top_p=0.9)
    ends = {without_cache(config, params, PROMPTS[4], how)[5]}
    found = Decoder(config, params, how, ends).texts(PROMPTS, KEY, slots=slots, length=32)
    assert found == [without_cache(config, params, prompt, how, ends) for prompt in PROMPTS]
    assert len(found[4]) <= 6 and found[4][-1] in ends  # it ended there
    assert len(found[1]) == 20 or found[1][-1] in ends


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_texts_of_every_family_are_those_without_a_cache(name):
    config, params = model_of(PARTS[name])
    begins = [1, 5, 9, 4, 2], [3]
    room = config.max_length
    prompts = [Prompt(ids, room - len(ids), number) for number, ids in enumerate(begins)]
    decoder = Decoder(config, params, Sampling(), ())
    found = decoder.texts(prompts, KEY, slots=2, length=config.max_length)
    assert found == [without_cache(config, params, prompt, Sampling()) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 581])
def test_draws_follow_the_logits(size):
    """A chi-squared test of each way to cut the distribution, and nothing beyond the cut."""
    rng = np.random.default_rng(size)
    logits = rng.normal(scale=2, size=size).astype(np.float32)
    keys, count = jax.random.split(KEY, 20_000), 20_000
    order = np.argsort(-logits)
    for how in (
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_p=0.8),
        Sampling(temperature=2.0, top_p=0.9),
    ):
        expected = np.exp((logits - logits.max()).astype(np.float64) / how.temperature)
        expected /= expected.sum()
        nucleus = int(np.searchsorted(np.cumsum(expected[order]), how.top_p)) + 1
        expected[order[nucleus:]] = 0
        expected /= expected.sum()
        drawn = draw(jnp.broadcast_to(logits, (count, size)), keys, how)
        counts = np.bincount(np.asarray(drawn), minlength=size)
        assert len(counts) == size and counts[expected == 0].sum() == 0
        common = expected * count >= 5
        found = [*counts[common], counts[~common].sum()]
        wanted = [*expected[common], expected[~common].sum()]
        if wanted[-1] == 0:
            found, wanted = found[:-1], wanted[:-1]
        if len(found) > 1:
            assert stats.chisquare(found, np.array(wanted) * count).pvalue > 1e-4, how
    zero = draw(jnp.asarray(logits[None]), keys[:1], Sampling(temperature=0))
    assert zero.tolist() == [int(order[0])]
