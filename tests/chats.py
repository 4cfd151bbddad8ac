"""A tiny tokenizer with the special tokens of chats, and templates."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fedsim.data.tokenizer import Tokenizer

START, STOP = "<|im_start|>", "<|im_end|>"
NAMED = {"bos_token": [START], "eos_token": [STOP]}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
    "+ '\n' }}{% endfor %}"
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
