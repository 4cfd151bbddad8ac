"""Damaged files: each is built, or refused in one line that shows nobody's text."""

import json
import random

import pytest
from test_cases import ALL_IN_TRAIN, CASES, SECRET

from fedsim.data.building.build import build
from fedsim.errors import FedsimError

NASTY = ['"', '""', "\n", "\r", ",", "\t", "\0", "\x1b[2J", "\ufeff", "\ud83d", "{", "[", "\\", ";"]


def damaged(draw, data):
    """Bytes cut off, left out, put in or repeated somewhere."""
    for _ in range(draw.randrange(4)):
        at, upto = sorted(draw.choices(range(len(data) + 1), k=2))
        nasty = draw.choice(NASTY).encode("utf-8", "surrogatepass")
        middle = draw.choice([b"", draw.randbytes(3), nasty, data[at:upto] * 2])
        data = draw.choice([data[:at], data[:at] + middle + data[draw.choice([at, upto]) :]])
    return data


def is_fine(number, directory):
    """True if a damaged file of a case is built. Raises: AssertionError: it is refused in another
    way than one line without anybody's text; whatever else is raised."""
    directory.mkdir()
    draw = random.Random(number)
    case = draw.choice(CASES)
    settings = ALL_IN_TRAIN | json.loads((case / "case.json").read_text()).get("settings", {})
    if "chat_template" in settings:
        settings["chat_template"] = case / settings["chat_template"]
    source = draw.choice(sorted(case.glob("input*")))
    file = directory / source.name
    content = source.read_bytes().replace(b"hello", SECRET.encode())
    file.write_bytes(damaged(draw, content))
    try:
        build(file, directory / "out", **settings)
        return True
    except FedsimError as error:
        said = str(error)
        assert "\n" not in said and said.isprintable(), said
        # A word where the first line has the names of columns is the name of one.
        assert SECRET not in said.partition("no such column, expected one of")[0], said
        assert list(directory.iterdir()) == [file]
        return False


@pytest.mark.parametrize("start", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_files_are_built_or_refused_in_one_line(start, tmp_path):
    numbers = range(start, start + (600 if start else 40))
    found = [is_fine(number, tmp_path / str(number)) for number in numbers]
    assert 0.1 < sum(found) / len(found) < 0.9
