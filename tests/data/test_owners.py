"""Texts with several owners: how they are read, stored and counted."""

import json

import numpy as np

from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset, stats

MAIL = [
    (["bob", "amy"], "hello"),
    (["eve"], "alone"),
    (["amy", "bob"], "again"),
    (["cat", "amy", "bob"], "all"),
    ("eve", "more"),
    (["dan", "eve"], "two"),
]
GRAPH = {"amy": 3, "bob": 3, "cat": 1, "dan": 1, "eve": 3}


def jsonl(tmp_path, rows, name="mail.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps({"who": who, "text": text}) for who, text in rows))
    return path


def build_all(source, out, **options):
    options = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1, **options}
    return build(source, out, **options)


def texts(store):
    """{owners: texts} of a store of bytes."""
    found, ids, graph = {}, store.user_ids(), store.owners
    for i, (low, high) in enumerate(zip(store.offsets[:-1], store.offsets[1:], strict=True)):
        tokens, sizes = store.gather(np.arange(low, high), 32)
        names = tuple(ids[u] for u in graph.users[graph.starts[i] : graph.starts[i + 1]])
        rows = zip(tokens, sizes, strict=True)
        found[names] = [bytes((row[1:size] - 1).astype(np.uint8)) for row, size in rows]
    return found


def test_texts_keep_their_owners(tmp_path):
    data = build_all(jsonl(tmp_path, MAIL), tmp_path / "out", user_column="who")
    store = Dataset.open(data.path).train
    assert store.user_ids() == sorted(GRAPH) and store.num_users == 5
    assert dict(zip(store.user_ids(), store.examples_per_user.tolist(), strict=True)) == GRAPH
    assert {*texts(store)} == {("amy", "bob"), ("eve",), ("amy", "bob", "cat"), ("dan", "eve")}
    assert len(texts(store)["amy", "bob"]) == len(texts(store)["eve",]) == 2
    found = stats(store)  # a text counts for each owner
    assert found["num_users"] == 5 and found["num_examples"] == 6
    sizes = {"min": 1, "median": 3, "p95": 3, "p99": 3, "max": 3}
    assert found["examples_per_user"] == sizes
    store.check()


def test_the_bits_of_data_with_one_owner_are_those_they_always_were(tmp_path):
    # Recorded before texts could have several owners; a new format of stores changes it.
    rows = [(f"user {i % 7}", f"text {i}") for i in range(50)]
    data = build(jsonl(tmp_path, rows), tmp_path / "out", user_column="who")
    assert data.train.fingerprint == RECORDED
    assert not {"num_owner_sets", "owners"} & {*data.train.metadata, *data.metadata["columns"]}


RECORDED = "c2b5ee4bc646c2e0c55e2d78c49450bbc420fd62154111799b0f40507c165673"


def test_nothing_that_a_held_out_user_owns_is_trained_on(tmp_path, rng):
    drawn = (rng.choice(40, rng.integers(1, 4), replace=False) for _ in range(400))
    rows = [([f"u{i}" for i in who], f"text {n}") for n, who in enumerate(drawn)]
    data = build_all(jsonl(tmp_path, rows), tmp_path / "out", user_column="who", eval_users=0.2)
    train, held = set(data.train.user_ids()), data.eval_users
    outside = set(held.user_ids()) - train
    assert data.train.num_examples + held.num_examples == 400
    assert outside and not train & outside
    assert all(outside & set(who) for who in texts(held))
