"""Files as people have them: other delimiters and encodings, JSON lists, folders of all of it."""

import gzip
import json
import shutil

import pytest
from test_build import texts_of

from fedsim.data.building.build import build
from fedsim.errors import DataError

ROWS = [("ann", "caf\u00e9; or tea"), ("bob", 'say "\u00e7a"'), ("ann", "two\nlines")]


def built(source, tmp_path, **options):
    """(user, text) of what is built of it."""
    options = {"eval_users": 0, "eval_examples": False, **options}
    data = build(source, tmp_path / "out", **options)
    found = texts_of(data.train).items()
    return sorted((user, text) for user, texts in found for text in texts)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.json"])
def test_lines_of_json_are_read_in_any_encoding(name, encoding, tmp_path):
    rows = [{"user_id": user, "text": text} for user, text in ROWS]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(lines.encode(encoding))
    assert built(tmp_path / name, tmp_path, encoding=encoding) == sorted(ROWS)
    if encoding == "utf-16":
        with pytest.raises(DataError, match="it is UTF-16: encoding=utf-16"):
            build(tmp_path / name, tmp_path / "without")


def test_a_folder_is_all_files_in_it_that_can_be_read(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"user_id": "ann", "text": "one"}))
    (folder / "settings.json").write_text("{}")
    (folder / "b.tsv").write_text("user_id\ttext\nbob\ttwo\n")
    (folder / "notes.md").write_text("not data")
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
