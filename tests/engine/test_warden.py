"""What is left of a killed cluster goes, and nothing of anybody else's does."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedsim.engine import cluster, warden


@pytest.fixture
def sleeper():
    started = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    while len(warden.family({warden.process(started.pid)})) < 2:
        pass
    yield started
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGKILL)
    started.wait()


def test_a_process_that_was_given_the_number_of_one_that_ended_is_not_killed(sleeper):
    now = warden.process(sleeper.pid)
    then = now._replace(started=now.started - 1)  # the one that had the number before
    assert now.is_there and not then.is_there
    warden.end({then})
    assert sleeper.poll() is None
    assert warden.family({then}) == {then}  # what the other has started is none of the cluster's
    child = (warden.family({now}) - {now}).pop()
    warden.end({child, warden.Process(2**22 + 1, 0)})
    sleeper.wait(10)
    assert not child.is_there


def test_the_number_is_held_while_it_is_signalled(sleeper, monkeypatch):
    """A process that ends between the look and the signal leaves its number to nobody."""
    sent = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda held, number: sent.append(number))
    monkeypatch.setattr(os, "kill", None)
    warden.end({warden.process(sleeper.pid)})
    assert sent == [signal.SIGKILL]


def test_the_program_is_told_who_is_meant(sleeper, tmp_path):
    (tmp_path / "cluster").mkdir()
    now = warden.process(sleeper.pid)
    then = now._replace(started=now.started - 1)
    for processes in ({then}, {now}):
        assert sleeper.poll() is None
        watching = cluster._start_warden(tmp_path / "cluster", processes)
        watching.communicate(timeout=60)  # its end of the pipe: as if this process had ended
        assert not (tmp_path / "cluster").exists()
    assert sleeper.wait(10) == -signal.SIGKILL


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where private directories are made."""
    base = Path("/tmp") / f"t{os.getpid()}"
    base.mkdir()
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(base))
    yield base
    for path in base.glob("*"):
        cluster._remove(path)
        path.unlink() if path.is_symlink() else None
    base.rmdir()


def test_the_directory_of_a_killed_process_goes_when_the_next_one_is_made(place):
    code = f"""if True:
        import os, tempfile
        from fedsim.engine import cluster
        tempfile.gettempdir = lambda: {str(place)!r}
        cluster.short_directory().joinpath("r").mkdir()
        os.kill(os.getpid(), 9)
    """
    killed = subprocess.run([sys.executable, "-c", code], timeout=100)
    assert killed.returncode == -signal.SIGKILL
    left = list(place.iterdir())
    assert len(left) == 1 and (left[0] / "r").is_dir()
    mine = cluster.short_directory()
    assert list(place.iterdir()) == [mine]
    again = cluster.short_directory()
    assert {mine, again} == set(place.iterdir())  # that of a living process stays


def test_directories_that_are_not_left_behind_stay(place, tmp_path):
    """Those of other programs, links, one that is just being made, and those of other users."""
    other, link, new = (place / f"fedsim-{name}" for name in ("budget", "link", "new"))
    other.mkdir()
    (tmp_path / "held").write_text("held")
    link.symlink_to(tmp_path)
    new.mkdir()
    (new / "held").touch()
    kept = {other, link, new}
    if os.getuid() == 0:
        theirs = place / "fedsim-theirs"
        theirs.mkdir()
        (theirs / "held").write_text("held")
        os.chown(theirs, 12345, 12345)
        kept.add(theirs)
    mine = cluster.short_directory()
    assert set(place.iterdir()) == kept | {mine}
    assert (tmp_path / "held").exists()
