"""The store: what is gathered, how it is pickled, and that disk and memory are one thing."""

import json
import pickle
import shutil

import numpy as np
import pytest
from refused import refuses
from stores import store_of

from fedsim.data import users
from fedsim.data.store import FORMAT, TokenWriter, close_store, token_dtype
from fedsim.data.users import UserStore
from fedsim.errors import DataError

EXAMPLES = {"bob": [[1, 2, 3], [4]], "amy": [[5, 6]], "eve": []}


def write(directory, examples, vocab_size=300, max_length=64, piece=7):
    """The same store as store_of makes, through a directory, in pieces of some rows."""
    directory.mkdir()
    ids = sorted(user for user in examples if examples[user])
    rows = [row for user in ids for row in examples[user]]
    with TokenWriter(directory, token_dtype(vocab_size)) as writer:
        for start in range(0, len(rows), piece):
            some = rows[start : start + piece]
            writer.write(np.array([len(row) for row in some]), np.concatenate(some))
    counts = np.array([len(examples[user]) for user in ids], int)
    close_store(directory, ids, counts, {"max_length": max_length, "vocab_size": vocab_size})
    return UserStore(directory)


def random_examples(rng, num_users, mean_rows, vocab_size=300):
    """{user id: rows of 1 to 63 ids}; at least one row each."""
    sizes = (rng.integers(1, 64, 1 + rng.poisson(mean_rows)) for _ in range(num_users))
    rows = ([rng.integers(0, vocab_size, n).tolist() for n in each] for each in sizes)
    return {f"user {u:04d}": each for u, each in enumerate(rows)}


def test_gather_pads_cuts_and_takes_rows_in_any_order():
    store = store_of(EXAMPLES, 8, 10)
    assert store.user_ids() == ["amy", "bob", "eve"] and store.offsets.tolist() == [0, 1, 3, 3]
    assert (store.num_users, store.num_examples, store.num_tokens) == (3, 3, 6)
    tokens, sizes = store.gather(np.array([1, -1, 0, 2, 1]), 2)
    assert tokens.tolist() == [[1, 2], [0, 0], [5, 6], [4, 0], [1, 2]]
    assert sizes.tolist() == [2, 0, 2, 1, 2]
    assert tokens.dtype == sizes.dtype == np.int32
    assert store.sizes(np.array([1, -1, 0, 2, 1])).tolist() == [3, 0, 2, 1, 3]
    with pytest.raises(DataError, match="no such rows"):
        store.gather(np.array([0, 3]), 4)


@pytest.mark.parametrize("vocab_size, piece", [(300, 1), (300, 7), (300, 10**6), (70_000, 7)])
def test_the_bytes_do_not_depend_on_the_pieces(vocab_size, piece, tmp_path, rng, monkeypatch):
    monkeypatch.setattr(users, "BLOCK_ROWS", 7)
    examples = random_examples(rng, 30, 4, vocab_size)
    store = write(tmp_path / "s", examples, vocab_size, piece=piece)
    assert store.fingerprint == store_of(examples, 64, vocab_size).fingerprint
    expected = [row for user in sorted(examples) for row in examples[user]]
    offsets, tokens = (np.load(tmp_path / "s" / f"{name}.npy") for name in ("offsets", "tokens"))
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, *np.cumsum([*map(len, expected)])]
    assert tokens.dtype == (np.uint16 if vocab_size <= 2**16 else np.uint32)
    np.testing.assert_array_equal(tokens, np.concatenate(expected))
    rows = rng.permutation(store.num_examples)
    tokens, sizes = store.gather(rows, 64)
    found = [t[:n].tolist() for t, n in zip(tokens, sizes, strict=True)]
    assert found == [expected[row] for row in rows]


@pytest.mark.privacy
def test_a_store_pickles_as_its_path_and_a_worker_refuses_another_one_there(tmp_path, rng):
    """The driver's rows of several users may all be one user's there."""
    store = write(tmp_path / "s", random_examples(rng, 200, 5))
    data = pickle.dumps(store)
    assert len(data) < 1_000 and pickle.loads(data).fingerprint == store.fingerprint
    shutil.rmtree(tmp_path / "s")
    write(tmp_path / "s", random_examples(rng, 200, 5))
    with refuses("data", DataError, says="the data set of the driver"):
        pickle.loads(data)


def test_the_fingerprint_tells_data_and_owners_apart():
    def print_of(examples):
        return store_of(examples, 8, 10).fingerprint

    assert print_of({"a": [[1], [2]]}) == print_of({"a": [[1], [2]]})
    others = {"a": [[1], [3]]}, {"a": [[1]], "b": [[2]]}, {"b": [[1], [2]]}
    assert print_of({"a": [[1], [2]]}) not in map(print_of, others)


def test_open_refuses_what_is_not_a_store(tmp_path):
    with pytest.raises(DataError, match="expected a directory built by fedsim"):
        UserStore(tmp_path)
    for found in ({"kind": "dataset", "format": FORMAT}, {"kind": "users", "format": FORMAT - 1}):
        (tmp_path / "metadata.json").write_text(json.dumps(found))
        with pytest.raises(DataError, match="expected kind 'users', format 2, got"):
            UserStore(tmp_path)


@pytest.mark.parametrize("name", ["users.parquet", "offsets.npy", "tokens.npy"])
def test_files_of_another_store_and_changed_ones_are_refused(name, tmp_path, rng):
    store = write(tmp_path / "a", random_examples(rng, 5, 3))
    write(tmp_path / "b", random_examples(rng, 9, 3))
    store.check()
    whole = (tmp_path / "a" / name).read_bytes()
    (tmp_path / "a" / name).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(DataError, match=f"data={tmp_path / 'a'}: changed since it was built"):
        store.check()
    shutil.copy(tmp_path / "b" / name, tmp_path / "a")
    with refuses("data", DataError, says="files of one store"):
        UserStore(tmp_path / "a")
    (tmp_path / "b" / "tokens.npy").unlink()
    with pytest.raises(DataError, match="expected users.parquet, offsets.npy, tokens.npy, got"):
        UserStore(tmp_path / "b")


DAMAGES = {
    "cut off": lambda b: b[:-2],
    "too long": lambda b: b + b"xx",
    "without a whole header": lambda b: b[:40],
    "of other things": lambda b: b"x" * len(b),
    "of other numbers": lambda b: b.replace(b"<u2", b"<i2").replace(b"<i8", b"<u8"),
    "of objects": lambda b: b.replace(b"'<u2'", b"'|O'  ").replace(b"'<i8'", b"'|O' "),
}


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_open_refuses_a_damaged_file_and_quotes_nothing_of_it(damage, name, tmp_path, rng):
    store = write(tmp_path / "s", random_examples(rng, 5, 3))
    (store.path / name).write_bytes(damage((store.path / name).read_bytes()))
    with pytest.raises(DataError, match=f"data=.*/s: {name}: cut off or damaged .[a-z ]+.$"):
        UserStore(store.path)


def test_a_store_knows_which_tokens_are_trained_on(tmp_path):
    trained = {"bob": [[False, True, True], [True]], "amy": [[False, True]], "eve": []}
    memory = store_of(EXAMPLES, 8, 10, trained)
    (tmp_path / "disk").mkdir()
    with TokenWriter(tmp_path / "disk", token_dtype(10), marked=True) as writer:
        for ids in ([10, 13], [2, 5, 7], [9]):  # of amy and bob: twice the id, + 1 if trained on
            writer.write(np.array([len(ids)]), np.array(ids, np.uint32))
    about = {"max_length": 8, "vocab_size": 10}
    close_store(tmp_path / "disk", ["amy", "bob", "eve"], np.array([1, 2, 0]), about, True)
    disk = UserStore(tmp_path / "disk")
    for store in (memory, disk, pickle.loads(pickle.dumps(disk))):
        assert store.fingerprint == memory.fingerprint and store.is_flagged
        rows = np.array([1, -1, 0])
        assert store.gather(rows, 4)[0].tolist() == [[1, 2, 3, 0], [0] * 4, [5, 6, 0, 0]]
        found = store.trained(rows, 4)
        assert found.dtype == bool
        assert found.astype(int).tolist() == [[0, 1, 1, 0], [0] * 4, [0, 1, 0, 0]]
        store.check()
    plain = store_of(EXAMPLES, 8, 10)
    assert plain.fingerprint != memory.fingerprint and "trained" not in plain.metadata
    assert plain.trained(np.array([0]), 4) is None
    (tmp_path / "disk" / "trained.npy").unlink()
    with pytest.raises(DataError, match="offsets.npy, tokens.npy, trained.npy, got "):
        UserStore(tmp_path / "disk")
