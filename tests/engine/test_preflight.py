"""What a machine that is too small is told, before JAX or Ray start."""

import functools
import os
import subprocess
import sys

import pytest

from fedsim import cgroups
from fedsim.cgroups import cpus, free_memory
from fedsim.cli import main as cli
from fedsim.config import EngineConfig
from fedsim.engine import preflight
from fedsim.errors import ConfigError

TRAIN = "train uls --data nowhere --epsilon 1 --num-steps 2 --run-dir never --engine local".split()


def of_kernel(tmp_path, membership, files):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000000 kB\n")
    (tmp_path / "cgroup").write_text(membership)
    for name, content in files.items():
        place = tmp_path / "cgroups" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return free_memory(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "cgroups")


@pytest.mark.parametrize(
    "membership, files, free",
    [
        ("0::/\n", {}, 8_000_000 * 1024),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "5\n"}, 8_000_000 * 1024),
        (  # of version 2, by the group above; cached files count as free
            "0::/a/b\n",
            {
                "a/memory.max": "2000\n",
                "a/memory.current": "1500\n",
                "a/memory.stat": "anon 1\ninactive_file 300\n",
                "a/b/memory.max": "max\n",
            },
            800,
        ),
        (  # of version 1
            "4:cpu:/x\n3:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "2000", "memory/a/memory.usage_in_bytes": "500"},
            1500,
        ),
        (  # inside a container, which sees its own group at the top
            "3:memory:/docker/5f\n",
            {"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "500"},
            400,
        ),
    ],
)
def test_free_memory_is_that_of_the_container(membership, files, free, tmp_path):
    assert of_kernel(tmp_path, membership, files) == free


@pytest.mark.parametrize(
    "membership, files, count",
    [
        ("0::/\n", {}, 64),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 64),
        ("0::/a/b\n", {"a/cpu.max": "350000 100000\n", "a/b/cpu.max": "max 100000\n"}, 4),
        ("0::/a\n", {"a/cpu.max": "10000 100000\n"}, 1),
        (
            "4:cpu:/x\n3:memory:/a\n",
            {"cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000"},
            2,
        ),
        (
            "4:cpu:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"},
            64,
        ),
    ],
)
def test_cpus_are_those_of_the_container(membership, files, count, tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups.os, "sched_getaffinity", lambda _: range(64))
    of_kernel(tmp_path, membership, files)
    assert cpus(tmp_path / "cgroup", tmp_path / "cgroups") == count


def test_a_driver_of_a_cluster_needs_no_room_for_workers(monkeypatch):
    monkeypatch.setattr(preflight, "free_memory", lambda: preflight.LOCAL_MEMORY)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="^memory="):
        preflight.expect_enough(EngineConfig("ray", num_workers=2))
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    preflight.expect_enough(EngineConfig("ray", num_workers=2))


def test_ray_without_shared_memory_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preflight, "SHARED", tmp_path / "shm")
    with pytest.raises(ConfigError, match=r"^shared_memory=\S+/shm: .* --shm-size=1g\), or engine"):
        preflight.expect_enough(EngineConfig("ray"))
    preflight.expect_enough(EngineConfig("local"))


@pytest.mark.parametrize(
    "error, line",
    [
        (MemoryError(), "memory ran out (MemoryError): strategy=scan and rows_per_pass=1"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "memory ran out (RESOURCE_EXHAUSTED"),
        (RuntimeError("can't start new thread"), "no more threads can be started: raise"),
    ],
)
def test_what_runs_out_later_is_one_line_too(error, line, monkeypatch, capsys):
    @functools.wraps(cli.train)
    def fails(*_, **__):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", fails)
    monkeypatch.setattr(cli, "train", fails)
    with pytest.raises(SystemExit) as ended:
        cli.main(TRAIN)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1 and last.startswith(f"fedsim: error: {line}")


def test_a_process_with_little_address_space_is_refused_before_xla_aborts():
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
from fedsim.cli.main import main
main({TRAIN!r})
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("fedsim: error: ulimit -v=2.00 GB: expected ")
