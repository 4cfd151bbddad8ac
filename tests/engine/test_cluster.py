"""Where a cluster is not what was asked for, there is one clear line, and soon: never a hang."""

import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest
from problems import mean_problem

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.engine import environment, preflight, ray_engine
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import EngineError
from fedsim.errors import ConfigError
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import preset

pytestmark = pytest.mark.ray


def ray_pool(task, num_workers=1):
    return ray_engine.RayEngine(task, EngineConfig("ray", num_lanes=4, num_workers=num_workers))


@pytest.mark.parametrize(
    "address, says",
    [
        ("ray://127.0.0.1:10001", "use `ray job submit`"),
        ("http://127.0.0.1:8265", "use `ray job submit`"),
        ("127.0.0.1:1", "a running cluster that can be joined"),
        ("nowhere.invalid:6379", "a running cluster that can be joined"),
        ("127.0.0.1:99999", "a running cluster that can be joined"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address, says, monkeypatch):
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS={address}: .*{re.escape(says)}"):
        Cluster._join(object.__new__(Cluster), address)


STARTING = """
import subprocess, sys
import psutil
from fedsim import engine
from fedsim.config import EngineConfig
class Nothing(engine.Task):
    pass
engine.create(EngineConfig(kind="local"), Nothing())
assert "ray" not in sys.modules
neighbour = subprocess.Popen(["sleep", "100"])
workers = engine.create(EngineConfig(kind="ray", num_workers=1), Nothing())
import ray
print(ray.is_initialized(), end=" ")
workers.close()
print(ray.is_initialized(), neighbour.poll(), end=" ")
print(len(psutil.Process().children()))
neighbour.kill()
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_private_cluster_ends_with_its_engine_and_nothing_else_does():
    words = [sys.executable, "-c", STARTING]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    options = {"env": environment, "text": True, "timeout": 300, "capture_output": True}
    process = subprocess.run(words, **options)
    assert process.stdout.split() == ["True", "False", "None", "1"], process.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_that_cannot_see_the_data_says_so(ray_cluster, tmp_path):
    source = tmp_path / "texts.jsonl"
    rows = [{"user_id": f"u{i % 5}", "text": "some words"} for i in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    built = tmp_path / "built"
    build([str(source)], out=built, max_length=16)
    dataset = Dataset.open(built)
    task = LanguageModelTask(dataset, preset("tiny", dataset.train.vocab_size, 16))
    built.rename(tmp_path / "elsewhere")  # as on a node without the shared file system
    pool = ray_pool(task)
    with pytest.raises(EngineError, match="a worker could not start: .*built") as raised:
        pool.ready()
    assert len(str(raised.value).splitlines()) == 1
    pool.close()


class Unlike(ray_engine.Worker):
    """Each is of another kind, as on nodes with other processors."""

    def facts(self):
        return super().facts() | {"kind": f"process {os.getpid()}"}


@pytest.mark.slow
@pytest.mark.privacy
def test_workers_of_two_kinds_are_refused(ray_cluster, rng, monkeypatch):
    """Who computes a unit may depend on who else was drawn; its bits may not."""
    monkeypatch.setattr(ray_engine, "Worker", Unlike)
    pool = ray_pool(mean_problem(rng, [5])[1], num_workers=2)
    kinds = r"process \d+ instead of process \d+: workers must be of one kind"
    with pytest.raises(EngineError, match=rf"the worker on .* has {kinds}"):
        pool.ready()
    pool.close()


@pytest.mark.slow
@pytest.mark.ci
def test_a_worker_with_other_versions_is_refused(ray_cluster, rng, tmp_path, monkeypatch):
    other = tmp_path / "jaxlib-9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ['PYTHONPATH']}")
    variables = preflight.worker_environment(preflight.Placement(1, 1))
    variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    monkeypatch.setattr(preflight, "worker_environment", lambda _: variables)
    pool = ray_pool(mean_problem(rng, [5])[1])
    with pytest.raises(EngineError, match=r"the worker on .* has jaxlib 9.9 instead of "):
        pool.ready()
    pool.close()


@pytest.mark.privacy
def test_workers_have_the_same_packages_of_accelerators_also_where_the_driver_has_none(
    ray_cluster, rng
):
    pool = ray_pool(mean_problem(rng, [5])[1])
    known = {"kind": "K", "host": "h", "versions": environment.versions()}
    ours, other = ({**known, "versions": known["versions"] | {"cublas": n}} for n in "12")
    assert [pool._why_incompatible(facts) for facts in (ours, ours)] == ["", ""]
    assert pool._why_incompatible(other) == "the worker on h has cublas 2 instead of 1"
    pool.close()


@pytest.mark.slow
@pytest.mark.ci
def test_a_stop_that_all_processes_hear_ends_none_of_the_cluster(ray_cluster, rng):
    """As `timeout`, a closed terminal, systemd and Slurm send it; the driver decides."""
    if ray_cluster._directory is None:
        pytest.skip("a cluster that was there before")
    _, task = mean_problem(rng, [5] * 8)
    params, rows, clip = np.zeros(6, np.float32), np.arange(8)[:, None], Clip(1.0)
    pool = ray_pool(task)
    pool.ready()
    expected, _ = pool.clipped_sum(params, rows, clip)
    family = [
        each
        for each in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(each.cmdline())  # of pools that tests before it had
    ]
    assert len(family) > 5
    for each in family:
        os.kill(each.pid, signal.SIGTERM)
        os.kill(each.pid, signal.SIGHUP)
    total, _ = pool.clipped_sum(params, rows, clip)
    assert np.array_equal(total, expected)
    assert pool.redispatched == 0
    pool.close()
