"""Folders and globs, and what is shown of the columns of a file."""

import json
import shutil

from test_build import texts_of

from fedsim.data.building.build import build
from fedsim.data.building.columns import expected_of


def built(source, tmp_path, **options):
    """(user, text) of what is built of it."""
    options = {"eval_users": 0, "eval_examples": False, **options}
    data = build(source, tmp_path / "out", **options)
    found = texts_of(data.train).items()
    return sorted((user, text) for user, texts in found for text in texts)


def test_a_folder_is_all_files_in_it_that_can_be_read(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"user_id": "ann", "text": "one"}))
    (folder / "settings.json").write_text("{}")
    (folder / "b.tsv").write_text("user_id\ttext\nbob\ttwo\n")
    (folder / "notes.md").write_text("not data")
    (folder / "._a.csv").write_bytes(b"\0\5\x16\7")
    (folder / "more").mkdir()
    (folder / "C.NDJSON").write_text(json.dumps({"user_id": "cid", "text": "three"}))
    assert built(folder, tmp_path) == [("ann", "one"), ("bob", "two"), ("cid", "three")]


def test_a_glob_takes_folders_as_the_shell_would_and_looks_below_them(tmp_path):
    deep = tmp_path / "g" / "deep" / "er"
    deep.mkdir(parents=True)
    for name, user in ((deep / "c", "cat"), (tmp_path / "g" / "a", "ann")):
        name.with_suffix(".jsonl").write_text(json.dumps({"user_id": user, "text": "one"}))
    assert built(tmp_path / "g" / "**" / "*.jsonl", tmp_path) == [("ann", "one"), ("cat", "one")]
    spark = tmp_path / "g" / "table.csv"
    spark.mkdir()
    (spark / "part-0.csv").write_text("user_id,text\nben,two\n")
    (tmp_path / "g" / "file.csv").write_text("user_id,text\ndan,two\n")
    shutil.rmtree(tmp_path / "out")
    assert built(tmp_path / "g" / "*.csv", tmp_path) == [("ben", "two"), ("dan", "two")]


def test_columns_are_shown_where_they_are_no_text():
    for names in (["author", "body"], ["x1", "text"]):
        assert expected_of(names).endswith(f"expected one of {', '.join(names)}")
    for text in ("I am ill", "x" * 41, "last message to the whole group"):
        assert "text" not in expected_of(["text", text]).partition("person")[0]
