"""Jobs side by side: at most so many at a time, again after a lost process, each with its end."""

import json
import os
import signal
import threading
import time

import pytest

from fedsim.engine.engine import EngineError
from fedsim.errors import ConfigError, FedsimError


def job(given):
    """Notes when it ran and where, in a file of its own; ends as it is told to."""
    directory, index, end = given
    started = time.time()
    tries = len(list(directory.glob(f"{index}-*")))
    (directory / f"{index}-{tries}").write_text(json.dumps([os.getpid(), os.environ["NPROC"]]))
    if end == "lost" or (end == "lost once" and tries == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "mistake":
        raise ConfigError("epsilon=0: expected > 0")
    if end == "fault":
        raise ZeroDivisionError("a fault of the code")
    time.sleep(0.3)
    return index, started, time.time()


def test_an_error_of_a_run_keeps_its_kind():
    """To a private selection, a run that diverged has lost; any other error is a fault."""
    from ray.exceptions import RayTaskError

    from fedsim.engine.parallel_runs import _failure
    from fedsim.training import Diverged

    found = _failure(RayTaskError("job", "traceback", Diverged("the loss is nan")))
    assert isinstance(found, Diverged) and str(found) == "the loss is nan"


@pytest.mark.slow
@pytest.mark.ray
def test_every_job_ends_and_no_more_run_than_are_wanted(tmp_path, ray_cluster):
    from fedsim.engine.parallel_runs import ATTEMPTS, ParallelRuns

    ends = ["", "mistake", "lost once", "", "fault", "lost", ""]
    side = ParallelRuns(at_once=2, threads=1)
    assert side.placement.num_workers == 2
    found = dict(side.run(job, [(tmp_path, i, end) for i, end in enumerate(ends)]))
    side.close()
    assert sorted(found) == list(range(len(ends)))
    well = [found[i] for i, end in enumerate(ends) if end in ("", "lost once")]
    assert sorted(index for index, *_ in well) == [0, 2, 3, 6]
    for _, start, _ in well:  # never more than two at a time
        assert sum(a <= start < b for _, a, b in well) <= 2
    assert isinstance(found[1], FedsimError) and str(found[1]) == "epsilon=0: expected > 0"
    assert "ZeroDivisionError: a fault of the code" in str(found[4])
    assert isinstance(found[5], EngineError) and f"lost {ATTEMPTS} times" in str(found[5])
    tries = {i: sorted(tmp_path.glob(f"{i}-*")) for i in range(len(ends))}
    assert [len(tries[i]) for i in range(len(ends))] == [1, 1, 2, 1, 1, ATTEMPTS, 1]
    assert {json.loads(path.read_text())[1] for paths in tries.values() for path in paths} == {"1"}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_a_process_without_room_keeps_no_job_from_the_others(tmp_path, ray_cluster, monkeypatch):
    """The room that is counted may be others': here they have 7 of 8 CPUs, then 8."""
    import ray

    from fedsim.engine import parallel_runs

    class Others:
        def ready(self):
            return True

    def others(cpus):
        held = ray.remote(Others).options(num_cpus=cpus).remote()
        assert ray.get(held.ready.remote())
        return held

    held, said = others(7), []
    side = parallel_runs.ParallelRuns(at_once=3, threads=1, warn=said.append)
    assert side.placement.num_workers == 3
    found = dict(side.run(job, [(tmp_path, i, "") for i in range(3)]))
    assert [found[i][0] for i in range(3)] == [0, 1, 2] and not said
    side.close()

    monkeypatch.setattr(parallel_runs, "LONG_S", 0.1)
    last, side = others(1), parallel_runs.ParallelRuns(at_once=1, warn=said.append)
    threading.Timer(1.0, lambda: ray.kill(last)).start()
    ((_, (index, *_)),) = side.run(job, [(tmp_path, 7, "")])
    assert index == 7 and len(said) == 1 and "no process has room" in said[0]
    side.close()
    ray.kill(held)


@pytest.mark.ray
def test_as_many_as_there_is_room_for(ray_cluster):
    from fedsim.engine.parallel_runs import ParallelRuns

    side = ParallelRuns(threads=3)  # the cluster of the tests has 8 CPUs
    assert side.placement.num_workers == 2 and side.placement.needs == {"CPU": 3}
    side.close()
    assert list(side.run(job, [])) == []


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_an_autoscaler_sees_all_jobs_that_are_wanted_at_once(tmp_path, ray_cluster):
    """Ray reports processes without room to it; those that have room do all the work until then."""
    from fedsim.engine.parallel_runs import ParallelRuns

    side = ParallelRuns(threads=6, at_once=2, wait_s=1)  # the cluster of the tests has 8 CPUs
    assert side.placement.num_workers == 2
    found = dict(side.run(job, [(tmp_path, i, "") for i in range(3)]))
    assert [found[i][0] for i in range(3)] == [0, 1, 2]
    side.close()
