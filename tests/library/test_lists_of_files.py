"""A list of Parquet files is one data set: ids by the one rule, whatever file comes first."""

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data import load
from fedsim.library.tables import source_of

pytestmark = pytest.mark.privacy


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_CACHE_DIR", str(tmp_path / "cache"))


def users_of(tmp_path, *columns):
    files = [tmp_path / f"{i}.parquet" for i in range(len(columns))]
    for file, ids in zip(files, columns, strict=True):
        pq.write_table(pa.table({"who": ids, "text": ["x"] * len(ids)}), file)
    options = {"user_column": "who", "eval_users": 0.0, "eval_examples": False, "num_workers": 1}
    return set(load(source_of(files, user_column="who"), **options).train.user_ids())


def test_the_order_of_the_files_changes_nobodys_id(tmp_path):
    columns = [
        pa.array([16, 7, 8]),
        pa.array(["007", "0x10", "8"]),
        pa.array([7.0, 2.0**53 - 1]),
        pa.array(["ann", "7.0"]).dictionary_encode(),
        pa.array(["ann "], pa.large_string()),
        pa.array([2**40], pa.uint64()),
    ]
    expected = {"16", "7", "8", "007", "0x10", str(2**53 - 1), "ann", str(2**40)}
    for i, several in enumerate(itertools.permutations(columns)):
        if i % 200 == 0:
            assert users_of(tmp_path, *several) == expected


def test_owners_in_lists_are_read_alike(tmp_path):
    columns = [pa.array([[7, 8], [16]]), pa.array([["007", "8"], ["ann"]])]
    for several in (columns, columns[::-1]):
        assert users_of(tmp_path, *several) == {"7", "8", "16", "007", "ann"}
