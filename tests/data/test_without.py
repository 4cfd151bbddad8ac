"""`fedsim data without`: what is gone, what stays byte for byte, and what is refused."""

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
from fedsim.data import Dataset, build, without
from fedsim.data.building import build as building
from fedsim.errors import DataError
from fedsim.trust import budget

GONE = ["person-003", "person-011", "person-017"]
ROWS = [
    {"user_id": f"person-{user:03}", "text": f"words {user} {i} of it"}
    for user in range(40)
    for i in range(2 + user % 7)
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def listed(path, ids):
    path.write_text("".join(f"{each}\n" for each in ids))
    return path


def copied(data, ids, out, capsys):
    """(the copy, the JSON object of the command, the lines of its warnings)."""
    users = listed(out.with_suffix(".txt"), ids)
    main(["data", "without", str(data.path), "--users", str(users), "--out", str(out), "--json"])
    said, messages = capsys.readouterr()
    return Dataset.open(out), json.loads(said), messages.splitlines()[1:]


def rows_of(store):
    """[(owner set, bytes of each row, with its flags)] in the order of the store."""
    spans = itertools.pairwise(store.offsets.tolist())
    return [
        (key, [row_of(store, row) for row in range(*span)])
        for key, span in zip(store.owner_sets(), spans, strict=True)
    ]


def row_of(store, row):
    tokens, sizes = store.gather(np.array([row]), store.max_length)
    flags = store.trained(np.array([row]), store.max_length)
    return tokens.tobytes(), int(sizes[0]), None if flags is None else flags.tobytes()


def files_of(directory):
    return {path for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("built")
    return build(jsonl(path / "source.jsonl", ROWS), path / "data", num_workers=1, eval_users=0.3)


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_only_whoever_builds_them_can_read_data(tmp_path, capsys, monkeypatch, umask):
    def keep_private(directory):
        assert directory.parent.stat().st_mode & 0o777 == 0o700  # while parts are written, too
        files.keep_private(directory)

    monkeypatch.setattr(building, "keep_private", keep_private)
    before = os.umask(umask)
    try:
        data = build(jsonl(tmp_path / "source.jsonl", ROWS), tmp_path / "data", num_workers=1)
        copy = copied(data, GONE, tmp_path / "copy", capsys)[0]
    finally:
        os.umask(before)
    for place in (data.path, copy.path):
        inside = [place, *place.rglob("*")]
        modes = {path: path.stat().st_mode & 0o777 for path in inside}
        assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in inside}


def test_all_other_texts_stay_byte_for_byte_in_their_split_and_order(data, tmp_path, capsys):
    before = {path: path.read_bytes() for path in files_of(data.path)}
    new, said, messages = copied(data, GONE, tmp_path / "new", capsys)
    assert new.splits().keys() == data.splits().keys() == {"train", "eval_users", "eval_examples"}
    held_out = set(data.eval_users.user_ids()) & set(GONE)
    assert held_out and held_out != set(GONE)
    for name, store in data.splits().items():
        expected = [(key, rows) for key, rows in rows_of(store) if key not in GONE]
        assert rows_of(new.splits()[name]) == expected
        new.splits()[name].check()
        assert said["splits"][name] == sum(len(rows) for _, rows in expected)
    assert new.people() == sorted(set(data.people()) - set(GONE))
    assert said["users"] == 3 and not said["not_found"] and not messages
    assert said["texts"] == sum(row["user_id"] in GONE for row in ROWS)
    tokenizers = [each.tokenizer_path.read_bytes() for each in (new, data)]
    assert tokenizers[0] == tokenizers[1]
    kept = {name: value for name, value in data.metadata.items() if name != "sources"}
    assert {name: value for name, value in new.metadata.items() if name != "sources"} == kept
    assert {path: path.read_bytes() for path in files_of(data.path)} == before


@pytest.mark.privacy
def test_the_copy_is_what_a_build_without_their_texts_has(data, tmp_path, capsys):
    """Of the same texts: nothing else of them is in it, nor a digest of the old sources."""
    new, _, _ = copied(data, GONE, tmp_path / "new", capsys)
    rest = [row for row in ROWS if row["user_id"] not in GONE]
    source = jsonl(tmp_path / "source.jsonl", rest)
    built = build(source, tmp_path / "built", num_workers=1, eval_users=0.3)
    for name, store in built.splits().items():
        assert new.splits()[name].fingerprint == store.fingerprint
    content = b"".join(path.read_bytes() for path in files_of(new.path))
    assert data.metadata["sources"][0]["sha256"].encode() not in content
    assert not any(each.encode() in content for each in GONE)


def test_a_text_goes_if_one_of_its_owners_does(tmp_path, capsys):
    mail = [(["bob", "amy"], "hello to both"), (["amy"], "amy alone"), (["eve"], "eve")]
    mail += [(["cat", "amy", "bob"], "to three"), (["bob", "eve"], "without her")]
    rows = [{"who": who, "text": text} for who, text in mail]
    options = {"user_column": "who", "eval_users": 0.0, "eval_examples": False, "num_workers": 1}
    old = build(jsonl(tmp_path / "mail.jsonl", rows), tmp_path / "data", **options)
    new, said, _ = copied(old, ["amy"], tmp_path / "new", capsys)
    kept = [(key, found) for key, found in rows_of(old.train) if "amy" not in key.split("\x1f")]
    assert rows_of(new.train) == kept and len(kept) == 2
    assert new.train.user_ids() == ["bob", "eve"] and said["texts"] == 3 and said["users"] == 1
    assert new.train.examples_per_user.tolist() == [1, 2]
    new.train.check()
    alone, _, _ = copied(old, ["bob"], tmp_path / "alone", capsys)  # each text has one owner now
    assert alone.train.owners is None and alone.train.user_ids() == ["amy", "eve"]


def test_tokens_that_are_trained_on_stay_so(tmp_path, capsys):
    rows = [{"user_id": f"u{i}", "prompt": f"why {i}", "completion": f"so {i}"} for i in range(5)]
    options = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1}
    old = build(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "data", **options)
    new, _, _ = copied(old, ["u2"], tmp_path / "new", capsys)
    assert new.train.is_flagged
    assert rows_of(new.train) == [(key, row) for key, row in rows_of(old.train) if key != "u2"]


def test_a_split_without_texts_is_left_out(data, tmp_path, capsys):
    new, said, _ = copied(data, data.eval_users.user_ids(), tmp_path / "new", capsys)
    assert new.eval_users is None and "eval_users" not in said["splits"]
    assert new.train.fingerprint == data.train.fingerprint


def test_ids_of_nobody_are_counted_and_named(data, tmp_path, capsys):
    few = ["\ufeff", *GONE, "Person-003", "nobody \x1b[31m", ""]
    _, said, messages = copied(data, few, tmp_path / "few", capsys)
    assert said["not_found"] == ["Person-003", "nobody \x1b[31m"] and said["users"] == 3
    (line,) = messages
    assert line.endswith("2 ids are of no user of the data: Person-003, nobody \\x1b[31m")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\n  \n", "with at least one user id"),
        (b"\xff\xfe", "a file of UTF-8 text"),
        (b"nobody\n", "the id of at least one user of"),
        ("".join(f"{row['user_id']}\n" for row in ROWS).encode(), "texts of somebody to train on"),
    ],
    ids=["empty", "no text", "nobody", "everyone"],
)
def test_files_of_users_that_are_refused(data, tmp_path, capsys, content, expected):
    (tmp_path / "users").write_bytes(content)
    words = ["--users", str(tmp_path / "users"), "--out", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as stopped:
        main(["data", "without", str(data.path), *words])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and last.startswith("fedsim: error: users") and expected in last
    assert os.listdir(tmp_path) == ["users"]


def test_a_place_that_exists_and_data_that_were_changed_are_refused(data, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "letters").touch()
    with refuses("out"):
        without(data, set(GONE), tmp_path / "there")
    assert os.listdir(tmp_path / "there") == ["letters"]
    copy, _, _ = copied(data, GONE, tmp_path / "copy", capsys)
    tokens = copy.path / "train" / "tokens.npy"
    whole = bytearray(tokens.read_bytes())
    whole[-1] ^= 1
    tokens.write_bytes(whole)
    with pytest.raises(DataError, match="changed since it was built"):
        without(copy, {"person-001"}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.privacy
def test_earlier_runs_count_for_who_stays_and_for_who_comes_back(data, tmp_path, capsys):
    planned, delta, place = [(StepEvent(1.0, 0.05), 30)], 1e-6, tmp_path / "ledger"
    with open_locked(place) as ledger:
        users = ledger.save_users(ledger.users(data.train.user_ids()))
        ledger.begin(Entry(0, "a run", "train", "", users, "", planned, (0.0, 0.0)))
        ledger.end("a run", planned, "released")
    new, _, _ = copied(data, GONE, tmp_path / "new", capsys)
    left = sorted(set(data.train.user_ids()) & set(GONE))
    before, after, gone = (
        budget(place, ids, delta=delta) for ids in (data.people(), new.people(), left)
    )
    assert before["epsilon"] == after["epsilon"] == gone["epsilon"] > 0
    sizes = [run["users"] for found in (before, after, gone) for run in found["runs"]]
    assert sizes[0] == sizes[1] + sizes[2] == data.train.num_users and sizes[2] == len(left) > 0
