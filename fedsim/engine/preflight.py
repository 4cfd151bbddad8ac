"""What a machine and a cluster must have for a run, before JAX starts; does not import JAX.

On a machine without enough memory, XLA aborts the process and Ray waits or ends with a traceback.
So the least that both need, with a small model, is looked for first. `place_workers` turns a
cluster's resources into workers, and `actor_options` has the environment of their processes.
"""

import ctypes
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from fedsim.config import EngineConfig
from fedsim.errors import ConfigError, expect
from fedsim.files import cgroup_value, cpus

GB = 1e9
# Measured with the README's training on one and two cores, less a tenth; in bytes.
LOCAL_MEMORY, RAY_MEMORY = 0.42 * GB, 0.6 * GB
WORKER_MEMORY = 0.25 * GB  # of each worker, beside RAY_MEMORY
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h

Resources = Mapping[str, float]  # of a node, as Ray counts them: CPU, GPU, TPU, ...
PLATFORMS = {None: "cpu", "GPU": "cuda,cpu", "TPU": "tpu,cpu"}  # by accelerator


def cluster_address() -> str:
    """Address of the cluster to join, which RAY_ADDRESS names; empty for a private one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def free_memory() -> int:
    """Return the free bytes of memory: of the machine, or of its container if less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if found := re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text()):
        free = int(found[1]) * 1024
    limit, used = cgroup_value("memory.max"), cgroup_value("memory.current")
    if limit.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)$", cgroup_value("memory.stat"), re.M)
        free = min(free, int(limit) - int(used) + int(cached[1] if cached else 0))
    return free


def expect_enough(config: EngineConfig) -> None:
    """Check that this machine has the least that a driver needs, and its Ray if it starts one.

    Raises: ConfigError: it has not; or Ray is not installed.
    """
    if config.kind == "ray":
        expect("engine", "ray", find_spec("ray") is not None, "the extra ray, or engine=local")
    memory, who, instead = LOCAL_MEMORY, "JAX", "give it more"
    if config.kind == "ray" and not cluster_address():
        workers = config.num_workers or max(1, cpus() // config.threads_per_worker)
        memory, who = RAY_MEMORY + workers * WORKER_MEMORY, f"Ray with {workers} workers"
        instead = "fewer workers (num_workers), or engine=local"
    needed, free = f"at least {memory / GB:.2f} GB free for {who}: {instead}", free_memory()
    expect("memory", f"{free / GB:.2f} GB", free >= memory, needed)


def set_threads(config: EngineConfig) -> None:
    """Check the machine, and give this process the threads and platform of a run's driver, if JAX
    has not started: a process that has computed before keeps its own.

    Raises: ConfigError: the machine is too small, or JAX cannot compute with its settings.
    """
    expect_enough(config)
    import jax
    from jax._src import xla_bridge

    from fedsim.engine.environment import expect_usable_jax

    if not xla_bridge.backends_are_initialized():
        os.environ["NPROC"] = str(config.threads_per_worker)
        if config.kind != "local":  # workers compute: the driver must take no accelerator
            jax.config.update("jax_platforms", "cpu")
    expect_usable_jax()


def keep_memory() -> None:
    """Have this process reuse the memory that it frees: fresh pages for the next pass and the next
    sum cost up to a third of their time. Not for a program that uses fedsim as a library."""
    with suppress(AttributeError, OSError, TypeError):  # without glibc
        tune = ctypes.CDLL(None).mallopt
        tune(M_MMAP_MAX, 0)
        tune(M_TRIM_THRESHOLD, -1)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The number of workers and the resources of each."""

    num_workers: int
    threads: int
    """CPU threads of a worker."""
    accelerator: str | None = None
    """Ray's name of the workers' accelerator, GPU or TPU; None: CPU."""

    def num_lanes(self, most: int) -> int:
        """Lanes of a step: one a worker on accelerators, for a lane ends with the transfer of its
        sum from the device."""
        return self.num_workers if self.accelerator else most

    @property
    def needs(self) -> dict[str, float]:
        """Resources of one worker, by Ray's names."""
        accelerator: dict[str, float] = {self.accelerator: 1} if self.accelerator else {}
        return {"CPU": self.threads, **accelerator}

    def room(self, nodes: Iterable[Resources]) -> int:
        """Return the number of workers that the nodes can hold."""
        return sum(
            min(int(node.get(name, 0) // need) for name, need in self.needs.items())
            for node in nodes
        )


def place_workers(config: EngineConfig, nodes: Sequence[Resources]) -> Placement:
    """Place as many workers as the nodes hold: by default one per GPU or TPU chip, or else one per
    `threads_per_worker` CPUs.

    Args:
      config: number, threads and accelerator of the workers.
      nodes: resources of each node.
    """
    name = config.accelerator.upper()
    if name == "AUTO":
        there = (name for name in ("GPU", "TPU") if any(node.get(name, 0) for node in nodes))
        name = next(there, "CPU")
    placement = Placement(1, config.threads_per_worker, None if name == "CPU" else name)
    count = config.num_workers or max(1, placement.room(nodes))
    return dataclasses.replace(placement, num_workers=count)


def expect_room(placement: Placement, nodes: Sequence[Resources]) -> None:
    """Raise ConfigError if the nodes have no room for the workers: Ray would wait forever."""
    if (room := placement.room(nodes)) < placement.num_workers:
        each = ", ".join(f"{need:g} {name}" for name, need in placement.needs.items())
        have = [
            ", ".join(f"{node.get(name, 0):g} {name}" for name in placement.needs) for node in nodes
        ]
        raise ConfigError.of(
            "num_workers",
            placement.num_workers,
            f"at most {room} (a worker needs {each}; nodes have {'; '.join(have) or 'nothing'})",
        )


def worker_environment(placement: Placement) -> dict[str, str]:
    """Variables with which a worker's process starts, because JAX reads them then."""
    # NPROC sizes XLA's thread pool; OMP_NUM_THREADS and XLA flags do not.
    variables = {"NPROC": str(placement.threads)}
    # Explicit, because workers inherit the driver's variables, and because an accelerator that JAX
    # cannot use must be an error, not a slow run.
    variables["JAX_PLATFORMS"] = PLATFORMS[placement.accelerator]
    variables["JAX_PLATFORM_NAME"] = ""  # an older name, by which JAX would choose another device
    if placement.accelerator == "GPU":
        # A worker has its GPU to itself; the default leaves a quarter of the memory unused.
        variables["XLA_CLIENT_MEM_FRACTION"] = "0.9"
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = ""  # its older name: JAX takes one of the two
        # For every program, also those without `compiler_options`.
        variables["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"
    if placement.accelerator is None:
        variables["JAX_NUM_CPU_DEVICES"] = "1"
    return variables


def actor_options(placement: Placement) -> dict:
    """Options of a worker's Ray actor.

    The engine retries, not Ray, whose retry is silent and goes to the same actor.
    """
    needs = placement.needs
    return {
        "num_cpus": needs.pop("CPU"),
        "num_gpus": needs.pop("GPU", 0),
        "resources": needs,
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": worker_environment(placement)},
    }


def exhausted(error: BaseException) -> str:
    """Describe an error by which Python or JAX report a lack of memory or threads; else empty."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "std::bad_alloc" in text:
        remedy = "strategy=scan and rows_per_pass=1, a smaller max_length or model need less"
        return f"memory ran out ({text[:100] or 'MemoryError'}): {remedy}"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return "no more threads can be started: raise `ulimit -u`, or the container's --pids-limit"
    return ""
