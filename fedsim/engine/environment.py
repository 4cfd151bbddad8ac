"""The host that a process computes on, and what it computes with.

So that driver, workers and later runs can be compared: packages, settings, kind of host. Also what
is free there, and what compiled programs are kept.
"""

import ctypes
import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
from jax._src import compilation_cache, xla_bridge
from jax._src.lru_cache import LRUCache

from fedsim.config import EngineConfig
from fedsim.engine.resources import driver_environment
from fedsim.errors import ConfigError, expect
from fedsim.files import NotOurs, own_directory

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
