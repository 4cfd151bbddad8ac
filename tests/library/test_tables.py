"""Tables in memory of other libraries: read, or refused in one line."""

import io
import json
import shutil
import weakref
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset
from refused import refuses

import fedsim
from fedsim.files import sha256_of
from fedsim.library import tables
from fedsim.library.tables import source_of

COLUMNS = {"user_column": "author", "text_column": "body"}
FRAME = pd.DataFrame({"author": ["ann", "ben"] * 20, "body": ["a day", "old maps"] * 20})
HALF = pd.DataFrame({"text": ["a \ud83d day", None], "other": ["ann", "ben"]}, dtype=object)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))


def rows_of(data, user="author", text="body"):
    table = pq.read_table(source_of(data, user_column=user, text_column=text))
    return list(zip(*(table[name].to_pylist() for name in (user, text)), strict=True))


ROWS = list(FRAME.itertuples(index=False, name=None))


def test_record_batches_of_other_tools_are_read(tmp_path):
    table = pa.Table.from_pandas(FRAME)
    pq.write_table(table, tmp_path / "table.parquet")
    for data in (table.to_reader(7), dataset(tmp_path / "table.parquet")):
        assert rows_of(data) == ROWS


def test_half_of_a_surrogate_pair_in_a_text_is_the_replacement_character():
    frame = HALF.rename(columns={"other": "author", "text": "body"})
    assert rows_of(frame) == [("ann", "a \ufffd day"), ("ben", None)]


@pytest.mark.parametrize(
    "data, what",
    [
        (FRAME.groupby("author"), "data=pandas DataFrameGroupBy"),
        (FRAME.set_index("author")["body"], "data=pandas Series"),
        ([{"author": "ann", "body": "secret"}, FRAME], "data=rows of type DataFrame"),
        (iter(["secret"]), "data=rows of type str"),
        ([{"author": "ann", "body": "secret"}, {"body": "secret"}], "user_column"),
        ([{"author": "ann", "body": "secret"}, {"author": "ben", "body": 3}], "text_column=body"),
        (datasets.IterableDatasetDict(), "data=IterableDatasetDict"),
        ({"author": ["a", "b"], "body": ["secret", 3]}, "data=builtins.dict"),
        (
            pd.read_csv(io.StringIO("author,body\na,secret\n"), chunksize=1),
            "data=pandas TextFileReader",
        ),
        (["one.parquet", "two.parquet"], "data=list"),
        (HALF.rename(columns={"text": "author", "other": "body"}), "user_column=author"),
    ],
)
def test_what_is_no_table_is_one_line_without_what_is_in_it(data, what):
    with refuses(what) as error:
        source_of(data, **COLUMNS)
    said = str(error.value)
    assert "\n" not in said and "secret" not in said and "ann" not in said


def dicts():
    return FRAME.assign(likes=1).to_dict("records")


@pytest.mark.parametrize(
    "data",
    [
        dicts(),
        tuple(dicts()),
        iter(dicts()),
        datasets.IterableDataset.from_generator(dicts),
        datasets.Dataset.from_list(dicts()).to_iterable_dataset(num_shards=3),
    ],
    ids=["list", "tuple", "iterator", "stream", "shards"],
)
def test_dicts_and_streams_are_read_as_a_table(data, monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 7)
    assert rows_of(data) == ROWS


@pytest.mark.privacy
def test_in_dicts_an_id_is_the_same_user_as_text_or_number():
    assert [user for user, _ in rows_of([{"author": a, "body": "x"} for a in (7, "7", "b")])] == [
        "7",
        "7",
        "b",
    ]


@pytest.mark.privacy
def test_an_id_keeps_its_zeros_after_parts_with_numbers(monkeypatch):
    monkeypatch.setattr(tables, "ROWS", 1)
    found = rows_of([{"author": a, "body": "x"} for a in (8.0, "007", 7, "8")])
    assert [user for user, _ in found] == ["8", "007", "7", "8"]


def test_a_stream_is_not_held_whole(monkeypatch):
    """While it is written, only the rows of two parts are in memory."""

    class Row(dict):
        __slots__ = ("__weakref__",)

    monkeypatch.setattr(tables, "ROWS", 5)
    alive, most = [], 0

    def rows():
        nonlocal most
        for i in range(200):
            row = Row(author=f"a{i}", body="x")
            alive.append(weakref.ref(row))
            most = max(most, sum(ref() is not None for ref in alive))
            yield row

    source_of(rows(), **COLUMNS)
    assert len(alive) == 200 and most <= 12


ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}


def chats_in(data):
    table = pq.read_table(source_of(data, user_column="author", messages_column="turns"))
    return [json.loads(cell) for cell in table["turns"].to_pylist()]


def test_a_key_that_only_later_turns_have_is_kept(monkeypatch):
    """Also one that says that a turn is not trained on."""
    monkeypatch.setattr(tables, "ROWS", 2)
    rows = [{"author": f"u{i}", "turns": [ASKED, SAID]} for i in range(4)]
    rows.append({"author": "z", "turns": [ASKED, {**SAID, "weight": 0}]})
    for data in (rows, iter(rows), pd.DataFrame(rows), datasets.Dataset.from_list(rows)):
        found = chats_in(data)
        assert found[-1][1]["weight"] == 0 and found[0][1]["content"] == "a"


def test_contents_of_several_kinds_and_numpy_are_chats_too():
    parts = {**ASKED, "content": [{"type": "text", "text": "q"}]}
    weighed = {**SAID, "weight": np.int64(0)}
    rows = [{"author": "a", "turns": np.array([parts, weighed], object)}]
    rows += [{"author": "b", "turns": json.dumps([ASKED, SAID])}]
    first, second = chats_in(pd.DataFrame(rows))
    assert first == [parts, {**SAID, "weight": 0}] and second == [ASKED, SAID]
    with refuses("messages_column", says="turns"):
        chats_in([{"author": "a", "turns": [{**ASKED, "content": b"\xff"}]}])
    with refuses("messages_column", says="no such column"):
        chats_in([{"author": "a"}])


@pytest.mark.privacy
def test_the_name_of_a_table_confirms_no_guess_of_its_rows(tmp_path, monkeypatch):
    """It is in the settings, and without the key nobody can compute it."""
    first, again = (Path(source_of(FRAME, **COLUMNS)) for _ in range(2))
    assert first == again and first.parent.stat().st_mode & 0o77 == 0
    key = first.parent / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "other"))
    other = Path(source_of(FRAME, **COLUMNS))
    assert other.read_bytes() == first.read_bytes() and other.name != first.name
    assert first.stem not in sha256_of(first)


def test_a_run_goes_on_with_the_same_table_after_the_cache_was_cleared(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    names = {"user": "author", "text": "body", "run_dir": tmp_path / "run", "output": "quiet"}
    flags = {"epsilon": 8, "num_steps": 1, "batch_size": 4, "model": "micro", "engine": "local"}
    flags |= {"strategy": "scan", "rows_per_pass": 1, "max_length": 8}
    frame = pd.DataFrame({"author": map(str, range(40)), "body": FRAME.body})
    run = fedsim.train("uls", frame, **flags, **names)
    shutil.rmtree(tmp_path / "cache")
    done = fedsim.train("uls", frame, resume=True, **flags, **names)
    assert done.summary["params_sha256"] == run.summary["params_sha256"]
    changed = frame.assign(body=frame.body[::-1].to_numpy())
    with refuses("data", says="was started"):
        fedsim.train("uls", changed, resume=True, **flags, **names)
