"""Building from files: formats, splits, order, bytes, and every kind of bad input."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from learnt import learnt
from refused import refuses

from fedsim.data.building.build import build
from fedsim.data.dataset import is_held_out
from fedsim.data.tokenizer import Tokenizer
from fedsim.files import sha256_of

ROWS = [(f"user {i % 17}", f"text {i} of it") for i in range(300)]
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}


def parquet(path, rows=ROWS, **columns):
    users, texts = zip(*rows, strict=True) if rows else ((), ())
    table = {"user_id": pa.array(users), "text": pa.array(texts), **columns}
    pq.write_table(pa.table(table), path)
    return path


def texts_of(store, tokenizer=None):
    """{user id: texts} as the store's tokens decode."""
    if store is None:
        return {}
    tokenizer = tokenizer or Tokenizer.bytes()
    tokens, sizes = store.gather(np.arange(store.num_examples), store.max_length)
    texts = [tokenizer.decode(t[:n]) for t, n in zip(tokens, sizes, strict=True)]
    bounds = zip(store.user_ids(), store.offsets[:-1], store.offsets[1:], strict=True)
    return {user: texts[start:end] for user, start, end in bounds}


def by_user(rows):
    users = sorted({str(user) for user, _ in rows})
    return {user: [text for owner, text in rows if str(owner) == user] for user in users}


def digests(directory):
    """{relative path: sha256} of all files below."""
    files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256_of(path) for path in files}


def test_many_files_and_globs_join_a_users_rows(tmp_path):
    for i in range(3):
        parquet(tmp_path / f"part-{i}.parquet", ROWS[100 * i : 100 * (i + 1)])
    data = build(tmp_path / "part-*.parquet", tmp_path / "out", **ALL_IN_TRAIN)
    assert texts_of(data.train) == by_user(ROWS)
    assert [s["name"] for s in data.metadata["sources"]] == [f"part-{i}.parquet" for i in range(3)]
    (tmp_path / "link.parquet").symlink_to(parquet(tmp_path / "all.parquet"))
    sources = [tmp_path / "link.parquet", tmp_path / "all.parquet", tmp_path / "a*.parquet"]
    one = build(sources, tmp_path / "one", **ALL_IN_TRAIN)  # a file is read once
    assert one.train.fingerprint == data.train.fingerprint
    assert [about["name"] for about in one.metadata["sources"]] == ["link.parquet"]


@pytest.mark.privacy
def test_users_keep_their_split_when_texts_and_users_are_added(tmp_path):
    old_rows = [(f"user {i % 23:02}", f"text {i}") for i in range(230)]
    later = [(f"user {i % 40:02}", f"later {i}") for i in range(0, 240, 2)]
    later += [("a first", f"first {i}") for i in range(25)]
    old_file = parquet(tmp_path / "old.parquet", old_rows)
    old = build(old_file, tmp_path / "old", eval_users=0.2)
    both_files = [old_file, parquet(tmp_path / "later.parquet", later)]
    both = build(both_files, tmp_path / "both", eval_users=0.2)
    was, now = ((texts_of(data.train), texts_of(data.eval_users)) for data in (old, both))
    for before, after in zip(was, now, strict=True):
        assert set(before) < set(after)
        assert set(after) & set(old.people()) == set(before)
    for user, texts in was[1].items():
        assert now[1][user][: len(texts)] == texts


def cut_finely(monkeypatch):
    """Many row groups, many blocks, nothing at its usual size."""
    monkeypatch.setattr("fedsim.data.building.sources.READ_ROWS", 64)
    monkeypatch.setattr("fedsim.data.building.sorting.BLOCK_ROWS", 50)


@pytest.mark.parametrize("kind", ["bytes", "wordpiece", "bpe"])
def test_the_same_input_gives_the_same_bytes(tmp_path, monkeypatch, kind):
    file, tokenizer = parquet(tmp_path / "a.parquet", ROWS * 5), "bytes"
    if kind != "bytes":
        tokenizer = learnt(kind, [text for _, text in ROWS], 400, tmp_path / "learnt.json")
    build(file, tmp_path / "one", tokenizer=tokenizer)
    cut_finely(monkeypatch)
    build(file, tmp_path / "two", tokenizer=tokenizer)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert str(tmp_path) not in (tmp_path / "one" / "metadata.json").read_text()


def test_every_split_is_whole(tmp_path, monkeypatch, rng):
    """Against plain Python, with everything cut as finely as it goes and users of all sizes."""
    cut_finely(monkeypatch)
    sizes = [*rng.integers(1, 9, 60), 70, 250]
    users = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()
    days = rng.integers(0, 100, len(users)).tolist()
    rows = [(f"u{user}", f"{user} {i}") for i, user in enumerate(users)]
    file = parquet(tmp_path / "a.parquet", rows, day=pa.array(days))
    options = {"order_column": "day", "test_from": "80", "eval_users": 0.2, "min_examples": 3}
    data = build(file, tmp_path / "out", **options)
    expected = {name: {} for name in ("train", "eval_users", "eval_examples", "test")}
    numbered = list(enumerate(zip(rows, days, strict=True)))
    for user in {user for user, _ in rows}:
        own = [(day, i, text) for i, ((u, text), day) in numbered if u == user]
        texts = [text for *_, text in sorted(own)]
        late = [text for day, _, text in sorted(own) if day >= 80]
        early = [text for text in texts if text not in late]
        if is_held_out(user, 0.2):
            late, early = [], []
            expected["eval_users"][user] = texts if len(texts) >= 3 else []
        held = min(32, -(-len(early) // 10))
        if len(early) >= 3:
            expected["eval_examples"][user] = early[:held]
            expected["train"][user] = early[held:]
        expected["test"][user] = late
    for name, of_user in expected.items():
        assert texts_of(getattr(data, name)) == {u: t for u, t in of_user.items() if t}


BAD = "max_length=1 long_texts=wrap rows_without_user=keep min_examples=0 min_examples=99 "
BAD += "test_from=2018-01-01 owners=link eval_users=1.0 eval_users=0.99999 tokenizer=nonsense "
BAD += "order_column=when user_column=text delimiter=;"


@pytest.mark.parametrize("option", BAD.split())
def test_bad_options_are_named_and_leave_nothing(tmp_path, option):
    file = parquet(tmp_path / "a.parquet")
    field, value = option.split("=")
    number = value.replace(".", "").isdigit()
    with refuses(field) as raised:
        build([file], tmp_path / "out", **{field: json.loads(value) if number else value})
    assert str(raised.value).startswith(f"{option}: ")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
@pytest.mark.privacy
def test_a_build_after_a_killed_one_starts_again_and_removes_what_it_left(tmp_path):
    """SIGKILL while two processes tokenise 8 files."""
    for number in range(8):
        parquet(tmp_path / f"{number}.parquet", ROWS * 30)
    (tmp_path / "script.py").write_text(KILLED)
    (tmp_path / "killing.py").write_text(KILLING)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "*.parquet", tmp_path / "out"]
    killed = subprocess.run([*command, "kill"], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.*")
    assert list(left.glob("rows/*.parquet")) and not (tmp_path / "out").exists()
    subprocess.run([*command, "finish"], check=True, timeout=300)
    assert not list(tmp_path.glob(".out.*"))
    build(tmp_path / "*.parquet", tmp_path / "whole", num_workers=1)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


KILLED = """
import sys
from fedsim.data.building import build
import killing

if __name__ == "__main__":
    if sys.argv[3] == "kill":
        build.write_rows = killing.write_rows
    build.SMALL_BYTES = 0
    build.build(sys.argv[1], sys.argv[2], num_workers=2)
"""

KILLING = """
import os, signal, time
from fedsim.data.building import tokenised

def write_rows(item, *, encoding):
    record = tokenised.write_rows(item, encoding=encoding)
    if item[0] >= 2:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # but they end with their parent
    return record
"""
