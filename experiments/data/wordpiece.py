"""A WordPiece tokenizer, the paper's kind, that is learnt from public text."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from fedsim.data import is_held_out
from fedsim.data.building.columns import Columns
from fedsim.data.building.sources import cut, read

PREFIX = "wordpiece:"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_CHARACTERS = 1000
MAX_TEXTS = 2**22  # evenly spaced


def texts_of(
    files: Sequence[Path], columns: Columns, eval_users: float, num_rows: int
) -> Iterator[str]:
    """Yield texts of Parquet files: MAX_TEXTS at most, of users who are not held out."""
    every, row = -(-num_rows // MAX_TEXTS), 0
    for part in chain.from_iterable(cut(file, columns) for file in files):
        for _, batch in read(part, columns):
            wanted = np.flatnonzero(np.arange(row, row + len(batch)) % every == 0)
            row += len(batch)
            rows = batch.take(wanted)
            pairs = zip(rows["user_id"].to_pylist(), rows["text"].to_pylist(), strict=True)
            yield from (t for user, t in pairs if user and t and not is_held_out(user, eval_users))


def learn(texts: Callable[[], Iterable[str]], size: int, out: Path) -> Path:
    """Write a lower-case WordPiece tokenizer of at most `size` pieces.

    The library breaks ties by the ids of pieces and numbers single characters at random, so
    characters are numbered here first.

    Args: texts: called twice: to count characters, then to learn.
    """
    counts = Counter(chain.from_iterable(texts()))
    ranked = sorted(counts, key=lambda c: (-counts[c], c))
    num_kept = min(MAX_CHARACTERS, size // 4)
    too_rare = dict.fromkeys(map(ord, ranked[num_kept:]), " ")
    trainer = BertWordPieceTokenizer(lowercase=True)
    kept = trainer.normalize("".join(ranked[:num_kept])).split()
    characters = sorted(set(chain.from_iterable(kept)))
    trainer.train_from_iterator(
        (text if text.isascii() else text.translate(too_rare) for text in texts()),
        vocab_size=size,
        limit_alphabet=2 * MAX_CHARACTERS,
        special_tokens=[*BERT_TOKENS, *characters, *(f"##{c}" for c in characters)],
        show_progress=False,
    )
    BertWordPieceTokenizer(trainer.get_vocab(), lowercase=True).save(str(out))
    return out
