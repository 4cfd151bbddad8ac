"""The files of cluster/ as far as they can be checked without a cloud: schemas, versions, names."""

import os
import re
import shlex
import signal
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

import fedsim
from fedsim.cli.arguments import parse
from fedsim.cli.main import Command, Train
from fedsim.config import RunConfig, flags_of

DIRECTORY = Path(__file__).parents[2] / "cluster"
SCRIPTS = sorted([*DIRECTORY.glob("*.sh"), *DIRECTORY.glob("slurm/*")])
LAUNCHERS = ["gcp.yaml", "aws.yaml"]
JOBS = sorted(path.name for path in DIRECTORY.glob("kuberay/*.yaml"))


def load(name):
    return yaml.safe_load((DIRECTORY / name).read_text())


def jobs_and_kinds():
    return [(load(f"kuberay/{name}"), name[7:-5]) for name in JOBS]


def groups(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod(group):
    return group["template"]["spec"]


def trained(command):
    """The fields of a `fedsim train` command; other words than its flags are refused."""
    words = shlex.split(command)
    assert words[0] == "fedsim"
    return parse(Command, words[1:])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed(path):
    subprocess.run(["bash", "-n", path], check=True)
    # Both end every Ray process of the host, whoever's it is.
    assert not re.search(r"^[^#]*\b(ray stop|symmetric-run)", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ray_up_takes_the_launchers(name):
    config = load(name)
    validate_config(prepare_config(config))
    for key in ("max_wrokers", "docker_image"):
        with pytest.raises(Exception, match=key):  # the check sees what is not in the schema
            validate_config(prepare_config({**load(name), key: 1}))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_keep_to_themselves(name):
    config = load(name)
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert config["available_node_types"]["gpu"]["min_workers"] == 0
    both = [config[f"{node}_start_ray_commands"] for node in ("head", "worker")]
    assert [first for first, _ in both] == ["ray stop"] * 2  # in its own container
    starts = [start for _, start in both]
    for command in starts:  # with a token, and one that is there
        (token,) = re.findall(r"RAY_AUTH_TOKEN_PATH=(\S+)", command)
        assert token in config["file_mounts"] and "RAY_AUTH_MODE=token" in command
        assert "ray stop" not in command
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_there_is_a_job_for_every_kind_of_device():
    assert [kind for _, kind in jobs_and_kinds()] == ["cpu", "gpu", "tpu"]


@pytest.mark.parametrize("job, kind", jobs_and_kinds(), ids=JOBS)
def test_jobs_are_rayjobs_of_the_pinned_version(job, kind):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert job["spec"]["submissionMode"] == "HTTPMode"
    tag = {"cpu": "cpu", "gpu": "cuda12", "tpu": "tpu"}[kind]
    images = {pod(group)["containers"][0]["image"] for group in groups(job)}
    assert images == {f"REGISTRY/fedsim:{fedsim.__version__}-{tag}"}
    assert tag in (DIRECTORY / "Dockerfile").read_text()
    variables = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert "JAX_PLATFORMS" in variables
    assert variables["FEDSIM_BUDGET_LEDGER"].startswith("/shared/")  # outlives the driver's pod


@pytest.mark.parametrize("job, kind", jobs_and_kinds(), ids=JOBS)
def test_a_jobs_command_asks_for_what_its_pods_have(job, kind):
    command = trained(job["spec"]["entrypoint"])
    assert isinstance(command, Train) and command.run.resume  # a retry is a new cluster
    run = command.run
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = pod(workers)["containers"][0]["resources"]["limits"]
    devices = {"cpu": 1} | {
        name: int(limits.get(of_pod, 0))
        for name, of_pod in (("gpu", "nvidia.com/gpu"), ("tpu", "google.com/tpu"))
    }
    assert run.engine.num_workers == workers["replicas"] * devices[kind]
    assert workers["replicas"] == workers["maxReplicas"]
    assert run.engine.threads_per_worker * devices[kind] <= int(limits["cpu"])
    assert run.engine.accelerator == kind
    assert kind != "cpu" or int(limits["cpu"]) == run.engine.threads_per_worker
    for path in (run.data.source, str(run.run_dir)):  # outlive the pods
        assert path.startswith("/shared/")


@pytest.mark.parametrize("job, kind", jobs_and_kinds(), ids=JOBS)
def test_pods_have_shared_memory_and_the_shared_files(job, kind):
    for group in groups(job):
        spec = pod(group)
        mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes["shared"]
    head = groups(job)[0]
    assert head["rayStartParams"]["num-cpus"] == "0"
    probe = pod(head)["containers"][0]["readinessProbe"]["exec"]["command"]
    assert probe == ["ray", "health-check"]


def test_the_runtime_environment_needs_no_network():
    found = load("runtime_env.yaml")
    assert found.keys() == {"env_vars", "excludes"}
    assert all(isinstance(value, str) for value in found["env_vars"].values())


def local(command, directory):
    environment = {**os.environ, "FEDSIM_CLUSTER_DIR": str(directory)}
    done = [DIRECTORY / "local.sh", command]
    return subprocess.run(done, env=environment, capture_output=True, text=True)


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


def test_slurm_gets_flags_that_exist():
    text = (DIRECTORY / "slurm" / "fedsim.sbatch").read_text()
    flags = set(re.findall(r"--([a-z-]+)", text[text.index("fedsim train") :].split("&")[0]))
    known = {name.replace("_", "-") for name in flags_of(RunConfig)}
    assert flags and flags <= known
    assert "--accelerator gpu" in text  # nodes may join one by one, and auto would take any
    assert "\nexport SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n" in text
    assert len(text.splitlines()) < 80


COMMANDS = {  # of a cluster whose head never starts
    "scontrol": 'case $1 in show) echo node1 ;; *) echo "$@" >> "$SAID" ;; esac',
    "srun": 'while [[ $1 == -* || $1 == node1 ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "ray": 'if [[ $1 == start ]]; then exec sleep 60; fi; touch "$SAID"; exit 1',
    "fedsim": 'echo trained >> "$SAID"',
}


@pytest.mark.parametrize("sent, again", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_slurm_job_is_queued_again_at_its_time_limit_alone(sent, again, tmp_path):
    """SIGTERM is what `scancel` sends."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    said, number = tmp_path / "said", str(10**9 + os.getpid())
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
    env |= {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "node1", "SLURM_CPUS_PER_TASK": "1"}
    command = ["bash", DIRECTORY / "slurm" / "fedsim.sbatch", "uls"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as job:
        while not said.exists():  # the first check of the head's health
            time.sleep(0.05)
            assert job.poll() is None
        job.send_signal(sent)
        assert job.wait(30) == 75
    assert said.read_text() == (f"requeue {number}\n" if again else "")
    assert not Path(f"/tmp/fedsim-{number}").exists()
    assert not (tmp_path / f".fedsim-{number}").exists()
