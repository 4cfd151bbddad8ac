"""Tokenizer files that are learnt from texts."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments.data import wordpiece


def learnt(kind, texts, size, file):
    """Write a WordPiece or a byte-level BPE of at most `size` pieces. Returns: its file."""
    if kind == "wordpiece":
        return wordpiece.learn(lambda: texts, size, file)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = {"initial_alphabet": alphabet, "special_tokens": ["<|endoftext|>"]}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **own)
    inner.train_from_iterator(texts, trainer)
    inner.save(str(file))
    return file
