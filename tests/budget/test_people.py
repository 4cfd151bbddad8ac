"""Data sets are known by their people, and nobody can read off who they are."""

import numpy as np
import pytest

from fedsim.budget.ledger import open_locked
from fedsim.budget.spending import MAX_PATTERNS, patterns
from fedsim.keys import SecretKey


@pytest.fixture
def ledger(tmp_path):
    with open_locked(tmp_path) as found:
        yield found


def test_the_same_people_have_the_same_fingerprints_in_any_order(ledger):
    ids = [f"user {i}" for i in range(100)]
    found = ledger.users(ids)
    assert found.dtype == np.uint64 and len(found) == 100
    assert np.array_equal(found, ledger.users(ids[::-1] * 2))
    grown = ledger.users([*ids, "another", "\udcff"])
    assert len(grown) == 102 and np.isin(found, grown).all()


@pytest.mark.privacy
def test_without_the_key_ids_cannot_be_tried(ledger):
    keys = [ledger.key, *map(SecretKey.create, (None, 1, 1))]
    found = {int(ledger.users(["ann"])[0]) for ledger.key in keys}
    assert len(found) == 4  # no seed gives the fingerprints away


def test_those_who_pay_most_are_in_sets_that_no_others_exceed():
    users = np.arange(10, dtype=np.uint64)
    sets = {"a": users[:6], "b": users[4:8], "c": users[5:6], "d": users[9:] + 5}
    found = patterns(users, sets)
    assert sorted(map(sorted, found)) == [["a", "b", "c"]]
    del sets["c"]
    assert sorted(map(sorted, patterns(users, sets))) == [["a", "b"]]
    assert patterns(users[8:], sets) == [frozenset()]
    assert patterns(users, {}) == [frozenset()] or patterns(users, {}) == []


def test_too_many_combinations_are_taken_as_one():
    users = np.arange(MAX_PATTERNS + 1, dtype=np.uint64)
    sets = {str(i): users[i : i + 1] for i in users.tolist()}
    assert patterns(users, sets) == [frozenset(sets)]
