"""Files that were written without quoting: no user is given the rows of others."""

import csv
import io
import random
import re

import pytest
from test_build import ALL_IN_TRAIN, by_user, texts_of

from fedsim.data.building import text_files
from fedsim.data.building.build import build
from fedsim.data.building.text_files import TextFormat
from fedsim.errors import DataError

DUMP = [
    ("ann", "a day at the sea"),
    ("ben", '"well I never'),
    ("cleo", "my door code is 4711"),
    ("dora", "I live at number 9"),
    ("ed", 'that is all he said"'),
    ("ann", "old maps"),
]


def dump(path, rows):
    """A file without quoting."""
    between = "\t" if path.suffix == ".tsv" else ","
    path.write_text("\n".join(map(between.join, [("user_id", "text"), *rows])) + "\n", newline="")
    return path


def quoted(path, rows, **how):
    with path.open("w", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        csv.writer(file, delimiter=delimiter, **how).writerows([("user_id", "text"), *rows])
    return path


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_rows_inside_a_quotation_are_refused_with_the_line_and_read_without_quoting(name, tmp_path):
    file = dump(tmp_path / name, DUMP)
    with pytest.raises(DataError, match="^line 3: .* ends in line 6, .* --quoting none") as error:
        build(file, tmp_path / "out")
    assert "4711" not in str(error.value) and str(error.value).count("\n") == 0
    data = build(file, tmp_path / "none", quoting="none", **ALL_IN_TRAIN)
    assert texts_of(data.train) == by_user(DUMP)
    data = build(file, tmp_path / "minimal", quoting="minimal", **ALL_IN_TRAIN)
    assert set(texts_of(data.train)) == {"ann", "ben"}  # as it was asked for


def test_without_quoting_marks_are_characters_and_line_ends_end_rows(tmp_path):
    rows = [("u1", '"'), ("u2", 'x"y'), ("u1", '"a" and "b"'), ("u3", '""')]
    data = build(dump(tmp_path / "x.tsv", rows), tmp_path / "out", quoting="none", **ALL_IN_TRAIN)
    assert texts_of(data.train) == by_user(rows)
    with pytest.raises(DataError, match="line 3: expected 2 columns, as in the first line, found"):
        build(
            dump(tmp_path / "x.csv", [("a", "b"), ("c", '"d,e"')]), tmp_path / "n", quoting="none"
        )
    with pytest.raises(DataError, match="quoting=all: expected none or minimal"):
        TextFormat(quoting="all")


# Texts with line ends and commas in them, as people write them, in files that are quoted.
LETTER = "Hello, you\nhow are you?\nYes, I know\n\nBye, me"
QUOTED = [
    [("ann", LETTER), ("ben", "well, well")],
    [("ann", "one, two\nthree, four"), ("ben", 'he said "no, no"')],
    [("ann", "a\nb, c"), ("ben", "no\nmore")],
    [("zoe", 'two\nlines, "quoted"')],
]


@pytest.mark.parametrize("rows", QUOTED)
@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_texts_of_several_lines_in_a_quoted_file_are_read(rows, name, tmp_path):
    data = build(quoted(tmp_path / name, rows), tmp_path / "out", **ALL_IN_TRAIN)
    assert texts_of(data.train) == by_user(rows)


def test_what_is_quoted_everywhere_is_quoted(tmp_path):
    rows = [("ann", "one\ntwo, three"), ("ben", "four")]
    file = quoted(tmp_path / "x.csv", rows, quoting=csv.QUOTE_ALL)
    assert texts_of(build(file, tmp_path / "out", **ALL_IN_TRAIN).train) == by_user(rows)


def is_refused(path):
    try:
        text_files.check_csv(path, TextFormat())
        return False
    except DataError:
        return True


@pytest.mark.parametrize("suffix, alphabet", [("tsv", 'ab," '), ("csv", 'ab" '), ("csv", 'abc"')])
def test_a_random_dump_is_refused_or_every_row_has_its_user(suffix, alphabet, tmp_path):
    draw, hidden = random.Random(suffix + alphabet), 0
    for number in range(400):
        texts = ["".join(draw.choices(alphabet, k=draw.randrange(1, 7))) for _ in range(8)]
        if suffix == "csv":  # two marks together are how one is quoted
            texts = [re.sub('"+', '"', text) for text in texts]
        rows = [(f"u{i}", text) for i, text in enumerate(texts)]
        file = dump(tmp_path / f"{number}.{suffix}", rows)
        delimiter = "\t" if suffix == "tsv" else ","
        read = csv.reader(io.StringIO(file.read_text()), delimiter=delimiter)
        users = [record[0] for record in read][1:]
        if users != [user for user, _ in rows]:
            assert is_refused(file), file.read_text()
            hidden += 1
    assert hidden > 100  # rows would have changed hands


def test_a_header_that_comes_again_is_refused(tmp_path):
    file = dump(tmp_path / "x.csv", [("a", "b"), ("user_id", "text"), ("c", "d")])
    with pytest.raises(DataError, match="line 3: expected the names of the columns once"):
        build(file, tmp_path / "out")


def test_a_record_that_never_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MOST_CHARACTERS", 1000)
    for text in ("a" * 2000, '"' + "a\n" * 1000):
        file = dump(tmp_path / "x.csv", [("ann", "fine"), ("ben", text)])
        with pytest.raises(DataError, match="line 3: expected a record of at most 1,000 charac"):
            build(file, tmp_path / "out")
