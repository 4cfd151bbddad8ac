"""Work in several processes: results in order, errors at once, killed workers named."""

import os
import time

import pytest

from fedsim.data import pool
from fedsim.data.pool import Pool
from fedsim.data.shards import DataError


def square(item, *, report):
    report(item)
    return item * item


def fail_or_sleep(item, *, report):
    if item == 0:
        raise DataError("field=0: expected something else")
    time.sleep(60)


def die(item, *, report):
    os._exit(3)


@pytest.fixture(params=[1, 2])
def workers(request, monkeypatch):
    """A pool of this process alone, and of two more."""
    monkeypatch.setattr(pool, "SMALL_BYTES", 0)
    lines = []
    with Pool(request.param, lines.append) as found:
        found.grow(1)
        yield found, lines


def test_results_are_in_order_and_progress_reaches_the_end(workers):
    found, lines = workers
    assert found.map(square, range(20), "squared", 190) == [i * i for i in range(20)]
    assert lines[-1] == "squared 190 of 190 rows"
    assert found.map(square, []) == []


def test_an_error_ends_it_at_once(monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 0)
    start = time.monotonic()
    with pytest.raises(DataError, match="field=0"), Pool(2, None) as found:
        found.grow(1)
        found.map(fail_or_sleep, [1, 0])
    assert time.monotonic() - start < 40


def test_a_killed_worker_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 0)
    with pytest.raises(DataError, match="num_workers=2: a worker process was killed"):
        with Pool(2, None) as found:
            found.grow(1)
            found.map(die, [1, 2])
