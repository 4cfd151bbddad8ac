"""Canaries that share their texts: what an audit plants where texts have several owners.

A canary owns texts alone and others together with partners, made-up users who are always there.
In ULS every partner also wrote a text that pulls the other way, so that a partner's group with a
text of the canary's in it is turned round by whether that text says anything. Who owns what is the
same whatever the coins say: a canary that was left out has its texts, without content.
"""

import dataclasses
from typing import Any

import numpy as np

from fedsim.config import Algorithm
from fedsim.data import Dataset, UserStore, of_ids
from fedsim.trust.canaries import POOLS, CanaryTask, Planted, PlantedStore, canary_tokens

OPPOSED = -0.5
"""How far a partner's own text pulls the canary's way: less than one text of the canary's."""


def partners_of(algorithm: Algorithm, max_changed: int) -> int:
    """How many partners a canary has: more than the bound lets in, so that the bound shows."""
    return POOLS - 1 if algorithm == Algorithm.ELS else POOLS * max(1, max_changed)


@dataclasses.dataclass
class PlantedAmongOthers(Planted):
    """The canaries of one audit, each with partners of its own."""

    partners: int
    opposed: bool
    """Whether partners wrote a text that pulls the other way."""

    def data(self, data: Dataset) -> Dataset:
        """The data with all canaries and partners at the end."""
        store = data.train
        each = 1 + self.partners  # a canary's, then its partners'
        drawn = canary_tokens(data, len(self.included) * each, self.rng)
        tokens = [drawn[low : low + each] for low in range(0, len(drawn), each)]
        self.texts = UserStore.from_examples(
            {f"{i:08d}": [row[0]] for i, row in enumerate(tokens[self.num_gradient :])},
            store.max_length,
            store.vocab_size,
        )
        sets: list[tuple[Any, list[list[int]], int, float]] = []  # owners, texts, canary, pull
        for i, there in enumerate(self.included):
            pulled = i if i < self.num_gradient else -1
            own = [tokens[i][0] if there else []] * self.rows
            partners = [f"{i:08d}-{j}" for j in range(self.partners)]
            for owners in [f"{i:08d}", *((f"{i:08d}", each) for each in partners)]:
                sets.append((owners, own, pulled if there else -1, 1.0))
            if self.opposed:
                for name, text in zip(partners, tokens[i][1:], strict=True):
                    sets.append((name, [text], pulled, OPPOSED))
        sets.sort(key=lambda each: of_ids(each[0]))  # as a store has them
        planted = UserStore.from_examples(
            {owners: texts for owners, texts, _, _ in sets}, store.max_length, store.vocab_size
        )
        counts = [len(texts) for _, texts, _, _ in sets]
        of_real = np.full(store.num_examples, -1, np.int32)
        own = np.repeat(np.array([each[2] for each in sets], np.int32), counts)
        pulls = np.repeat(np.array([each[3] for each in sets], np.float32), counts)
        self.owners = np.concatenate([of_real, own])
        self.pulls = np.concatenate([np.zeros(len(of_real), np.float32), pulls])
        canaries = {"gradient": self.num_gradient, "text": self.num_text}
        return dataclasses.replace(data, train=PlantedStore(store, planted, canaries))

    def task(self, task: Any, params: Any) -> Any:
        """The run's task with the losses of canaries and partners."""
        planted = super().task(task, params)
        if planted is task:
            return task
        return CanaryTask(task, self.owners, self.directions, self.clip_norm, self.pulls)


def rows_of_users(data: Dataset, split: str, most_users: int, most_rows: int) -> list[np.ndarray]:
    """Some texts of each of some users of a split, evenly spaced among its users.

    A text is held out if any of its owners is, so that users who are trained on own texts of
    held-out splits: of other splits than train only users are taken who are in no training text.
    """
    store: UserStore = getattr(data, split)
    owners = store.owners
    assert owners is not None, "of texts with several owners"
    of_user: list[list[np.ndarray]] = [[] for _ in range(owners.num_users)]
    offsets: list[int] = store.offsets.tolist()
    for number, user in zip(owners.sets.tolist(), owners.users.tolist(), strict=True):
        of_user[user].append(np.arange(offsets[number], offsets[number + 1]))
    trained = set() if split == "train" else set(data.train.user_ids())
    users = [u for u, name in enumerate(store.user_ids()) if name not in trained]
    chosen = np.linspace(0, len(users) - 1, min(most_users, len(users))).astype(np.int64)
    found = (np.concatenate([np.zeros(0, np.int64), *of_user[users[i]]]) for i in chosen)
    return [rows[:most_rows] for rows in found]
