"""Stores of given token ids, in a directory that lasts as long as the process."""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import UserStore
from fedsim.data.store import MARKED, SEPARATOR, TokenWriter, close_store, token_dtype

_PLACE, _NUMBERS = tempfile.TemporaryDirectory(), itertools.count()


def store_of(
    examples: Mapping[Any, Sequence[Sequence[int]]],
    max_length: int,
    vocab_size: int,
    trained: Mapping[Any, Sequence[Sequence[bool]]] | None = None,
) -> UserStore:
    """Write a store, and open it. Users are sorted by id, and may have no sequences.

    Args:
      examples: sequences of token ids of each user, by user id. The sequences of a tuple of ids
        belong to all of these users.
      max_length: maximum number of tokens of a sequence.
      vocab_size: upper bound of token ids, exclusive.
      trained: which tokens are trained on, in the form of `examples`; None: all.
    """
    users = {_key(user): user for user in examples}
    assert len(users) == len(examples), "ids that differ as strings"
    directory = Path(_PLACE.name, str(next(_NUMBERS)))
    directory.mkdir()
    with TokenWriter(directory, token_dtype(vocab_size), trained is not None) as writer:
        for user in (users[key] for key in sorted(users)):
            for i, row in enumerate(examples[user]):
                ids = np.array(row, MARKED)
                assert len(row) <= max_length and ids.max(initial=0) < vocab_size
                if trained is not None:
                    ids = 2 * ids + np.array(trained[user][i], MARKED)
                writer.write(np.array([len(row)]), ids)
    counts = np.array([len(examples[users[key]]) for key in sorted(users)], np.int64)
    about = {"max_length": max_length, "vocab_size": vocab_size}
    close_store(directory, sorted(users), counts, about, trained is not None)
    return UserStore(directory)


def _key(owner: Any) -> str:
    """The owner set of an id, or of a tuple of ids, as a string."""
    return SEPARATOR.join(sorted(set(map(str, owner if isinstance(owner, tuple) else (owner,)))))
