"""One Ray for the whole run, and the CPU thread setting that workers have, so that bits agree."""

import os
import shutil
import tempfile
from pathlib import Path

os.environ["NPROC"] = "1"  # before JAX starts its client
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("FEDSIM_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fedsim-test-cache"))
os.environ.pop("RAY_ADDRESS", None)
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # workers import tasks of the tests

import jax
import numpy as np
import pytest

from fedsim.engine.worker import keep_compiled
from fedsim.files import cache_dir
from fedsim.keys import SecretKey

keep_compiled(cache_dir() / "compiled")  # before the first program
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key() -> SecretKey:
    return SecretKey.create(seed=7)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


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
