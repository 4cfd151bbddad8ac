"""A tiny tokenizer with the special tokens of chats, templates, and a model that says one thing."""

import json

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from zoo import save_model

from fedsim.data.tokenizer import Tokenizer
from fedsim.models.transformer import Transformer, TransformerConfig

START, STOP = "<|im_start|>", "<|im_end|>"
NAMED = {"bos_token": [START], "eos_token": [STOP]}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}"
)

PROMPTING = CHATML + (
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"  # of a reply
)


def tiny(merges=(("Ċ", "Ġ"),), special=(START, STOP)):
    """A byte-level BPE with a few merges, among them one of a line break with a blank."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    return Tokenizer(inner, "tiny", named=NAMED)


def model_files(directory, template=CHATML):
    """The files of a model's tokenizer, with a chat template unless it is None."""
    directory.mkdir()
    tiny().save(directory / "tokenizer.json")
    settings = {"bos_token": START, "eos_token": STOP}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def saying(directory, text, files=None):
    """A model in `directory` that answers everything with a text of different letters, and ends."""
    files = files or model_files(directory.with_name("files"), PROMPTING)
    tokenizer = Tokenizer.load(files / "tokenizer.json")
    added = json.loads(tokenizer.json)["added_tokens"]
    stop = next(each["id"] for each in added if each["content"] == STOP)
    letters = [tokenizer.encode_batch([letter])[0][-1] for letter in text]
    chain = [*tokenizer.encode_batch(["\n"])[0], *letters, stop]
    config = TransformerConfig(
        *(tokenizer.vocab_size, 128, 32, 1, 2),
        norm="rms",
        positions="rope",
        mlp="swiglu",
        mlp_bias=False,
        tied=False,
        family="llama",
    )
    rng, tokens = np.random.default_rng(0), np.zeros((1, 2), np.int32)
    shapes = jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    embedding = rng.normal(size=(config.vocab_size, config.width)).astype(np.float32)
    params["embed"]["embedding"] = embedding
    params["final_norm"]["scale"] += 1
    for token, following in zip(chain[:-1], chain[1:], strict=True):
        params["head"]["kernel"][:, following] = embedding[token]
    save_model(directory, config, params, files / "tokenizer.json", files)
    return directory
