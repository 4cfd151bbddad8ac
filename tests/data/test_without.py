"""Data without some users: what is gone, what stays byte for byte, and what is refused."""

import itertools
import json
import os

import numpy as np
import pytest
from refused import refuses

from fedsim import files
from fedsim.accounting import StepEvent
from fedsim.budget import Entry, open_locked
from fedsim.cli.main import main
from fedsim.data import Dataset, build, read_ids, without
from fedsim.data.building import build as building
from fedsim.errors import DataError
from fedsim.trust import budget

GONE = {"person-003", "person-011", "person-017"}
ROWS = [
    {"user_id": f"person-{user:03}", "text": f"words {user} {i} of it"}
    for user in range(40)
    for i in range(2 + user % 7)
]
PLAIN = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def copied(data, ids, out):
    """(the copy, what is said of it)."""
    said = without(data, set(ids), out)
    return Dataset.open(out), said


def rows_of(store):
    """[(owner set, bytes of each row, with its flags)] in the order of the store."""
    spans = itertools.pairwise(store.offsets.tolist())
    pairs = zip(store.owner_sets(), spans, strict=True)
    return [(key, [row_of(store, row) for row in range(*span)]) for key, span in pairs]


def row_of(store, row):
    tokens, sizes = store.gather(np.array([row]), store.max_length)
    flags = store.trained(np.array([row]), store.max_length)
    return tokens.tobytes(), int(sizes[0]), None if flags is None else flags.tobytes()


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("built")
    return build(jsonl(path / "source.jsonl", ROWS), path / "data", num_workers=1, eval_users=0.3)


@pytest.mark.parametrize("umask", [0, 0o77])
def test_only_whoever_builds_them_can_read_data(tmp_path, monkeypatch, umask):
    def keep_private(directory):
        assert directory.parent.stat().st_mode & 0o777 == 0o700  # while parts are written, too
        files.keep_private(directory)

    monkeypatch.setattr(building, "keep_private", keep_private)
    before = os.umask(umask)
    try:
        data = build(jsonl(tmp_path / "source.jsonl", ROWS), tmp_path / "data", num_workers=1)
        copy = copied(data, GONE, tmp_path / "copy")[0]
    finally:
        os.umask(before)
    for place in (data.path, copy.path):
        inside = [place, *place.rglob("*")]
        modes = {path: path.stat().st_mode & 0o777 for path in inside}
        assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in inside}


@pytest.mark.privacy
def test_all_other_texts_stay_and_the_copy_is_what_a_build_without_them_has(data, tmp_path):
    """Nothing else of them is in it, nor a digest of the old sources."""
    before = contents(data.path)
    new, said = copied(data, GONE, tmp_path / "new")
    assert new.splits().keys() == data.splits().keys() == {"train", "eval_users", "eval_examples"}
    held_out = set(data.eval_users.user_ids()) & GONE
    assert held_out and held_out != GONE
    rest = jsonl(tmp_path / "rest.jsonl", [row for row in ROWS if row["user_id"] not in GONE])
    built = build(rest, tmp_path / "built", num_workers=1, eval_users=0.3)
    for name, store in data.splits().items():
        expected = [(key, rows) for key, rows in rows_of(store) if key not in GONE]
        assert rows_of(new.splits()[name]) == expected
        assert new.splits()[name].fingerprint == built.splits()[name].fingerprint
        new.splits()[name].check()
        assert said["splits"][name] == sum(len(rows) for _, rows in expected)
    assert new.people() == sorted(set(data.people()) - GONE)
    assert said["users"] == 3 and not said["not_found"]
    assert said["texts"] == sum(row["user_id"] in GONE for row in ROWS)
    assert new.tokenizer_path.read_bytes() == data.tokenizer_path.read_bytes()
    own, old = ({k: v for k, v in d.metadata.items() if k != "sources"} for d in (new, data))
    assert own == old and contents(data.path) == before
    content = b"".join(contents(new.path).values())
    assert new.metadata["sources"] == []
    assert not any(each.encode() in content for each in GONE)


def test_a_text_goes_if_one_of_its_owners_does(tmp_path):
    mail = [(["bob", "amy"], "hello to both"), (["amy"], "amy alone"), (["eve"], "eve")]
    mail += [(["cat", "amy", "bob"], "to three"), (["bob", "eve"], "without her")]
    source = jsonl(tmp_path / "mail.jsonl", [{"who": who, "text": text} for who, text in mail])
    old = build(source, tmp_path / "data", user_column="who", **PLAIN)
    new, said = copied(old, ["amy"], tmp_path / "new")
    kept = [(key, found) for key, found in rows_of(old.train) if "amy" not in key.split("\x1f")]
    assert rows_of(new.train) == kept and len(kept) == 2
    assert new.train.user_ids() == ["bob", "eve"] and said["texts"] == 3 and said["users"] == 1
    assert new.train.examples_per_user.tolist() == [1, 2]
    new.train.check()
    alone, _ = copied(old, ["bob"], tmp_path / "alone")  # each text has one owner now
    assert alone.train.owners is None and alone.train.user_ids() == ["amy", "eve"]


def test_tokens_that_are_trained_on_stay_so(tmp_path):
    rows = [{"user_id": f"u{i}", "prompt": f"why {i}", "completion": f"so {i}"} for i in range(5)]
    old = build(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "data", **PLAIN)
    new, _ = copied(old, ["u2"], tmp_path / "new")
    assert new.train.is_flagged
    assert rows_of(new.train) == [(key, row) for key, row in rows_of(old.train) if key != "u2"]


def test_ids_of_nobody_are_counted_and_named(data, tmp_path, capsys):
    (tmp_path / "ids").write_text("\n".join(["\ufeff", *GONE, "Person-003", "nobody \x1b[31m", ""]))
    words = ["--users", str(tmp_path / "ids"), "--out", str(tmp_path / "new"), "--json"]
    main(["data", "without", str(data.path), *words])
    said, messages = capsys.readouterr()
    said = json.loads(said)
    assert said["not_found"] == ["Person-003", "nobody \x1b[31m"] and said["users"] == 3
    expected = "2 ids are of no user of the data: Person-003, nobody \\x1b[31m"
    assert messages.splitlines()[-1].endswith(expected)


EVERYONE = "".join(f"{row['user_id']}\n" for row in ROWS).encode()
REFUSED = [(b"\n  \n", "with at least one user id"), (b"\xff\xfe", "a file of UTF-8 text")]
REFUSED += [(b"nobody\n", "the id of at least one user"), (EVERYONE, "somebody to train on")]


@pytest.mark.parametrize("content, says", REFUSED)
def test_files_of_users_that_are_refused(data, tmp_path, content, says):
    (tmp_path / "users").write_bytes(content)
    with refuses("users", says=says):
        without(data, read_ids(tmp_path / "users"), tmp_path / "new")
    assert os.listdir(tmp_path) == ["users"]


def test_data_that_were_changed_are_refused(data, tmp_path):
    copy, _ = copied(data, GONE, tmp_path / "copy")
    tokens = copy.path / "train" / "tokens.npy"
    whole = bytearray(tokens.read_bytes())
    whole[-1] ^= 1
    tokens.write_bytes(whole)
    with pytest.raises(DataError, match="changed since it was built"):
        without(copy, {"person-001"}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.privacy
def test_earlier_runs_count_for_who_stays_and_for_who_comes_back(data, tmp_path):
    planned, delta, place = [(StepEvent(1.0, 0.05), 30)], 1e-6, tmp_path / "ledger"
    with open_locked(place) as ledger:
        users = ledger.save_users(ledger.users(data.train.user_ids()))
        ledger.begin(Entry(0, "a run", "train", "", users, "", planned, (0.0, 0.0)))
        ledger.end("a run", planned, "released")
    new, _ = copied(data, GONE, tmp_path / "new")
    left = sorted(set(data.train.user_ids()) & GONE)
    people = data.people(), new.people(), left
    before, after, gone = (budget(place, ids, delta=delta) for ids in people)
    assert before["epsilon"] == after["epsilon"] == gone["epsilon"] > 0
    sizes = [run["users"] for found in (before, after, gone) for run in found["runs"]]
    assert sizes[0] == sizes[1] + sizes[2] == data.train.num_users and sizes[2] == len(left) > 0
