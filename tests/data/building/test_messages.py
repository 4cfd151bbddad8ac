"""What is said of files: the right line, what to do, and nobody's text."""

import gzip
import json

import pyarrow as pa
import pytest
from test_build import ALL_IN_TRAIN, texts_of

from fedsim.data.building import text_files
from fedsim.data.building.build import build
from fedsim.data.building.columns import expected_of, plain
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


def test_hidden_files_are_no_sources_of_a_folder(tmp_path):
    folder = tmp_path / "posts"
    folder.mkdir()
    (folder / "a.csv").write_text("user_id,text\nann,x\n")
    (folder / "._a.csv").write_bytes(b"\0\5\x16\7")
    (folder / ".b.csv").write_text("user_id,text\nben,y\n")
    assert texts_of(build(folder, tmp_path / "out", **ALL_IN_TRAIN).train) == {"ann": ["x"]}


@pytest.mark.parametrize("source", ["", "*.csv*", "both"])
def test_a_file_beside_its_packed_copy_is_refused(source, tmp_path):
    (tmp_path / "a.csv").write_text("user_id,text\nann,x\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"user_id,text\nann,x\n"))
    both = [tmp_path / "a.csv.gz", tmp_path / "a.csv"]
    with pytest.raises(DataError, match="a.csv.gz: expected it or a.csv, got both"):
        build(both if source == "both" else tmp_path / source, tmp_path / "out")


TEXTS = pa.array(["one", "two", None])
KINDS = {
    "categories": TEXTS.dictionary_encode(),
    "categories of views": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None], pa.uint32()), pa.array(["one", "two"], pa.string_view())
    ),
    "views": TEXTS.cast(pa.string_view()),
    "large": TEXTS.cast(pa.large_string()),
    "an extension": pa.ExtensionArray.from_storage(pa.json_(), TEXTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_ids_are_read_whatever_holds_them(kind):
    assert plain(KINDS[kind], "text").to_pylist() == ["one", "two", None]


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
