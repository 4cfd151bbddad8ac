"""The options of XLA and JAX with which fedsim computes: an allow-list.

An option can break what the guarantee rests on: XLA's fast math folds `isfinite` to true, and
JAX_DEBUG_NANS ends a run because of one user's numbers. So an option that is not listed here is
refused before anything is computed, in the driver and in every worker, whatever the run claims.
"""

import os
import re
from typing import Any

import jax
from jaxlib import xla_client

from fedsim.errors import expect

ANY, NUMBER, SWITCH = r".*", r"\d+", r"|true|false|1|0"
XLA: dict[str, str] = {
    "xla_force_host_platform_device_count": NUMBER,  # each device computes as one alone does
    "xla_cpu_max_isa": r"\w+",  # the proof holds with and without fused products and sums
    "xla_cpu_multi_thread_eigen": SWITCH,  # threads of a product; its terms may have any order
    "xla_cpu_use_fusion_emitters": SWITCH,  # another generator of code for the same operations
    "xla_backend_optimization_level": r"[0-3]",  # LLVM keeps to IEEE 754 at every level
    "xla_gpu_deterministic_ops": r"|true|1",  # as in `environment.compiler_options`
    "xla_gpu_cuda_data_dir": ANY,  # the place of CUDA
    "xla_dump_to": ANY,  # writes programs, not the numbers that they compute
    "xla_dump_hlo_as_text": SWITCH,
}
"""Options in XLA_FLAGS, each with a pattern of its values."""
VARIABLES: dict[str, str] = {
    "JAX_PLATFORMS": ANY,  # the device, whose arithmetic is checked
    "JAX_PLATFORM_NAME": ANY,
    "JAX_CUDA_VISIBLE_DEVICES": ANY,
    "JAX_ROCM_VISIBLE_DEVICES": ANY,
    "JAX_NUM_CPU_DEVICES": ANY,
    "JAX_COMPILATION_CACHE_DIR": ANY,  # programs are kept by all options of their compilation
    "JAX_COMPILATION_CACHE_MAX_SIZE": ANY,
    "JAX_ENABLE_COMPILATION_CACHE": ANY,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ANY,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": ANY,
    "JAX_DEFAULT_MATMUL_PRECISION": ANY,  # of the model; norms and sums ask for the highest
    "JAX_THREEFRY_PARTITIONABLE": ANY,  # of the first parameters; draws and noise are not JAX's
    "JAX_RANDOM_SEED_OFFSET": ANY,
    "JAX_NUMPY_RANK_PROMOTION": ANY,  # a check of shapes, when a program is traced
    "JAX_LOGGING_LEVEL": ANY,  # messages
    "JAX_LOG_COMPILES": ANY,
    "JAX_DEBUG_LOG_MODULES": ANY,
    "JAX_EXPLAIN_CACHE_MISSES": ANY,
    "JAX_TRACEBACK_FILTERING": ANY,
    "LIBTPU_INIT_ARGS": "",  # no option of TPUs has been looked at
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


def expect_allowed() -> None:
    """Check the options of XLA and JAX in this process, without starting JAX.

    Raises: ConfigError: one of them is not on the allow-list.
    """
    for word in os.environ.get("XLA_FLAGS", "").split():  # a word without -- names a file of them
        name, _, value = word.removeprefix("--").partition("=")
        known = word.startswith("--") and name in XLA and re.fullmatch(XLA[name], value)
        _expect("XLA_FLAGS", word, bool(known), f"only {', '.join(XLA)}")
    for name, value in os.environ.items():
        ours = name in VARIABLES or name.startswith(("JAX_", "LIBTPU_"))
        if value and ours and name.lower() not in IN_FORCE:
            pattern = VARIABLES.get(name)
            known = pattern is not None and re.fullmatch(pattern, value)
            instead = f"only {', '.join(VARIABLES)}" if pattern is None else pattern or "unset"
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
