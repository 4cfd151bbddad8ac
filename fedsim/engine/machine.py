"""What a machine must have before JAX or Ray start, said in one line where it lacks.

On a machine without enough memory or threads, XLA aborts the process and Ray waits or ends with a
traceback. So the least that both need is looked for first: free memory, here and in the container;
threads that can be started; the limit of address space; shared memory. The least is that of a small
model. A larger one may need more, which `--dry-run` estimates.

Does not import JAX, which needs threads itself.
"""

import dataclasses
import os
import resource
import threading
from pathlib import Path

from fedsim.cgroups import cpus, free_memory
from fedsim.config import EngineConfig
from fedsim.errors import ConfigError
from fedsim.installation import expect_installed

GB = 1e9
SHARED = Path("/dev/shm")
MOST_THREADS = 1000  # to look for: starting more takes too long


@dataclasses.dataclass(frozen=True)
class Resources:
    """Memory and threads: those that are free, or those that are needed."""

    memory: float
    """Bytes."""
    address_space: float
    """Bytes that a process may reserve (ulimit -v)."""
    threads: int
    """Threads and processes."""


# Measured with the README's training on one and two cores, less a tenth.
LOCAL = Resources(0.42 * GB, 4 * GB, 24)
RAY = Resources(0.6 * GB, 12 * GB, 170)
WORKER = Resources(0.25 * GB, 0, 45)
"""For each worker, beside RAY."""


def needed(kind: str, workers: int) -> Resources:
    """Return the least that a driver needs, with its own Ray and workers if it has one."""
    if kind == "local":
        return LOCAL
    each = (getattr(WORKER, field.name) for field in dataclasses.fields(Resources))
    base = (getattr(RAY, field.name) for field in dataclasses.fields(Resources))
    return Resources(*(first + workers * more for first, more in zip(base, each, strict=True)))


def free(most_threads: int = MOST_THREADS) -> Resources:
    """Return what is free now. Args: most_threads: threads to look for."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    space = float("inf") if limit == resource.RLIM_INFINITY else limit
    return Resources(free_memory(), space, free_threads(most_threads))


def free_threads(most: int) -> int:
    """Return how many threads this process can start now, up to `most`, by starting them.

    Limits are of the user, of containers and of the machine; only a try sees all of them.
    """
    over, started = threading.Event(), []
    before = threading.stack_size(64 * 1024)  # so that it is not memory that ends it
    try:
        while len(started) < most:
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # can't start new thread
        pass
    finally:
        threading.stack_size(before)
        over.set()
        for thread in started:
            thread.join()
    return len(started)


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
    starts_ray = config.kind == "ray" and not cluster_address()
    most = max(1, cpus() // config.threads_per_worker)
    workers = (config.num_workers or most) if starts_ray else 0
    kind = "ray" if starts_ray else "local"
    if starts_ray and not os.access(SHARED, os.W_OK):
        expected = "a directory for Ray's shared memory: start the container with it (docker run "
        raise ConfigError.of("shared_memory", SHARED, f"{expected}--shm-size=1g), or engine=local")
    here = free(min(MOST_THREADS, needed(kind, workers).threads))
    if fault := lacking(here, kind, workers):
        raise fault


def lacking(here: Resources, kind: str, workers: int) -> ConfigError | None:
    """Return the error for what a machine lacks, with a remedy; None if it has enough.

    Args:
      here: what is free.
      kind: local, or ray if this process starts Ray.
      workers: their number.
    """
    least, who = needed(kind, workers), "JAX"
    remedies = []
    if kind == "ray":
        who = f"Ray with {workers} worker{'s' * (workers != 1)}"
        fewer = [n for n in range(1, workers) if _fits(here, needed(kind, n))]
        remedies += [f"num_workers={max(fewer)}"] if fewer else []
        remedies += ["engine=local"] if _fits(here, needed("local", 0)) else []
    instead = " or ".join(remedies)
    if here.memory < least.memory:
        expected = f"at least {_gb(least.memory)} free for {who}"
        return ConfigError.of(
            "memory", _gb(here.memory), f"{expected}: {instead or 'give it more memory'}"
        )
    if here.threads < min(MOST_THREADS, least.threads):
        more = instead or "raise `ulimit -u`, or the container's --pids-limit"
        return ConfigError.of(
            "threads", here.threads, f"at least {least.threads} that can start, for {who}: {more}"
        )
    if here.address_space < least.address_space:
        more = "`ulimit -v unlimited`" + (f", or {instead}" if instead else "")
        expected = f"at least {_gb(least.address_space)} of address space for {who}: {more}"
        return ConfigError.of("ulimit -v", _gb(here.address_space), expected)
    return None


def _fits(here: Resources, least: Resources) -> bool:
    return all(getattr(here, f.name) >= getattr(least, f.name) for f in dataclasses.fields(here))


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
