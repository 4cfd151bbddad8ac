"""Generation of text from a model, and of a tokenizer from such text.

Generated text has the same privacy as the model: the run's epsilon; and so has a tokenizer that was
trained on it (Ponomareva et al. 2022, arXiv 2203.09943).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fedsim.accounting import at_most
from fedsim.config import Sampling
from fedsim.data import FROM_USERS, SIZES, Tokenizer
from fedsim.engine import expect_usable_jax
from fedsim.errors import expect
from fedsim.files import expand_home
from fedsim.models import HUB, TOKENIZER, Decoder, Pretrained, Prompt, key_of, lengths_up_to
from fedsim.run import directory, find_model, spent


def generate_text(
    source: str, prompt: str, *, num_tokens: int, how: Sampling, seed: int
) -> dict[str, Any]:
    """Continue a prompt with a run's last checkpoint or a pretrained model.

    Args:
      source: the directory of a run or of a Hugging Face model, or hf:NAME.
      prompt: text.
      num_tokens: most tokens to generate.
      how: how they are drawn.
      seed: of the draws.
    Returns: the fields of --json. `stopped` is end (the model ended the text), num_tokens, or
      length (prompt and text have max_length tokens, the most that the model reads).
    Raises: ConfigError: there is no such model, it has no tokenizer, the prompt is too long, or a
      number is out of range.
    """
    expect_usable_jax()
    expect("num_tokens", num_tokens, num_tokens >= 1, ">= 1")
    key = key_of(seed)
    model = model_to_generate(expand_home("model", source))
    assert model.tokenizer is not None
    tokenizer = Tokenizer.load(model.tokenizer)
    ids = [tokenizer.begin_id, *tokenizer.encode_batch([prompt])[0]]
    longest = model.config.table
    expect("prompt", f"{len(ids)} tokens", len(ids) < longest, f"fewer than {longest} tokens")
    count = min(num_tokens, longest - len(ids))
    generated = [token for piece in continued(model, ids, count, how, key) for token in piece]
    stopped = "num_tokens" if count == num_tokens else "length"
    if generated[-1] in tokenizer.end_ids:
        stopped = "end"
        del generated[-1]
    text = tokenizer.decode_after(ids, generated)
    about = {"stopped": stopped, "max_length": longest, "seed": seed}
    return {"prompt": prompt, "text": text, "tokens": len(generated), **about}


def model_to_generate(source: str) -> Pretrained:
    """The model that `source` names, with a tokenizer.

    Raises: ConfigError: there is no such model, or it has no tokenizer.
    """
    there = Path(source).exists() or source.startswith(HUB)
    kinds = "the directory of a run or of a Hugging Face model, or hf:NAME"
    model = find_model(source) if there else None
    expect("model", source, model is not None, kinds)
    assert model is not None
    expect("model", source, model.tokenizer is not None, f"a model with a {TOKENIZER}")
    return model


def continued(
    model: Pretrained,
    ids: list[int],
    count: int,
    how: Sampling,
    key: jax.Array,
    ends: frozenset[int] | None = None,
    *,
    at_once: int = 16,
) -> Iterator[list[int]]:
    """Yield the next tokens of a text, at most `at_once` at a time, `count` in all.

    Args: ends: tokens that end the text; the last token is one of them, or the last of `count`.
    """
    assert model.tokenizer is not None
    ends = Tokenizer.load(model.tokenizer).end_ids if ends is None else ends
    length = next(n for n in lengths_up_to(model.config.table) if n >= len(ids) + count)
    decoder = Decoder(model.config, model.params, how, ends)
    prompts = [Prompt(ids, count)]
    for _, tokens, _ in decoder.pieces(prompts, key, slots=1, length=length, at_once=at_once):
        yield tokens


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
    texts = _sampled(model, samples, num_tokens, key)
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


def _sampled(model: Pretrained, samples: int, num_tokens: int, key: jax.Array) -> list[str]:
    """Texts of a model, each from the begin token to an end token, or to `num_tokens`."""
    assert model.tokenizer is not None, "runs keep their tokenizer"
    tokenizer = Tokenizer.load(model.tokenizer)
    most = min(num_tokens, model.config.table - 1)
    prompts = [Prompt([tokenizer.begin_id], most, number) for number in range(samples)]
    decoder = Decoder(model.config, model.params, Sampling(), tokenizer.end_ids)
    texts: dict[int, str] = {}
    for number, ids in decoder.texts(prompts, key, slots=TEXTS_AT_ONCE, length=most + 1):
        texts[number] = tokenizer.decode(id for id in ids if id not in tokenizer.end_ids)
    return [texts[number] for number in range(samples)]
