"""The environment of driver and workers: resources, threads, packages and compiled programs.

Versions, settings and kind of host make driver, workers and later runs comparable, because bits
depend on them. `place_workers` turns a cluster's resources into workers; this module has all
environment variables and compiler options with which their processes start.
"""

import ctypes
import dataclasses
import hashlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
from jax._src import xla_bridge

from fedsim.config import EngineConfig
from fedsim.engine.compiler_options import expect_allowed
from fedsim.errors import ConfigError
from fedsim.files import NotOurs, cache_dir, own_directory
from fedsim.installation import version

PACKAGES = ("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "randomgen", "ray")
PACKAGES += ("dp-accounting", "scipy", "cryptography")
WHERE_INSTALLED = ("jax-cuda12-plugin", "nvidia-cublas-cu12", "jax-cuda13-plugin", "nvidia-cublas")
JAX_SETTINGS = ("jax_threefry_partitionable", "jax_random_seed_offset", "jax_enable_x64")
JAX_SETTINGS += ("jax_default_matmul_precision",)
"""JAX options, from variables or the program, on which bits of parameters and gradients depend."""
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "GLIBC_TUNABLES")
VARIABLES += ("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE")
"""Variables of the driver that choose how the compiler, NumPy and the C library compute."""
NO_BITS = r"dump|^glibc\.malloc"
"""Words in VARIABLES that change no bit; workers get other ones for the allocator."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def set_threads(config: EngineConfig) -> bool:
    """Give this process the threads and platform of a run's driver, if JAX has not started.

    JAX reads them when it starts to compute, so a process that has computed before keeps its own.
    `Worker.host` records the number of threads of a run.
    Args:
      config: kind of engine and threads.
    Returns: true if the process has the threads and platform of the settings.
    Raises: ConfigError: JAX cannot compute with its settings; see `expect_usable_jax`.
    """
    variables = driver_environment(config.threads_per_worker)
    if config.kind == "local":  # this process computes, on whatever there is
        del variables["JAX_PLATFORMS"]
    if xla_bridge.backends_are_initialized():
        expect_usable_jax()
        return all(os.environ.get(name) == value for name, value in variables.items())
    os.environ.update(variables)
    if "JAX_PLATFORMS" in variables:  # JAX has read the variable when it was imported
        jax.config.update("jax_platforms", variables["JAX_PLATFORMS"])
    expect_usable_jax()
    return True


def expect_usable_jax() -> None:
    """Check JAX's settings before JAX fails with a traceback.

    Raises: ConfigError: an option is not allowed, or the machine has none of the requested devices.
    """
    expect_allowed()
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        asked = {"JAX_PLATFORMS": jax.config.values["jax_platforms"]}
        asked["JAX_PLATFORM_NAME"] = os.environ.get("JAX_PLATFORM_NAME")  # which JAX reads, too
        fields = ", ".join(f"{name}={value}" for name, value in asked.items() if value)
        reason = " ".join(str(error).partition("(set JAX")[0].split())[:200] or "JAX finds none"
        expected = f"devices that this machine has ({reason}); unset it, or set it to cpu"
        raise ConfigError(f"{fields}: expected {expected}", field="JAX_PLATFORMS") from None


def keep_memory() -> bool:
    """Have this process reuse the memory that it frees, as workers do; see `ALLOCATOR`.

    Fresh pages for the sums of a large model take longer than its noise.

    For a driver process, not for a program that uses fedsim as a library.
    Returns: true if the C library supports it, which only glibc does.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(tune(M_MMAP_MAX, 0) and tune(M_TRIM_THRESHOLD, -1))


def versions() -> dict[str, str]:
    """Return the versions, settings and variables of this process on which the draws, noise and
    bits of a run depend, by name."""
    values = {"python": platform.python_version()}
    values |= {name: version(name) for name in PACKAGES}
    there = {name: version(name) for name in WHERE_INSTALLED}
    values |= {name: number for name, number in there.items() if number != "none"}
    values |= {name: str(getattr(jax.config, name, "none")) for name in JAX_SETTINGS}
    for name in VARIABLES:
        words = re.split(
            r"[\s:]+" if name == "GLIBC_TUNABLES" else r"\s+", os.environ.get(name, "")
        )
        words = [word for word in words if word and not re.search(NO_BITS, word)]
        values |= {name: " ".join(words)} if words else {}
    return values


def difference(driver: dict[str, str], worker: dict[str, str]) -> str:
    """Describe the difference of two `versions`, for people; empty if there is none.

    VARIABLES are not compared, because workers have other ones.
    """
    names = [name for name in driver if driver[name] != worker.get(name) and name not in VARIABLES]
    return ", ".join(f"{name} {worker.get(name)} instead of {driver[name]}" for name in names)


# Fields of /proc/cpuinfo that equal hosts share. Steppings and microcode differ between them.
GENERATION = "vendor_id|cpu family|model|CPU implementer|CPU architecture|CPU part"
# Instruction sets for numbers. The others depend on the kernel, too.
NUMERIC = re.compile(r"\b(?:s?sse|avx|fma|f16c|amx|bmi|fp|asimd|neon|sve|sme|bf16|i8mm)\w*")


def keep_compiled(cache_dir: Path) -> None:
    """Keep this process's compiled programs in a directory, and use the programs that are there.

    Programs are run as they are read, so a directory that other users can write to is not used.
    """
    try:
        place = own_directory(cache_dir / host_kind())
    except NotOurs as error:
        print(f"fedsim: compiled programs are not kept: {error}", file=sys.stderr)
        return
    # Of a program that another process is writing, or was killed while writing: it is compiled.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def remember_programs() -> Path:
    """Keep this process's compiled programs in the cache: the first parameters, the optimizer's
    update, and everything with engine=local.

    Returns: the directory, which workers use, too.
    """
    compiled = cache_dir() / "compiled"
    keep_compiled(compiled)
    return compiled


def host_kind() -> str:
    """Name all on which compiled programs depend: other kinds of hosts must not share them.

    The name is the CPU's model name and a digest of its generation, its instruction sets and XLA's
    CPU flags, because a cloud has several kinds of machines with one model name.
    """
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    model = re.search(r"^model name\s*: (.*)", info, re.M)
    told = re.findall(r"--xla_(?:cpu|backend)\S+", os.environ.get("XLA_FLAGS", ""))
    instructions = set(
        NUMERIC.findall(" ".join(re.findall(r"^(?:flags|Features)\s*:.*", info, re.M)))
    )
    generation = set(re.findall(rf"^(?:{GENERATION})\s*:.*", info, re.M))
    facts = [*sorted(generation), *sorted(instructions), *told]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    name = f"{model[1] if model else platform.machine()} {digest}"
    return re.sub(r"\W+", "-", name).strip("-")


Resources = Mapping[str, float]  # of a node, as Ray counts them: CPU, GPU, TPU, ...

# Freed memory stays with the process, in large pages, for the next program. By default every call
# gets fresh pages, which costs up to a tenth of a gradient's time.
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
    """The number of workers and the resources of each."""

    num_workers: int
    threads: int
    """CPU threads of a worker."""
    accelerator: str | None = None
    """Ray's name of the workers' accelerator, GPU or TPU; None: CPU."""

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

    def describe(self) -> str:
        """Describe the device of one worker, for people."""
        if self.accelerator:
            return f"1 {self.accelerator}"
        return f"{self.threads} CPU thread{'' if self.threads == 1 else 's'}"


def place_workers(
    num_workers: int | None,
    threads: int,
    nodes: Iterable[Resources],
    accelerator: str = "auto",
) -> Placement:
    """Place as many workers as the nodes hold: by default one per GPU or TPU chip, or else one per
    `threads` CPUs. Pure: reads nothing but its arguments.

    Args:
      num_workers: requested number of workers; None: as many as there is room for.
      threads: CPU threads of a worker.
      nodes: resources of each node.
      accelerator: auto, cpu, gpu or tpu.
    """
    nodes = list(nodes)
    if accelerator == "auto":
        there = (name for name in ("GPU", "TPU") if any(node.get(name, 0) for node in nodes))
        accelerator = next(there, "CPU")
    name = accelerator.upper()
    placement = Placement(1, threads, None if name == "CPU" else name)
    return dataclasses.replace(placement, num_workers=num_workers or max(1, placement.room(nodes)))


def expect_room(placement: Placement, nodes: Iterable[Resources]) -> None:
    """Raise ConfigError if the nodes have no room for the workers: Ray would wait forever."""
    nodes = list(nodes)
    room = placement.room(nodes)
    if not room and placement.accelerator:
        raise ConfigError.of(
            "accelerator",
            placement.accelerator.lower(),
            f"nodes with a {placement.accelerator} for each worker, found none",
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
    """Variables of a driver whose workers compute the gradients: it must take no accelerator."""
    return {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"}


def compiler_options(platform: str) -> dict[str, str | bool] | None:
    """Options of XLA for each program whose bits matter."""
    # A unit's contribution must be a function of its rows: no atomics, whose order varies, and no
    # choice of kernels by timing, which would differ between workers.
    return {"xla_gpu_deterministic_ops": True} if platform == "gpu" else None


def worker_environment(placement: Placement) -> dict[str, str]:
    """Variables with which a worker's process starts: JAX and the C library read them then."""
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
        variables["GLIBC_TUNABLES"] = ALLOCATOR
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
