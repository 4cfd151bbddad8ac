"""Directories that `datasets.save_to_disk` wrote."""

import json

import datasets
import pytest
from refused import refuses

from fedsim.data.building.build import build

ROWS = {"user_id": ["ann", "ben", "ann"], "text": ["a day", "old maps", "and a night"]}
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}


def built(saved, tmp_path, **options):
    lines = []
    data = build(saved, tmp_path / "out", progress=lines.append, **ALL_IN_TRAIN, **options)
    return data.train, lines


@pytest.fixture
def splits(tmp_path):
    """Two splits, of three rows and of one."""
    whole, part = datasets.Dataset.from_dict(ROWS), datasets.Dataset.from_dict(ROWS).select([1])
    datasets.DatasetDict({"train": whole, "test": part}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_one_split_is_read_and_others_are_named(splits, tmp_path):
    train, lines = built(splits, tmp_path)
    assert (train.num_users, train.num_examples) == (2, 3)
    assert "of what is saved, these splits are not read: test (see split)" in lines


def test_a_split_that_was_asked_for_is_read_and_nothing_is_said(splits, tmp_path):
    train, lines = built(splits, tmp_path, split="test")
    assert (train.num_users, train.num_examples) == (1, 1)
    assert not any("not read" in line for line in lines)
    with refuses("split=dev", says="train, test"):
        built(splits, tmp_path / "dev", split="dev")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"splits": 3}'])
def test_a_damaged_list_of_splits_is_one_line(splits, tmp_path, content):
    (splits / "dataset_dict.json").write_text(content)
    with refuses("data"):
        built(splits, tmp_path)


def test_files_of_a_split_that_its_state_does_not_list_are_not_read(splits, tmp_path):
    state = splits / "train" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": []}))
    with refuses("data"):
        built(splits, tmp_path)
