"""One Ray for the whole run, and the CPU thread setting that workers have, so that bits agree."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import jaxlib.version  # alone starts nothing

os.environ["NPROC"] = "1"  # before JAX starts its client
os.environ["JAX_PLATFORMS"] = os.environ.get("FEDSIM_TEST_PLATFORM", "cpu")
if not os.environ.get("FEDSIM_TEST_AS_COMPILED"):  # as users' programs are; compiling takes twice
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if jaxlib.version.__version_info__ < (0, 11, 1):  # XLA aborts on flags that it does not know
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("FEDSIM_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fedsim-test-cache"))
os.environ["FEDSIM_BUDGET_LEDGER"] = tempfile.mkdtemp(prefix="fedsim-test-budget-")
os.environ.pop("RAY_ADDRESS", None)
os.environ["PYTHONPATH"] = os.pathsep.join(  # what several test files, and workers, import
    [
        os.environ.get("PYTHONPATH", str(Path(__file__).parent)),  # by which mistakes are planted
        *(str(path) for path in Path(__file__).parent.glob("**/") if path.name != "__pycache__"),
    ]
)
sys.path.extend(os.environ["PYTHONPATH"].split(os.pathsep))

import jax
import numpy as np
import pytest

from fedsim.engine.environment import keep_compiled
from fedsim.files import cache_dir
from fedsim.keys import SecretKey

atexit.register(shutil.rmtree, os.environ["FEDSIM_BUDGET_LEDGER"], ignore_errors=True)
keep_compiled(cache_dir() / "compiled")  # before the first program
os.environ |= {  # and before the first one of the processes that tests start
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
jax.config.update("jax_numpy_rank_promotion", "raise")
if os.environ["JAX_PLATFORMS"] != "cpu":  # tests compare with products of float32, not of TF32
    jax.config.update("jax_default_matmul_precision", "highest")
HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
for number, handler in HANDLERS.items():  # a job in the background may have to ignore them
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture
def key() -> SecretKey:
    return SecretKey.create(seed=7)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def compiled():
    """How often anything was compiled since."""
    events = []

    def listener(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.fixture(scope="session")
def ray_cluster():
    """A private Ray for all tests of this process."""
    from fedsim.engine.cluster import Cluster

    cluster = Cluster(num_cpus=8)
    yield cluster
    cluster.close()


@pytest.fixture
def run_dir():
    """A short path for a run; pytest's tmp_path is fine too, this one is removed at once."""
    directory = Path(tempfile.mkdtemp(prefix="run-"))
    yield directory / "run"
    shutil.rmtree(directory, ignore_errors=True)
