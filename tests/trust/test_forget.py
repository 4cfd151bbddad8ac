"""`fedsim forget`: what is gone, what stays byte for byte, what is found, and what is certified."""

import dataclasses
import gzip
import itertools
import json
import os
import shutil
import string
import sys
import zipfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refuses

from fedsim import accounting, files as files_of
from fedsim.budget import Books, Charge, Entry
from fedsim.cli.main import main
from fedsim.data import Dataset, build, forgetting
from fedsim.els import ELS
from fedsim.errors import DataError
from fedsim.keys import SecretKey
from fedsim.plan import REPRODUCTION
from fedsim.run import Console
from fedsim.sampling import Sampling
from fedsim.trust import certificate, forget, remains
from fedsim.uls import ULS

forgetting_of = sys.modules[forget.__module__]

GONE = ["person-0003", "person-0011", "person-0017"]
TEXT_BYTES, TOKEN_RUN = 20, 8


def words(rng, number):
    letters = rng.choice([*string.ascii_lowercase], (number, 7))
    return " ".join(map("".join, letters))


def rows_of(num_users=24):
    """Texts of which each has something of its own, and something that everybody says."""
    rng = np.random.default_rng(0)
    return [
        {"user_id": f"person-{user:04d}", "text": f"as everybody always says, {words(rng, 9)}"}
        for user in range(num_users)
        for _ in range(rng.integers(2, 6))
    ]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def users_file(path, ids=GONE):
    path.write_text("".join(f"{each}\n" for each in ids))
    return path


def told(capsys, *args):
    """(the JSON object of a command, its messages)."""
    main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    return json.loads(out), err


def interrupted(line):
    if line.startswith("tokenised"):
        raise KeyboardInterrupt


class World:
    """Data, a finished run on them, an unfinished build of the same source, caches and a ledger."""

    def __init__(self, path):
        self.path, self.data = path, path / "data"
        self.rows = rows_of()
        self.source = jsonl(path / "source.jsonl", self.rows)
        self.users = users_file(path / "users")
        build(self.source, self.data, num_workers=1)
        with pytest.raises(KeyboardInterrupt):
            build(self.source, path / "other", num_workers=1, progress=interrupted)
        flags = {"data": self.data, "model": "micro", "engine": "local", "epsilon": 8}
        flags |= {"num-steps": 2, "batch-size": 8, "group-size": 2, "checkpoint-every": 1}
        flags |= {"strategy": "scan:2", "run-dir": path / "run"}
        main(["train", "uls", *(str(x) for n, v in flags.items() for x in (f"--{n}", v))])
        shutil.copytree(self.data, path / "as it was")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world, what `forget --in-place` answered there, and what it said."""
    path = tmp_path_factory.mktemp("world")
    own = {"FEDSIM_CACHE_DIR": path / "cache", "FEDSIM_BUDGET_LEDGER": path / "ledger"}
    before = {name: os.environ.get(name) for name in own}
    os.environ |= {name: str(value) for name, value in own.items()}
    yield World(path)
    os.environ |= {name: value for name, value in before.items() if value is not None}


@pytest.fixture(scope="module")
def forgotten(world):
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("builtins.print", lambda *args, **_: said.append(args))
        args = ["--users", world.users, "--in-place", "--search", world.path / "other", "--json"]
        args += ["--search", world.source, "--search", world.path / ".other.building"]
        (world.path / "other").mkdir()
        main(["forget", str(world.data), *map(str, args)])
    return json.loads(said[-1][0])


def cells(table):
    """All texts, bytes and lists in a table, as bytes."""
    for row in table.to_pylist():
        for value in row.values():
            yield str(value).encode() if not isinstance(value, bytes) else value


def read(path):
    """The bytes of a file, and of what a Parquet file has in it."""
    parts = [path.read_bytes()]
    if path.suffix == ".parquet":
        parts += cells(pq.read_table(path))
    return b"\0".join(parts)


def signs(rows, people):
    """Strings of 20 bytes, and runs of 8 tokens as arrays have them, that only these people have,
    found without any of fedsim's code. A token is a byte."""
    theirs, others = (
        {
            row["text"].encode()[i : i + width]
            for row in rows
            if (row["user_id"] in people) == of_them
            for i in range(len(row["text"]) - width + 1)
        }
        for of_them, width in ((True, TEXT_BYTES), (False, TEXT_BYTES))
    )
    runs, others_runs = (
        {
            row["text"].encode()[i : i + TOKEN_RUN]
            for row in rows
            if (row["user_id"] in people) == of_them
            for i in range(len(row["text"]) - TOKEN_RUN + 1)
        }
        for of_them in (True, False)
    )
    tokens = {np.frombuffer(run, np.uint8).astype("<u2").tobytes() for run in runs - others_runs}
    return theirs - others, tokens


def files(*places):
    return [path for place in places for path in sorted(place.rglob("*")) if path.is_file()]


def test_no_file_of_the_new_data_has_a_string_or_an_id_of_theirs(world, forgotten):
    texts, tokens = signs(world.rows, GONE)
    assert len(texts) > 300 and len(tokens) > 300
    before = b"".join(map(read, files(world.path / "as it was")))
    assert all(token in before for token in tokens) and all(i.encode() in before for i in GONE)
    there = files(world.data)
    assert {path.name for path in there} >= {"users.parquet", "tokens.npy", "metadata.json"}
    for path in there:
        content = read(path)
        assert not any(sign in content for sign in itertools.chain(texts, tokens)), path
        assert not any(name.encode() in content for name in GONE), path
    assert not (world.path / ".data.forgetting").exists()


def test_every_file_that_still_has_a_string_of_theirs_is_listed(world, forgotten):
    texts, tokens = signs(world.rows, GONE)
    places = ("data", "run", "cache", "ledger", ".other.building")
    searched = [*files(*(world.path / place for place in places)), world.source]
    still = set()
    for path in searched:
        content = read(path)
        if any(sign in content for sign in itertools.chain(texts, tokens)):
            still.add(str(path))
    listed = {each["path"]: each["why"] for each in forgotten["found"]}
    assert still == set(listed)
    assert listed.pop(str(world.source)) == "a source of the build"
    assert set(listed.values()) == {"an unfinished build"}
    assert forgotten["files"] >= len(searched) and not forgotten["unread"]
    computed = {each["path"].removeprefix(f"{world.path}/run/") for each in forgotten["computed"]}
    assert {"metrics.jsonl", "checkpoints", "secret.json"} <= computed


GUESS = "was treated for something in Lund last May"


@pytest.mark.privacy
@pytest.mark.parametrize(
    "others, first, second",
    [(8, ["likes long walks along the river"], [GUESS]), (0, ["was ill"], ["was ill", "is well"])],
    ids=["a guess of their words", "whether texts are held back"],
)
def test_the_certificate_says_nothing_of_the_texts_of_those_who_stay(
    others, first, second, tmp_path, monkeypatch
):
    """It goes to the people who ask, and one of them may have written a guess of another's text.
    Of somebody with two texts one is held back, which makes files."""
    records = []
    for name, texts in (("one", first), ("two", second)):
        place = tmp_path / name
        place.mkdir()
        monkeypatch.setenv("FEDSIM_CACHE_DIR", str(place / "cache"))  # which is searched
        said = [{"user_id": "person-0000", "text": f"he {text}"} for text in texts]
        asked = {"user_id": "person-0001", "text": f"he {GUESS}"}
        source = jsonl(place / "texts.jsonl", [*rows_of(others), *said, asked])
        build([source], place / "data", tokenizer="bytes", num_workers=1, eval_users=0)
        users = users_file(place / "users.txt", ["person-0001"])
        forget(place / "data", users, tmp_path / "ledger", Console(), out=place / "new")
        record = json.loads((place / "new-forgotten.json").read_text().replace(str(place), ""))
        for changing in (record.pop("data"), record):
            for key in ("time", "signature", "before", "after"):
                changing.pop(key, None)
        records.append(record)
    assert records[0] == records[1]


def examples(data):
    """{split: {place: rows of tokens}} of a data set, with its ids."""
    return {
        name: {
            user: store.gather(np.arange(low, high), 96)[0].tolist()
            for user, (low, high) in enumerate(itertools.pairwise(store.offsets))
        }
        for name, store in data.splits().items()
    }


def test_all_else_is_byte_for_byte_as_it_was(world, forgotten):
    old, new = Dataset.open(world.path / "as it was"), Dataset.open(world.data)
    before, after = examples(old), examples(new)
    assert before.keys() == after.keys() and new.metadata["forgotten"] == len(GONE)
    emptied = set()
    for split, store in old.splits().items():
        ids, renamed = store.user_ids(), new.splits()[split].user_ids()
        assert len(ids) == len(renamed) == new.splits()[split].num_users
        for place, name in enumerate(ids):
            if name in GONE:
                emptied.add(renamed[place])
                assert after[split][place] == [] and before[split][place]
            else:
                assert renamed[place] == name and after[split][place] == before[split][place]
        new.splits()[split].check()
    assert len(emptied) == len(GONE) and all(name.startswith("forgotten-") for name in emptied)
    kept = ("tokenizer.json",)
    for name in kept:
        assert (world.data / name).read_bytes() == (world.path / "as it was" / name).read_bytes()


@pytest.mark.parametrize("algorithm", [ULS, ELS])
def test_the_key_draws_the_same_texts_of_all_others(world, forgotten, algorithm):
    old, new = (Dataset.open(world.path / name).train for name in ("as it was", "data"))
    gone = {place for place, name in enumerate(old.user_ids()) if name in GONE}
    key, drawn = SecretKey.create(3), {}
    for store in (old, new):
        settings = {"batch_size": 24, "group_size": 3, "sampling": Sampling(), "key": key}
        method = algorithm(store, **settings)
        drawn[store.path] = [
            [
                [(place, int(row - store.offsets[place])) for row, place in pairs]
                for pairs in (places(unit, store.offsets) for unit in method.draw(step))
            ]
            for step in range(8)
        ]
    before, after = drawn.values()
    taken = [[[pair for pair in unit if pair[0] not in gone] for unit in step] for step in before]
    if algorithm is ELS:  # which leaves out empty places of its pool
        taken = [[*filter(None, step)] for step in taken]
    assert taken != before and taken == after


def places(unit, offsets):
    """(row, its user) of the rows of a unit that are no padding."""
    rows = unit[unit >= 0]
    return zip(rows, np.searchsorted(offsets, rows, side="right") - 1, strict=True)


def test_a_run_is_trained_on_the_data_without_them(world, forgotten, capsys):
    flags = ["--data", world.data, "--model", "micro", "--engine", "local", "--epsilon", 8]
    flags += ["--num-steps", 1, "--batch-size", 8, "--group-size", 2, "--seed", 1]
    flags += ["--strategy", "scan:2", "--run-dir", world.path / "later"]
    assert told(capsys, "train", "uls", *flags)[0]["num_users"] == 22


def test_the_run_promises_them_what_the_accountant_says(world, forgotten):
    [run] = forgotten["runs"]
    trained = set(GONE) & set(Dataset.open(world.path / "as it was").train.user_ids())
    head = json.loads((world.path / "run" / "ledger.jsonl").read_text().split("\n")[0])
    plan = head["head"]["plan"]
    event = accounting.StepEvent(plan["noise_multiplier"], plan["sampling_prob"])
    ideal = accounting.epsilon(accounting.for_people([(event, 2)], len(trained)), run["delta"])
    assert run["people"] == len(trained) > 1
    assert ideal <= run["epsilon"] < ideal * 1.01 and run["how"] == "theorem"
    assert run["epsilon"] > accounting.epsilon([(event, 2)], run["delta"]) * len(trained)
    assert "had never been there" in run["sentence"] and forgotten["together"] is None
    assert run["outside"] == []


def test_a_promise_names_what_the_plan_leaves_uncovered(tmp_path):
    source = jsonl(tmp_path / "texts.jsonl", rows_of(12))
    build([source], tmp_path / "data", tokenizer="bytes", num_workers=1, eval_users=0)
    flags = ["--data", tmp_path / "data", "--model", "micro", "--engine", "local", "--epsilon", 8]
    flags += ["--num-steps", 1, "--batch-size", 4, "--group-size", 2, "--strategy", "scan:2"]
    flags += ["--clip-norm", 0.37, "--chosen-on-data", "clip_norm", "--run-dir", tmp_path / "run"]
    ledger = ["--budget-ledger", tmp_path / "ledger"]
    main(["train", "uls", "--quiet", *map(str, [*flags, *ledger])])
    users = users_file(tmp_path / "users", ["person-0003"])
    found = forget(tmp_path / "data", users, tmp_path / "ledger", Console(), out=tmp_path / "new")
    [run] = found["runs"]
    assert run["how"] == "theorem" and "clip_norm" in run["outside"][0]
    assert run["sentence"].endswith(f"; not covered: {run['outside'][0]}")


def test_the_run_is_not_violated_by_what_was_forgotten_since(world, forgotten, capsys):
    found, _ = told(capsys, "verify", world.path / "run")
    by_name = {check["promise"]: check for check in found["checks"]}
    assert found["holds"] and found["guarantee"] is None
    assert by_name["data"]["holds"] is None and "3 users were forgotten" in by_name["data"]["found"]


def checked(capsys, *args):
    """{promise: whether it holds} of a certificate."""
    try:
        found, _ = told(capsys, "verify", *args)
    except SystemExit:
        found = json.loads(capsys.readouterr().out)
    assert found["holds"] == all(check["holds"] is not False for check in found["checks"])
    return {check["promise"]: check["holds"] for check in found["checks"]}


def test_the_certificate_is_checked_by_its_key_its_page_and_the_data(
    world, forgotten, capsys, monkeypatch
):
    path = world.path / "data-forgotten.json"
    assert forgotten["certificate"] == str(path)
    whole = dict.fromkeys(("signature", "signer", "page", "data"), True)
    assert checked(capsys, path, "--data", world.data) == whole
    assert checked(capsys, path) == {**whole, "data": None}
    other = world.path / "as it was"
    assert checked(capsys, path, "--data", other) == {**whole, "data": False}
    elsewhere = world.path / "another ledger"
    assert checked(capsys, path, "--budget-ledger", elsewhere) == {
        **whole,
        "signer": None,
        "data": None,
    }
    with monkeypatch.context() as patch:  # of a colleague, who may not read the ledger
        patch.setattr("fedsim.trust.certificate.os.access", lambda *_: False)
        assert checked(capsys, path) == {**whole, "signer": None, "data": None}
    assert main(["verify", str(path)]) is None
    assert "Not confirmed: data could not be checked." in capsys.readouterr().out
    page = path.with_suffix(".html")
    text = page.read_text()
    page.write_text(text.replace("3 people", "2 people"))
    assert checked(capsys, path)["page"] is False
    page.write_text(text)


def test_any_changed_byte_breaks_the_certificate(world, forgotten, tmp_path):
    whole = (world.path / "data-forgotten.json").read_bytes()
    changed, place = tmp_path / "changed.json", world.path / "ledger"
    for at in range(0, len(whole), 7):
        changed.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert certificate.check(changed, None, place)[0].holds is False, at
    for other in (whole + b"\n", whole.replace(b"  ", b" "), b"{}", b"[]", b""):
        changed.write_bytes(other)
        assert certificate.check(changed, None, place)[0].holds is False
    changed.write_bytes(whole)
    assert certificate.check(changed, None, place)[0].holds


def test_a_certificate_by_another_key_than_the_ledgers_is_forged(
    world, forgotten, tmp_path, capsys
):
    path, record = tmp_path / "forged.json", json.loads(Path(forgotten["certificate"]).read_text())
    record["people"]["number"] = 10**6
    kept = {n: v for n, v in record.items() if n not in ("public_key", "signature")}
    certificate.sign(path, kept, SecretKey.create())
    certificate.issue(path)
    found = checked(capsys, path, "--budget-ledger", world.path / "ledger")
    assert found["signature"] and found["signer"] is False


@pytest.mark.parametrize("changed", [{}, {"search": 5}, {"data": 5}, {"data": {"after": 5}}])
def test_a_certificate_that_lacks_something_is_one_line(forgotten, tmp_path, changed):
    """Anyone can sign anything with a key of their own."""
    path, key = tmp_path / "some.json", SecretKey.create()
    record = json.loads(Path(forgotten["certificate"]).read_text()) if changed else {}
    about = {"kind": certificate.KIND, "format": certificate.FORMAT}
    private, record = certificate.signer(key), {**record, **about, **changed}
    record["public_key"] = private.public_key().public_bytes_raw().hex()
    record["signature"] = private.sign(certificate._signed(record)).hex()
    path.write_bytes(certificate._file(record))
    (found,) = certificate.check(path, None, tmp_path / "ledger")
    assert found.holds is False and f"{path}: expected " in found.found


def test_the_certificate_names_nobody_and_its_owner_recognises_everyone(world, forgotten):
    key = SecretKey.load(world.path / "ledger")
    assert forgotten["people"]["digests"] == certificate.digests(GONE, key)
    assert forgotten["people"]["digests"] != certificate.digests(GONE, SecretKey.create())
    assert (world.path / "ledger" / "secret.json").stat().st_mode & 0o077 == 0
    names = Dataset.open(world.data).people()
    for suffix in (".json", ".html", ".md"):
        text = (world.path / f"data-forgotten{suffix}").read_text()
        assert not any(each in text for each in (*GONE, *names))


@pytest.fixture
def small(tmp_path):
    """A built directory and files of users."""
    build(jsonl(tmp_path / "source.jsonl", rows_of(6)), tmp_path / "data", num_workers=1)
    return tmp_path


BAD = {
    "unknown": ("a\nperson-0001\n", "in line 1"),
    "several": ("a\nperson-0001\nb\nc\n", "in lines 1, 3, 4"),
    "empty": ("\n  \n", "at least one user id, got none"),
    "too many": ("".join(f"x{i}\n" for i in range(9)), "at most the 6 users there are"),
    "everyone": ("".join(f"person-{i:04d}\n" for i in range(6)), "texts of somebody"),
    "no text": ("\udcff", "text in UTF-8"),
    "nobody": ("person-0001\nNA\n", "in line 2"),
    "not named": ("person-0001\nsomebody@example.org\n", "in line 2"),
}


def ask(small, source=None, **options):
    return forget(source or small / "data", small / "users", small / "ledger", Console(), **options)


@pytest.mark.parametrize("kind", BAD)
def test_files_of_users_that_are_refused(small, kind):
    content, expected = BAD[kind]
    (small / "users").write_bytes(content.encode(errors="surrogateescape"))
    with refuses("users", says=expected) as raised:
        ask(small, out=small / "new")
    assert "somebody@" not in str(raised.value)  # whom the message must not name
    assert not {"new", "data-forgotten.json", "new-forgotten.json"} & set(os.listdir(small))
    Dataset.open(small / "data").train.check()


def test_ids_that_look_like_one_of_theirs_are_counted(tmp_path, capsys):
    rows = [{"user_id": each, "text": "a text"} for each in ("Ann", "ann", " ann.", "Ben", "Cem")]
    build(jsonl(tmp_path / "source.jsonl", rows), tmp_path / "data", num_workers=1, eval_users=0)
    users_file(tmp_path / "users", ["ann"])
    ask(tmp_path, out=tmp_path / "new")
    assert "1 other id of the data looks like one of these, and what" in capsys.readouterr().err


def test_places_that_are_refused(small):
    users_file(small / "users", ["person-0001"])
    for field, options in (
        ("data", {"source": small, "in_place": True}),
        ("out", {}),
        ("out", {"out": small / "data"}),
        ("out", {"out": small / "new", "in_place": True}),
        ("certificate", {"in_place": True, "file": small / "users"}),
        ("run", {"in_place": True, "runs": [small]}),
        ("search", {"in_place": True, "also": [small / "none"]}),
    ):
        with refuses(field):
            ask(small, **options)
    assert "new" not in os.listdir(small)
    ask(small, out=small / "new")
    with refuses("users", says="in line 1"):  # who was forgotten is no user any more
        ask(small, source=small / "new", in_place=True, file=small / "again.json")
    with refuses("certificate"):  # which is there
        ask(small, in_place=True, file=small / "new-forgotten.json")


@pytest.mark.parametrize("kind", ["lines", "csv", "jsonl"])
def test_ids_are_read_by_the_rules_of_the_build(tmp_path, kind):
    rows = [{"user_id": name, "text": f"hello {name}"} for name in ("ANN", "7", "bob", "cat")]
    options = {"normalise_ids": "casefold", "num_workers": 1}
    data = build(jsonl(tmp_path / "source.jsonl", rows), tmp_path / "data", **options)
    users = tmp_path / f"users.{kind}"
    users.write_text(
        {
            "lines": " Ann \n7.0\n",
            "csv": "mail,user_id\nx, Ann\ny,7.0\n",
            "jsonl": '{"user_id": "Ann"}\n{"user_id": 7.0}\n',
        }[kind]
    )
    first = 2 if kind == "csv" else 1
    assert forgetting.read_users(users, data) == {"ann": first, "7": first + 1}
    if kind != "lines":
        with pytest.raises(DataError, match="other"):
            forgetting.read_users(users, data, "other")


def test_a_text_with_several_owners_goes_if_one_of_them_does(tmp_path, capsys):
    mail = [(["bob", "amy"], "hello to both of you"), (["amy"], "amy alone"), (["eve"], "eve")]
    mail += [(["cat", "amy", "bob"], "to three"), (["bob", "eve"], "without her")]
    rows = [{"who": who, "text": text} for who, text in mail]
    options = {"user_column": "who", "eval_users": 0.0, "eval_examples": False, "num_workers": 1}
    old = build(jsonl(tmp_path / "mail.jsonl", rows), tmp_path / "data", **options).train
    users = users_file(tmp_path / "users", ["amy"])
    told(capsys, "forget", tmp_path / "data", "--users", users, "--out", tmp_path / "new")
    new = Dataset.open(tmp_path / "new").train
    names = new.user_ids()
    assert names[0].startswith("forgotten-") and names[1:] == ["bob", "cat", "eve"]
    left = dict(zip(names[1:], new.examples_per_user[1:].tolist(), strict=True))
    assert left == {"bob": 1, "cat": 0, "eve": 2} and new.examples_per_user[0] == 0
    for name in ("owners.parquet",):
        was, now = ((tmp_path / place / "train" / name) for place in ("data", "new"))
        assert was.read_bytes() == now.read_bytes()
    assert new.num_users == old.num_users and b"amy" not in b"".join(map(read, files(new.path)))


def test_what_is_trained_on_stays_with_its_tokens(tmp_path, capsys):
    rows = [{"user_id": f"u{i}", "prompt": f"why {i}", "completion": f"so {i}"} for i in range(5)]
    options = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1}
    old = build(jsonl(tmp_path / "chats.jsonl", rows), tmp_path / "data", **options).train
    users = users_file(tmp_path / "users", ["u2"])
    main(["forget", str(tmp_path / "data"), "--users", str(users), "--out", str(tmp_path / "new")])
    out, err = capsys.readouterr()
    assert f"still there: {tmp_path / 'data' / 'train' / 'tokens.npy'}: " in err
    assert out.startswith(f"1 person was forgotten in {tmp_path / 'new'}; 1 of ")
    new = Dataset.open(tmp_path / "new").train
    kept = np.array([0, 1, 3, 4])
    assert np.array_equal(old.gather(kept, 64)[0], new.gather(np.arange(4), 64)[0])
    was, now = old.trained(kept, 64), new.trained(np.arange(4), 64)
    assert was is not None and now is not None and np.array_equal(was, now) and was.any()


def test_the_search_reads_what_is_compressed_and_how_json_spells_it(small, tmp_path):
    data = Dataset.open(small / "data")
    text = next(row["text"] for row in rows_of(6) if row["user_id"] == "person-0002")
    place = tmp_path / "place"
    place.mkdir()
    (place / "a.gz").write_bytes(gzip.compress(text.encode()))
    (place / os.fsdecode(b"\xff.gz")).write_bytes(gzip.compress(b"a name that is no UTF-8"))
    (place / "far").write_bytes(b"." * (remains.BLOCK - 40) + text.encode())
    (place / "tokens").write_bytes(np.frombuffer(text.encode(), np.uint8).astype("<i8").tobytes())
    (place / "ids").write_bytes(b"x person-0002, y")
    (place / "other").write_bytes(b"person-00021 as everybody always says, " + text[:10].encode())
    found = remains.search(data, ["person-0002"], [place])
    by_name = {path.name: kinds for path, kinds in found.found.items()}
    assert by_name.keys() == {"a.gz", "far", "tokens", "ids"}
    assert by_name["far"] == by_name["a.gz"] and by_name["far"].keys() == {remains.TEXT}
    assert by_name["tokens"].keys() == {remains.TOKENS} and by_name["ids"] == {remains.ID: 1}
    assert found.files == 6 and not found.unread
    (place / "torn.parquet").write_bytes(b"PAR1" + text.encode())
    found = remains.search(data, ["person-0002"], [place])
    assert found.unread == [place / "torn.parquet"] and found.unread[0] in found.found


def test_what_cannot_be_read_is_named_to_the_owner_and_not_in_the_certificate(
    small, tmp_path, capsys
):
    (tmp_path / "place").mkdir()
    (torn := tmp_path / "place" / "torn.parquet").write_bytes(b"PAR1")
    users, new = users_file(tmp_path / "users", ["person-0002"]), tmp_path / "new"
    how = ("--users", users, "--out", new, "--search", torn.parent)
    result, err = told(capsys, "forget", small / "data", *how)
    assert result["unread"] == [str(torn)] and f"could not be read: {torn}" in err
    assert "torn" not in (tmp_path / "new-forgotten.json").read_text()


def test_what_is_damaged_in_an_archive_is_unread_and_numbers_hide_no_text(small, tmp_path):
    data = Dataset.open(small / "data")
    text = next(row["text"] for row in rows_of(6) if row["user_id"] == "person-0002")
    with zipfile.ZipFile(tmp_path / "torn.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", text)
    whole = bytearray((tmp_path / "torn.zip").read_bytes())
    whole[31 + 9 : 31 + 30] = b"\xff" * 21
    (tmp_path / "torn.zip").write_bytes(whole)
    table = pa.table({"price": pa.array([Decimal("1.50")]), "text": [text]})
    pq.write_table(table, tmp_path / "prices.parquet", compression="zstd")
    named = (tmp_path / "prices.parquet").rename(tmp_path / os.fsdecode(b"\xff.parquet"))
    paths = [tmp_path / "torn.zip", named]
    found = remains.search(data, ["person-0002"], paths)
    assert found.unread == paths[:1] and paths[1] in found.found


def test_a_search_in_several_passes_finds_the_same(small, monkeypatch):
    data, places = Dataset.open(small / "data"), [small / "data", small / "source.jsonl"]
    whole = remains.search(data, ["person-0001", "person-0004"], places)
    monkeypatch.setattr(remains, "MOST_TOKENS", 1)
    parts = remains.search(data, ["person-0001", "person-0004"], places)
    assert whole.found.keys() == parts.found.keys()
    assert {path.name for path in whole.found} == {"source.jsonl", "tokens.npy", "users.parquet"}


def test_runs_of_tokens_are_the_strings_of_their_bytes():
    tokens = np.random.default_rng(0).integers(0, 999, 40)
    for dtype in ("<u2", "<u4", "<i8"):
        array = tokens.astype(dtype)
        width = TOKEN_RUN * array.itemsize
        every = remains.rolling(array.view(np.uint8), [width])[width]
        assert np.array_equal(remains.runs(array), every[:: array.itemsize])


STEPS: list[tuple[accounting.Event, int]] = [(accounting.StepEvent(4.0, 1.0), 1)]
UNKNOWN = [(accounting.cyclic_event(4.0, 0.25, 1, 4), 1)]  # the noise may be correlated


def charge(
    number, state="gone", label="", kind="train", released=STEPS, slack=(0.0, 0.0), planned=STEPS
):
    entry = Entry(number, f"run {number}", kind, "/none/there", "", label, planned, slack)
    return Charge(entry, released, state)


def promise(one, people=3):
    return forgetting_of._of_charge(one, people, 1e-6, Console())


def test_a_run_that_is_not_here_promises_what_group_privacy_gives():
    found = promise(charge(1, planned=UNKNOWN))
    ideal = accounting.group_epsilon(UNKNOWN, 1e-6, 3)
    assert found.how == "group privacy" and ideal <= found.epsilon < 1.01 * ideal
    assert "by group privacy, which is not tight" in found.sentence
    assert promise(charge(1, slack=(1e-3, 1e-10), planned=UNKNOWN)).epsilon > found.epsilon
    assert promise(charge(1), people=0).sentence.endswith("trained on none of them")
    exact = accounting.epsilon(accounting.for_people(STEPS, 3), 1e-6)
    known = promise(charge(1))
    assert known.how == "theorem" and known.epsilon == pytest.approx(exact, rel=1e-3)
    assert known.epsilon < accounting.group_epsilon(STEPS, 1e-6, 3)
    hopeless = promise(charge(1, planned=UNKNOWN), people=10**4)
    assert hopeless.epsilon == np.inf and "no finite epsilon is known" in hopeless.sentence


def test_a_run_without_a_guarantee_promises_nothing_and_says_why():
    seeded, free = promise(charge(1, label=REPRODUCTION)), promise(charge(1, released=None))
    assert seeded.sentence.endswith("promises 3 of them nothing: a known seed")
    assert free.why_not == "without noise" and free.epsilon == np.inf and free.how == ""


def test_all_runs_together_are_composed_and_one_without_a_guarantee_spoils_them():
    def together(*charges, counts=(3, 3)):
        return forgetting_of._together(charges, counts[: len(charges)], 3, 1e-6)

    both = together(charge(1), charge(2))
    event, count = STEPS[0]
    exact = accounting.epsilon(accounting.for_people([(event, 2 * count)], 3), 1e-6)
    assert both.epsilon == pytest.approx(exact, rel=1e-6) and both.how == "theorem"
    grouped = together(charge(1), charge(2, planned=UNKNOWN))
    ideal = accounting.group_epsilon([*STEPS, *UNKNOWN], 1e-6, 3)
    assert ideal <= grouped.epsilon < 1.01 * ideal and grouped.how == "group privacy"
    fewer = together(charge(1), charge(2), counts=(3, 1))
    phases = [*accounting.for_people(STEPS, 3), *STEPS]
    assert fewer.epsilon == pytest.approx(accounting.epsilon(phases, 1e-6), rel=1e-6)
    histogram = [(accounting.PureEvent(0.2), 1)]
    with_it = together(
        charge(1), charge(2, kind="histogram", released=histogram, planned=histogram)
    )
    phases = [*accounting.for_people(STEPS, 3), (accounting.PureEvent(3 * 0.2), 1)]
    assert with_it.how == "theorem"
    assert with_it.epsilon == pytest.approx(accounting.epsilon(phases, 1e-6), rel=1e-6)
    none = together(charge(1), charge(2, label=REPRODUCTION))
    assert none.epsilon == np.inf and "a known seed" in none.sentence
    assert together(charge(1)) is None


@pytest.mark.parametrize("atomic", [True, False])
def test_two_directories_exchange_their_names(tmp_path, monkeypatch, atomic):
    if not atomic:
        monkeypatch.setattr(files_of.ctypes, "CDLL", lambda *_, **__: None)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    files_of.exchange(tmp_path / "a", tmp_path / "b")
    assert [(tmp_path / name / "file").read_text() for name in ("a", "b")] == ["b", "a"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_a_killed_process_left_is_removed_and_a_running_run_is_waited_for(small, monkeypatch):
    users_file(small / "users", ["person-0001"])
    left = small / ".data.forgetting"
    shutil.copytree(small / "data", left)
    running = [charge(1, state="running")]
    with monkeypatch.context() as patch:
        patch.setattr(forgetting_of, "books", lambda *_: Books(running, [], []))
        patch.setattr(forgetting_of, "_counted", lambda *_: 1)
        with refuses("in_place", says="/none/there"):
            ask(small, in_place=True)
    assert not left.exists()
    (small / "link").symlink_to(small / "data")
    ask(small, source=small / "link", in_place=True)
    assert (small / "link").is_symlink() and not left.exists()
    assert not (small / "data").is_symlink() and (small / "data-forgotten.json").exists()
    assert "person-0001" not in Dataset.open(small / "link").people()


@pytest.mark.privacy
@pytest.mark.parametrize("when", ["before", "after"])
def test_nothing_is_certified_before_it_is_done_and_the_same_command_goes_on(
    small, monkeypatch, when
):
    """A kill before the data are in their place, or before the old ones are removed."""
    users_file(small / "users", ["person-0001"])

    remove = shutil.rmtree

    def killed(path, *_, **options):
        if Path(path).suffix not in (".forgetting", ".signed"):
            return remove(path, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        if when == "before":
            patch.setattr(forgetting_of, "exchange", killed)
        ask(small, in_place=True)
    assert not (small / "data-forgotten.json").exists()
    assert ("person-0001" in Dataset.open(small / "data").people()) == (when == "before")
    found = ask(small, in_place=True)
    assert "person-0001" not in Dataset.open(small / "data").people()
    assert found["people"]["number"] == 1 and found["out"] == str(small / "data")
    checks = certificate.check(small / "data-forgotten.json", str(small / "data"), small / "ledger")
    assert all(each.holds for each in checks)
    assert not [name for name in os.listdir(small) if name.startswith(".data")]
    users_file(small / "users", ["person-0002"])  # others are not taken for these
    with refuses("certificate", says="a new file"):
        ask(small, in_place=True)


@pytest.mark.privacy
def test_what_was_stopped_in_its_search_is_done_by_the_same_command(small, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    users_file(small / "users", ["person-0001"])
    ask(small, out=small / "new", dry_run=True, file=small / "place" / "c.json")
    assert not (small / "place").exists()
    assert not (small / "ledger").exists(), "a dry run makes no ledger"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(forgetting_of, "search", killed)
        ask(small, out=small / "new")
    assert not (small / "new").exists()
    found = ask(small, out=small / "new")
    assert found["out"] == str(small / "new") and (small / "new-forgotten.json").exists()
    assert not [name for name in os.listdir(small) if name.startswith(".new")]


@pytest.mark.privacy
def test_the_run_that_lies_at_the_place_of_another_one_promises_nothing_for_it(world, forgotten):
    other = dataclasses.replace(charge(1, state="released"), released=STEPS)
    other = dataclasses.replace(
        other, entry=dataclasses.replace(other.entry, place=str(world.path / "run"))
    )
    found = promise(other)
    exact = accounting.epsilon(accounting.for_people(STEPS, 3), 1e-6)
    assert found.epsilon == pytest.approx(exact, rel=1e-3) and found.place is None


def test_an_evaluation_belongs_to_the_run_above_it(world, forgotten):
    entry = charge(1, kind="evaluation").entry
    place = str(world.path / "run" / "evaluations" / "training")
    assert forgetting_of._home(dataclasses.replace(entry, place=place)) == world.path / "run"


def test_an_id_that_is_a_number_changes_no_number_of_the_certificate(small):
    data = Dataset.open(small / "data")
    request = forgetting_of.Request(data, ["1", "3939"], SecretKey.create(0))
    known = forgetting_of.Promise("run/1", "a3939b", 1, 2.0, 1e-6, "theorem", "of 1")
    shown = known.unnamed(request).as_dict()
    assert shown["run"] == "run/(id)" and shown["why_not"] == "of (id)"
    assert shown["model"] == "a3939b" and "promises 1 of them nothing" in shown["sentence"]


@pytest.mark.parametrize(
    "end, text", [("csv", "user_id\n" + "x" * 200_000), ("jsonl", "[" * 99_999)]
)
def test_a_file_of_users_that_no_reader_takes_is_one_line(small, end, text):
    (small / f"users.{end}").write_text(text)
    with refuses("users", says="in line "):
        forgetting.read_users(small / f"users.{end}", Dataset.open(small / "data"))


def test_an_encrypted_zip_is_listed_as_unread(small):
    path = small / "some.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "text")
    whole = bytearray(path.read_bytes())
    whole[6] |= 1
    whole[whole.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(whole)
    found = remains.search(Dataset.open(small / "data"), ["person-0002"], [path])
    assert found.unread == [path]


def test_other_entries_of_the_data_are_not_removed_and_its_mode_stays(small):
    users_file(small / "users", ["person-0001"])
    notes = small / "data" / "notes.txt"
    notes.write_text("mine")
    with refuses("in_place", says="notes.txt"):
        ask(small, in_place=True)
    assert notes.read_text() == "mine" and "person-0001" in Dataset.open(small / "data").people()
    notes.unlink()
    (small / "data").chmod(0o700)
    ask(small, in_place=True)
    assert (small / "data").stat().st_mode & 0o777 == 0o700


def test_data_are_replaced_by_one_process_at_a_time(small, monkeypatch):
    """A second one, which read them before the first replaced them, would bring texts back."""
    users_file(small / "users", ["person-0001"])
    with files_of.locked("data", small / "data"), refuses("data", says="no other process"):
        ask(small, in_place=True)
    assert "person-0001" in Dataset.open(small / "data").people()

    def replaced(*_):
        (small / "data").rename(small / "elsewhere")
        shutil.copytree(small / "elsewhere", small / "data")

    with monkeypatch.context() as patch:
        patch.setattr(files_of.fcntl, "flock", replaced)
        with refuses("data", says="no other process"):
            ask(small, in_place=True)
    ask(small, in_place=True)
    assert "person-0001" not in Dataset.open(small / "data").people()
