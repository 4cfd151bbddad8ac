"""What text canaries write: made-up words and numbers, in the tokens of the data.

A text, not a row of random token ids: whatever tokenizer a model came with, a canary is something
that a user could have written, without special tokens or pieces that no text has. Nobody else
writes it, and it is framed as every other text is.
"""

import numpy as np

from fedsim.data.dataset import Dataset
from fedsim.data.text import Tokenizer

CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxz", "aeiou"
MOST_TOKENS = 32
WORDS = 24  # more than fit


def canary_text(rng: np.random.Generator) -> str:
    """Made-up words, and numbers among them."""
    words = []
    for _ in range(WORDS):
        letters = (rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 2 + (CONSONANTS,))
        words.append("".join(letters) if rng.random() < 0.7 else str(rng.integers(10, 100_000)))
    return " ".join(words)


def canary_tokens(data: Dataset, count: int, rng: np.random.Generator) -> list[list[int]]:
    """The tokens of so many canaries' texts, each of the same number, for data with a tokenizer;
    random ones for data without."""
    store = data.train
    length = min(store.max_length, MOST_TOKENS)
    if data.tokenizer_path is None:
        return rng.integers(0, store.vocab_size, (count, length)).tolist()
    tokenizer = Tokenizer.load(data.tokenizer_path)
    texts = tokenizer.encode_batch([canary_text(rng) for _ in range(count)])
    return [[tokenizer.begin_id, *ids][:length] for ids in texts]
