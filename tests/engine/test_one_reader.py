"""A task that reads its rows from one open file gets each user's own rows, on every engine."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from experiments.harness.mean_task import MeanTask
from fedsim.clipping import Clip, Strategy
from fedsim.config import EngineConfig
from fedsim.engine.task import DUMMY, Task, read_rows, sizes_of
from fedsim.engine.worker import LocalEngine

pytestmark = pytest.mark.privacy
ROWS, WIDTH = 600, 3
CLIP, SCAN = Clip(1.0), Strategy("scan", 1)


class FromAFile(Task):
    """Estimates a mean; all numbers of row i are i. Rows are sought and then read, one by one."""

    def __init__(self, path):
        self.path, self.file, self.lengths = path, None, 0
        self.inside, self.most = 0, 0

    def init(self, key):
        return np.zeros(WIDTH, np.float32)

    def read(self, split, rows):
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.file = self.file or self.path.open("rb")
        read = np.zeros((len(rows), WIDTH), np.float32)
        for place, row in enumerate(rows):
            if row >= 0:
                self.file.seek(int(row) * WIDTH * 4)
                time.sleep(1e-6)  # where another thread goes on
                read[place] = np.frombuffer(self.file.read(WIDTH * 4), np.float32)
        self.inside -= 1
        return read

    def sizes(self, split, rows):
        return np.asarray(self.read(split, rows)[:, 0], np.int64)

    def losses(self, params, batch):
        return MeanTask.losses(self, params, batch)  # pyright: ignore

    def __getstate__(self):
        return {**self.__dict__, "file": None, "inside": 0, "most": 0}


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "rows"
    np.repeat(np.arange(ROWS, dtype=np.float32), WIDTH).tofile(path)
    return FromAFile(path)


def expect_own_rows(engine, task, rng):
    """The loss of a unit at 0 is that of its row, also while the next rows are read."""
    params = task.init(None)
    for _ in range(4):
        rows = rng.choice(ROWS, ROWS // 2, replace=False)[:, None]
        _, stats = engine.clipped_sum(params, rows, CLIP, SCAN)
        assert np.array_equal(stats.losses, np.float32(WIDTH / 2) * rows[:, 0] ** 2)


def test_a_local_engine_reads_each_users_own_rows(task, rng):
    engine = LocalEngine(task, num_lanes=2)
    expect_own_rows(engine, task, rng)
    engine.close()
    assert task.most == 1


@pytest.mark.ray
def test_workers_on_ray_read_each_users_own_rows(task, rng, ray_cluster):
    from fedsim.engine.ray_engine import RayEngine

    engine = RayEngine(task, EngineConfig("ray", num_workers=1))
    try:
        engine.ready()
        expect_own_rows(engine, task, rng)
    finally:
        engine.close()


def test_one_thread_reads_at_a_time_whatever_it_asks_for(task):
    rows = np.arange(40)
    calls = [
        lambda: read_rows(task, "train", rows),
        lambda: read_rows(task, DUMMY, rows),
        lambda: sizes_of(task, "train", rows),
    ]
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = [call.result() for call in [threads.submit(each) for each in calls * 4]]
    assert task.most == 1
    assert all(np.array_equal(answer[:, 0], rows) for answer in answers[::3])
    assert all(np.array_equal(answer, rows) for answer in answers[2::3])
