"""What a machine must have before JAX or Ray start, and the workers that a cluster has room for."""

import subprocess
import sys

import pytest

from fedsim import files
from fedsim.config import EngineConfig
from fedsim.engine import preflight
from fedsim.engine.preflight import actor_options, place_workers, worker_environment

REUSES = """
import pathlib, sys, numpy
from fedsim.engine.worker import Worker
Worker(cache_dir=pathlib.Path(sys.argv[1]))
freed = numpy.ones(2**25).sum()
assert int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 > 2**28, "given back"
"""
CACHING = {"memory.max": "2000", "memory.current": "1500", "cpu.max": "350000 100000"}
CACHING["memory.stat"] = "anon 1\ninactive_file 300\n"
GPUS = {"CPU": 64.0, "GPU": 8.0}
TPUS = {"CPU": 64.0, "TPU": 4.0}


@pytest.mark.parametrize(
    "values, free, count",
    [
        ({}, 8_000_000 * 1024, 64),
        ({"memory.max": "max", "memory.current": "5", "cpu.max": "max 100000"}, 8_192_000_000, 64),
        (CACHING, 800, 4),  # cached files count as free
    ],
)
def test_memory_and_cpus_are_those_of_the_container(values, free, count, tmp_path, monkeypatch):
    for name, value in values.items():
        (tmp_path / name).write_text(value + "\n")
    monkeypatch.setattr(files, "CGROUP", tmp_path)
    monkeypatch.setattr(files.os, "sched_getaffinity", lambda _: range(64))
    assert files.cpus() == count
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000000 kB\n")
    monkeypatch.setattr(preflight, "Path", lambda _: tmp_path / "meminfo")
    assert preflight.free_memory() == free


@pytest.mark.parametrize(
    "nodes, threads, expected",
    [
        ([{"CPU": 8.0}], 1, 8),
        ([{"CPU": 8.0}], 3, 2),
        ([{"CPU": 3.0}, {"CPU": 3.0}], 2, 2),  # not three: none spans two nodes
        ([{"CPU": 2.0}], 4, 1),  # refused by expect_room
        ([GPUS, GPUS, {"CPU": 4.0}], 1, 16),
        ([GPUS], 32, 2),  # so many have their threads
        ([TPUS, TPUS], 8, 8),
        ([{"CPU": 64.0, "GPU": 0.0}], 8, 8),
    ],
)
def test_there_are_as_many_workers_as_the_nodes_hold(nodes, threads, expected):
    config = EngineConfig("ray", threads_per_worker=threads)
    assert place_workers(config, nodes).num_workers == expected


@pytest.mark.parametrize(
    "node, gpus, others, platform, asked",
    [
        ({"CPU": 4.0}, 0, {}, "cpu", None),
        (GPUS, 1, {}, "cuda", "--xla_gpu_deterministic_ops=true"),  # a function of its rows
        (TPUS, 0, {"TPU": 1}, "tpu", None),
    ],
)
def test_a_worker_has_one_accelerator_where_there_are_any(node, gpus, others, platform, asked):
    placement = place_workers(EngineConfig("ray", threads_per_worker=2), [node])
    options, variables = actor_options(placement), worker_environment(placement)
    assert (options["num_cpus"], options["num_gpus"]) == (2, gpus)
    assert options["resources"] == others and options["runtime_env"]["env_vars"] == variables
    assert variables["JAX_PLATFORMS"].split(",")[0] == platform and variables["NPROC"] == "2"
    assert variables.get("XLA_FLAGS") == asked
    assert placement.num_lanes(8) == (8 if platform == "cpu" else placement.num_workers)


def test_a_worker_keeps_the_memory_that_it_frees_for_the_next_pass(tmp_path):
    assert not subprocess.run([sys.executable, "-c", REUSES, tmp_path]).returncode
