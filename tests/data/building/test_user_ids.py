"""Whose text is it: one rule for ids, whatever the file, and what is not certain is said."""

import csv
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data.building import csv_records, user_ids
from fedsim.data.building.build import build
from fedsim.data.building.form import Form
from fedsim.errors import DataError

pytestmark = pytest.mark.privacy
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}


def write(path, ids):
    """A file whose column `who` has these ids, as a person's tools would write them."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            rows = [("" if one is None else one, "x") for one in ids]
            csv.writer(file).writerows([("who", "text"), *rows])
    elif path.suffix == ".jsonl":
        lines = (json.dumps({"who": one, "text": "x"}) + "\n" for one in ids)
        path.write_text("".join(lines))
    else:
        pq.write_table(pa.table({"who": ids, "text": ["x"] * len(ids)}), path)
    return path


def built(tmp_path, kind, ids, **options):
    told = []
    file = write(tmp_path / f"x.{kind}", ids)
    options = {"user_column": "who", "progress": told.append, **ALL_IN_TRAIN, **options}
    return build(file, tmp_path / "out", **options), told


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_one_user_is_one_user_however_the_id_is_written(kind, tmp_path):
    ids = ["1", "1.0", " 1", "1\u00a0", "ann", "ann ", "b/c"]
    data, told = built(tmp_path, kind, ids)
    assert data.train.user_ids() == ["1", "ann", "b/c"]
    counts = data.metadata["counts"]
    assert (counts["user_ids_trimmed"], counts["user_ids_without_fraction"]) == (3, 1)
    assert any("3 rows have white space around the user id" in line for line in told)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_words_for_nobody_are_nobody(kind, tmp_path):
    ids = ["ann", None, "NA", "nan", "None", " NULL ", "<NA>", "Nancy", "na"]
    with pytest.raises(DataError, match=r"6 null or empty user ids .*\(rows 2, 3, 4, 5, 6, "):
        built(tmp_path, kind, ids)
    data, _ = built(tmp_path, kind, ids, unowned="drop")
    assert data.train.user_ids() == ["Nancy", "ann", "na"]
    counts = data.metadata["counts"]
    assert (counts["rows_without_user_dropped"], counts["words_for_nobody"]) == (6, 5)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_whole_numbers_that_pandas_wrote_with_gaps_are_whole_numbers(kind, tmp_path):
    data, _ = built(tmp_path, kind, [7.0, None, 12.0, 7.0], unowned="drop")
    assert data.train.user_ids() == ["12", "7"] and data.metadata["counts"]["rows"] == 4


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("number", [0.1 + 0.2, float(2**53 + 2), 1e300])
def test_numbers_that_may_have_been_others_are_refused(kind, number, tmp_path):
    with pytest.raises(DataError, match="expected text or whole numbers, got .* in row 2"):
        built(tmp_path, kind, [1.0, number])


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_texts_like_versions_are_texts_and_each_spelling_is_a_user(kind, tmp_path):
    data, told = built(tmp_path, kind, ["3.1", "3.10", "3.10", "3.10.2", "7.0"])
    assert data.train.user_ids() == ["3.1", "3.10", "3.10.2", "7"]
    assert data.metadata["counts"]["user_ids_like_fractions"] == 3
    assert "1 row has a user id like 7.0, which is 7" in told
    assert any(line.startswith("3 rows have a user id like 3.10, which stays") for line in told)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_floats_with_a_fraction_are_nobodys_ids(kind, tmp_path):
    with pytest.raises(DataError, match="expected text or whole numbers, got 0.5 in row 2"):
        built(tmp_path, kind, [1.0, 0.5])


def test_single_precision_is_exact_up_to_where_it_is():
    tally = Counter()
    exact = pa.array([2.0**24, float("nan")], pa.float32())
    assert user_ids.as_ids(exact, "user_column=who", range(2), tally).to_pylist() == [
        "16777216",
        None,
    ]
    with pytest.raises(DataError, match="got 16777218"):
        user_ids.as_ids(pa.array([2.0**24 + 2], pa.float32()), "user_column=who", [0], tally)


@pytest.mark.parametrize(
    "ids", [["007", "7"], ["Ann", "ann"], ["a b", "ab"], ["x", "x\u200b"], ["3.1", "3.10"]]
)
def test_ids_that_look_alike_stay_apart_and_are_said(ids, tmp_path):
    data, told = built(tmp_path, "jsonl", [*ids, "other"])
    assert data.train.num_users == 3
    assert data.metadata["counts"]["users_that_look_alike"] == 2
    assert any(f"as {ids[0]!r} and {ids[1]!r} do" in line for line in told)


def test_owners_of_a_text_are_read_by_the_same_rule(tmp_path):
    rows = [{"who": ["1.0", "2"], "text": "x"}, {"who": [" 1", "2"], "text": "y"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"user_column": "who", **ALL_IN_TRAIN}
    data = build(tmp_path / "x.jsonl", tmp_path / "out", **options)
    assert data.train.num_users == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_inside_another_is_named_with_a_dot(kind, tmp_path):
    users = [{"id": "a", "at": {"site": "x"}}, {"id": "b", "at": {"site": "x"}}]
    file = tmp_path / f"x.{kind}"
    if kind == "jsonl":
        lines = (json.dumps({"user": user, "text": "hi"}) + "\n" for user in users)
        file.write_text("".join(lines))
    else:
        pq.write_table(pa.table({"user": users, "text": ["hi", "ho"]}), file)
    data = build(file, tmp_path / "id", user_column="user.id", **ALL_IN_TRAIN)
    assert data.train.user_ids() == ["a", "b"]
    columns = {"user_column": ["user.at.site", "user.id"]}
    assert build(file, tmp_path / "site", **columns, **ALL_IN_TRAIN).train.user_ids() == [
        "x/a",
        "x/b",
    ]
    with pytest.raises(DataError, match="expected one of user, user.id, user.at, user.at.site"):
        build(file, tmp_path / "none", user_column="user.name")


FINE = [
    'user,text\nu1,"a\nb"\nu2,"say ""hi"""\n',
    'user,text\nu1,5" disk\nu2,x"y"\r\nu3,"z"',
    '\ufeff"user","te,xt"\n"u1","a,b"\n',
    "user,text\n\nu1,\n",
]


@pytest.mark.parametrize("text", FINE)
def test_quotations_that_end_where_fields_do_are_fine(text, tmp_path):
    file = tmp_path / "x.csv"
    file.write_text(text, newline="")
    csv_records.check(file, Form())
