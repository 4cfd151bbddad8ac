"""Where a cluster is not what was asked for, there is one clear line, and soon: never a hang."""

import os
import re
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import yaml
from problems import mean_problem
from ray._private.runtime_env.packaging import create_package
from refused import refuses

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine import cluster, environment, ray_engine
from fedsim.engine.cluster import Cluster
from fedsim.engine.engine import EngineError
from fedsim.errors import ConfigError
from fedsim.keys import SecretKey

pytestmark = pytest.mark.ray


def ray_pool(task, num_workers=1):
    return ray_engine.RayEngine(task, EngineConfig("ray", num_lanes=4, num_workers=num_workers))


SUBMIT, JOIN = "use `ray job submit`", "a running cluster that can be joined"
ADDRESSES = {"ray://127.0.0.1:10001": SUBMIT, "http://127.0.0.1:8265": SUBMIT}
ADDRESSES |= {"127.0.0.1:1": JOIN, "nowhere.invalid:6379": JOIN, "127.0.0.1:99999": JOIN}


@pytest.mark.parametrize("address, says", ADDRESSES.items())
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
def test_a_private_cluster_ends_with_its_engine_and_nothing_else_does():
    words = [sys.executable, "-c", STARTING]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    options = {"env": environment, "text": True, "timeout": 300, "capture_output": True}
    process = subprocess.run(words, **options)
    assert process.stdout.split() == ["True", "False", "None", "1"], process.stderr


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
def test_a_stop_that_all_processes_hear_ends_none_of_the_cluster(ray_cluster, rng):
    """As `timeout`, a closed terminal, systemd and Slurm send it; the driver decides."""
    if ray_cluster._directory is None:
        pytest.skip("a cluster that was there before")
    _, task = mean_problem(rng, [5] * 8)
    params, rows, clip = np.zeros(6, np.float32), np.arange(8)[:, None], Clip(1.0)
    pool = ray_pool(task)
    pool.ready()
    expected, _ = pool.clipped_sum(params, rows, clip)
    family = psutil.Process().children(recursive=True)
    before = "resource_tracker"  # of pools that tests before it had
    family = [each for each in family if before not in " ".join(each.cmdline())]
    assert len(family) > 5
    for each in family:
        os.kill(each.pid, signal.SIGTERM)
        os.kill(each.pid, signal.SIGHUP)
    total, _ = pool.clipped_sum(params, rows, clip)
    assert np.array_equal(total, expected)
    assert pool.redispatched == 0
    pool.close()


# ---- Clusters that others use, too: what is sent to them, and whom they let in

ENVIRONMENT = Path(__file__).parents[2] / "cluster" / "runtime_env.yaml"
CODE = "train.py lib/tokens.py lib/settings.toml notes.md requirements.txt a/b/c.py".split()
CODE += ["own/data/read.py", "own/data/page.jinja"]  # of a package of that name
SECRETS = "runs/x/secret.json secret.json old/secret.json auth_token .fedsim-token".split()
SECRETS += "runs/x/ledger.jsonl runs/x/tb/events.out data/texts own/data/a.csv".split()
ENDINGS = "json jsonl.gz ndjson csv tsv.gz txt parquet".split()
ENDINGS += "arrow xlsx db zip npz pkl safetensors".split()
TEXTS = [f"{place}posts.{ending}" for place in ("", "my/own/") for ending in ENDINGS]


def test_a_package_takes_no_keys_texts_or_tables_along(tmp_path):
    source = tmp_path / "source"
    for name in (*CODE, *SECRETS, *TEXTS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    excludes = yaml.safe_load(ENVIRONMENT.read_text())["excludes"]
    create_package(str(source), tmp_path / "sent.zip", False, excludes=excludes)
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        names = {name for name in sent.namelist() if not name.endswith("/")}
    assert names == {*CODE}


def test_a_run_does_not_start_from_a_package_with_a_key(tmp_path, monkeypatch):
    package = tmp_path / "_ray_pkg_0123456789abcdef"
    (package / "code").mkdir(parents=True)
    (package / "runs" / "posts").mkdir(parents=True)
    SecretKey.create().save(tmp_path)  # beside the package: not in it
    cluster._expect_no_key(package / "code")
    SecretKey.create().save(package / "runs" / "posts")
    monkeypatch.chdir(package / "code")
    with refuses("working_dir", says="=runs/posts/secret.json"):
        Cluster._join(object.__new__(Cluster), "127.0.0.1:6379")
    cluster._expect_no_key(tmp_path)


@pytest.fixture
def head():
    """A server that answers as a cluster's head does, with a status."""
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    state = {}

    class Answer(grpc.GenericRpcHandler):
        def service(self, call):
            def answer(request, context):
                if (status := state["status"]) is not None:
                    context.abort(status, "no")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server.add_generic_rpc_handlers((Answer(),))
    server.start()
    yield f"127.0.0.1:{port}", state
    server.stop(None)


def test_a_cluster_that_asks_for_no_token_is_known(head, monkeypatch):
    (address, state), code = head, grpc.StatusCode
    found = {None: False, code.UNAUTHENTICATED: True, code.UNIMPLEMENTED: False}
    for status, authenticated in found.items():
        state["status"] = status
        assert cluster._is_authenticated(address) == authenticated
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert cluster._is_authenticated(address)  # nobody gets in without a certificate


def test_a_cluster_of_our_own_asks_for_the_token(ray_cluster):
    import ray

    assert cluster._is_authenticated(ray.get_runtime_context().gcs_address)
    assert ray_cluster.warning == ""


class Open(Cluster):
    def __init__(self, num_cpus):
        super().__init__(num_cpus)
        self.warning = cluster.OPEN.format("head:6379")


def test_a_run_on_a_cluster_that_asks_for_no_token_says_so(ray_cluster, rng, monkeypatch):
    notes, (_, task) = [], mean_problem(rng, [5])
    monkeypatch.setattr(ray_engine, "Cluster", Open)
    ray_engine.RayEngine(task, EngineConfig("ray", num_workers=1), warn=notes.append).close()
    assert len(notes) == 1 and "RAY_ADDRESS=head:6379: this Ray cluster has no token" in notes[0]
