"""Which users and examples are held out, and which rows each split therefore has."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.data.owners import SEPARATOR
from fedsim.errors import DataError

EVAL_SHARE, EVAL_CAP = 10, 32
TRAIN, EVAL_USERS, TEST = range(3)  # groups of owners: a user of rows before and after test_from


@dataclass(frozen=True)
class Holdout:
    """What is kept from training, for evaluation."""

    eval_users: float
    """Fraction of the users, drawn by a fixed hash of the id: the same users in every build."""
    eval_examples: bool
    """Also the first min(32, ceil(n / 10)) of a training user's n >= 2 examples (CC-News)."""
    min_examples: int = 1
    """Users with fewer are left out of training and evaluation."""
    test_from: str | None = None
    """Rows whose order column is at least this are tests (Stack Overflow), unless held out."""

    def takes_user(self, user_id: str) -> bool:
        """Whether all of this user's examples are held out; of an owner set: of any of its users,
        so that nothing that a held-out user owns is trained on."""
        if SEPARATOR in user_id:
            return any(map(self.takes_user, user_id.split(SEPARATOR)))
        digest = hashlib.sha256(b"fedsim eval user\0" + user_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.eval_users * 2**64

    def num_eval_examples(self, num_examples: np.ndarray) -> np.ndarray:
        """int64 [users]: how many of each training user's first examples are held out."""
        tenth = np.minimum(EVAL_CAP, -(-num_examples // EVAL_SHARE))
        return np.where((num_examples >= 2) & self.eval_examples, tenth, 0)


@dataclass(frozen=True)
class SplitRows:
    """The rows of one split: of owner owners[i] those from low[i] to high[i] in its order."""

    owners: np.ndarray
    """int64 [users], ascending."""
    low: np.ndarray
    high: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """int64 [users]: rows of each."""
        return self.high - self.low


def divide(group: np.ndarray, counts: np.ndarray, holdout: Holdout) -> Mapping[str, SplitRows]:
    """The splits that have rows, of owners in `group` with `counts` rows each.

    Raises: DataError: nothing is left for training.
    """
    large = (counts >= holdout.min_examples) | (group == TEST)
    held = np.where(group == TRAIN, holdout.num_eval_examples(counts), 0)
    none = np.zeros_like(counts)
    spans = {
        "train": (group == TRAIN, held, counts),
        "eval_users": (group == EVAL_USERS, none, counts),
        "eval_examples": (group == TRAIN, none, held),
        "test": (group == TEST, none, counts),
    }
    found = {}
    for name, (chosen, low, high) in spans.items():
        owners = np.flatnonzero(chosen & large & (high > low))
        if len(owners):
            found[name] = SplitRows(owners, low[owners], high[owners])
    if "train" not in found:
        raise DataError(_nothing_left(group, holdout))
    return found


def _nothing_left(group: np.ndarray, holdout: Holdout) -> str:
    if (group == EVAL_USERS).all():
        return (
            f"eval_users={holdout.eval_users}: holds out all {len(group)} users, expected to leave "
            "at least one for training"
        )
    if holdout.test_from is not None and not (group == TRAIN).any():
        return f"test_from={holdout.test_from}: expected a value that leaves rows for training"
    return f"min_examples={holdout.min_examples}: expected at most as many as the largest user has"


def dropped(group: np.ndarray, counts: np.ndarray, holdout: Holdout) -> dict[str, Any]:
    """How many users and examples min_examples leaves out."""
    small = (counts < holdout.min_examples) & (group != TEST)
    return {"users_dropped": int(small.sum()), "examples_dropped": int(counts[small].sum())}
