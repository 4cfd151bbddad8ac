"""Turns what a cluster has into workers: how many, with what, and how their processes start.

The one place that knows these variables, and pure: it reads nothing but its arguments. (The
compile cache is named after the host's processor, so each worker names its own: `worker`.)
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from fedsim.errors import ConfigError

Resources = Mapping[str, float]  # of a node, as Ray counts them: CPU, GPU, TPU, ...

# Memory that a program frees stays with the process, in large pages, for the next program. By
# default every call gets fresh pages, which costs up to a tenth of a gradient's time.
ALLOCATOR = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "mmap_threshold": 2**40,
        "trim_threshold": 2**40,
        "arena_max": 1,  # other arenas cannot hold large blocks
        "hugetlb": 1,
    }.items()
)

PLATFORMS = {None: "cpu", "GPU": "cuda,cpu", "TPU": "tpu,cpu"}  # by accelerator


@dataclasses.dataclass(frozen=True)
class Placement:
    """How many workers there are and what each of them gets."""

    num_workers: int
    threads: int
    """CPU threads of a worker."""
    accelerator: str | None = None
    """Ray's name of what workers compute on: GPU, TPU, or None for CPU."""
    devices: int = 1
    """JAX devices of a worker: accelerators, or as many CPU devices."""

    @property
    def needs(self) -> dict[str, float]:
        """What one worker takes of a node."""
        on_cpu: dict[str, float] = {"CPU": self.threads * (1 if self.accelerator else self.devices)}
        return on_cpu | ({self.accelerator: self.devices} if self.accelerator else {})

    def room(self, nodes: Iterable[Resources]) -> int:
        """How many workers the nodes can hold."""
        return sum(
            min(int(node.get(name, 0) // need) for name, need in self.needs.items())
            for node in nodes
        )

    def describe(self) -> str:
        """What one worker is, for people."""
        if self.accelerator:
            return f"Ray actor with {self.devices} {self.accelerator}(s)"
        several = f" for {self.devices} devices" if self.devices > 1 else ""
        return f"Ray actor with {self.threads * self.devices} CPU thread(s){several}"


def place_workers(
    num_workers: int | None,
    threads: int,
    nodes: Iterable[Resources],
    devices: int | None = None,
    accelerator: str = "auto",
) -> Placement:
    """A placement of as many workers as the nodes hold: by default one per GPU, per TPU host, or
    else one per `threads` CPUs.

    Args:
      num_workers: what the user asked for, or None.
      devices: devices of a worker that the user asked for, or None.
      accelerator: auto, cpu, gpu or tpu.
    """
    nodes = list(nodes)
    most = {name: int(max((n.get(name, 0) for n in nodes), default=0)) for name in ("GPU", "TPU")}
    if accelerator == "auto":
        accelerator = next((name.lower() for name, count in most.items() if count), "cpu")
    if accelerator == "gpu":
        placement = Placement(1, threads, "GPU", devices or 1)
    elif accelerator == "tpu":  # one process holds all chips of a host
        placement = Placement(1, threads, "TPU", devices or most["TPU"] or 1)
    else:
        placement = Placement(1, threads, None, devices or 1)
    return dataclasses.replace(placement, num_workers=num_workers or max(1, placement.room(nodes)))


def expect_room(placement: Placement, nodes: Iterable[Resources]) -> None:
    """Raises ConfigError where Ray would wait forever for what the cluster does not have."""
    nodes = list(nodes)
    room = placement.room(nodes)
    if not room and placement.accelerator:
        raise ConfigError.of(
            "accelerator",
            placement.accelerator.lower(),
            f"nodes with {placement.devices} {placement.accelerator}(s) for each worker, found "
            "none",
        )
    if placement.num_workers > room:
        each = ", ".join(f"{need:g} {name}" for name, need in placement.needs.items())
        have = [
            ", ".join(f"{node.get(name, 0):g} {name}" for name in placement.needs) for node in nodes
        ]
        raise ConfigError.of(
            "num_workers",
            placement.num_workers,
            f"at most {room} (a worker needs {each}; nodes have {'; '.join(have) or 'nothing'})",
        )


def driver_environment(threads: int) -> dict[str, str]:
    """Variables of a process that leaves the gradients to workers: it must take no accelerator."""
    return {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}


def compiler_options(platform: str) -> dict[str, str | bool] | None:
    """What XLA is told of each program whose bits matter, whoever started the process."""
    # A unit's contribution must be a function of its rows: no atomics in any order, and no choice
    # of kernels by their times, which would differ between workers.
    return {"xla_gpu_deterministic_ops": True} if platform == "gpu" else None


def worker_environment(placement: Placement) -> dict[str, str]:
    """Variables that a worker's process starts with: JAX and the C library read them then."""
    # NPROC sizes XLA's thread pool; OMP_NUM_THREADS and XLA flags do not.
    variables = {"NPROC": str(placement.threads)}
    # Named, for workers inherit the driver's variables; and an accelerator that JAX cannot use is
    # an error, not a slow run.
    variables["JAX_PLATFORMS"] = PLATFORMS[placement.accelerator]
    if placement.accelerator == "GPU":
        # A worker has its GPU to itself; the default leaves a quarter of the memory unused.
        variables["XLA_CLIENT_MEM_FRACTION"] = "0.9"
        # Of every program, not of those alone that get `compiler_options`.
        variables["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true"
    if placement.accelerator is None:
        variables["JAX_NUM_CPU_DEVICES"] = str(placement.devices)
        variables["GLIBC_TUNABLES"] = ALLOCATOR
    return variables


def actor_options(placement: Placement) -> dict:
    """Options of a worker's Ray actor. The pool retries, not Ray: its own retry is silent and
    goes to the same actor."""
    needs = placement.needs
    return {
        "num_cpus": needs.pop("CPU"),
        "num_gpus": needs.pop("GPU", 0),
        "resources": needs,
        "max_restarts": -1,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": worker_environment(placement)},
    }


def store_bytes(param_bytes: int, lanes_in_flight: int) -> int:
    """Object store that a node needs: parameters, sums on their way, the next version, a margin."""
    return math.ceil(1.2 * param_bytes * (2 + lanes_in_flight))
