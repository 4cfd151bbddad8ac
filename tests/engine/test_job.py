"""Training as a job of a cluster that the test starts: its log, its exit code, its bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_verify import write_texts

LOCAL = Path(__file__).parents[2] / "cluster" / "local.sh"
PORT = 21000
CAPTURED = {"capture_output": True, "text": True}
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet", num_users=50)


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a CPU each; a function that runs local.sh."""
    environment = {**os.environ, "FEDSIM_CLUSTER_PORT": str(PORT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)

    def run(*arguments, check=True):
        words = [LOCAL, *map(str, arguments)]
        return subprocess.run(words, env=environment, check=check, timeout=300, **CAPTURED)

    run("start", 2, 1)
    yield run
    run("stop")
    assert not Path(f"/tmp/fedsim-{os.getuid()}-{PORT}").exists()


def command(texts, run_dir, *more):
    words = f"fedsim train uls --data {texts} --run-dir {run_dir} --epsilon 4 --num-steps 40"
    words += " --batch-size 24 --group-size 2 --max-length 24 --seed 3 --model micro"
    return [*f"{words} --num-workers 2".split(), *more]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def expected(texts, tmp_path_factory):
    """What the run ends with in one process, without a cluster."""
    run_dir = tmp_path_factory.mktemp("expected") / "run"
    words = command(texts, run_dir, "--engine", "local")
    subprocess.run([sys.executable, "-m", "fedsim.cli.main", *words[1:]], check=True, timeout=300)
    return summary(run_dir)["params_sha256"]


def test_a_job_shows_its_log_and_ends_with_the_commands_exit_code(
    cluster, texts, tmp_path, expected
):
    found = cluster("submit", "--", *command(texts, tmp_path / "run"))
    assert "step 40/40" in found.stdout and "epsilon 4.0000 at delta" in found.stdout
    assert "2 processes, 1 CPU thread each; a step is cut in 8 parts" in found.stdout
    assert summary(tmp_path / "run")["params_sha256"] == expected
    failed = cluster("submit", *command(texts, tmp_path / "run"), check=False)  # no --resume
    assert failed.returncode == 1 and "fedsim: error: run_dir=" in failed.stdout


def test_a_client_without_the_token_is_turned_away(cluster, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    words = ["ray", "job", "list", "--address", f"http://127.0.0.1:{PORT + 1}"]
    variables = {**os.environ, "HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled"}
    found = subprocess.run(words, env=variables, timeout=60, **CAPTURED)
    assert found.returncode != 0 and "nauthorized" in found.stdout + found.stderr
