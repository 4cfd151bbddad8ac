"""Columns become user ids, texts and an order; what cannot is refused."""

import pyarrow as pa
import pytest

from fedsim.data.building.columns import Columns, is_blank, normalise
from fedsim.errors import DataError


def normalised(columns, first_row=0, **table):
    return normalise(pa.RecordBatch.from_pydict(table), columns, first_row).to_pydict()


def test_one_user_column_is_taken_as_it_is():
    columns = Columns.of("who", "what")
    found = normalised(columns, who=[7, 10], what=["a", "b"], other=[1.0, 2.0])
    assert found == {"user_id": ["7", "10"], "text": ["a", "b"]}


def test_several_user_columns_never_make_two_users_one():
    columns = Columns.of(["site", "name"], "text")
    sites, names = ["a", "a/b", "a\\", "a", None, "a"], ["b/c", "c", "/b", "\\/b", "b", " "]
    ids = normalised(columns, site=sites, name=names, text=["x"] * 6)["user_id"]
    assert ids[4:] == [None, None] and len(set(ids[:4])) == 4
    assert normalised(columns, site=["so"], name=[12], text=["x"])["user_id"] == ["so/12"]


def test_several_text_columns_are_joined_and_nulls_skipped():
    columns = Columns.of("user_id", ["title", "body"])
    found = normalised(columns, user_id=["u"] * 3, title=["T", None, None], body=["b", "c", None])
    assert found["text"] == ["T\nb", "c", ""]
    assert is_blank(pa.array(found["text"])).tolist() == [False, False, True]


def test_a_url_column_makes_the_domain_the_user():
    columns = Columns.of("user_id", "text", url="url")
    urls = ["http://x.a.org/1", "https://a.org", None, "http://localhost/"]
    assert normalised(columns, url=urls, text=["t"] * 4)["user_id"] == [
        "a.org",
        "a.org",
        None,
        None,
    ]


def test_token_lists_are_kept():
    columns = Columns.of("user_id", "ids")
    found = normalised(columns, user_id=["u", "v"], ids=[[1, 2], []])
    assert found["text"] == [[1, 2], []]
    assert is_blank(pa.array(found["text"])).tolist() == [False, True]


@pytest.mark.parametrize("column", ["user_id", "text"])
def test_bytes_that_are_no_utf8_are_refused_with_their_row(column):
    good = pa.array(["a", "b", "c"])
    bad = pa.Array.from_buffers(pa.string(), 3, [None, good.buffers()[1], pa.py_buffer(b"a\xffc")])
    columns = {"user_id": good, "text": good, column: bad}
    with pytest.raises(DataError, match=f"{column.removesuffix('_id')}.*UTF-8.*in row 12$"):
        normalised(Columns.of("user_id", "text"), first_row=10, **columns)
