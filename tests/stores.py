"""Stores of token ids, in a directory that lasts as long as the process."""

import itertools
import tempfile
from pathlib import Path

import numpy as np

from fedsim.data import UserStore
from fedsim.data.store import MARKED, SEPARATOR, TokenWriter, close_store, token_dtype

PLACE, NUMBERS = tempfile.TemporaryDirectory(), itertools.count()


def store_of(examples, max_length, vocab_size, trained=None):
    """A store of lists of ids by user id, or by a tuple of those who own them. Args: trained: which
    tokens are, in the form of `examples`; None: all."""
    users = {owner_set(user): user for user in examples}
    assert len(users) == len(examples), "ids that differ as strings"
    directory = Path(PLACE.name, str(next(NUMBERS)))
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


def owner_set(owner):
    return SEPARATOR.join(sorted(set(map(str, owner if isinstance(owner, tuple) else (owner,)))))
