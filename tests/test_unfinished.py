"""Hidden places of what is being written: private, whole or absent, removed, never a stranger's."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from fedsim import files
from fedsim.errors import ConfigError
from fedsim.files import new_directory

KILLED = """
import os, sys, pathlib
from fedsim.files import new_directory
with new_directory(pathlib.Path(sys.argv[1])) as made:
    (made / "texts").write_text("of people")
    (made / "folder").mkdir()
    os.kill(os.getpid(), 9)
"""


def kill_one(out):
    """A process that is killed while it writes `out`."""
    done = subprocess.run([sys.executable, "-c", KILLED, out], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_directory_appears_whole_and_was_private_until_then(tmp_path):
    before = os.umask(0)
    try:
        with new_directory(tmp_path / "out") as made:
            (made / "file").write_text("done")
            (place,) = tmp_path.iterdir()
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
            assert place == made.parent and place.name != made.parent.parent.name
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


@pytest.mark.parametrize("error", [ValueError, ConfigError, OSError, SystemExit, KeyboardInterrupt])
def test_errors_leave_nothing(tmp_path, error):
    with pytest.raises(error), new_directory(tmp_path / "out") as made:
        (made / "file").write_text("half")
        raise error("something")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.privacy
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    kill_one(tmp_path / "out")
    (left,) = tmp_path.iterdir()
    assert (left / "made" / "texts").exists()
    with new_directory(tmp_path / "other"):
        assert left.exists()  # it is not of this name
    with new_directory(tmp_path / "out"):
        assert not left.exists()


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["link", "another's name", "link inside", "another user's"])
def test_what_may_be_somebody_elses_is_neither_followed_nor_emptied(tmp_path, kind, monkeypatch):
    """A shared directory in which a stranger knows the name of what will be written."""
    home, place = tmp_path / "home", tmp_path / "shared" / f".out.{'0123' * 4}{files.HIDDEN}"
    home.mkdir()
    place.parent.mkdir()
    if kind == "link":
        (home / files.MADE).mkdir()
        place.symlink_to(home)
    else:
        place.mkdir()
    kept = place / "letters"
    kept.write_text("dear")
    if kind == "link inside":
        (place / files.MADE).symlink_to(home)
    if kind == "another user's":
        (place / files.MADE).mkdir()
        us = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: us + 1)
    with new_directory(place.parent / "out") as made:
        (made / "file").write_text("done")
    assert kept.read_text() == "dear"
    assert [path.name for path in (place.parent / "out").iterdir()] == ["file"]


def test_a_name_that_another_process_writes_is_refused_or_waited_for(tmp_path):
    out = tmp_path / "out"
    with new_directory(out) as made:
        with pytest.raises(ConfigError, match="to which no other process is writing"):
            new_directory(out).__enter__()
        (made / "file").touch()
    with pytest.raises(ConfigError, match="not there yet.*already exists"):
        new_directory(out, wait=True).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_is_taken_or_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    for name, expected in {
        "file": "it already exists",
        "file/out": "a place to write to",
        "link": "no link",
        "nowhere": "no link",
    }.items():
        with pytest.raises(ConfigError, match=f"out=.*{expected}"):
            new_directory(tmp_path / name).__enter__()
    with new_directory(tmp_path / "empty") as made:
        (made / "file").touch()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["file"]
