"""Generation of text from a model.

One pass over the prompt, then a token at a time, with cached keys and values. Two programs are
compiled, whatever the lengths. Generated text has the same privacy as the model: the run's epsilon.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.data import Tokenizer
from fedsim.engine import expect_usable_jax
from fedsim.errors import expect
from fedsim.files import expand_home
from fedsim.models import HUB, TOKENIZER, Pretrained, Transformer, TransformerConfig, lengths_up_to
from fedsim.run import find_model


def generate_text(
    source: str, prompt: str, *, num_tokens: int, temperature: float, top_k: int, seed: int
) -> dict[str, Any]:
    """Continue a prompt with a run's last checkpoint or a pretrained model.

    Args:
      source: the directory of a run or of a Hugging Face model, hf:NAME, or a GGUF file.
      prompt: text.
      num_tokens: most tokens to generate.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: number of likeliest tokens to draw from; 0: all.
      seed: of the draws.
    Returns: the fields of --json. `stopped` is end (the model ended the text), num_tokens, or
      length (prompt and text have max_length tokens, the most that the model reads).
    Raises: ConfigError: there is no such model, it has no tokenizer, the prompt is too long, or a
      number is out of range.
    """
    expect_usable_jax()
    expect("num_tokens", num_tokens, num_tokens >= 1, ">= 1")
    expect("temperature", temperature, temperature >= 0, ">= 0")
    expect("top_k", top_k, top_k >= 0, ">= 0")
    model = model_to_generate(expand_home("model", source))
    assert model.tokenizer is not None
    tokenizer = Tokenizer.load(model.tokenizer)
    ids = [tokenizer.begin_id, *tokenizer.encode_batch([prompt])[0]]
    longest = model.config.table
    expect("prompt", f"{len(ids)} tokens", len(ids) < longest, f"fewer than {longest} tokens")
    count = min(num_tokens, longest - len(ids))
    generated: list[int] = []
    stopped = "num_tokens" if count == num_tokens else "length"
    for token in tokens_after(
        model, ids, count, temperature=temperature, top_k=top_k, key=jax.random.key(seed)
    ):
        if token in tokenizer.end_ids:
            stopped = "end"
            break
        generated.append(token)
    text = tokenizer.decode(generated)
    about = {"stopped": stopped, "max_length": longest, "seed": seed}
    return {"prompt": prompt, "text": text, "tokens": len(generated), **about}


def model_to_generate(source: str) -> Pretrained:
    """The model that `source` names, with a tokenizer.

    Raises: ConfigError: there is no such model, or it has no tokenizer.
    """
    there = Path(source).exists() or source.startswith(HUB)
    kinds = "the directory of a run or of a Hugging Face model, hf:NAME, or a GGUF file"
    model = find_model(source) if there else None
    expect("model", source, model is not None, kinds)
    assert model is not None
    expect("model", source, model.tokenizer is not None, f"a model with a {TOKENIZER}")
    return model


def tokens_after(
    model: Pretrained,
    ids: list[int],
    count: int,
    *,
    temperature: float,
    top_k: int,
    key: jax.Array,
) -> Iterator[int]:
    """Yield `count` tokens; token i is drawn with `key` folded with i."""
    longest = next(n for n in (*lengths_up_to(model.config.table),) if n >= len(ids) + count)
    config = dataclasses.replace(model.config, max_length=longest, num_positions=model.config.table)
    params = jax.device_put(model.params)
    width = next(n for n in lengths_up_to(longest) if n >= len(ids))
    prompt = np.zeros((1, width), np.int32)
    prompt[0, : len(ids)] = ids
    # Padding's entries in the cache are replaced before attention reads them.
    logits, cache = _first(config, params, prompt, len(ids) - 1)
    for i in range(count):
        token = draw(logits, jax.random.fold_in(key, i), temperature, top_k)
        yield int(token)
        if i + 1 < count:
            logits, cache = _next(config, params, cache, token, len(ids) + i)


def draw(logits_V: jax.Array, key: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """Draw one token, int32, from logits [V]."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    logits_V = logits_V.astype(jnp.float32) / temperature
    if 0 < top_k < len(logits_V):
        least = jax.lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < least, -jnp.inf, logits_V)
    return jax.random.categorical(key, logits_V).astype(jnp.int32)


def _apply(config: TransformerConfig, variables: Any, tokens: Any, at: Any) -> tuple[Any, Any]:
    return Transformer(config).apply(variables, tokens, at, mutable=["cache"])


@jax.jit(static_argnums=0)
def _first(config, params, prompt, last):
    logits, state = _apply(config, {"params": params}, prompt, jnp.int32(0))
    return logits[0, last], state["cache"]


@jax.jit(static_argnums=0, donate_argnums=2)
def _next(config, params, cache, token, at):
    variables = {"params": params, "cache": cache}
    logits, state = _apply(config, variables, token[None, None], at)
    return logits[0, 0], state["cache"]
