"""Training as a job of a cluster that the test starts: logs, exit code, stop, resume."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

LOCAL = Path(__file__).parents[2] / "cluster" / "local.sh"
PORT = 21000
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(50) for _ in range(rng.integers(1, 9))]
    sentences = [" ".join(rng.choice(["red", "green", "blue", "grey"], 6)) for _ in users]
    path = tmp_path_factory.mktemp("texts") / "texts.parquet"
    pq.write_table(pa.table({"user_id": users, "text": sentences}), path)
    return path


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with a CPU each; a function that runs local.sh."""
    environment = {**os.environ, "FEDSIM_CLUSTER_PORT": str(PORT)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)

    def run(*arguments, check=True):
        return subprocess.run(
            [LOCAL, *map(str, arguments)],
            env=environment,
            check=check,
            capture_output=True,
            text=True,
            timeout=300,
        )

    run("start", 2, 1)
    yield run
    run("stop")
    assert not Path(f"/tmp/fedsim-{os.getuid()}-{PORT}").exists()


@pytest.fixture
def client(cluster):
    # In the headers: Ray has read the variables when it was imported.
    variables = dict(re.findall(r"export (\w+)=(.*)", cluster("env").stdout))
    token = Path(variables["RAY_AUTH_TOKEN_PATH"]).read_text()
    address = variables["RAY_ADDRESS"]
    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"})


def command(texts, run_dir, **flags):
    flags = {
        **{"data": texts, "run-dir": run_dir, "epsilon": 4, "num-steps": 40, "batch_size": 24},
        **{
            "group-size": 2,
            "max-length": 24,
            "seed": 3,
            "model": "micro",
            "num-workers": 2,
        },
        **flags,
    }
    words = (str(x) for name, value in flags.items() for x in (f"--{name}", value))
    return ["fedsim", "train", "uls", *words]


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def wait_until(holds, seconds):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert holds()


@pytest.fixture(scope="module")
def expected(texts, tmp_path_factory):
    """What the run ends with in one process, without a cluster."""
    run_dir = tmp_path_factory.mktemp("expected") / "run"
    words = command(texts, run_dir, engine="local")
    subprocess.run([sys.executable, "-m", "fedsim.cli.main", *words[1:]], check=True, timeout=300)
    return summary(run_dir)["params_sha256"]


@pytest.mark.ci
def test_a_job_shows_its_log_and_ends_with_the_commands_exit_code(
    cluster, texts, tmp_path, expected
):
    found = cluster("submit", "--", *command(texts, tmp_path / "run"))
    assert "step 40/40" in found.stdout and "epsilon 4.0000 at delta" in found.stdout
    assert "2 processes, 1 CPU thread each; a step is cut in 8 parts" in found.stdout
    assert summary(tmp_path / "run")["params_sha256"] == expected
    failed = cluster("submit", *command(texts, tmp_path / "run"), check=False)  # no --resume
    assert failed.returncode == 1 and "fedsim: error: run_dir=" in failed.stdout


def test_a_stopped_job_saves_its_step_and_is_resumed(client, texts, tmp_path):
    run_dir = tmp_path / "run"
    words = " ".join(command(texts, run_dir, **{"checkpoint-every": 1000}))
    job = client.submit_job(entrypoint=words)
    ledger = run_dir / "ledger.jsonl"
    wait_until(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > 9, 200)
    client.stop_job(job)
    wait_until(lambda: client.get_job_status(job).is_terminal(), 60)
    assert client.get_job_status(job) == JobStatus.STOPPED
    stopped = summary(run_dir)  # written after the checkpoint: the driver ended by itself
    assert 8 <= stopped["steps_done"] < 40
    assert "resume=true continues from there" in client.get_job_logs(job)
    job = client.submit_job(entrypoint=f"{words} --resume")
    wait_until(lambda: client.get_job_status(job).is_terminal(), 200)
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert client.get_job_info(job).driver_exit_code == 0
    assert f"resuming after step {stopped['steps_done']}" in client.get_job_logs(job)
    assert (summary(run_dir)["steps_done"], summary(run_dir)["lost_steps"]) == (40, 0)


def test_a_client_without_the_token_is_turned_away(cluster, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = subprocess.run(
        ["ray", "job", "list", "--address", f"http://127.0.0.1:{PORT + 1}"],
        env={**os.environ, "HOME": "/nonexistent", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode != 0 and "nauthorized" in found.stdout + found.stderr
