"""What is said of files: the right line, what to do, and nobody's text."""

import gzip
import json

import pytest

from fedsim.data.building import text_files
from fedsim.data.building.build import build
from fedsim.data.building.columns import expected_of
from fedsim.errors import DataError


def said_of(file, content, **options):
    """What is said of a file of bytes, or of objects as lines or a list."""
    if not isinstance(content, bytes):
        rows = [json.dumps(row) for row in content]
        as_list = file.suffix == ".json"
        content = (f"[{', '.join(rows)}]" if as_list else "\n\n".join(rows)).encode()
    file.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)
    with pytest.raises(DataError) as error:
        build(file, file.parent / "out", **options)
    said = str(error.value)
    assert "\n" not in said and said.isprintable()
    return said


def row(user="ann", text="fine"):
    return {"user_id": user, "text": text}


HEADERLESS = [b"ann,my door code is 4711\nben,I am ill\n", b"ann;my door code\n"]
HEADERLESS += [b"my door code is 4711\n", b"user_id," + b"door" * 11]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "csv.gz"])
@pytest.mark.parametrize("content", HEADERLESS)
def test_a_first_line_that_is_no_header_is_not_shown(content, suffix, tmp_path):
    said = said_of(tmp_path / f"x.{suffix}", content)
    assert "ann" not in said and "door" not in said
    assert "first line of CSV must have the names" in said or "delimiter" in said


def test_columns_are_shown_where_they_are_no_text():
    for names in (["author", "body"], ["x1", "text"]):
        assert expected_of(names).endswith(f"expected one of {', '.join(names)}")
    for text in ("I am ill", "x" * 41, "last message to the whole group"):
        assert "text" not in expected_of(["text", text]).partition("person")[0]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", ["x.csv.gz", "x.tsv.gz", "x.jsonl.gz", "x.json.gz", "l.json.gz"])
def test_a_small_file_that_unpacks_to_a_large_row_is_refused(name, tmp_path, monkeypatch):
    most = 2**18
    monkeypatch.setattr(text_files, "MAX_BYTES", most)
    begin = {"x": b'{"user_id": "a", "text": "', "l": b'[{"user_id": "a", "text": "'}[name[0]]
    if "json" not in name:
        begin = b"user_id\ttext\na\t" if "tsv" in name else b"user_id,text\na,"
    with gzip.open(tmp_path / name, "wb", 1) as file:
        file.write(begin)
        for _ in range(128):
            file.write(b"a" * most)
        file.write(b"\n")
    with pytest.raises(DataError, match="expected rows of at most|empty data set"):
        build(tmp_path / name, tmp_path / "out")
