"""Tables in memory of other libraries: read, or refused in one line."""

import io
import weakref

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from refused import refuses

import fedsim
from fedsim.library import tables
from fedsim.library.tables import source_of

FRAME = pd.DataFrame({"author": ["ann", "ben"] * 20, "body": ["a day", "old maps"] * 20})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))


def rows_of(data, user="author", text="body"):
    table = pq.read_table(source_of(data, user, text))
    return list(zip(*(table[name].to_pylist() for name in (user, text)), strict=True))


ROWS = list(FRAME.itertuples(index=False, name=None))


def test_chunks_of_a_file_are_read_as_the_whole():
    chunks = pd.read_csv(io.StringIO(FRAME.to_csv(index=False)), chunksize=7)
    assert rows_of(chunks) == ROWS
    lines = io.StringIO(FRAME.to_json(orient="records", lines=True))
    assert rows_of(pd.read_json(lines, lines=True, chunksize=7)) == ROWS


def test_chunks_whose_ids_pandas_reads_in_two_ways_are_refused():
    text = "author,body\n007,a\n8,b\nx,c\n007,d\n"
    with refuses("user=author"):
        source_of(pd.read_csv(io.StringIO(text), chunksize=2), "author", "body")
    found = rows_of(pd.read_csv(io.StringIO(text), chunksize=2, dtype=str))
    assert [user for user, _ in found] == ["007", "8", "x", "007"]


@pytest.mark.parametrize(
    "data, what",
    [
        (FRAME.groupby("author"), "data=pandas DataFrameGroupBy"),
        (FRAME.groupby("author")["body"], "data=pandas SeriesGroupBy"),
        (FRAME.set_index("author")["body"], "data=pandas Series"),
        (FRAME.index, "data=pandas RangeIndex"),
        ([FRAME, FRAME], "data=builtins.list"),
        ([{"author": "ann", "body": "secret"}, FRAME], "data=rows of type DataFrame"),
        (iter(["secret"]), "data=rows of type str"),
        ([{"author": "ann", "body": "secret"}, {"body": "secret"}], "user"),
        ([{"author": "ann", "body": "secret"}, {"author": "ben", "body": 3}], "text=body"),
        (datasets.IterableDatasetDict(), "data=IterableDatasetDict"),
        ({"author": ["a", "b"], "body": ["secret", 3]}, "data=builtins.dict"),
        (pd.DataFrame([["ben", "a secret"]], columns=["ann", "my secret"]), "user"),
        (
            pd.read_csv(io.StringIO("author,body\na,secret\nb,c,d,e\n"), chunksize=1),
            "data=pandas TextFileReader",
        ),
    ],
)
def test_what_is_no_table_is_one_line_without_what_is_in_it(data, what):
    with refuses(what) as error:
        source_of(data, "author", "body")
    said = str(error.value)
    assert "\n" not in said and "secret" not in said and "ann" not in said


def test_columns_are_named_by_numbers(tmp_path):
    settings = {
        "epsilon": 8.0,
        "num_steps": 1,
        "batch_size": 1,
        "model": "micro",
        "engine": "local",
    }
    numbered = FRAME.set_axis([0, 1], axis=1)
    with refuses("user", says="user=2: no such column"):
        fedsim.train("uls", numbered, user=2, text=1, run_dir=tmp_path / "no", **settings)
    with refuses("num_steps=0"):  # the columns are there
        settings["num_steps"] = 0
        fedsim.train("uls", numbered, user=0, text=1, run_dir=tmp_path / "no", **settings)
    assert rows_of(numbered, "0", "1") == ROWS


def test_categories_and_views_of_polars_are_read():
    pl = pytest.importorskip("polars")
    table = pl.DataFrame({"author": FRAME.author.to_list(), "body": FRAME.body.to_list()})
    for kind in (pl.String, pl.Categorical, pl.Enum(["ann", "ben"])):
        assert rows_of(table.with_columns(pl.col("author").cast(kind))) == ROWS
    for data in (table.lazy(), table["body"], table.group_by("author")):
        with refuses("data"):
            source_of(data, "author", "body")


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

    source_of(rows(), "author", "body")
    assert len(alive) == 200 and most <= 12
