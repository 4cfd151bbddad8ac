"""Work in several processes: results in order, errors raised, ended workers named."""

import multiprocessing
import os
import time

import pytest

from fedsim.data.building import build
from fedsim.data.building.build import Pool
from fedsim.errors import DataError, Interrupted


def square(item):
    return item * item


def fail_or_touch(item):
    if item == 0:
        raise DataError("field=0: expected something else")
    time.sleep(0.2)
    item.touch()


def die(item):
    os._exit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_progress_reaches_the_end(workers, monkeypatch):
    monkeypatch.setattr(build, "PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(build, "SMALL_BYTES", 0)
    lines = []
    with Pool(workers, lines.append) as found:
        found.grow(1)
        assert found.map(square, range(20), "squared") == [i * i for i in range(20)]
        assert found.map(square, []) == []
    assert lines[0].startswith("squared 1 of 20 parts")
    assert lines[-1] == "squared 20 of 20 parts"


@pytest.mark.slow
@pytest.mark.ci
def test_an_error_ends_it_without_the_parts_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SMALL_BYTES", 0)
    others = [tmp_path / str(number) for number in range(100)]
    with pytest.raises(DataError, match="field=0"), Pool(2, None) as found:
        found.grow(1)
        found.map(fail_or_touch, [0, *others])
    assert not multiprocessing.active_children()
    assert not others[-1].exists()


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_that_ends_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(build, "SMALL_BYTES", 0)
    ended = "num_workers=2: a worker process ended, expected enough memory.*run the same command"
    with Pool(2, None) as found:
        found.grow(1)
        for call in (die, square):  # the second finds them gone
            with pytest.raises(Interrupted, match=ended):
                found.map(call, [1, 2])
