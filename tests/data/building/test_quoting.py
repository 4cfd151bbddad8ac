"""Files that were written without quoting: no user is given the rows of others."""

import csv
import io
import itertools
import random
import re

import pytest

from fedsim.config import BuildConfig
from fedsim.data.building import text_files
from fedsim.data.building.build import build
from fedsim.data.building.columns import Columns
from fedsim.data.building.text_files import TextFile
from fedsim.errors import DataError


def dump(path, rows):
    """A file without quoting."""
    between = "\t" if path.suffix == ".tsv" else ","
    path.write_text("\n".join(map(between.join, [("user_id", "text"), *rows])) + "\n", newline="")
    return path


def is_refused(path):
    try:
        file = TextFile(path, path.suffix[1:], BuildConfig())
        list(file.batches(Columns()))
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


def test_a_record_that_never_ends_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_BYTES", 1000)
    texts = ("a" * 1500, "a" * 5000, '"' + "a\n" * 1000)
    for text, after in itertools.product(texts, ([], [("cy", "last")])):
        file = dump(tmp_path / "x.csv", [("ann", "fine"), ("ben", text), *after])
        with pytest.raises(DataError, match="expected (rows of at most|every quotation)"):
            build(file, tmp_path / "out")
