"""The host that a process computes on, and what it computes with.

So that driver, workers and later runs can be compared: packages, settings, kind of host. Also what
is free there, and what compiled programs are kept.
"""

import ctypes
import dataclasses
import hashlib
import math
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax._src import compilation_cache, xla_bridge
from jax._src.lru_cache import LRUCache

from fedsim.config import EngineConfig
from fedsim.errors import ConfigError, expect
from fedsim.files import NotOurs, cache_dir, own_directory

PACKAGES = ("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "randomgen", "ray")
PACKAGES += ("dp-accounting", "scipy", "cryptography")
WHERE_INSTALLED = ("jax-cuda12-plugin", "nvidia-cublas-cu12", "jax-cuda13-plugin", "nvidia-cublas")
USABLE: dict[str, tuple] = {
    "jax_enable_x64": (False,),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_disable_jit": (False,),
    "jax_transfer_guard": (None, "allow", "log"),
}
"""Options of JAX without whose defaults programs fail, each with its values that they work with."""
JAX_SETTINGS = ("jax_threefry_partitionable", "jax_random_seed_offset", "jax_enable_x64")
JAX_SETTINGS += ("jax_default_matmul_precision",)
"""Of JAX, by variables or by the program: bits of fresh parameters and gradients follow them."""
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "GLIBC_TUNABLES")
VARIABLES += ("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE")
"""Of the driver: they choose how the compiler, NumPy and the C library compute."""
NO_BITS = r"dump|^glibc\.malloc"
"""Words in them that change no bit; the allocator's are set for workers."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def set_threads(config: EngineConfig) -> bool:
    """Give this process the threads and the devices that a run's driver has, if it still can.

    JAX reads them when it starts to compute, so a process that has computed before keeps what it
    has. `Worker.host` says with how many threads a run was computed.
    Returns: whether they are what is asked for.
    Raises: ConfigError: JAX could not compute so; see `expect_usable_jax`.
    """
    variables = driver_environment(config.threads_per_worker)
    if config.kind == "local":  # this process computes, on whatever there is
        del variables["JAX_PLATFORMS"]
        if config.mesh_shape is not None:  # where there is no accelerator
            variables["JAX_NUM_CPU_DEVICES"] = str(config.mesh_shape.devices)
    if xla_bridge.backends_are_initialized():
        expect_usable_jax()
        return all(os.environ.get(name) == value for name, value in variables.items())
    os.environ.update(variables)
    if "JAX_NUM_CPU_DEVICES" in variables:
        jax.config.update("jax_num_cpu_devices", int(variables["JAX_NUM_CPU_DEVICES"]))
    if "JAX_PLATFORMS" in variables:  # JAX has read the variable when it was imported
        jax.config.update("jax_platforms", variables["JAX_PLATFORMS"])
    expect_usable_jax()
    return True


def expect_usable_jax() -> None:
    """Raises ConfigError: JAX is set to something that programs are not written for, or to compute
    on devices that this machine does not have. Said before JAX says it in a traceback."""
    for name, usable in USABLE.items():
        value = getattr(jax.config, name)
        value = getattr(value, "value", value)  # of an enumeration
        how = f"unset it, or jax.config.update({name!r}, {usable[0]!r}) in Python"
        expect(name.upper(), value, value in usable, f"{usable[0]}, JAX's default: {how}")
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
    """Keep memory that this process frees for what it needs next, as workers do (see `ALLOCATOR`):
    fresh pages for the sums of a large model take longer than its noise.

    For a driver's own process, not for a program that uses fedsim as a library.
    Returns: whether the C library can do that; others than glibc cannot.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(tune(M_MMAP_MAX, 0) and tune(M_TRIM_THRESHOLD, -1))


def versions() -> dict[str, str]:
    """Python, packages, settings and variables on which draws, noise and the bits of a run depend,
    as they are in this process."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *WHERE_INSTALLED):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in PACKAGES:
                found[name] = "none"
    found |= {name: str(getattr(jax.config, name, "none")) for name in JAX_SETTINGS}
    for name in VARIABLES:
        words = re.split(
            r"[\s:]+" if name == "GLIBC_TUNABLES" else r"\s+", os.environ.get(name, "")
        )
        words = [word for word in words if word and not re.search(NO_BITS, word)]
        found |= {name: " ".join(words)} if words else {}
    return found


def difference(driver: dict[str, str], worker: dict[str, str]) -> str:
    """How the two differ, for people; empty if they do not. Workers have variables of their own."""
    names = [name for name in driver if driver[name] != worker.get(name) and name not in VARIABLES]
    return ", ".join(f"{name} {worker.get(name)} instead of {driver[name]}" for name in names)


# Of /proc/cpuinfo: what equal hosts have in common. Steppings and microcode differ between them.
GENERATION = "vendor_id|cpu family|model|CPU implementer|CPU architecture|CPU part"
# Of its instructions, those that numbers are computed with: the others depend on the kernel, too.
NUMERIC = re.compile(r"\b(?:s?sse|avx|fma|f16c|amx|bmi|fp|asimd|neon|sve|sme|bf16|i8mm)\w*")


class _OwnPrograms(LRUCache):
    """JAX's directory of compiled programs, as long as nobody else can write to it."""

    def get(self, key: str) -> bytes | None:
        """A program, or None: there is none, or it might be somebody else's."""
        return super().get(key) if self._is_ours() else None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program, if it is safe there."""
        if self._is_ours():
            super().put(key, value)

    def _is_ours(self) -> bool:
        place = Path(str(self.path))
        try:
            return own_directory(place) == place
        except NotOurs:
            return False


def keep_compiled(cache_dir: Path) -> None:
    """Keep this process's compiled programs in a directory, and use those that are there.

    They are run as they are read, so a directory that others can write to is not used; which is
    looked at again before each program that is read or kept.
    """
    try:
        place = own_directory(cache_dir / host_kind())
    except NotOurs as error:
        print(f"fedsim: compiled programs are not kept: {error}", file=sys.stderr)
        return
    compilation_cache.get_file_cache = lambda path: (_OwnPrograms(path, max_size=-1), path)
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def remember_programs() -> Path:
    """Keep what this process compiles for later ones: the first parameters, the optimizer's update,
    and everything with engine=local. Returns the directory where workers keep theirs, too."""
    compiled = cache_dir() / "compiled"
    keep_compiled(compiled)
    return compiled


def trial_clock() -> Callable[[], float]:
    """Processor seconds where the device is one thread of the host: other work on the machine
    disturbs them little. Elsewhere the time that passes."""
    alone = jax.local_devices()[0].platform == "cpu" and os.environ.get("NPROC") == "1"
    return time.process_time if alone else time.perf_counter


def free_memory() -> int:
    """Bytes that one worker may use beside what it holds: of its accelerator, or its share of the
    host's."""
    found = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in found:
        return found["bytes_limit"] - found["bytes_in_use"]
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = int(re.search(r"MemAvailable:\s*(\d+) kB", meminfo)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        pass
    cpus = os.cpu_count() or 1
    return available * min(cpus, int(os.environ.get("NPROC", cpus))) // cpus


def host_kind() -> str:
    """Names what compiled programs depend on: unlike hosts must not share them.

    The processor as it calls itself, and a digest of its generation and its instructions, for
    machines of a cloud have one name for several; and of what XLA was told about processors.
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
