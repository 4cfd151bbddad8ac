"""The host that a worker computes on: what it is, what is free there, and what it keeps."""

import hashlib
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from fedsim.files import NotOurs, own_directory

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
