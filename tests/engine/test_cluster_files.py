"""The files of cluster/ as far as they can be checked without a cloud: schemas, versions, names."""

import os
import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import fedsim
from fedsim.cli.main import parse
from fedsim.cli.models import train

DIRECTORY = Path(__file__).parents[2] / "cluster"
SCRIPTS = sorted([*DIRECTORY.glob("*.sh"), *DIRECTORY.glob("slurm/*")])
JOBS = sorted(path.name for path in DIRECTORY.glob("kuberay/*.yaml"))


def load(name):
    return yaml.safe_load((DIRECTORY / name).read_text())


def trained(command):
    """The fields of a `fedsim train` command; other words than its flags are refused."""
    words = shlex.split(command)
    assert words[0] == "fedsim"
    return parse(words[1:])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(path):
    subprocess.run(["bash", "-n", path], check=True)
    # Both end every Ray process of the host, whoever's it is.
    assert not re.search(r"^[^#]*\b(ray stop|symmetric-run)", path.read_text(), re.MULTILINE)


def local(command, directory):
    environment = {**os.environ, "FEDSIM_CLUSTER_DIR": str(directory)}
    done = [DIRECTORY / "local.sh", command]
    return subprocess.run(done, env=environment, capture_output=True, text=True)


PRIVATE = ["gcp.yaml", "aws.yaml"]


@pytest.mark.parametrize("name", PRIVATE)
def test_launched_clusters_are_of_rays_schema_and_ask_for_a_token(name):
    config = load(name)
    validate_config(prepare_config(load(name)))
    for node in ("head", "worker"):
        _, start = config[f"{node}_start_ray_commands"]
        (token,) = re.findall(r"RAY_AUTH_TOKEN_PATH=(\S+)", start)
        assert token in config["file_mounts"] and "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][1]


@pytest.mark.parametrize("job, kind", [(load(f"kuberay/{x}"), x[7:-5]) for x in JOBS], ids=JOBS)
def test_a_jobs_command_is_one_that_there_is(job, kind):
    command = trained(job["spec"]["entrypoint"])
    run = command.keywords["run"]
    assert command.func is train and run.resume  # a retry is a new cluster
    assert run.engine.accelerator == kind
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")
    tag = {"cpu": "cpu", "gpu": "cuda12", "tpu": "tpu"}[kind]
    images = set(re.findall(r"'image': '(.*?)'", str(job)))
    assert images == {f"REGISTRY/fedsim:{fedsim.__version__}-{tag}"}
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    for path in (str(run.run_dir), variables["FEDSIM_BUDGET_LEDGER"]):
        assert path.startswith("/shared/")  # outlives the driver's pod


def test_a_local_cluster_removes_what_it_made_and_nothing_else(tmp_path):
    own, kept = tmp_path / "own", tmp_path / "own" / "thesis.tex"
    own.mkdir()
    kept.touch()
    assert local("start", own).returncode == 1 and list(own.iterdir()) == [kept]
    stopped = local("stop", own)
    assert stopped.returncode == 1 and kept.exists()
    assert stopped.stderr == f"{own}: there is no cluster\n"
    (own / "ray" / "session").mkdir(parents=True)
    for name in ("start.log", "jobs.log", "token"):
        (own / name).touch()
    assert local("stop", own).returncode == 0 and list(own.iterdir()) == [kept]
