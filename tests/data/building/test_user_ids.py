"""Whose text is it: one rule for ids, whatever the file, and what is not certain is said."""

import csv
import json
import re
import sys
import unicodedata
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data.building import text_files, user_ids
from fedsim.data.building.build import build
from fedsim.data.building.text_files import TextFormat
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
    tmp_path.mkdir(exist_ok=True)
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


def test_texts_with_as_many_digits_as_a_float_keeps_are_told_apart(tmp_path):
    """Such as the times by which Slack names threads."""
    ids = ["1503435956.000247", "1503435956.000248", "-0.000000000000000001", "450359962737049.5"]
    assert len({float(text) for text in ids[:2]}) == 2
    data, _ = built(tmp_path, "jsonl", ids)
    assert data.train.user_ids() == sorted(ids)
    for text in ("4503599627370496.5", "0.30000000000000004", "12345678901234567890.25"):
        with pytest.raises(DataError, match=f"text or whole numbers, got {text} in row 1"):
            built(tmp_path / text, "jsonl", [text])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_floats_with_a_fraction_are_nobodys_ids(kind, tmp_path):
    with pytest.raises(DataError, match="expected text or whole numbers, got 0.5 in row 2"):
        built(tmp_path, kind, [1.0, 0.5])


def test_single_precision_is_exact_up_to_where_it_is():
    tally = Counter()
    exact = pa.array([2.0**24 - 1, float("nan")], pa.float32())
    assert user_ids.as_ids(exact, "user_column=who", range(2), tally).to_pylist() == [
        "16777215",
        None,
    ]
    for rounded in (2**24 + 1, 2**24 + 2):  # the first is 2^24, as its neighbour is
        with pytest.raises(DataError, match="got 1677721[68]"):
            user_ids.as_ids(pa.array(np.float32([rounded])), "user_column=who", [0], tally)


@pytest.mark.parametrize(
    "ids",
    [
        *(["007", "7"], ["Ann", "ann"], ["a b", "ab"], ["x", "x\u200b"], ["3.1", "3.10"]),
        *(["7", "7,0"], ["3,1", "3,10"], ["3,1", "3.1"], ["STRASSE", "straße"], ["ab", "a\u2028b"]),
    ],
)
def test_ids_that_look_alike_stay_apart_and_are_said(ids, tmp_path):
    data, told = built(tmp_path, "jsonl", [*ids, "other"])
    assert data.train.num_users == 3
    assert data.metadata["counts"]["users_that_look_alike"] == 2
    assert any(f"as {ids[0]!r} and {ids[1]!r} do" in line for line in told)


def unseen():
    """Characters that one does not see: of format and control, and what Unicode calls ignorable."""
    ignorable = [0x34F, 0x115F, 0x17B4, 0x180B, 0x3164, 0xFE00, 0xFE0F, 0xFFA0, 0xE0100, 0xE01EF]
    of_format = [i for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) == "Cf"]
    control = [i for i in range(0x20) if chr(i) not in "\t\n\r\x1f"] + [0x7F, 0x85]
    return [chr(i) for i in (*ignorable, *of_format, *control)]


def test_every_mark_that_one_does_not_see_is_said_and_can_be_stripped(tmp_path):
    marks = unseen()
    assert len(marks) > 190 and {"\0", "\u202a", "\u2066", "\u061c", "\u00ad", "\ufe0f"} <= set(
        marks
    )
    names = [f"p{i}x" for i in range(len(marks))]
    marked = [f"p{mark}{i}x{mark}" for i, mark in enumerate(marks)]
    column = pa.array([*names, *marked])
    assert user_ids.look_alikes(column)[0] == 2 * len(marks)
    tally = Counter()
    found = user_ids.as_ids(column, "who", range(len(column)), tally, ("strip-marks",))
    assert found.to_pylist() == names * 2
    assert tally["user_ids_normalised"] == len(marks)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_what_a_person_says_makes_one_user_of_several_spellings(kind, tmp_path):
    ids = ["Ann", "ANN\u200b", "\uff21nn", "\u202aann\u202c", "ben", "NAN", "\uff11"]
    ids += [None, "\u200b", "N\u200bA"]
    how = {"unowned": "drop"}
    data, told = built(tmp_path / "none", kind, ids, **how)
    assert data.train.num_users == 8 + 1 and "normalise_ids" not in data.metadata["columns"]
    data, told = built(
        tmp_path / "all", kind, ids, normalise_ids="casefold, nfkc,strip-marks", **how
    )
    assert data.train.user_ids() == ["1", "ann", "ben", "nan"]
    assert data.metadata["counts"]["rows_without_user_dropped"] == 3
    assert data.metadata["columns"]["normalise_ids"] == list(user_ids.STEPS)
    assert data.metadata["unicode"] == unicodedata.unidata_version
    assert "6 rows have a user id that normalise_ids changed" in told
    data, _ = built(tmp_path / "one", kind, ids, normalise_ids=("casefold",), **how)
    assert "ann" in data.train.user_ids() and "\uff41nn" in data.train.user_ids()
    with pytest.raises(DataError, match="normalise_ids=lower: expected some of strip-marks, nfkc"):
        built(tmp_path / "bad", kind, ids, normalise_ids="lower")


def test_a_step_that_is_done_again_changes_nothing():
    several = [user_ids.STEPS, ("casefold",), ("nfkc", "casefold"), ("strip-marks", "nfkc")]
    for how in several:
        for i in (*range(0x3000), 0xFB13, 0xFF21, 0x1D400):
            once = user_ids.fold(f"a{chr(i)}\u0345", how)
            assert user_ids.fold(once, how) == once


ROUNDED = ["1.23456789012345677E18", "1.34E7", "1,23457E+18", "1E+18", "12e+17", "-1.5E-7"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("number", [*ROUNDED, "1.5D+18", ".5e3"])
def test_numbers_that_programs_have_rounded_are_refused(kind, number, tmp_path):
    with pytest.raises(DataError, match=f"got {re.escape(number)} in row 2; ids that were read as"):
        built(tmp_path, kind, ["ann", number])


def test_ids_that_may_have_been_rounded_are_said(tmp_path):
    data, told = built(tmp_path, "csv", ["1e18", "5e-7", "550e8400", "e5", "ann"])
    assert data.train.user_ids() == ["1e18", "550e8400", "5e-7", "ann", "e5"]
    assert data.metadata["counts"]["user_ids_like_exponents"] == 2
    assert any(line.startswith("2 rows have a user id like 1E18, which") for line in told)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_list_of_people_in_one_cell_is_said(kind, tmp_path):
    ids = ["ann@x.org; bob@x.org", '["bob@x.org"]', "['cy@x.org', 'di@x.org']", "[deleted]", "bob"]
    data, told = built(tmp_path, kind, ids)
    assert data.train.num_users == 5 and data.metadata["counts"]["owners_like_several"] == 3
    assert any(line.startswith("3 rows have an owner with a comma") for line in told)


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
    text_files.check_csv(file, TextFormat())
