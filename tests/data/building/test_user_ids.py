"""Whose text is it: one rule for ids, whatever the file."""

import json

import numpy as np
import pyarrow as pa
import pytest

from fedsim.data.building import user_ids
from fedsim.data.building.build import build
from fedsim.errors import DataError, brief

pytestmark = pytest.mark.privacy
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}


def test_single_precision_is_exact_up_to_where_it_is():
    exact = pa.array([2.0**24 - 1, float("nan")], pa.float32())
    assert user_ids.as_ids(exact, "user_column=who", range(2)).to_pylist() == ["16777215", None]
    for rounded in (2**24 + 1, 2**24 + 2):  # the first is 2^24, as its neighbour is
        with pytest.raises(DataError, match="got 1677721[68]"):
            user_ids.as_ids(pa.array(np.float32([rounded])), "user_column=who", [0])


LOOK_ALIKE = [["007", "7"], ["Ann", "ann"], ["a b", "ab"], ["x", "x\u200b"], ["3.1", "3.10"]]
LOOK_ALIKE += [["STRASSE", "stra\u00dfe"], ["ab", "a\u2028b"], ["a\0b", "ab"]]


@pytest.mark.parametrize("ids", LOOK_ALIKE)
def test_ids_that_look_alike_stay_apart_and_are_counted(ids, tmp_path):
    file, told, every = tmp_path / "x.jsonl", [], [ids[0]] * 100 + ids
    file.write_text("".join(json.dumps({"who": one, "text": "x"}) + "\n" for one in every))
    data = build(file, tmp_path / "out", user_column="who", progress=told.append, **ALL_IN_TRAIN)
    assert data.train.num_users == 2 == data.metadata["counts"]["users_that_look_alike"]
    assert any(f"as {ids[0]!r} and {ids[1]!r} do" in line for line in told)
    many = f"the user {brief(ids[0])} has 101 of 102 texts: people who share an id are protected as"
    assert f"{many} one" in told
