"""Work in several processes: results in order, errors at once, killed workers named."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from fedsim.data.building import processes
from fedsim.data.building.processes import Pool
from fedsim.errors import DataError, Interrupted


def square(item, *, report):
    report(item)
    return item * item


def fail_or_sleep(item, *, report):
    """A failure, and what would note that it came to its end."""
    if item == 0:
        raise DataError("field=0: expected something else")
    time.sleep(60)
    item.touch()


def die(item, *, report):
    os._exit(3)


@pytest.fixture(params=[1, 2])
def workers(request, monkeypatch):
    """A pool of this process alone, and of two more."""
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    lines = []
    with Pool(request.param, lines.append) as found:
        found.grow(1)
        yield found, lines


def test_results_are_in_order_and_progress_reaches_the_end(workers):
    found, lines = workers
    assert found.map(square, range(20), "squared", 190) == [i * i for i in range(20)]
    assert lines[-1] == "squared 190 of 190 rows"
    assert found.map(square, []) == []


@pytest.mark.slow
@pytest.mark.ci
def test_an_error_ends_it_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    end = tmp_path / "end"
    with pytest.raises(DataError, match="field=0"), Pool(2, None) as found:
        found.grow(1)
        found.map(fail_or_sleep, [end, 0])
    assert not multiprocessing.active_children()  # the others are gone, ...
    assert not end.exists()  # ... and were not waited for


@pytest.mark.slow
@pytest.mark.ci
def test_a_killed_worker_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(processes, "SMALL_BYTES", 0)
    killed = "num_workers=2: a worker process was killed.*the same command goes on where it was"
    with Pool(2, None) as found:
        found.grow(1)
        for call in (die, square):  # the second finds them gone
            with pytest.raises(Interrupted, match=killed):
                found.map(call, [1, 2])


SCRIPT = """
from pathlib import Path
from fedsim.data.building import processes
from fedsim.data.building.build import build
processes.SMALL_BYTES = 0
Path("texts.csv").write_text("user_id,text\\nann,hello\\nbob,good day\\n")
print(build(Path("texts.csv"), Path("built"), num_workers=2).train.num_users)
"""


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("given", ["-", "script.py"])
def test_a_script_needs_no_guard(given, tmp_path):
    """Workers do not run the program again: it may do its work where it is imported."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, given]
    found = subprocess.run(command, input=SCRIPT, cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "2\n"), found.stderr


def test_there_are_no_more_processes_than_the_container_may_use(monkeypatch):
    monkeypatch.setattr(processes, "cpus", lambda: 3)
    assert Pool(None, None).num_workers == 3
