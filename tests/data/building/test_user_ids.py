"""Whose text is it: one rule for ids, whatever the file, and what is not certain is said."""

import csv
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data.building import user_ids
from fedsim.data.building.build import build
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


LOOK_ALIKE = [["007", "7"], ["Ann", "ann"], ["a b", "ab"], ["x", "x\u200b"], ["3.1", "3.10"]]
LOOK_ALIKE += [["STRASSE", "stra\u00dfe"], ["ab", "a\u2028b"], ["a\0b", "ab"]]


@pytest.mark.parametrize("ids", LOOK_ALIKE)
def test_ids_that_look_alike_stay_apart_and_are_said(ids, tmp_path):
    data, told = built(tmp_path, "jsonl", [*ids, "other"])
    assert data.train.num_users == 3
    assert data.metadata["counts"]["users_that_look_alike"] == 2
    assert any(f"as {ids[0]!r} and {ids[1]!r} do" in line for line in told)
