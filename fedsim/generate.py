"""Generation of text from a model, and of a tokenizer from such text.

One pass over the prompt, then a token at a time, with cached keys and values. Two programs are
compiled, whatever the lengths. Generated text has the same privacy as the model: the run's epsilon;
and so has a tokenizer that was trained on it (Ponomareva et al. 2022, arXiv 2203.09943).
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim.accounting import at_most
from fedsim.data import FROM_USERS, SIZES, Tokenizer
from fedsim.engine import expect_usable_jax
from fedsim.errors import expect
from fedsim.files import expand_home
from fedsim.models import HUB, TOKENIZER, Pretrained, Transformer, TransformerConfig, lengths_up_to
from fedsim.run import directory, find_model, spent


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
    key = key_of(seed)
    model = model_to_generate(expand_home("model", source))
    assert model.tokenizer is not None
    tokenizer = Tokenizer.load(model.tokenizer)
    ids = [tokenizer.begin_id, *tokenizer.encode_batch([prompt])[0]]
    longest = model.config.table
    expect("prompt", f"{len(ids)} tokens", len(ids) < longest, f"fewer than {longest} tokens")
    count = min(num_tokens, longest - len(ids))
    generated: list[int] = []
    stopped = "num_tokens" if count == num_tokens else "length"
    for (token,) in tokens_after(model, ids, count, temperature=temperature, top_k=top_k, key=key):
        if token in tokenizer.end_ids:
            stopped = "end"
            break
        generated.append(int(token))
    text = tokenizer.decode(generated)
    about = {"stopped": stopped, "max_length": longest, "seed": seed}
    return {"prompt": prompt, "text": text, "tokens": len(generated), **about}


def key_of(seed: int) -> jax.Array:
    """The key of the draws of a seed. Raises: ConfigError: there is none of such a seed."""
    expect("seed", seed, -(2**63) <= seed < 2**63, "a number of 64 bits")
    return jax.random.key(seed)


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
    texts: int = 1,
) -> Iterator[np.ndarray]:
    """Yield `count` times the next token of each text, int32 [texts].

    Tokens i are drawn with `key` folded with i.
    """
    longest = next(n for n in (*lengths_up_to(model.config.table),) if n >= len(ids) + count)
    config = dataclasses.replace(model.config, max_length=longest, num_positions=model.config.table)
    params = jax.device_put(model.params)
    width = next(n for n in lengths_up_to(longest) if n >= len(ids))
    prompt = np.zeros((texts, width), np.int32)
    prompt[:, : len(ids)] = ids
    # Padding's entries in the cache are replaced before attention reads them.
    logits, cache = _first(config, params, prompt, len(ids) - 1)
    for i in range(count):
        tokens = draw(logits, jax.random.fold_in(key, i), temperature, top_k)
        yield np.asarray(tokens)
        if i + 1 < count:
            logits, cache = _next(config, params, cache, tokens, len(ids) + i)


def draw(logits_BV: jax.Array, key: jax.Array, temperature: float, top_k: int) -> jax.Array:
    """Draw a token for each text, int32 [B], from logits [B, V]."""
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV.astype(jnp.float32) / temperature
    if 0 < top_k < logits_BV.shape[-1]:
        least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV).astype(jnp.int32)


TEXTS_AT_ONCE = 64


def train_tokenizer(
    run_dir: Path, out: Path, *, vocab_size: int, samples: int, num_tokens: int, seed: int
) -> dict[str, Any]:
    """Train a byte-level BPE tokenizer on texts sampled from the model of a protected run.

    It costs nothing beyond the run: it is computed from the model alone.

    Args:
      out: the file to write, X.json; X.provenance.json beside it says where it comes from.
      vocab_size: maximum number of pieces.
      samples: number of texts.
      num_tokens: most tokens of a text, in the model's tokens.
      seed: of the draws. Public.

    Returns:
      The file, the number of its pieces and of characters it was trained on, and its origin.

    Raises:
      ConfigError: a number is out of range, the run has not ended, has no guarantee or no tokenizer
        that is public, or `out` exists or has no directory.
    """
    expect_usable_jax()
    expect("samples", samples, samples >= 1, ">= 1")
    expect("num_tokens", num_tokens, num_tokens >= 1, ">= 1")
    expect("out", out, out.suffix == ".json" and not out.exists(), "a new file ending in .json")
    expect("out", out, out.parent.is_dir(), "a file in a directory that exists")
    pieces = f">= {SIZES.start} and < {SIZES.stop:,}"
    expect("vocab_size", vocab_size, vocab_size in SIZES, pieces)
    key = key_of(seed)
    plan, summary = directory.load(run_dir).plan, directory.summary_of(run_dir)
    # Else the texts would be of a model that nothing protects, or in its users' own pieces.
    protected = plan is not None and plan.guarantee and summary is not None
    expect("from", run_dir, protected, "a run of train that has ended and has a guarantee")
    assert plan is not None and summary is not None
    model = find_model(str(run_dir))
    assert model is not None and model.tokenizer is not None, "load() found a run"
    public = not any(fact.startswith(FROM_USERS) for fact in plan.non_private)
    public = public and not Tokenizer.load(model.tokenizer).trained_on_data
    expect("from", run_dir, public, "a run whose tokenizer was not trained on its users' texts")
    texts = list(_sampled(model, samples, num_tokens, key))
    trained = Tokenizer.train_bpe(lambda: texts, vocab_size)
    epsilon, delta = at_most(spent(summary), ".4g"), at_most(plan.delta, ".2e")
    sha256 = summary["params_sha256"]
    origin = f"texts of the protected model of run {run_dir.resolve().name}, parameters "
    origin += f"{sha256[:12]}: epsilon {epsilon} at delta {delta}"
    how = {"samples": samples, "num_tokens": num_tokens, "temperature": 1.0, "seed": seed}
    trained.save_with(
        out, origin, params_sha256=sha256, ledger_chain=summary["ledger_chain"], **how
    )
    characters = sum(map(len, texts))
    return {
        **{"out": str(out), "vocab_size": trained.vocab_size, "characters": characters},
        "origin": origin,
    }


def _sampled(model: Pretrained, samples: int, num_tokens: int, key: jax.Array) -> Iterator[str]:
    """Texts of a model, each from the begin token to an end token, or to `num_tokens`."""
    assert model.tokenizer is not None, "runs keep their tokenizer"
    tokenizer = Tokenizer.load(model.tokenizer)
    count = min(num_tokens, model.config.table - 1)
    for batch in range(-(-samples // TEXTS_AT_ONCE)):
        drawn = tokens_after(
            model,
            [tokenizer.begin_id],
            count,
            temperature=1.0,
            top_k=0,
            key=jax.random.fold_in(key, batch),
            texts=TEXTS_AT_ONCE,
        )
        rows = np.stack(list(drawn), axis=1)[: samples - batch * TEXTS_AT_ONCE].tolist()
        for row in rows:
            yield tokenizer.decode(itertools.takewhile(lambda id: id not in tokenizer.end_ids, row))


def _apply(config: TransformerConfig, variables: Any, tokens: Any, at: Any) -> tuple[Any, Any]:
    return Transformer(config).apply(variables, tokens, at, mutable=["cache"])


@jax.jit(static_argnums=0)
def _first(config, params, prompt, last):
    logits, state = _apply(config, {"params": params}, prompt, jnp.int32(0))
    return logits[:, last], state["cache"]


@jax.jit(static_argnums=0, donate_argnums=2)
def _next(config, params, cache, tokens, at):
    variables = {"params": params, "cache": cache}
    logits, state = _apply(config, variables, tokens[:, None], at)
    return logits[:, 0], state["cache"]
