"""Do training users' texts, or planted ones, come back in a synthetic set?

For each user, it is counted which of the runs of so many tokens in the user's texts are in the
synthetic set, if no other user has the same run: a run of several users, such as a greeting, tells
of none of them. Held-out users are the control, as in arXiv 2606.16952. Which users were held out
was decided by a hash of their ids, so that training users and held-out users are exchangeable if
the model learnt nothing about single training users. A permutation test compares the means of the
two groups, at a stated level; the numbers of users may differ. If the first texts of
each training user were held back, those of held-out users are left out, too; later texts that were
held back as a test are not, and only make the search less likely to alarm.

Canaries are tested in the same way: the planted ones against those that a coin left out.

The results are computed from training users' texts without noise. They are private, the verdict
included: nothing here belongs on a page that is handed on. And to sample sets until one passes is a
choice by private data that no epsilon covers.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from fedsim.data import Dataset, Holdout, UserStore
from fedsim.errors import expect

LENGTHS = (10, 20)
LEVEL = 0.01
CONFIDENCE = 0.95
PERMUTATIONS = 4_999
DRAWS = 20
"""Samples of training users, as many as there are held-out users, for the share of texts."""
BLOCK_TOKENS = 2**20
FACTOR = np.uint64(0x9E3779B97F4A7C15)
NON_PRIVATE = "computed from texts of training users without noise: do not publish"


@dataclasses.dataclass(frozen=True)
class Group:
    """Some users of a store, each with consecutive rows, low[i] to high[i]."""

    store: UserStore
    low: np.ndarray
    high: np.ndarray

    @property
    def num_users(self) -> int:
        """Number of users."""
        return len(self.low)

    @classmethod
    def of(cls, store: UserStore, most: int, rng: np.random.Generator, skipped: Any = 0) -> "Group":
        """At most `most` users with texts, drawn at random.

        Args:
          skipped: number of each user's first rows that are left out, int or int64 [users].
        """
        low, high = store.offsets[:-1] + skipped, store.offsets[1:]
        there = np.flatnonzero(high > low)
        if len(there) > most:
            there = np.sort(rng.choice(there, most, replace=False))
        return cls(store, low[there], high[there])

    def runs(self, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (user of each run, hash of each run) of the texts, a block of rows at a time."""
        owners = np.repeat(np.arange(self.num_users), self.high - self.low)
        rows = np.concatenate([np.zeros(0, np.int64), *map(np.arange, self.low, self.high)])
        block = max(1, BLOCK_TOKENS // self.store.max_length)
        for start in range(0, len(rows), block):
            tokens, sizes = self.store.gather(rows[start : start + block], self.store.max_length)
            hashes, row = runs_of(tokens, sizes, length)
            yield owners[start + row], hashes


def runs_of(tokens: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of `length` tokens, uint64, and the row of each.

    Args:
      tokens: int [rows, width].
      sizes: int [rows], number of real tokens.
    """
    starts = tokens.shape[1] - length + 1
    if starts < 1:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    hashes = np.zeros((len(tokens), starts), np.uint64)
    for i in range(length):
        hashes = hashes * FACTOR + (tokens[:, i : starts + i].astype(np.uint64) + np.uint64(1))
        hashes ^= hashes >> np.uint64(32)
    whole = np.arange(starts) <= sizes[:, None] - length
    return hashes[whole], np.nonzero(whole)[0]


def search(
    synthetic: UserStore,
    data: Dataset,
    *,
    lengths: Sequence[int] = LENGTHS,
    level: float = LEVEL,
    most_users: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Test whether training users' texts are in a synthetic set more than held-out users' texts.

    Args:
      synthetic: the synthetic texts, from `store_of`.
      data: the run's data, with held-out users.
      lengths: numbers of tokens of the runs that are compared.
      level: probability of an alarm if nothing leaks, all lengths together.
      most_users: most users of each group, drawn at random.
      seed: of the draws of users and of the permutations.

    Returns:
      `alarm`, the comparisons of each length, and what is non-private about them.

    Raises:
      ConfigError: there are no held-out users, texts have several owners, or a number is out of
        range.
    """
    expect("lengths", lengths, bool(lengths) and min(lengths) >= 2, "numbers >= 2")
    expect("level", level, 0 < level < 1, "in (0, 1)")
    held_out = data.eval_users
    expect("data", data.path, held_out is not None, "data with held-out users, as a control")
    assert held_out is not None
    expect("data", data.path, data.train.owners is None, "texts with one owner each")
    rng = np.random.default_rng(seed)
    skipped: Any = 0
    if data.eval_examples is not None:  # the first texts of training users were not trained on
        skipped = Holdout(0.0, True).num_eval_examples(np.diff(held_out.offsets))
    groups = Group.of(data.train, most_users, rng), Group.of(held_out, most_users, rng, skipped)
    share = level / len(lengths)
    found = [compare(synthetic, *groups, length, share, rng) for length in lengths]
    return {
        "alarm": any(each["alarm"] for each in found),
        "level": level,
        "texts": synthetic.num_examples,
        "users": found,
        "non_private": [NON_PRIVATE],
    }


def compare(
    synthetic: UserStore,
    inside: Group,
    outside: Group,
    length: int,
    level: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Compare what a synthetic set shares with users who were trained on, and who were not.

    Args:
      inside: users who were trained on.
      outside: users who were not.
      length: tokens of a run.
      level: of the one-sided test.

    Returns:
      By group: `users` with a run of that length, `users_found`, those of whom a run of their own
      is in the set, `runs_found`, the mean over users of the share of their runs, and
      `texts_found`, the share of synthetic texts that have a run of some of `users_compared` users;
      then the p-value of the test of `runs_found`, an exact interval of the difference of the
      shares of users that were found, and `noticed`, see there.
    """
    texts = np.arange(synthetic.num_examples)  # each taken as the one text of a user
    runs = list(Group(synthetic, texts, texts + 1).runs(length))
    number, hashes = map(np.concatenate, zip(*runs, strict=True))
    keys, places = np.unique(hashes, return_inverse=True)
    pairs, totals = zip(*(_in_set(group, length, keys) for group in (inside, outside)), strict=True)
    shift = len(totals[0])
    user = np.concatenate([pairs[0][0], pairs[1][0] + shift])
    key = np.concatenate([pairs[0][1], pairs[1][1]])
    count = np.concatenate([pairs[0][2], pairs[1][2]])
    own = np.bincount(key, minlength=len(keys))[key] == 1  # no other user has that run
    user, key, count = user[own], key[own], count[own]
    total = np.concatenate(totals)
    shares = np.bincount(user, count, len(total)) / np.maximum(total, 1)
    scores = shares[:shift][totals[0] > 0], shares[shift:][totals[1] > 0]
    hits = [int(np.count_nonzero(each)) for each in scores]
    sizes = [len(each) for each in scores]
    compared = min(sizes)
    runs_of_user = _Runs(user, key, places, number, len(keys), synthetic.num_examples)
    members = np.flatnonzero(totals[0] > 0), shift + np.flatnonzero(totals[1] > 0)
    texts_found = [runs_of_user.texts_found(each, compared, rng) for each in members]
    p_value = permutation_test(*scores, rng) if compared else 1.0
    low, high = difference_of_shares(hits, sizes)
    return {
        "length": length,
        "users": sizes,
        "users_found": hits,
        "runs_found": [float(each.mean()) if len(each) else 0.0 for each in scores],
        "users_compared": compared,
        "texts_found": texts_found,
        "low": low,
        "high": high,
        "noticed": noticed(sizes, level),
        "p_value": p_value,
        "alarm": p_value <= level,
    }


def permutation_test(
    inside: np.ndarray, outside: np.ndarray, rng: np.random.Generator, count: int = PERMUTATIONS
) -> float:
    """p-value of the hypothesis that the mean of `inside` is no larger than that of `outside`.

    Guarantees: if the users of the two groups are exchangeable, it is at most p with a probability
      of at most p, for every p and all sizes of the groups.
    """
    both = np.concatenate([inside, outside])
    there = both[both != 0]
    if not len(there):
        return 1.0
    observed = outside.sum() * (1 + 1e-12)  # sums of other orders may differ by rounding
    # Only users with a score matter: how many of them fall among `outside`, and which.
    chosen = rng.hypergeometric(len(there), len(both) - len(there), len(outside), size=count)
    sums = np.array([rng.permutation(there)[:n].sum() for n in chosen])
    return float((1 + np.count_nonzero(sums <= observed)) / (1 + count))


def difference_of_shares(hits: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """Interval of the difference of two shares, from two exact intervals (Clopper and Pearson).

    Guarantees: covers the difference with a probability of at least CONFIDENCE.
    """
    if not min(sizes):
        return -1.0, 1.0
    each = (1 + CONFIDENCE) / 2  # both cover with CONFIDENCE
    one, other = (
        stats.binomtest(hit, size).proportion_ci(each)
        for hit, size in zip(hits, sizes, strict=True)
    )
    return float(one.low - other.high), float(one.high - other.low)


def noticed(sizes: Sequence[int], level: float) -> float | None:
    """The smallest share of users who were trained on that the test notices, if as much is found
    of each of them and nothing of the others; None if the others are too few for any share."""
    inside, outside = sizes
    shares = np.arange(1, inside + 1)
    p_values = stats.hypergeom.cdf(0, inside + outside, shares, outside)
    enough = np.flatnonzero(np.maximum(p_values, 1 / (1 + PERMUTATIONS)) <= level)
    return float(shares[enough[0]] / inside) if len(enough) else None


def _in_set(
    group: Group, length: int, keys: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """((user, index in keys, how often) of the runs of users that are among keys; runs of each
    user)."""
    total, found = np.zeros(group.num_users, np.int64), [np.zeros(0, np.int64)]
    for user, hashes in group.runs(length):
        total += np.bincount(user, minlength=group.num_users)
        if not len(keys):
            continue
        place = np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)
        there = keys[place] == hashes
        found.append(user[there] * len(keys) + place[there])
    pairs, counts = np.unique(np.concatenate(found), return_counts=True)
    user, place = np.divmod(pairs, max(1, len(keys)))
    return (user, place, counts), total


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of users in a set: user and key of each, and where keys are in the set."""

    user: np.ndarray
    key: np.ndarray
    places: np.ndarray
    number: np.ndarray
    num_keys: int
    num_texts: int

    def texts_found(self, members: np.ndarray, count: int, rng: np.random.Generator) -> float:
        """Share of texts with a run of some of `count` users; the mean over draws of users."""
        if not count:
            return 0.0
        draws = 1 if count == len(members) else DRAWS
        shares = []
        for _ in range(draws):
            drawn = rng.choice(members, count, replace=False)
            marked = np.zeros(self.num_keys, bool)
            marked[self.key[np.isin(self.user, drawn)]] = True
            shares.append(len(np.unique(self.number[marked[self.places]])) / self.num_texts)
        return float(np.mean(shares))
