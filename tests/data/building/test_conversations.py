"""Whom texts are said to: the last other speaker of the conversation, against a loop."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_owners import texts

from fedsim.cli.main import main
from fedsim.data.building.build import build
from fedsim.data.building.columns import Columns
from fedsim.data.building.readers import Part
from fedsim.data.building.sources import SPEAKER, SPOKEN_TO, last_other_speaker, write_conversations
from fedsim.data.dataset import Dataset
from fedsim.errors import DataError

HEARING = [  # conversation, turn, speaker, text: not in order
    ("b", 1, "eve", "b1"),
    ("a", 10, "amy", "a10"),
    ("a", 9, "bob", "a9"),
    ("a", 1, "amy", "a1"),
    ("a", 2, "amy", "a2"),
    ("a", 11, "amy", "a11"),
    ("b", 2, "amy", "b2"),
    ("a", 12, "cat", "a12"),
]
OWNERS = {"a1": "amy", "a2": "amy", "a9": "amy bob", "a10": "amy bob", "a11": "amy bob"}
OWNERS |= {"a12": "amy cat", "b1": "eve", "b2": "amy eve"}
COLUMNS = {"user_column": "who", "conversation_column": "case", "turn_column": "turn"}


def source(tmp_path, rows=HEARING, kind="jsonl", turn: Callable[..., Any] = int):
    named = [
        {"case": where, "turn": None if at is None else turn(at), "who": who, "text": text}
        for where, at, who, text in rows
    ]
    path = tmp_path / f"source.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(named), path, row_group_size=3)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, named)))
    else:
        lines = [",".join(map(str, row.values())) for row in named]
        path.write_text("\n".join(["case,turn,who,text", *lines]))
    return path


def built(tmp_path, file, **options):
    options = {"eval_users": 0.0, "eval_examples": False, "num_workers": 1, **COLUMNS, **options}
    return build(file, tmp_path / "out", **options)


@pytest.mark.parametrize(
    "kind, turn", [("jsonl", int), ("parquet", int), ("csv", int), ("jsonl", str), ("jsonl", float)]
)
def test_a_text_belongs_to_its_speaker_and_to_whoever_spoke_before(tmp_path, kind, turn):
    data = built(tmp_path, source(tmp_path, kind=kind, turn=turn))
    found = {  # of two special tokens one is at the end
        bytes(each + 1 for each in text[:-1]).decode(): " ".join(names)
        for names, several in texts(data.train).items()
        for text in several
    }
    assert found == OWNERS
    assert data.metadata["columns"]["conversation"] == "case"
    assert data.metadata["sources"][0]["name"] == f"source.{kind}"


@pytest.mark.privacy
def test_ids_of_conversations_are_read_as_they_are_written(tmp_path):
    """Numbers of 21 digits are one as floats, and 001 is 1 where all others are numbers."""
    ids = ("100000000000000000001", "100000000000000000002", "001", "1")
    rows = [(where, turn, f"{turn} in {where}", "text") for turn in (1, 2) for where in ids]
    data = built(tmp_path, source(tmp_path, rows, "csv"))
    expected = {f"1 in {where}" for where in ids} | {f"1 in {where} 2 in {where}" for where in ids}
    assert {" ".join(names) for names in texts(data.train)} == expected


@pytest.mark.privacy
@pytest.mark.parametrize("where, same", [("7", True), ("7.0", True), (" 7", True), ("07", False)])
def test_a_conversation_may_be_in_several_files(tmp_path, where, same):
    first = source(tmp_path, [(where, "1", "amy", "one")], "csv")
    first = first.rename(tmp_path / "first.csv")
    others = [("7", "2", "bob", "two"), ("x", "1", "eve", "three")]
    data = built(tmp_path, [first, source(tmp_path, others, "csv")])
    assert (data.train.owners is not None) == same


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("order", [None, "turn"])
def test_turns_are_in_order_whatever_the_file(tmp_path, kind, order):
    """Numbers that floats cannot tell apart, some written as texts, in two files."""
    after, before = 2**60 + 1, 2**60
    first = source(tmp_path, [("a", after, "amy", "x"), ("a", 9, "bob", "x")], kind)
    first = first.rename(tmp_path / f"first.{kind}")
    second = source(tmp_path, [("a", before, "cat", "x")], "jsonl", turn=str)
    if order is None:
        owners = texts(built(tmp_path, [first, second]).train)
    else:
        second = source(tmp_path, [("a", before, "cat", "x")], kind)
        owners = texts(built(tmp_path, [first, second], order_column=order).train)
    assert set(owners) == {("bob",), ("bob", "cat"), ("amy", "cat")}


@pytest.mark.parametrize("text, kind", [("x", pa.large_string()), ([1], pa.large_list(pa.int64()))])
def test_all_texts_together_may_take_more_than_an_array_of_strings_can(text, kind, tmp_path):
    file = source(tmp_path, [("a", 1, "amy", text), ("a", 2, "bob", text)])
    columns = Columns.of("who", "text", conversation="case", turn="turn")
    write_conversations([Part(file)], columns, tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.field("text").type.equals(kind)
    assert {schema.field(name).type for name in (SPEAKER, SPOKEN_TO)} == {pa.large_string()}
    if text == [1]:
        store = built(tmp_path, file).train
        assert store.owners is not None and store.num_tokens == 6


def test_times_with_zones_are_in_order(tmp_path):
    at = ["2020-01-01T10:30:00+02:00", "2020-01-01T09:00:00Z", "2020-01-01T11:30:00+02:00"]
    rows = [("a", time, name, "x") for time, name in zip(at, ("amy", "bob", "cat"), strict=True)]
    owners = texts(built(tmp_path, source(tmp_path, rows, "csv", turn=str)).train)
    assert set(owners) == {("amy",), ("amy", "bob"), ("bob", "cat")}


@pytest.mark.privacy
@pytest.mark.parametrize(
    ("at", "form"),
    [
        (["9:58", "9:59", "10:00"], "%H:%M"),
        (["12/31/19, 11:58 PM", "12/31/19, 11:59 PM", "1/1/20, 12:00 AM"], "%m/%d/%y, %I:%M %p"),
    ],
)
def test_clock_times_are_in_order_or_refused(at, form, tmp_path):
    """As texts, 10:00 is before 9:58: the texts of some would be said to others."""
    rows = [("a", time, name, "x") for time, name in zip(at, ("amy", "bob", "cat"), strict=True)]
    file = source(tmp_path, rows, "jsonl", turn=str)
    with pytest.raises(DataError, match="turn_column=turn: expected numbers or .*--turn-format"):
        built(tmp_path, file)
    owners = texts(built(tmp_path, file, turn_format=form).train)
    assert set(owners) == {("amy",), ("amy", "bob"), ("bob", "cat")}


@pytest.mark.privacy
def test_empty_cells_and_words_for_missing_values_are_no_conversation(tmp_path):
    rows = [
        ("", 1, "amy", "one"),
        ("", 2, "bob", "two"),
        ("NA", 3, "amy", "x"),
        ("NA", 4, "eve", "y"),
    ]
    assert built(tmp_path, source(tmp_path, rows, "csv")).train.owners is None


@pytest.mark.parametrize("where", [["a"], 0.5])
def test_what_is_no_id_of_a_conversation_is_refused(tmp_path, where):
    with pytest.raises(DataError, match="^conversation_column=case: "):
        built(tmp_path, source(tmp_path, [(where, 1, "amy", "one")]))


def test_the_last_other_speaker_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = int(rng.integers(0, 40))
        where, speaker = np.sort(rng.integers(-1, 3, rows)), rng.integers(-1, 4, rows)
        expected = []
        for i in range(rows):
            before = -1
            if speaker[i] >= 0 and where[i] >= 0:
                j = i
                while j >= 0 and where[j] == where[i] and speaker[j] in (speaker[i], -1):
                    j -= 1  # who is nobody has no turn
                before = speaker[j] if j >= 0 and where[j] == where[i] else -1
            expected.append(before)
        assert last_other_speaker(where, speaker).tolist() == expected


def test_texts_without_a_conversation_are_their_speakers_alone(tmp_path):
    rows = [(None, 1, "amy", "one"), (None, 2, "bob", "two")]
    said = []
    assert built(tmp_path, source(tmp_path, rows), progress=said.append).train.owners is None
    assert any(line.startswith("2 rows have no conversation: ") for line in said)


def test_rows_without_a_speaker_are_refused_or_left_out(tmp_path):
    rows = [*HEARING, ("a", 3, None, "nobody")]
    with pytest.raises(DataError, match="user_column=who: 1 null or empty user id"):
        built(tmp_path, source(tmp_path, rows))
    data = built(tmp_path, source(tmp_path, rows), unowned="drop")
    assert data.train.num_examples == len(HEARING)
    assert data.metadata["counts"]["rows_without_user_dropped"] == 1


def test_a_row_without_a_turn_is_named(tmp_path):
    for kind, turn in {"jsonl": None, "csv": "NA"}.items():
        rows = [*HEARING, ("a", turn, "amy", "when?")]
        with pytest.raises(
            DataError, match="turn_column=turn: expected a turn .* none in row 9 .in /"
        ):
            built(tmp_path, source(tmp_path, rows, kind, turn=lambda turn: turn))


def test_the_command_builds_conversations(tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in COLUMNS.items()]
    out = tmp_path / "out"
    main(["data", "build", str(source(tmp_path)), *flags, "--out", str(out), "--eval-users", "0"])
    assert "owners per example" in capsys.readouterr().out.replace("_", " ")
    assert Dataset.open(out).train.owners is not None
