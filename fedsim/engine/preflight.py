"""What a machine must have before JAX or Ray start, said in one line where it lacks.

On a machine without enough memory, XLA aborts the process and Ray waits or ends with a traceback.
So the least that both need is looked for first: free memory, here and in the container; the limit
of address space; shared memory. The least is that of a small model. A larger one may need more,
which `--dry-run` estimates.

Does not import JAX.
"""

import os
import resource
from pathlib import Path

from fedsim.cgroups import cpus, free_memory
from fedsim.config import EngineConfig
from fedsim.errors import ConfigError
from fedsim.installation import expect_installed

GB = 1e9
SHARED = Path("/dev/shm")


# Measured with the README's training on one and two cores, less a tenth; in bytes.
LOCAL_MEMORY, LOCAL_SPACE = 0.42 * GB, 4 * GB
RAY_MEMORY, RAY_SPACE = 0.6 * GB, 12 * GB
WORKER_MEMORY = 0.25 * GB  # of each worker, beside RAY_MEMORY


def cluster_address() -> str:
    """Address of the cluster to join, which RAY_ADDRESS names; empty for a private one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def expect_enough(config: EngineConfig) -> None:
    """Check that this machine has the least that a driver needs, and its Ray if it starts one.

    Raises: ConfigError: it has not; or Ray is not installed.
    """
    if config.kind == "ray":
        expect_installed("ray", otherwise=", or engine=local")
    memory, space, who, instead = LOCAL_MEMORY, LOCAL_SPACE, "JAX", "give it more"
    if config.kind == "ray" and not cluster_address():
        if not os.access(SHARED, os.W_OK):
            expected = "a directory for Ray's shared memory: start the container with it (docker "
            instead = "run --shm-size=1g), or engine=local"
            raise ConfigError.of("shared_memory", SHARED, expected + instead)
        workers = config.num_workers or max(1, cpus() // config.threads_per_worker)
        memory, space = RAY_MEMORY + workers * WORKER_MEMORY, RAY_SPACE
        who = f"Ray with {workers} worker{'s' * (workers != 1)}"
        instead = "fewer workers (num_workers), or engine=local"
    if (free := free_memory()) < memory:
        raise ConfigError.of(
            "memory", _gb(free), f"at least {_gb(memory)} free for {who}: {instead}"
        )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < space:
        expected = f"at least {_gb(space)} of address space for {who}: `ulimit -v unlimited`"
        raise ConfigError.of("ulimit -v", _gb(limit), expected)


def _gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


def set_threads(config: EngineConfig) -> bool:
    """Check the machine, then call `environment.set_threads`, which starts JAX.

    Returns: true if the process has the threads and platform of the settings.
    Raises: ConfigError: the machine is too small, or JAX cannot compute with its settings.
    """
    expect_enough(config)
    from fedsim.engine import environment

    return environment.set_threads(config)


def exhausted(error: BaseException) -> str:
    """Describe an error by which Python or JAX report a lack of memory or threads; else empty."""
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in said or "std::bad_alloc" in said:
        remedy = "strategy=scan and rows_per_pass=1, a smaller max_length or model need less"
        return f"memory ran out ({said[:100] or 'MemoryError'}): {remedy}"
    if isinstance(error, RuntimeError) and "can't start new thread" in said:
        return "no more threads can be started: raise `ulimit -u`, or the container's --pids-limit"
    return ""
