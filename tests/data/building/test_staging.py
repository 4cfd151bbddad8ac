"""Where a build works: whole or absent, held by one process, gone on with or cleared."""

import threading

import pytest

from fedsim.data.building.processes import resume, staging
from fedsim.errors import DataError, Interrupted


def finish(directory, text):
    (directory / "out").mkdir()
    (directory / "out" / "file").write_text(text)


def test_what_is_finished_appears_at_once(tmp_path):
    with staging(tmp_path / "out", wait=False) as directory:
        finish(directory, "done")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


@pytest.mark.parametrize("error", [ValueError, DataError, OSError, SystemExit])
def test_errors_leave_nothing(tmp_path, error):
    with pytest.raises(error), staging(tmp_path / "out", wait=False) as directory:
        finish(directory, "half")
        raise error("something")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_what_the_same_plan_takes_up(tmp_path):
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out", False) as directory:
        assert not resume(directory, {"a": (1, 2)})
        (directory / "part").write_text("done")
        (directory / "other.tmp").write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "out", False) as directory:
        assert resume(directory, {"a": (1, 2)})
        assert {path.name for path in directory.iterdir()} == {"plan.json", "part"}
        raise KeyboardInterrupt
    with staging(tmp_path / "out", wait=False) as directory:
        assert not resume(directory, {"a": (1, 3)})
        assert {path.name for path in directory.iterdir()} == {"plan.json"}
        finish(directory, "done")


@pytest.mark.parametrize("begun", [True, False])
def test_what_may_pass_leaves_what_is_finished_and_no_empty_directory(tmp_path, begun):
    with pytest.raises(Interrupted), staging(tmp_path / "out", False) as directory:
        if begun:
            resume(directory, {"a": 1})
        raise Interrupted("data=hf:a: expected a network")
    assert [path.name for path in tmp_path.iterdir()] == [".out.building"] * begun


def test_one_builds_and_the_other_waits(tmp_path):
    entered, leave, outcome = threading.Event(), threading.Event(), []

    def first():
        with staging(tmp_path / "out", wait=False) as directory:
            entered.set()
            leave.wait(10)
            finish(directory, "first")

    def second():
        try:
            with staging(tmp_path / "out", wait=True):
                outcome.append("built again")
        except DataError as error:
            outcome.append(str(error))

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(10)
    with pytest.raises(DataError, match="no other process is building"):
        staging(tmp_path / "out", wait=False).__enter__()
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert len(outcome) == 1 and "already exists" in outcome[0]
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="out=.*expected a place to write to"):
        staging(tmp_path / "file" / "out", wait=False).__enter__()


def test_a_link_is_refused_before_anything_is_built(tmp_path):
    (tmp_path / "place").mkdir()
    for target in (tmp_path / "place", tmp_path / "nowhere"):
        (tmp_path / "out").symlink_to(target)
        with pytest.raises(DataError, match="out: expected a new directory, not a link"):
            staging(tmp_path / "out", wait=False).__enter__()
        (tmp_path / "out").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
