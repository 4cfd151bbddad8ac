"""What of shared texts may be used: every bound against a count by loops, on many random graphs."""

import itertools

import numpy as np
import pytest

from fedsim.data.store import Owners
from fedsim.keys import SecretKey
from fedsim.sampling import contributions
from fedsim.sampling.contributions import bounded_pool, greedy_pool, largest_pool, owners_groups

GRAPHS = 1000


def random_graph(rng, most_users=12, most_sets=14, most_texts=4):
    """Owners of random owner sets, each once, and offsets of random numbers of texts."""
    num_users = int(rng.integers(1, most_users + 1))
    sets = set()
    for _ in range(rng.integers(1, most_sets + 1)):
        size = int(min(rng.geometric(0.45), num_users))
        sets.add(tuple(sorted(rng.choice(num_users, size, replace=False).tolist())))
    sets = sorted(sets)
    starts = np.cumsum([0, *map(len, sets)])
    users = np.array(list(itertools.chain(*sets)), np.int32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, most_texts + 1, len(sets)))])
    return sets, offsets, Owners(num_users, starts, users)


def graphs(count, seed, **sizes):
    rng = np.random.default_rng(seed)
    for number in range(count):
        yield number, *random_graph(rng, **sizes), int(rng.integers(1, 5))


def owners_of(text, sets, offsets):
    return sets[int(np.searchsorted(offsets, text, side="right")) - 1]


@pytest.mark.privacy
@pytest.mark.parametrize("exact", [True, False])
def test_nobody_has_more_than_g_texts_in_the_pool_of_any_graph(exact, monkeypatch):
    monkeypatch.setattr(contributions, "EXACT_SETS", 1000 if exact else 0)
    for number, sets, offsets, owners, most in graphs(GRAPHS // 10 if exact else GRAPHS, 1):
        pool = bounded_pool(offsets, owners, most, SecretKey.create(seed=number))
        counts = dict.fromkeys(range(owners.num_users), 0)
        for text in pool.tolist():
            for user in owners_of(text, sets, offsets):
                counts[user] += 1
        assert max(counts.values()) <= most
        assert len(set(pool.tolist())) == len(pool) and (np.diff(pool) > 0).all()


@pytest.mark.privacy
def test_nobody_is_in_more_than_k_groups_of_others_in_any_graph():
    for number, sets, offsets, owners, most in graphs(GRAPHS, 2):
        groups = owners_groups(offsets, owners, most - 1, SecretKey.create(seed=number))
        users = groups.users
        others = {user: set() for user in range(owners.num_users)}
        assert len(users) == groups.num_users == len(set(users.tolist()))
        for home, low, high in zip(users, groups.offsets[:-1], groups.offsets[1:], strict=True):
            assert high > low
            for text in groups.examples(np.arange(low, high)).tolist():
                members = owners_of(text, sets, offsets)
                assert home in members
                for user in set(members) - {int(home)}:
                    others[user].add(int(home))
        assert max(map(len, others.values())) <= groups.max_changed == most - 1
        assert len(set(groups.rows.tolist())) == len(groups.rows) == groups.offsets[-1]


def test_the_greedy_pool_is_that_of_the_loop():
    for number, sets, offsets, owners, most in graphs(400, 4, most_texts=8):
        order = np.random.default_rng(number).permutation(int(offsets[-1]))
        room, kept = dict.fromkeys(range(owners.num_users), most), []
        for text in order.tolist():
            members = owners_of(text, sets, offsets)
            if all(room[user] for user in members):
                kept.append(text)
                for user in members:
                    room[user] -= 1
        assert greedy_pool(order, offsets, owners, most).tolist() == sorted(kept)


def test_the_largest_pool_is_that_of_trying_all():
    for _, sets, offsets, owners, most in graphs(150, 5, most_users=5, most_sets=5, most_texts=2):
        counts = np.diff(offsets)
        best = 0
        for chosen in itertools.product(*(range(count + 1) for count in counts.tolist())):
            used = [0] * owners.num_users
            for number, members in zip(chosen, sets, strict=True):
                for user in members:
                    used[user] += number
            if max(used) <= most:
                best = max(best, sum(chosen))
        found = largest_pool(counts, owners, most)
        assert found.sum() == best and (found <= counts).all()


@pytest.mark.privacy
def test_pool_and_groups_follow_from_the_graph_and_the_key(key):
    others = []
    for _, sets, offsets, owners, most in graphs(20, 8, most_texts=30):
        again, other = SecretKey.create(seed=7), SecretKey.create(seed=8)
        one, two, three = (bounded_pool(offsets, owners, most, k) for k in (key, again, other))
        np.testing.assert_array_equal(one, two)
        others.append(one.tolist() != three.tolist())
        groups = [owners_groups(offsets, owners, most, k).rows for k in (key, again)]
        np.testing.assert_array_equal(*groups)
        own = owners_groups(offsets, owners, 0, key)  # those whose every text is their own
        alone = [text for text in range(offsets[-1]) if len(owners_of(text, sets, offsets)) == 1]
        assert sorted(own.rows.tolist()) == alone
        whole = owners_groups(offsets, owners, 99, key)  # with room for all, all are in
        assert sorted(whole.rows.tolist()) == list(range(offsets[-1]))
    assert any(others)
