"""Clusters that others use, too: what is sent to them, and whom they let in."""

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml
from problems import mean_problem
from ray._private.runtime_env.packaging import create_package
from refused import refuses

from fedsim.config import EngineConfig
from fedsim.engine import cluster
from fedsim.engine.cluster import Cluster
from fedsim.keys import SecretKey

ENVIRONMENT = Path(__file__).parents[2] / "cluster" / "runtime_env.yaml"
CODE = [
    "train.py",
    "lib/tokens.py",
    "lib/settings.toml",
    "notes.md",
    "requirements.txt",
    "a/b/c.py",
]
SECRETS = ["runs/x/secret.json", "secret.json", "old/secret.json", "auth_token", ".fedsim-token"]
ENDINGS = (
    "json jsonl.gz ndjson csv tsv.gz txt parquet arrow xlsx db zip npz pkl safetensors".split()
)
TEXTS = [f"{place}posts.{ending}" for place in ("", "my/own/") for ending in ENDINGS]


def test_a_package_takes_no_keys_texts_or_tables_along(tmp_path):
    source = tmp_path / "source"
    for name in (
        *CODE,
        *SECRETS,
        *TEXTS,
        "runs/x/ledger.jsonl",
        "runs/x/tb/events.out",
        "data/texts",
        "own/data/a.csv",
        "own/data/read.py",
        "own/data/page.jinja",
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    excludes = yaml.safe_load(ENVIRONMENT.read_text())["excludes"]
    create_package(str(source), tmp_path / "sent.zip", False, excludes=excludes)
    with zipfile.ZipFile(tmp_path / "sent.zip") as sent:
        names = {name for name in sent.namelist() if not name.endswith("/")}
    assert names == {*CODE, "own/data/read.py", "own/data/page.jinja"}  # of a package of that name


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
    address, state = head
    for status, authenticated in (
        (None, False),
        (grpc.StatusCode.UNAUTHENTICATED, True),
        (grpc.StatusCode.UNIMPLEMENTED, False),
    ):
        state["status"] = status
        assert cluster._is_authenticated(address) == authenticated
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert cluster._is_authenticated(address)  # nobody gets in without a certificate


@pytest.mark.ray
def test_a_cluster_of_our_own_asks_for_the_token(ray_cluster):
    import ray

    assert cluster._is_authenticated(ray.get_runtime_context().gcs_address)
    assert ray_cluster.warning == ""


class Open(Cluster):
    def __init__(self, num_cpus):
        super().__init__(num_cpus)
        self.warning = cluster.OPEN.format("head:6379")


@pytest.mark.ray
def test_a_run_on_a_cluster_that_asks_for_no_token_says_so(ray_cluster, rng, monkeypatch):
    from fedsim.engine import ray_engine

    notes, (_, task) = [], mean_problem(rng, [5])
    monkeypatch.setattr(ray_engine, "Cluster", Open)
    ray_engine.RayEngine(task, EngineConfig("ray", num_workers=1), warn=notes.append).close()
    assert len(notes) == 1 and "RAY_ADDRESS=head:6379: this Ray cluster has no token" in notes[0]
