"""Tables in memory of other libraries: read, or refused in one line."""

import shutil
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refuses

import fedsim
from fedsim.data import BuildSettings, source_of
from fedsim.files import sha256_of

COLUMNS = {"user_column": "author", "text_column": "body"}
FRAME = pd.DataFrame({"author": ["ann", "ben"] * 20, "body": ["a day", "old maps"] * 20, "n": 1})
ROWS = FRAME.to_dict("records")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))


def source(data, **columns):
    return source_of(data, BuildSettings(**(columns or COLUMNS)).columns)


def read(data, **columns):
    return pq.read_table(source(data, **columns)).to_pydict()


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        ROWS,
        tuple(ROWS),
        FRAME.to_dict("list"),
        pa.Table.from_pylist(ROWS),
        pa.Table.from_pylist(ROWS).to_reader(7),
        datasets.Dataset.from_list(ROWS[::-1]).select(range(39, -1, -1)),
        FRAME.astype({"author": "category"}),
    ],
    ids=["frame", "dicts", "tuple", "lists", "arrow", "reader", "data set", "categories"],
)
def test_a_table_is_read_whatever_holds_it_and_only_its_two_columns(data):
    assert read(data) == {"author": list(FRAME.author), "body": list(FRAME.body)}


@pytest.mark.parametrize(
    "data, what",
    [
        (FRAME.groupby("author"), "data=DataFrameGroupBy"),
        (FRAME.set_index("author")["body"], "data=Series"),
        ([{"author": "ann", "body": "secret"}, FRAME], "data=list"),
        (["one.parquet", "two.parquet"], "data=list"),
        (iter(ROWS), "data=list_iterator"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "data=IterableDataset"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "user_column"),
        ([{"body": "secret"}], "user_column"),
        ([], "data=an empty list"),
        ([{"author": "ann", "body": "secret"}, {"author": "ben", "body": 3}], "text_column=body"),
        ({"author": ["ann", "ben"], "body": ["secret"]}, "data=dict"),
        ([{"author": "ann", "body": "secret \ud83d"}], "text_column=body"),
        (pd.DataFrame([["ann", "x", "b"]], columns=["author", "body", "author"]), "user_column"),
    ],
)
def test_what_is_no_table_is_one_line_without_what_is_in_it(data, what):
    with refuses(what) as error:
        source(data)
    line = str(error.value)
    assert "\n" not in line and "secret" not in line and "ann" not in line


@pytest.mark.privacy
@pytest.mark.parametrize("kind", [pd.DataFrame, pd.DataFrame.from_records, list])
def test_an_id_is_nobody_elses(kind):
    """Of ids of several types, none is converted: 7 may be "7", and "007" is not 7."""
    with refuses("user_column=author"):
        source(kind([{"author": a, "body": "x"} for a in (7, "007", 8.0)]))
    assert read(kind([{"author": a, "body": "x"} for a in ("7", "007")]))["author"] == ["7", "007"]
    data = fedsim.data.load(source(kind([{"author": 7, "body": "x"}] * 2)), **COLUMNS)
    assert data.people() == ["7"]


def test_columns_without_names_are_numbered_and_names_of_any_kind_are_shown():
    frame = pd.DataFrame([["a", "x"]])
    with refuses("text_column=body", says="author, What is it?"):
        source(pd.DataFrame([["ann", "x"]], columns=["author", "What is it?"]))
    assert read(frame, user_column="0", text_column="1") == {"0": ["a"], "1": ["x"]}


ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
UNFIT = [
    ("secret", "string in place of list"),
    ([ASKED, {**SAID, "content": 3}], "int64 in place of string"),
    ([ASKED, {**SAID, "content": "secret \ud83d"}], "others"),
]


@pytest.mark.parametrize("bad, got", UNFIT)
def test_the_first_row_of_another_type_is_named(bad, got):
    rows = [{"author": "ann", "turns": each} for each in ([ASKED], None, [ASKED, SAID], bad, 7)]
    with refuses("messages_column=turns", says=f"got {got} in row 4") as error:
        source(rows, user_column="author", messages_column="turns")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("names", ["text", "messages tools", "conversations", "prompt completion"])
def test_columns_are_recognised_as_those_of_files_are(names):
    others = {"messages": [SAID], "prompt": "secret", "completion": "x"} if "text" in names else {}
    row = dict.fromkeys(names.split(), [ASKED])
    found = read([{"author": "ann", **others, **row, "note": "secret"}], user_column="author")
    assert found == {name: [value] for name, value in {"author": "ann", **row}.items()}


def test_a_mask_of_turns_beside_chats_is_refused():
    with refuses("column=loss_mask"):
        source([{"author": "ann", "messages": [SAID], "loss_mask": [0]}], user_column="author")


def test_a_table_is_built_with_all_settings_of_a_build(tmp_path):
    built = fedsim.data.build(ROWS, tmp_path / "out", **COLUMNS, min_examples=20, max_length=64)
    assert built.metadata["settings"]["max_length"] == 64 and built.people() == ["ann", "ben"]
    assert "out': 2 users, 36 examples to train on; held out: eval_examples)" in repr(built)
    with refuses("user=author", says="such as user_column"):
        fedsim.data.build(ROWS, tmp_path / "other", user="author")


@pytest.mark.parametrize("user, where", [(1.5, "in the table.$"), (None, "of the table;")])
def test_a_table_has_no_path_in_an_error(user, where, tmp_path):
    with pytest.raises(fedsim.DataError, match=where):
        fedsim.data.build([{**ROWS[0], "author": user}] * 2, tmp_path / "out", **COLUMNS)


@pytest.mark.parametrize("kind", [list, pd.DataFrame, datasets.Dataset.from_list])
def test_a_key_that_only_later_turns_have_is_kept(kind):
    """Also one that says that a turn is not trained on."""
    rows = [{"author": f"u{i}", "turns": [ASKED, SAID]} for i in range(4)]
    rows.append({"author": "z", "turns": [ASKED, {**SAID, "weight": np.int64(0)}]})
    turns = read(kind(rows), user_column="author", messages_column="turns")["turns"]
    assert turns[-1][1]["weight"] == 0 and turns[0][1] == {**SAID, "weight": None}


@pytest.mark.privacy
def test_the_name_of_a_table_confirms_no_guess_of_its_rows(tmp_path, monkeypatch):
    """It is in the settings, and without the key nobody can compute it."""
    first, again = (Path(source(FRAME)) for _ in range(2))
    assert first == again and first.parent.stat().st_mode & 0o77 == 0
    key = first.parent / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "other"))
    other = Path(source(FRAME))
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
