"""The environment of a process that computes: threads, options of XLA and JAX, packages, programs.

Versions, settings and kind of host make driver, workers and later runs comparable, because bits
depend on them. Options of XLA and JAX have an allow-list.
"""

import hashlib
import os
import platform
import re
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jaxlib import xla_client

from fedsim.errors import ConfigError, expect
from fedsim.files import NotOurs, cache_dir, own_directory

PACKAGES = ("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "randomgen", "ray")
PACKAGES += ("dp-accounting", "scipy", "cryptography")
ACCELERATORS = ("jax-cuda12-plugin", "nvidia-cublas-cu12", "jax-cuda13-plugin", "nvidia-cublas")
JAX_SETTINGS = ("jax_threefry_partitionable", "jax_random_seed_offset", "jax_enable_x64")
JAX_SETTINGS += ("jax_default_matmul_precision",)
"""JAX options, from variables or the program, on which bits of parameters and gradients depend."""
VARIABLES = ("XLA_FLAGS", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")
VARIABLES += ("OPENBLAS_CORETYPE",)
"""Variables that choose how the compiler and NumPy compute; workers on Ray have other ones."""


# An option can break what the guarantee rests on: XLA's fast math folds `isfinite` to true, and
# JAX_DEBUG_NANS ends a run because of one user's numbers. So one that is not in these tables is
# refused before anything is computed, in the driver and in every worker, whatever the run claims.
ANY, SWITCH = r".*", r"|true|false|1|0"
XLA: dict[str, str] = {
    "xla_cpu_max_isa": r"\w+",  # the proof holds with and without fused products and sums
    "xla_cpu_use_fusion_emitters": SWITCH,  # another generator of code for the same operations
    "xla_backend_optimization_level": r"[0-3]",  # LLVM keeps to IEEE 754 at every level
    "xla_gpu_deterministic_ops": r"|true|1",  # as in `compiler_options`
    "xla_gpu_cuda_data_dir": ANY,  # the place of CUDA
}
"""Options in XLA_FLAGS, each with a pattern of its values."""
ALLOWED: dict[str, str] = {
    "JAX_PLATFORMS": ANY,  # the device, whose arithmetic is checked
    "JAX_PLATFORM_NAME": ANY,
    "JAX_CUDA_VISIBLE_DEVICES": ANY,
    "JAX_NUM_CPU_DEVICES": ANY,
    "JAX_COMPILATION_CACHE_DIR": ANY,  # programs are kept by all options of their compilation
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ANY,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": ANY,
    "JAX_DEFAULT_MATMUL_PRECISION": ANY,  # of the model; norms and sums ask for the highest
    "JAX_THREEFRY_PARTITIONABLE": ANY,  # of the first parameters; draws and noise are not JAX's
    "JAX_LOGGING_LEVEL": ANY,  # messages
    "JAX_TRACEBACK_FILTERING": ANY,
    "NVIDIA_TF32_OVERRIDE": "0",  # 0: never TF32
}
"""Variables that start with JAX_ or LIBTPU_, or can reduce precision, each with a pattern of its
values; those of IN_FORCE may be set, too."""
IN_FORCE: dict[str, tuple] = {
    # With other values, programs fail.
    "jax_enable_x64": (False,),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_disable_jit": (False,),
    "jax_transfer_guard": (None, "allow", "log"),
    # With other values, one user's numbers can end a run.
    "jax_debug_nans": (False,),
    "jax_debug_infs": (False,),
    "jax_error_checking_behavior_nan": ("ignore",),
    "jax_error_checking_behavior_divide": ("ignore",),
    "jax_error_checking_behavior_oob": ("ignore",),
    # Further options of the compiler.
    "jax_pjrt_client_create_options": (None, ""),
    "jax_optimization_level": ("UNKNOWN",),
    "jax_exec_time_optimization_effort": (0.0,),
}
"""Options of JAX whose other values are refused, wherever they were set, each with the values that
are accepted: the default first."""
COMPILED_WITH = {
    "xla_cpu_enable_fast_math": False,
    "xla_gpu_enable_fast_min_max": False,
    "xla_disable_hlo_passes": "",
}
"""Values of options with which XLA must compile: it reads XLA_FLAGS once, and a program may have
changed the variable since."""


def expect_usable_jax() -> None:
    """Check JAX's settings before JAX fails with a traceback.

    Raises: ConfigError: an option is not allowed, or the machine has none of the requested devices.
    """
    expect_allowed()
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        value = os.environ.get("JAX_PLATFORM_NAME") or jax.config.values["jax_platforms"]
        reason = " ".join(str(error).partition("(set JAX")[0].split())[:200] or "JAX finds none"
        expected = f"devices that this machine has ({reason}); unset it, or set it to cpu"
        raise ConfigError.of("JAX_PLATFORMS", value, expected) from None


def expect_allowed() -> None:
    """Check the options of XLA and JAX in this process, without starting JAX.

    Raises: ConfigError: one of them is not on the allow-list.
    """
    for word in os.environ.get("XLA_FLAGS", "").split():  # a word without -- names a file of them
        name, _, value = word.removeprefix("--").partition("=")
        known = word.startswith("--") and name in XLA and re.fullmatch(XLA[name], value)
        _expect("XLA_FLAGS", word, bool(known), f"only {', '.join(XLA)}")
    for name, value in os.environ.items():
        ours = name in ALLOWED or name.startswith(("JAX_", "LIBTPU_"))
        if value and ours and name.lower() not in IN_FORCE:
            pattern = ALLOWED.get(name)
            known = pattern is not None and re.fullmatch(pattern, value)
            instead = f"only {', '.join(ALLOWED)}" if pattern is None else pattern or "unset"
            _expect(name, value, bool(known), instead)
    for name, usable in IN_FORCE.items():
        value = jax.config.values.get(name, usable[0])
        value = getattr(value, "value", value)  # of an enumeration
        how = f"unset it, or jax.config.update({name!r}, {usable[0]!r}) in Python"
        expect(name.upper(), value, value in usable, f"{usable[0]}, JAX's default: {how}")
    in_force = xla_client.CompileOptions().executable_build_options.debug_options
    for name, expected in COMPILED_WITH.items():
        value = getattr(in_force, name, expected)
        _expect("XLA_FLAGS", f"--{name}={value}", value == expected, f"--{name}={expected}")


def _expect(variable: str, value: Any, holds: bool, allowed: str) -> None:
    why = "the guarantee was not checked with other options"
    expect(variable, value, holds, f"{allowed}: {why}")


def version(package: str) -> str:
    """Version of an installed package by the name that records have; "none" without."""
    try:
        return metadata.version("fedsim-dp" if package == "fedsim" else package)
    except metadata.PackageNotFoundError:
        return "none"


def versions() -> dict[str, str]:
    """Return the versions, settings and variables of this process on which the draws, noise and
    bits of a run depend, by name."""
    there = {name: version(name) for name in ACCELERATORS}
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        **{name: number for name, number in there.items() if number != "none"},
        **{name: str(getattr(jax.config, name, "none")) for name in JAX_SETTINGS},
        **{name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
    }


def difference(driver: dict[str, str], worker: dict[str, str]) -> str:
    """Describe the difference of two `versions` but for VARIABLES; empty if there is none."""
    names = [name for name in driver if driver[name] != worker.get(name) and name not in VARIABLES]
    return ", ".join(f"{name} {worker.get(name)} instead of {driver[name]}" for name in names)


# Fields of /proc/cpuinfo that equal hosts share. Steppings and microcode differ between them.
GENERATION = r"^(?:vendor_id|cpu family|model|CPU implementer|CPU architecture|CPU part)\s*:.*"
# Instruction sets for numbers. The others depend on the kernel, too.
NUMERIC = r"\b(?:s?sse|avx|fma|f16c|amx|bmi|fp|asimd|neon|sve|sme|bf16|i8mm)\w*"


def keep_compiled(directory: Path | None = None) -> Path:
    """Keep this process's compiled programs in a directory, and use the programs that are there.

    Programs are run as they are read, so a directory that other users can write to is not used.
    Args: directory: by default that of the cache.
    Returns: the directory, which workers use, too.
    """
    directory = directory or cache_dir() / "compiled"
    try:
        place = own_directory(directory / host_kind())
    except NotOurs as error:
        print(f"fedsim: compiled programs are not kept: {error}", file=sys.stderr)
        return directory
    # Of a program that another process is writing, or was killed while writing: it is compiled.
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory


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
    listed = " ".join(re.findall(r"^(?:flags|Features)\s*:.*", info, re.M))
    flags = re.findall(r"--xla_(?:cpu|backend)\S+", os.environ.get("XLA_FLAGS", ""))
    generation, instructions = re.findall(GENERATION, info, re.M), re.findall(NUMERIC, listed)
    facts = [*sorted(set(generation)), *sorted(set(instructions)), *flags]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
    name = f"{model[1] if model else platform.machine()} {digest}"
    return re.sub(r"\W+", "-", name).strip("-")
