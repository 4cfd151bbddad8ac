"""Data with later texts: what stays byte for byte, where new texts go, and what is refused."""

import itertools
import json
import shutil

import numpy as np
import pytest
from test_build import digests, interrupt, parquet

from fedsim.cli.main import main
from fedsim.data import Dataset, Holdout, forgetting
from fedsim.data.building import tokenised
from fedsim.data.building.build import build
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError

OLD = [(f"user {i % 23:02}", f"text {i} of it") for i in range(230)]
# Texts of half of the old users, of held-out ones too, and of new ones who sort before and after.
NEW = [(f"user {i % 40:02}", f"later {i}") for i in range(0, 240, 2)]
NEW += [("a first", f"first {i}") for i in range(25)]
RULES = {"eval_users": 0.2, "num_workers": 1}


def extended(path, rows, old, name="new", **options):
    file = parquet(path / f"{name}.parquet", rows)
    return build(file, path / name, num_workers=1, extend=old.path, **options)


@pytest.fixture
def old(tmp_path):
    return build(parquet(tmp_path / "old.parquet", OLD), tmp_path / "old", **RULES)


def rows_of(store):
    """[(owner set, [tokens of each row])] in the order of the store."""
    spans = itertools.pairwise(store.offsets.tolist())
    return [
        (
            key,
            [store.gather(np.array([row]), store.max_length)[0].tobytes() for row in range(*span)],
        )
        for key, span in zip(store.owner_sets(), spans, strict=True)
    ]


def fingerprints(data):
    return {name: store.fingerprint for name, store in data.splits().items()}


@pytest.mark.privacy
def test_old_rows_stay_in_their_places_and_new_ones_follow(tmp_path, old):
    new = extended(tmp_path, NEW, old)
    alone = build(tmp_path / "new.parquet", tmp_path / "alone", **RULES)
    later = {name: dict(rows_of(store)) for name, store in alone.splits().items()}
    assert set(old.splits()) == set(new.splits()) == {"train", "eval_users", "eval_examples"}
    for name, store in old.splits().items():
        before, after = rows_of(store), rows_of(new.splits()[name])
        for (key, rows), (still, found) in zip(before, after, strict=False):
            more = [] if name == "eval_examples" else later[name].get(key, [])
            if name == "train":  # all later texts of an old user are trained on
                more = later["eval_examples"].get(key, []) + more
            assert (still, found) == (key, rows + more)
        known = {key for key, _ in before}
        expected = [pair for pair in sorted(later[name].items()) if pair[0] not in known]
        assert after[len(before) :] == expected and expected
    holdout = Holdout(0.2, True)
    assert not set(new.train.user_ids()) & set(new.eval_users.user_ids())
    assert set(new.eval_users.user_ids()) == set(filter(holdout.takes_user, new.people()))
    assert new.metadata["counts"]["rows"] == len(OLD) + len(NEW) and new.metadata["extended"] == 1
    new.train.check()


def test_what_adds_no_text_adds_nothing(tmp_path, old):
    same = extended(tmp_path, [("user 01", ""), ("nobody yet", " ")], old)
    assert fingerprints(same) == fingerprints(old)
    assert (same.path / "tokenizer.json").read_bytes() == old.tokenizer_path.read_bytes()


def test_twice_is_once_with_both(tmp_path, old):
    """Where no user who is new in the first has texts in the second, and ids of those are later."""
    first = [row for row in NEW if row[0] < "user 30"]
    second = [row for row in NEW if row[0] >= "user 30"] + [("user 03", "again"), ("user 05", "x")]
    one = extended(tmp_path, first, old, "one")
    two = extended(tmp_path, second, one, "two")
    files = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    both = build(files, tmp_path / "both", num_workers=1, extend=old.path)
    assert fingerprints(two) == fingerprints(both)
    assert {**two.metadata, "extended": 1} == both.metadata and two.metadata["extended"] == 2


@pytest.mark.parametrize("stage", ["tokenised", "sorted"])
def test_an_interrupted_extension_goes_on(tmp_path, monkeypatch, old, stage):
    file, out, lines = parquet(tmp_path / "new.parquet", NEW), tmp_path / "out", []
    options = {"num_workers": 1, "extend": old.path}
    build(file, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        build(file, out, progress=interrupt(stage), **options)
    monkeypatch.setattr(Tokenizer, "encode", None)
    build(file, out, progress=lines.append, **options)
    assert lines[0] == "going on with the build that was interrupted"
    assert digests(out) == digests(tmp_path / "whole")
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        build(file, tmp_path / "other", progress=interrupt(stage), **options)
    other = extended(tmp_path, [("user 01", "between")], old, "between")
    options["extend"], lines = other.path, []
    build(file, tmp_path / "other", progress=lines.append, **options)
    assert "going on with the build that was interrupted" not in lines


def test_rows_are_read_by_the_settings_of_the_data(tmp_path, monkeypatch):
    """In pieces, in the order of a column, some of them tests, with a trained tokenizer."""
    monkeypatch.setattr(tokenised, "PIECE_BYTES", 8)

    def source(name, days):
        path = tmp_path / f"{name}.jsonl"
        rows = [
            {"who": f"u{day % 5}", "said": f"on day {day} {'all ' * (day % 7)}", "day": str(day)}
            for day in days
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    settings = {"user_column": "who", "text_column": "said", "order_column": "day"}
    settings |= {"test_from": "60", "tokenizer": "wordpiece:300", "eval_users": 0.3}
    first = build(source("a", range(40, 80)), tmp_path / "old", num_workers=1, **settings)
    new = build(
        source("b", [*range(39, -1, -1), *range(80, 99)]),
        tmp_path / "new",
        num_workers=1,
        extend=first.path,
        tokenizer="wordpiece:300",
        order_column="day",
    )
    tokenizer = Tokenizer.load(new.tokenizer_path)
    assert tokenizer.sha256 == Tokenizer.load(first.tokenizer_path).sha256
    for field in ("tokenizer", "rules", "columns", "settings"):
        assert new.metadata[field] == first.metadata[field]
    assert {"tokenizer.provenance.json", "test"} <= {path.name for path in new.path.iterdir()}
    for name, store in first.splits().items():
        after = dict(rows_of(new.splits()[name]))
        assert [*after][: len(store.offsets) - 1] == store.owner_sets()
        assert all(after[key][: len(rows)] == rows for key, rows in rows_of(store))
    user = new.train.user_ids()[0]
    low, high = new.train.offsets[:2]
    texts, sizes = new.train.gather(np.arange(low, high), 128)
    days = [
        int(tokenizer.decode(text[:size]).split()[2])
        for text, size in zip(texts, sizes, strict=True)
    ]
    old_days = len(dict(rows_of(first.train))[user])
    assert days[old_days:] == sorted(days[old_days:]) and len(days) == old_days + 8
    assert min(days[:old_days]) > 39 >= max(days[old_days:])
    assert new.test.num_examples == first.test.num_examples + 19


def test_min_examples_drops_new_users_only(tmp_path):
    first = build(parquet(tmp_path / "old.parquet", OLD), tmp_path / "old", min_examples=5, **RULES)
    rows = [("user 02", "one more"), ("few", "one"), *[("many", f"{i}") for i in range(5)]]
    new = extended(tmp_path, rows, first)
    assert set(new.people()) == {*first.people(), "many"}
    assert new.metadata["counts"]["users_dropped"] == 1
    before, after = dict(rows_of(first.train)), dict(rows_of(new.train))
    assert len(after["user 02"]) == len(before["user 02"]) + 1


@pytest.mark.privacy
def test_owners_of_shared_texts_keep_their_numbers(tmp_path):
    def source(name, pairs):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"user_id": owners, "text": f"{name} {i}"} for i, owners in enumerate(pairs)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    pairs = [["m"], ["m", "p"], ["k", "p"], ["q"]] * 3
    options = {"num_workers": 1, "eval_users": 0}
    later = [["p", "m"], ["a", "k"], ["z", "a", "q"], ["a"]]
    for name, earlier in (("shared", pairs), ("single", [["m"], ["p"], ["k"], ["q"]] * 3)):
        first = build(source(f"old {name}", earlier), tmp_path / f"old {name}", **options)
        data = source(f"new {name}", later)
        new = build(data, tmp_path / f"new {name}", num_workers=1, extend=first.path)
        assert new.train.user_ids() == [*first.train.user_ids(), "a", "z"]
        assert new.train.owner_sets()[: len(first.train.offsets) - 1] == first.train.owner_sets()
        ids, owners = new.train.user_ids(), new.train.owners
        for number, key in enumerate(new.train.owner_sets()):
            users = owners.users_of(number)
            assert (np.diff(users) > 0).all() and {ids[u] for u in users} == set(key.split("\x1f"))
    same = extended(tmp_path, [("m", "")], first, "same")
    assert fingerprints(same) == fingerprints(first)
    again = extended(tmp_path, [("m", "")], new, "again")
    assert fingerprints(again) == fingerprints(new)


@pytest.mark.privacy
def test_who_was_forgotten_comes_back_as_somebody_new(tmp_path, old):
    """The place of the past stays empty, and nothing says that they are the same."""
    (tmp_path / "without").mkdir()
    gone = old.train.user_ids()[3]
    forgetting.without(old, [gone], tmp_path / "without", lambda _: "forgotten-0123")
    without = Dataset.open(tmp_path / "without")
    new = extended(tmp_path, [(gone, "back"), (gone, "again")], without)
    assert new.train.user_ids() == [*without.train.user_ids(), gone]
    assert new.eval_examples.user_ids() == [*without.eval_examples.user_ids(), gone]
    assert rows_of(new.train)[3] == ("forgotten-0123", []) and len(rows_of(new.train)[-1][1]) == 1
    assert new.metadata["forgotten"] == 1 and new.train.num_users == old.train.num_users + 1
    for name, store in without.splits().items():
        assert rows_of(new.splits()[name])[: len(store.offsets) - 1] == rows_of(store)


def test_texts_that_are_there_already_are_counted(tmp_path, old):
    said = []
    rows = [*OLD[40:43], ("user 01", "new"), ("stranger", OLD[0][1]), ("USER 02", "who?")]
    new = extended(tmp_path, rows, old, progress=said.append)
    assert new.metadata["counts"]["users_that_look_alike"] == 2  # an old one and a new one
    assert "3 new texts are as old ones of the same user, and count again" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 64}, "max_length=64: expected 128, as extend="),
        ({"user_column": "who"}, "user_column=who: expected user_id, as extend="),
        ({"eval_users": 0.1}, "eval_users=0.1: expected 0.2, as extend="),
        ({"tokenizer": "wordpiece:300"}, "tokenizer=wordpiece:300: expected bytes, as extend="),
        ({"messages_column": "chat"}, "messages_column=chat: expected None, as extend="),
    ],
)
def test_a_setting_that_the_data_contradict_is_one_line(tmp_path, old, options, message):
    with pytest.raises(DataError) as error:
        extended(tmp_path, NEW, old, **options)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "old.parquet", "new.parquet"}


def test_data_that_cannot_be_extended_are_named(tmp_path, old):
    def refused(match, rows=NEW):
        with pytest.raises(DataError, match=match):
            extended(tmp_path, rows, old)
        assert not (tmp_path / "new").exists() and not (tmp_path / ".new.building").exists()

    refused("data=new.parquet: expected texts that extend=.* has not", OLD)
    refused("user_id: 1 null or empty user id in", [*NEW, (None, "whose?")])
    tokens = old.path / "train" / "tokens.npy"
    before = tokens.read_bytes()
    tokens.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    refused("changed since it was built")
    tokens.write_bytes(before)
    shutil.rmtree(old.path)
    refused("data=.*old: expected a directory built by fedsim")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": None}, "data whose settings are known"),
        ({"columns": {"conversation": "doc"}}, "texts without conversation_column"),
        ({"unicode": "1.0"}, "ids by unicode "),
    ],
)
def test_builds_that_nothing_can_be_added_to_are_refused(tmp_path, old, changes, message):
    file = old.path / "metadata.json"
    changed = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in changed.items() if value}))
    (old.path / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match=f"^extend=.*old: expected {message}"):
        extended(tmp_path, NEW, old)


def test_chats_keep_their_template_and_its_tokens(tmp_path):
    """A template may ask for tokens that only files beside the model's tokenizer name."""
    place = tmp_path / "model"
    place.mkdir()
    Tokenizer.bytes().save(place / "tokenizer.json")
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    template = "{{ pad_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}"
    names["chat_template"] = f"{template}{{% endfor %}}"
    (place / "tokenizer_config.json").write_text(json.dumps(names))

    def source(name, number):
        path = tmp_path / f"{name}.jsonl"
        chat = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": f"it is {name}"},
        ]
        rows = [{"user_id": f"u{i}", "messages": chat} for i in range(number)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    options = {"num_workers": 1, "eval_users": 0}
    first = build(source("old", 4), tmp_path / "old", tokenizer=place, **options)
    file = source("new", 6)
    build(file, tmp_path / "alone", tokenizer=place, **options)
    shutil.rmtree(place)
    new = build(file, tmp_path / "new", num_workers=1, extend=first.path)
    assert new.train.is_flagged and new.metadata["chats"] == first.metadata["chats"]
    alone = dict(rows_of(Dataset.open(tmp_path / "alone").train))
    for key, rows in rows_of(new.train):
        before = dict(rows_of(first.train)).get(key, [])
        assert rows == before + alone[key]
    with pytest.raises(DataError, match="text_column=text: expected messages, as extend="):
        extended(tmp_path, NEW, first, "texts")


def test_the_command_extends(tmp_path, old, capsys):
    file = parquet(tmp_path / "new.parquet", NEW)
    args = ["data", "build", "--extend", old.path, file, "--out", tmp_path / "new", "--json"]
    main([*map(str, args)])
    splits = json.loads(capsys.readouterr().out)["splits"]
    train = Dataset.open(tmp_path / "new").train
    assert splits["train"]["num_users"] == train.num_users > old.train.num_users
