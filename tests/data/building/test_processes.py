"""Work in several processes: results in order, errors raised, ended workers named."""

import os

import pytest

from fedsim.data.building import build
from fedsim.data.building.build import Pool
from fedsim.errors import Interrupted


def die(item):
    os._exit(3)


@pytest.mark.slow
def test_a_worker_that_ends_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(build, "SMALL_BYTES", 0)
    ended = "num_workers=2: a worker process ended, expected enough memory.*run the same command"
    with Pool(2, None) as found:
        found.grow(1)
        for call in (die, str):  # the second finds them gone
            with pytest.raises(Interrupted, match=ended):
                found.map(call, [1, 2])
